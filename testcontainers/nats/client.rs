//! What is asked of a NATS server over its own protocol. Clients are made anew for each call, with deadlines.

use std::time::Duration;

use async_nats::ConnectOptions;
use async_nats::jetstream;
use serde_json::{Value, json};

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
        // Read as it comes: the client's own type knows fields that a server before 2.10 does not send.
        let account: Result<Value, _> = context.request("INFO", &json!({})).await;
        match account.map_err(|error| error.to_string())?.get("error") {
            Some(error) => Err(error.to_string()),
            None => Ok(()),
        }
    };
    match tokio::time::timeout(2 * ANSWER_WITHIN, asked).await {
        Ok(answer) => answer,
        Err(_elapsed) => Err(format!("no answer within {:?}", 2 * ANSWER_WITHIN)),
    }
}
