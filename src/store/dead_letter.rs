//! The dead letter contracts: a place to put them, and a table to keep them in.

use futures_util::future::BoxFuture;
use time::OffsetDateTime;

use crate::envelope::Outgoing;
use crate::error::Result;

/// A place that takes dead letters: a table, or one of your own (an object store, a ticket system, another broker).
pub trait DeadLetterSink: Send + Sync + 'static {
    /// Finds out, when a consumer starts, whether its letters can be put here.
    ///
    /// # Errors
    /// Whatever is in the way; the consumer does not start.
    fn check<'a>(&'a self, consumer: &'a str) -> BoxFuture<'a, Result<()>>;

    /// Stores a letter durably before it returns `Ok`: after that the original is acknowledged. It may come again, with the same
    /// message id and redrive count, after an error, a deadline (30 s; then the future is dropped) or a crash.
    ///
    /// # Errors
    /// The letter may not be stored. Nothing is acknowledged; it is put again after growing pauses.
    fn put<'a>(&'a self, letter: &'a Outgoing) -> BoxFuture<'a, Result<()>>;
}

impl<S: DeadLetterStore> DeadLetterSink for S {
    fn check<'a>(&'a self, consumer: &'a str) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move { self.list(consumer, i64::MAX, 1).await.map(drop) })
    }

    fn put<'a>(&'a self, letter: &'a Outgoing) -> BoxFuture<'a, Result<()>> {
        DeadLetterStore::put(self, letter)
    }
}

/// A stored dead letter.
#[derive(Debug, Clone, PartialEq)]
pub struct DeadLetter {
    /// Number of the entry, in order of arrival.
    pub position: i64,
    /// Original message and its story; `story.reason` says why it is here.
    pub letter: Outgoing,
    /// When it was stored, by the database's clock.
    pub stored_at: OffsetDateTime,
}

/// Keeps dead letters in a table.
pub trait DeadLetterStore: Send + Sync + 'static {
    /// Stores a dead letter durably. The same message of the same consumer, stored twice with the same redrive
    /// count, is one entry; another one with the same id, as its [digest](crate::Message::digest) tells, is not the same.
    fn put<'a>(&'a self, letter: &'a Outgoing) -> BoxFuture<'a, Result<()>>;

    /// Up to `count_max` entries of a consumer after position `after`, oldest first.
    fn list<'a>(
        &'a self,
        consumer: &'a str,
        after: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<DeadLetter>>>;

    /// How many entries a consumer has.
    fn count<'a>(&'a self, consumer: &'a str) -> BoxFuture<'a, Result<u64>>;

    /// Removes an entry; whether it was there.
    fn remove(&self, position: i64) -> BoxFuture<'_, Result<bool>>;
}
