//! Real services for relaybox's tests.
//!
//! A test asks for a service and gets a running one, or fails with everything that was tried. In this order:
//!
//! 1. the address in the environment (`RELAYBOX_POSTGRES_URL`, `RELAYBOX_KAFKA_BROKERS`, `RELAYBOX_RABBITMQ_URL`,
//!    `RELAYBOX_NATS_URL`);
//! 2. a container, where a Docker engine answers (compiled, not proven);
//! 3. a local process from installed binaries (`testcontainers/install` gets them), with a directory and ports of its
//!    own, gone when the test process is gone, also after a panic or SIGKILL and from a `static`. Linux only.
//!
//! An address that is given and does not answer fails at once: nobody wants another server than the one they named.
//!
//! ```no_run
//! # async fn example() -> Result<(), relaybox_testcontainers::ServiceError> {
//! use relaybox_testcontainers::{shared_kafka, shared_postgres};
//!
//! let database = shared_postgres().await.create_database("orders").await?;
//! let topic = shared_kafka().await.create_topic("orders", 3).await?;
//! # let _ = (database, topic);
//! # Ok(())
//! # }
//! ```

mod controls;
mod docker;
mod error;
#[path = "../kafka/mod.rs"]
mod kafka;
mod local;
mod names;
#[path = "../nats/mod.rs"]
mod nats;
#[path = "../postgres/mod.rs"]
mod postgres;
mod proxy;
#[path = "../rabbitmq/mod.rs"]
mod rabbitmq;
mod server;
mod shared;
mod supervisor;

pub use error::ServiceError;
pub use kafka::{Kafka, KafkaLine, KafkaOptions, KafkaSecurity};
pub use names::unique_name;
pub use nats::{Nats, NatsOptions};
pub use postgres::{Postgres, PostgresOptions};
pub use proxy::Proxy;
pub use rabbitmq::{RabbitMq, RabbitMqOptions};
pub use server::Way;
pub use shared::{shared_kafka, shared_nats, shared_postgres, shared_rabbitmq};
