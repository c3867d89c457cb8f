//! An inbox without a database.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as StdError;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::OwnedMutexGuard;

use crate::error::{ErrorKind, Result};
use crate::store::{InboxStore, Recorded};

/// An inbox in memory, in which a handler works on a `C` of yours: a fake repository, a map, a list of calls.
///
/// A transaction is a copy: its handler changes a clone of what was committed last, a commit puts the clone in its place
/// together with the recorded keys, and anything else throws it away. Transactions run one after the other.
///
/// So what a clone shares with its original (an `Arc`, a channel) is outside the transaction, as a call to another service
/// would be: it is not rolled back. A clone of the inbox is the same inbox.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> relaybox::Result<()> {
/// use relaybox::store::InboxStore;
/// use relaybox::testing::MemoryInbox;
///
/// let inbox = MemoryInbox::new(Vec::<u32>::new());
/// let mut transaction = inbox.begin().await?;
/// MemoryInbox::connection(&mut transaction).push(1);
/// inbox.rollback(transaction).await?;
/// assert!(inbox.state().is_empty());
/// # Ok(())
/// # }
/// ```
pub struct MemoryInbox<C> {
    shared: Arc<Shared<C>>,
}

struct Shared<C> {
    /// Held by the open transaction.
    turn: Arc<tokio::sync::Mutex<()>>,
    kept: Mutex<Kept<C>>,
}

struct Kept<C> {
    state: C,
    records: BTreeMap<Record, Instant>,
    /// How often work began on a message that may have ended its process. Kept until it is forgotten.
    starts: BTreeMap<Record, String>,
}

/// A consumer and a key.
type Record = (String, String);

fn of(consumer: &str, key: &str) -> Record {
    (consumer.to_owned(), key.to_owned())
}

/// An open transaction of a [`MemoryInbox`].
pub struct MemoryTransaction<C> {
    state: C,
    records: BTreeSet<Record>,
    _turn: OwnedMutexGuard<()>,
}

impl<C> MemoryInbox<C> {
    /// An inbox that has recorded nothing, with this state.
    #[must_use]
    pub fn new(state: C) -> Self {
        let kept = Kept {
            state,
            records: BTreeMap::new(),
            starts: BTreeMap::new(),
        };
        Self {
            shared: Arc::new(Shared {
                turn: Arc::default(),
                kept: Mutex::new(kept),
            }),
        }
    }

    /// What is committed.
    #[must_use]
    pub fn state(&self) -> C
    where
        C: Clone,
    {
        self.kept().state.clone()
    }

    /// How many keys are recorded, of all consumers.
    #[must_use]
    pub fn recorded(&self) -> usize {
        self.kept().records.len()
    }

    /// A clone may panic while the lock is held; nothing was changed then.
    fn kept(&self) -> MutexGuard<'_, Kept<C>> {
        let kept = self.shared.kept.lock();
        kept.unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C> Clone for MemoryInbox<C> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<C> fmt::Debug for MemoryInbox<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryInbox")
            .field("recorded", &self.recorded())
            .finish_non_exhaustive()
    }
}

impl<C: Clone + Send + 'static> InboxStore for MemoryInbox<C> {
    type Connection = C;
    type Transaction = MemoryTransaction<C>;

    fn name(&self) -> &'static str {
        "memory"
    }

    /// One: copies of two transactions could not be put together.
    fn concurrency_max(&self) -> usize {
        1
    }

    async fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Waits for its turn, as long as another transaction is open.
    async fn begin(&self) -> Result<Self::Transaction> {
        let turn = Arc::clone(&self.shared.turn).lock_owned().await;
        Ok(MemoryTransaction {
            state: self.kept().state.clone(),
            records: BTreeSet::new(),
            _turn: turn,
        })
    }

    fn connection(transaction: &mut Self::Transaction) -> &mut C {
        &mut transaction.state
    }

    async fn record(
        &self,
        transaction: &mut Self::Transaction,
        consumer: &str,
        keys: &[&str],
    ) -> Result<Vec<Recorded>> {
        let kept = self.kept();
        let record = |key: &&str| {
            let record = of(consumer, key);
            let is_new = !kept.records.contains_key(&record) && transaction.records.insert(record);
            Recorded::first(is_new)
        };
        Ok(keys.iter().map(record).collect())
    }

    async fn is_recorded(&self, consumer: &str, key: &str) -> Result<bool> {
        Ok(self.kept().records.contains_key(&of(consumer, key)))
    }

    async fn note_start(&self, consumer: &str, key: &str, run: &str) -> Result<bool> {
        let mut kept = self.kept();
        let noted = kept.starts.entry(of(consumer, key));
        Ok(noted.or_insert_with(|| run.to_owned()) != run)
    }

    async fn forget_start(&self, consumer: &str, key: &str) -> Result<()> {
        self.kept().starts.remove(&of(consumer, key));
        Ok(())
    }

    async fn commit(&self, transaction: Self::Transaction) -> Result<()> {
        let mut kept = self.kept();
        kept.state = transaction.state;
        let now = Instant::now();
        let records = transaction.records.into_iter();
        kept.records.extend(records.map(|record| (record, now)));
        Ok(())
    }

    async fn rollback(&self, _transaction: Self::Transaction) -> Result<()> {
        Ok(())
    }

    /// There is no driver: whatever a handler fails with is its own.
    fn kind_of(&self, _error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        None
    }

    async fn clean_up(&self, consumer: &str, age: Duration, rows_max: usize) -> Result<u64> {
        let mut kept = self.kept();
        let old = |((of, _), at): &(&Record, &Instant)| of == consumer && at.elapsed() >= age;
        let old: Vec<_> = kept.records.iter().filter(old).take(rows_max).collect();
        let old: Vec<_> = old.into_iter().map(|(record, _)| record.clone()).collect();
        for record in &old {
            kept.records.remove(record);
        }
        Ok(old.len() as u64)
    }
}
