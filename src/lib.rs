//! Reliable messaging on the client side.
//!
//! A service writes its data and its message in one transaction ([`outbox`]); a [`relay`] moves committed rows to the
//! broker; the [`consumer`] records the message id in the transaction of its work ([`store::InboxStore`]), so duplicates change
//! nothing; failures climb a [`ladder`] of delayed retries; what cannot be handled becomes a dead letter ([`dlq`]).
//!
//! Delivery is at least once; the effect in the consumer's database is exactly once.
//!
//! Both sides in one program, on SQLite and the broker in memory:
//!
//! ```
//! # #[cfg(all(feature = "sqlite", feature = "memory"))]
//! # mod example {
//! use std::time::Duration;
//!
//! use relaybox::broker::memory::MemoryBroker;
//! use relaybox::store::{OutboxStore, sqlite::SqliteStore};
//! use relaybox::{Consumer, Json, Ladder, Message, Outbox, Relay, typed_fn};
//! use sqlx::SqliteConnection;
//!
//! // A payload that is no number becomes a dead letter at once; an error is tried again.
//! async fn charge(_app: &(), db: &mut SqliteConnection, Json(cents): Json<u32>) -> Result<(), sqlx::Error> {
//!     sqlx::query("INSERT INTO charge (cents) VALUES (?)").bind(cents).execute(db).await?;
//!     Ok(())
//! }
//!
//! # #[tokio::main]
//! pub async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     # let directory = tempfile::tempdir()?;
//!     # let path = directory.path().join("shop.db");
//!     let store = SqliteStore::connect(path).await?;
//!     store.migrate().await?;
//!     sqlx::raw_sql("CREATE TABLE charge (cents INTEGER)").execute(store.pool()).await?;
//!     let broker = MemoryBroker::new();
//!     broker.create_topic("orders", 3)?;
//!
//!     let outbox = Outbox::new(store.clone()).with_rules_of(&broker);
//!     let mut tx = store.pool().begin().await?;
//!     // ... the business data, and in the same transaction:
//!     outbox.enqueue(&mut tx, Message::new("orders", "OrderPlaced").with_key("order-17").with_json(&4200)?).await?;
//!     tx.commit().await?;
//!
//!     // A service would stop on a signal; this one when its work is done.
//!     let relayed = async {
//!         while store.pending(1).await.is_ok_and(|pending| pending > 0) {
//!             tokio::time::sleep(Duration::from_millis(10)).await;
//!         }
//!     };
//!     Relay::new(store.clone(), broker.clone()).run_until(relayed).await?;
//!
//!     let charged = async {
//!         while broker.committed("billing", "orders").iter().sum::<u64>() == 0 {
//!             tokio::time::sleep(Duration::from_millis(10)).await;
//!         }
//!     };
//!     Consumer::new("billing", "orders", broker.clone(), store.clone())
//!         .with_ladder(Ladder::rungs([5, 60, 600].map(Duration::from_secs)))
//!         .run_until(typed_fn((), charge), charged)
//!         .await?;
//!
//!     let cents: i64 = sqlx::query_scalar("SELECT sum(cents) FROM charge").fetch_one(store.pool()).await?;
//!     assert_eq!(cents, 4200);
//!     Ok(())
//! }
//! # }
//! # #[cfg(all(feature = "sqlite", feature = "memory"))]
//! # example::main().unwrap();
//! ```

// Vocabulary
pub mod backoff;
pub mod clock;
pub mod codec;
mod digest;
pub mod envelope;
mod error;
pub mod event;
#[cfg(any(feature = "rabbitmq", feature = "nats"))]
mod header_text;
pub mod headers;
pub mod lane;
mod message;
pub mod readiness;
pub mod story;

// Contracts and adapters
pub mod broker;
pub mod store;

// Engines
pub mod consumer;
pub mod dlq;
mod inbox;
pub mod ladder;
pub mod outbox;
pub mod relay;

// For tests: of adapters, and of programs that use relaybox
#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(feature = "testing")]
pub mod testing;

pub use codec::Json;
pub use consumer::{Consumer, Failure, Outcome, handler_fn, typed_fn};
pub use dlq::DeadLetters;
pub use envelope::Incoming;
pub use error::{Error, ErrorKind, Result, Violation};
pub use headers::Headers;
pub use ladder::Ladder;
pub use message::{Limits, Message, MessageId, TraceContext};
pub use outbox::Outbox;
pub use readiness::{Probe, Readiness};
pub use relay::Relay;
