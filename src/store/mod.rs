//! The store contracts, and one adapter per database.
//!
//! Typed where the user's transaction passes ([`Enqueue`], [`InboxStore`]); object-safe where only relaybox's own
//! statements run ([`OutboxStore`], [`DeadLetterStore`]).

mod dead_letter;
mod inbox;
mod names;
mod outbox;

pub use dead_letter::{DeadLetter, DeadLetterStore};
pub use inbox::{InboxStore, Recorded};
pub use names::Prefix;
pub use outbox::{
    Enqueue, FetchRequest, Lease, OutboxReader, OutboxStore, Page, PendingMessage, Settled,
    SettlementBatch, Verdict,
};

#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;
