//! Runs a command with services at its side, and ends with its exit code.
//!
//! ```sh
//! cargo run -p relaybox-testcontainers --bin with_services -- postgres kafka -- COMMAND [ARGUMENTS]
//! ```
//!
//! The command finds them by `RELAYBOX_POSTGRES_URL`, `RELAYBOX_KAFKA_BROKERS`, `RELAYBOX_RABBITMQ_URL` and
//! `RELAYBOX_NATS_URL`.

use std::error::Error;
use std::process::{Command, ExitCode};

use relaybox_testcontainers::{shared_kafka, shared_nats, shared_postgres, shared_rabbitmq};

const USAGE: &str = "usage: with_services postgres|kafka|rabbitmq|nats ... -- COMMAND [ARGUMENTS]";

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut words = std::env::args_os().skip(1);
    let mut addresses = Vec::new();
    loop {
        let word = words.next().ok_or(USAGE)?;
        addresses.push(match word.to_str() {
            Some("postgres") => ("RELAYBOX_POSTGRES_URL", shared_postgres().await.url()),
            Some("kafka") => ("RELAYBOX_KAFKA_BROKERS", shared_kafka().await.brokers()),
            Some("rabbitmq") => ("RELAYBOX_RABBITMQ_URL", shared_rabbitmq().await.url()),
            Some("nats") => ("RELAYBOX_NATS_URL", shared_nats().await.url()),
            Some("--") => break,
            _ => return Err(USAGE.into()),
        });
    }
    let command = words.next().ok_or(USAGE)?;
    let status = Command::new(command).args(words).envs(addresses).status()?;
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from))
}
