//! One instance a test binary, started by the first test that asks.
//!
//! The handle sits in a `static` and is never dropped; the supervisor ends the server with the process. A failed start
//! is kept too, so that a hundred tests fail in the time of one.

use tokio::sync::OnceCell;

use crate::{Kafka, KafkaOptions, Nats, Postgres, RabbitMq, ServiceError};

/// The PostgreSQL of this test binary; each test takes a database of its own from it.
///
/// # Panics
///
/// When no PostgreSQL can be had: the test that asked for one fails.
pub async fn shared_postgres() -> &'static Postgres {
    static SHARED: OnceCell<Result<Postgres, ServiceError>> = OnceCell::const_new();
    or_fail(SHARED.get_or_init(Postgres::start).await)
}

/// The Kafka of this test binary; each test takes topics of its own from it, and a [line](Kafka::line) to break.
///
/// # Panics
///
/// When no Kafka can be had: the test that asked for one fails.
pub async fn shared_kafka() -> &'static Kafka {
    static SHARED: OnceCell<Result<Kafka, ServiceError>> = OnceCell::const_new();
    let start = || Kafka::start_with(KafkaOptions::default().with_lines());
    or_fail(SHARED.get_or_init(start).await)
}

/// The RabbitMQ of this test binary; each test takes queues and exchanges of its own from it.
///
/// # Panics
///
/// When no RabbitMQ can be had: the test that asked for one fails.
pub async fn shared_rabbitmq() -> &'static RabbitMq {
    static SHARED: OnceCell<Result<RabbitMq, ServiceError>> = OnceCell::const_new();
    or_fail(SHARED.get_or_init(RabbitMq::start).await)
}

/// The NATS server of this test binary; each test takes streams and subjects of its own from it.
///
/// # Panics
///
/// When no NATS server can be had: the test that asked for one fails.
pub async fn shared_nats() -> &'static Nats {
    static SHARED: OnceCell<Result<Nats, ServiceError>> = OnceCell::const_new();
    or_fail(SHARED.get_or_init(Nats::start).await)
}

#[allow(
    clippy::panic,
    reason = "a service that was asked for and cannot be had fails the test"
)]
fn or_fail<T>(shared: &'static Result<T, ServiceError>) -> &'static T {
    match shared {
        Ok(service) => service,
        Err(error) => panic!("{error}"),
    }
}
