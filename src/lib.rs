//! Reliable messaging on the client side.
//!
//! A service writes its data and its message in one transaction ([`outbox`]); a [`relay`] moves committed rows to the
//! broker; the [`consumer`] records the message id in the transaction of its work ([`store::InboxStore`]), so duplicates change
//! nothing; failures climb a [`ladder`] of delayed retries; what cannot be handled becomes a dead letter ([`dlq`]).
//!
//! Delivery is at least once; the effect in the consumer's database is exactly once.

// Vocabulary
pub mod backoff;
pub mod clock;
pub mod envelope;
mod error;
pub mod headers;
pub mod lane;
mod message;
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

// For tests of programs that use relaybox
#[cfg(feature = "testing")]
pub mod testing;

pub use error::{Error, ErrorKind, Result, Violation};
pub use headers::Headers;
pub use message::{Limits, Message, MessageId, TraceContext};
