//! Runs a command with PostgreSQL, Kafka and RabbitMQ at its side, and ends with its exit code.
//!
//! ```sh
//! cargo run -p relaybox-testcontainers --bin with_services -- COMMAND [ARGUMENTS]
//! ```
//!
//! The command finds them by `RELAYBOX_POSTGRES_URL`, `RELAYBOX_KAFKA_BROKERS` and `RELAYBOX_RABBITMQ_URL`.

use std::error::Error;
use std::process::{Command, ExitCode};

use relaybox_testcontainers::{Kafka, Postgres, RabbitMq};

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut words = std::env::args_os().skip(1);
    let command = words
        .next()
        .ok_or("usage: with_services COMMAND [ARGUMENTS]")?;
    let (postgres, kafka, rabbitmq) =
        tokio::try_join!(Postgres::start(), Kafka::start(), RabbitMq::start())?;
    let status = Command::new(command)
        .args(words)
        .env("RELAYBOX_POSTGRES_URL", postgres.url())
        .env("RELAYBOX_KAFKA_BROKERS", kafka.brokers())
        .env("RELAYBOX_RABBITMQ_URL", rabbitmq.url())
        .status()?;
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from))
}
