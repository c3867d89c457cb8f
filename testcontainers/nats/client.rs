//! What is asked of a NATS server over its own protocol. Clients are made anew for each call, with deadlines.

use std::time::Duration;

use async_nats::ConnectOptions;
use async_nats::jetstream;

const ANSWER_WITHIN: Duration = Duration::from_secs(2);

async fn context(url: &str) -> Result<jetstream::Context, String> {
    let client = ConnectOptions::new()
        .connection_timeout(ANSWER_WITHIN)
        .request_timeout(Some(ANSWER_WITHIN))
        .connect(url)
        .await
        // The kind alone: an address may hold a password.
        .map_err(|error| format!("no connection: {}", error.kind()))?;
    Ok(jetstream::new(client))
}

/// Whether a question about the JetStream account is answered. An open port is no readiness: a server accepts
/// connections before it has recovered its streams.
pub(super) async fn answers(url: &str) -> Result<(), String> {
    let asked = async {
        let context = context(url).await?;
        let account = context.query_account().await;
        account.map(drop).map_err(|error| error.to_string())
    };
    match tokio::time::timeout(2 * ANSWER_WITHIN, asked).await {
        Ok(answer) => answer,
        Err(_elapsed) => Err(format!("no answer within {:?}", 2 * ANSWER_WITHIN)),
    }
}
