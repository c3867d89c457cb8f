//! An inbox whose database fails on command.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::faults::Callback;
use crate::error::{Error, ErrorKind, Result};
use crate::store::{InboxStore, Recorded};

/// The calls of an inbox that can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum InboxCall {
    /// Opening a transaction.
    Begin,
    /// Recording the keys of a batch.
    Record,
    /// Committing.
    Commit,
}

/// What happens to one call.
#[derive(Clone)]
#[non_exhaustive]
pub enum InboxFault {
    /// Not done, and an error of this kind: [`Unavailable`](ErrorKind::Unavailable) for a database that is away,
    /// [`Conflict`](ErrorKind::Conflict) for a deadlock. A commit that fails so is rolled back.
    Fail(ErrorKind),
    /// Done, but the answer is lost: an error of kind [`Unavailable`](ErrorKind::Unavailable).
    LoseAnswer,
    /// Done; then the callback runs and the call never returns. Made by [`InboxFault::crash`]. At a commit that is a crash
    /// between commit and acknowledgement.
    Crash(Callback),
}

impl InboxFault {
    /// A crash point: `callback` may [reach](super::CrashPoint::reach) the point at which the test lets the consumer die.
    pub fn crash(callback: impl Fn() + Send + Sync + 'static) -> Self {
        Self::Crash(Callback::new(callback))
    }
}

impl fmt::Debug for InboxFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fail(kind) => f.debug_tuple("Fail").field(kind).finish(),
            Self::LoseAnswer => f.write_str("LoseAnswer"),
            Self::Crash(_) => f.write_str("Crash"),
        }
    }
}

/// Wraps an inbox store, forwards everything, and lets planned calls go wrong. A clone counts on with its original.
#[derive(Debug, Clone)]
pub struct FaultyInbox<S> {
    inner: S,
    planned: BTreeMap<(InboxCall, u64), InboxFault>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    begins: AtomicU64,
    records: AtomicU64,
    commits: AtomicU64,
}

impl<S: InboxStore> FaultyInbox<S> {
    /// Wraps `inner`; without a plan it changes nothing.
    #[must_use]
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            planned: BTreeMap::new(),
            counts: Arc::default(),
        }
    }

    /// Plans a fault for the `nth` call of this kind, counted from 1 over all transactions. A second one for the same call
    /// replaces the first.
    #[must_use]
    pub fn with_fault(mut self, call: InboxCall, nth: u64, fault: InboxFault) -> Self {
        self.planned.insert((call, nth), fault);
        self
    }

    /// How often this call was made so far.
    #[must_use]
    pub fn calls(&self, call: InboxCall) -> u64 {
        self.count(call).load(Ordering::SeqCst)
    }

    fn count(&self, call: InboxCall) -> &AtomicU64 {
        match call {
            InboxCall::Begin => &self.counts.begins,
            InboxCall::Record => &self.counts.records,
            InboxCall::Commit => &self.counts.commits,
        }
    }

    fn fault(&self, call: InboxCall) -> Option<&InboxFault> {
        let nth = self.count(call).fetch_add(1, Ordering::SeqCst) + 1;
        self.planned.get(&(call, nth))
    }
}

/// What comes of a call that was done.
async fn after<T>(fault: Option<&InboxFault>, call: &'static str, done: T) -> Result<T> {
    match fault {
        None | Some(InboxFault::Fail(_)) => Ok(done),
        Some(InboxFault::LoseAnswer) => {
            let detail = "planned fault: the answer was lost";
            Err(Error::new(ErrorKind::Unavailable, call, detail))
        }
        Some(InboxFault::Crash(callback)) => callback.crash().await,
    }
}

/// Why a call is not even tried.
fn before(fault: Option<&InboxFault>, call: &'static str) -> Option<Error> {
    match fault {
        Some(InboxFault::Fail(kind)) => Some(Error::new(*kind, call, "planned fault: failed")),
        _ => None,
    }
}

impl<S: InboxStore> InboxStore for FaultyInbox<S> {
    type Connection = S::Connection;
    type Transaction = S::Transaction;

    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn concurrency_max(&self) -> usize {
        self.inner.concurrency_max()
    }

    fn remembers(&self) -> bool {
        self.inner.remembers()
    }

    async fn check(&self) -> Result<()> {
        self.inner.check().await
    }

    async fn begin(&self) -> Result<Self::Transaction> {
        let fault = self.fault(InboxCall::Begin);
        if let Some(error) = before(fault, "begin") {
            return Err(error);
        }
        after(fault, "begin", self.inner.begin().await?).await
    }

    fn connection(transaction: &mut Self::Transaction) -> &mut Self::Connection {
        S::connection(transaction)
    }

    async fn record(
        &self,
        transaction: &mut Self::Transaction,
        consumer: &str,
        keys: &[&str],
    ) -> Result<Vec<Recorded>> {
        let fault = self.fault(InboxCall::Record);
        if let Some(error) = before(fault, "record") {
            return Err(error);
        }
        let recorded = self.inner.record(transaction, consumer, keys).await?;
        after(fault, "record", recorded).await
    }

    async fn is_recorded(&self, consumer: &str, key: &str) -> Result<bool> {
        self.inner.is_recorded(consumer, key).await
    }

    async fn note_start(&self, consumer: &str, key: &str, run: &str) -> Result<bool> {
        self.inner.note_start(consumer, key, run).await
    }

    async fn forget_start(&self, consumer: &str, key: &str) -> Result<()> {
        self.inner.forget_start(consumer, key).await
    }

    async fn commit(&self, transaction: Self::Transaction) -> Result<()> {
        let fault = self.fault(InboxCall::Commit);
        if let Some(error) = before(fault, "commit") {
            self.inner.rollback(transaction).await?;
            return Err(error);
        }
        self.inner.commit(transaction).await?;
        after(fault, "commit", ()).await
    }

    /// Counts as a commit, whatever it begins.
    async fn commit_and_begin(
        &self,
        transaction: Self::Transaction,
    ) -> Result<Option<Self::Transaction>> {
        let fault = self.fault(InboxCall::Commit);
        if let Some(error) = before(fault, "commit") {
            self.inner.rollback(transaction).await?;
            return Err(error);
        }
        let next = self.inner.commit_and_begin(transaction).await?;
        after(fault, "commit", next).await
    }

    async fn rollback(&self, transaction: Self::Transaction) -> Result<()> {
        self.inner.rollback(transaction).await
    }

    fn kind_of(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        self.inner.kind_of(error)
    }

    async fn clean_up(&self, consumer: &str, age: Duration, rows_max: usize) -> Result<u64> {
        self.inner.clean_up(consumer, age, rows_max).await
    }
}
