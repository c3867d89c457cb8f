//! The inbox contract: the message id, recorded in the transaction of the work.

use std::error::Error as StdError;
use std::future::Future;
use std::time::Duration;

use crate::error::{ErrorKind, Result};
use crate::message::MessageId;

/// Whether a message is new to a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// First time: do the work.
    First,
    /// A committed transaction has dealt with it.
    Duplicate,
}

/// Transactions with an inbox in them, over the consumer's database.
///
/// A transaction that is dropped before its end never returns an unclean connection to a pool.
pub trait InboxStore: Send + Sync + 'static {
    /// The connection a handler sees, inside the transaction.
    type Connection: Send;
    /// An open transaction that owns its connection.
    type Transaction: Send;

    /// Name of the product, for logs and errors.
    fn name(&self) -> &'static str;

    /// How many transactions with an inbox in them can be open at a time (default: as many as there are connections).
    fn concurrency_max(&self) -> usize {
        usize::MAX
    }

    /// Checks that the tables exist; errors as [`OutboxStore::check`](super::OutboxStore::check).
    fn check(&self) -> impl Future<Output = Result<()>> + Send;

    /// Opens a transaction on a pooled connection.
    ///
    /// Not cancel safe: run it to its end.
    fn begin(&self) -> impl Future<Output = Result<Self::Transaction>> + Send;

    /// The connection inside the transaction.
    fn connection(transaction: &mut Self::Transaction) -> &mut Self::Connection;

    /// Records the id for the consumer, or finds it recorded.
    ///
    /// While another open transaction holds the same id it waits, at most the store's configured time.
    ///
    /// # Errors
    /// [`Busy`](crate::ErrorKind::Busy) when that wait ran out: the message is still in work elsewhere.
    fn record(
        &self,
        transaction: &mut Self::Transaction,
        consumer: &str,
        id: &MessageId,
    ) -> impl Future<Output = Result<Recorded>> + Send;

    /// Commits. After an error the effect may or may not be there; recording the id again tells.
    ///
    /// Not cancel safe: run it to its end.
    fn commit(&self, transaction: Self::Transaction) -> impl Future<Output = Result<()>> + Send;

    /// Rolls back. An error means that the connection was broken (and is not reused).
    ///
    /// Not cancel safe: run it to its end.
    fn rollback(&self, transaction: Self::Transaction) -> impl Future<Output = Result<()>> + Send;

    /// What a driver error of this database means, wherever it stands in the chain of `error`'s sources; `None` when
    /// there is none. Decided by code, never by text.
    fn kind_of(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind>;

    /// Deletes up to `rows_max` of the consumer's records at least `age` old, in its own transaction, and returns how
    /// many. Other consumers may have to remember theirs longer.
    fn clean_up(
        &self,
        consumer: &str,
        age: Duration,
        rows_max: usize,
    ) -> impl Future<Output = Result<u64>> + Send;
}
