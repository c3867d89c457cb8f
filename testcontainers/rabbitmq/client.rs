//! What is asked of a RabbitMQ over its own protocol.

use std::time::Duration;

use lapin::{Connection, ConnectionProperties};

const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Whether a channel opens. An open port is no readiness: a node that boots accepts connections before it serves.
pub(super) async fn answers(url: &str) -> Result<(), String> {
    let ask = async {
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        // Held: a channel that is dropped is closed behind our back.
        let _channel = connection.create_channel().await?;
        connection.close(200, "OK".into()).await
    };
    match tokio::time::timeout(ANSWER_WITHIN, ask).await {
        Ok(answer) => answer.map_err(|error: lapin::Error| error.to_string()),
        Err(_) => Err(format!("no answer within {ANSWER_WITHIN:?}")),
    }
}
