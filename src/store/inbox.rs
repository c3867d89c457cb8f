//! The inbox contract: the key of a message, recorded in the transaction of the work.

use std::collections::HashSet;
use std::error::Error as StdError;
use std::future::Future;
use std::time::Duration;

use crate::error::{ErrorKind, Result};

/// Whether a message is new to a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// First time: do the work.
    First,
    /// A committed transaction has dealt with it.
    Duplicate,
}

impl Recorded {
    /// [`First`](Self::First) if so.
    #[must_use]
    pub const fn first(is_new: bool) -> Self {
        if is_new { Self::First } else { Self::Duplicate }
    }

    /// For each key whether it is among the `new` ones, and was not before in `keys`.
    #[must_use]
    pub fn among(keys: &[&str], new: &[String]) -> Vec<Self> {
        let mut new: HashSet<&str> = new.iter().map(String::as_str).collect();
        let taken = keys.iter().map(|key| new.remove(key));
        taken.map(Self::first).collect()
    }
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

    /// Whether it remembers anything (default yes). Of a consumer whose inbox does not, nobody asks for how long.
    fn remembers(&self) -> bool {
        true
    }

    /// Checks that the tables exist; errors as [`OutboxStore::check`](super::OutboxStore::check).
    fn check(&self) -> impl Future<Output = Result<()>> + Send;

    /// Opens a transaction on a pooled connection.
    ///
    /// Not cancel safe: run it to its end.
    fn begin(&self) -> impl Future<Output = Result<Self::Transaction>> + Send;

    /// The connection inside the transaction.
    fn connection(transaction: &mut Self::Transaction) -> &mut Self::Connection;

    /// Records the keys for the consumer, or finds them recorded: an answer each, in their order. A key that stands twice
    /// is a duplicate the second time. A key is what the consumer's rule makes of a message, by default its id: 1 to 255
    /// bytes without NUL.
    ///
    /// While another open transaction holds one of them it waits, at most the store's configured time. Keys are inserted in
    /// one order, so that two batches with the same keys never wait for each other.
    ///
    /// # Errors
    /// [`Busy`](crate::ErrorKind::Busy) when that wait ran out: a message is still in work elsewhere.
    fn record(
        &self,
        transaction: &mut Self::Transaction,
        consumer: &str,
        keys: &[&str],
    ) -> impl Future<Output = Result<Vec<Recorded>>> + Send;

    /// Whether the key is recorded, in a committed transaction; waits for nobody.
    fn is_recorded(&self, consumer: &str, key: &str) -> impl Future<Output = Result<bool>> + Send;

    /// Takes durable note, in a transaction of its own, that `run` (a consumer from its start to its end) begins work on a
    /// message which may end its process. Returns whether the start of another run is noted already, and stays: its work
    /// never came to an end. Repeating it is harmless.
    fn note_start(
        &self,
        consumer: &str,
        key: &str,
        run: &str,
    ) -> impl Future<Output = Result<bool>> + Send;

    /// Forgets the start of work on a message, whoever began it: it came to an end, whichever.
    fn forget_start(&self, consumer: &str, key: &str) -> impl Future<Output = Result<()>> + Send;

    /// Commits. After an error the effect may or may not be there; recording the keys again tells.
    ///
    /// Not cancel safe: run it to its end.
    fn commit(&self, transaction: Self::Transaction) -> impl Future<Output = Result<()>> + Send;

    /// Commits as [`commit`](Self::commit) does. Where beginning another transaction on the same connection then costs no
    /// round trip and keeps nobody waiting for a connection, begins it and returns it (default: never). It is empty; dropped
    /// without use it gives its connection back.
    ///
    /// Not cancel safe: run it to its end.
    fn commit_and_begin(
        &self,
        transaction: Self::Transaction,
    ) -> impl Future<Output = Result<Option<Self::Transaction>>> + Send {
        async { self.commit(transaction).await.map(|()| None) }
    }

    /// Rolls back. An error means that the connection was broken (and is not reused).
    ///
    /// Not cancel safe: run it to its end.
    fn rollback(&self, transaction: Self::Transaction) -> impl Future<Output = Result<()>> + Send;

    /// What a driver error of this database means, wherever it stands in the chain of `error`'s sources; `None` when
    /// there is none. Decided by code, never by text.
    fn kind_of(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind>;

    /// Deletes up to `rows_max` of the consumer's records, as many of its starts and, where the store is a
    /// [`VersionStore`](super::VersionStore) too, of its aggregates, each at least `age` old and in a transaction of its own.
    /// Returns how many it were of what was most. Other consumers may have to remember theirs longer.
    ///
    /// An aggregate's age is that of the last version applied; it may stay an hour longer.
    fn clean_up(
        &self,
        consumer: &str,
        age: Duration,
        rows_max: usize,
    ) -> impl Future<Output = Result<u64>> + Send;
}
