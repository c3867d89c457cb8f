//! Points at which a consumer's process ends as if it had been killed there, and the inbox that passes them.

use std::error::Error as StdError;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use relaybox::store::{InboxStore, Recorded};
use relaybox::{ErrorKind, Result};

/// A place in a consumer's work, before or after a call has its effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    Begin,
    Begun,
    Record,
    Recorded,
    /// The handler is done; nothing of it is durable.
    Commit,
    /// The effect is durable; the broker has not heard of it.
    Committed,
    /// A suspect's start is about to be noted.
    Note,
    Noted,
    /// A suspect's work came to its end; its note is there still.
    Forget,
    Forgotten,
    /// A copy is about to go to a rung or to the dead letters.
    Publish,
    /// The copy is confirmed; the original is not settled.
    Published,
    /// A delivery is about to be acknowledged.
    Settle,
    Settled,
}

const POINTS: [(&str, Point); 14] = [
    ("begin", Point::Begin),
    ("begun", Point::Begun),
    ("record", Point::Record),
    ("recorded", Point::Recorded),
    ("commit", Point::Commit),
    ("committed", Point::Committed),
    ("note", Point::Note),
    ("noted", Point::Noted),
    ("forget", Point::Forget),
    ("forgotten", Point::Forgotten),
    ("publish", Point::Publish),
    ("published", Point::Published),
    ("settle", Point::Settle),
    ("settled", Point::Settled),
];

/// Where the process is to end, if anywhere.
#[derive(Debug, Default)]
pub struct Plan {
    point: Option<Point>,
    passages_left: AtomicU32,
}

impl Plan {
    /// Of `POINT:N`: it ends at the N-th passage.
    pub fn parse(words: &str) -> Result<Self, String> {
        let (name, passages) = words.split_once(':').ok_or("POINT:N is wanted")?;
        let named = POINTS.iter().find(|(word, _)| *word == name);
        let passages: u32 = passages
            .parse()
            .map_err(|_| format!("no number: {passages}"))?;
        Ok(Self {
            point: Some(named.ok_or(format!("no point {name:?}"))?.1),
            passages_left: AtomicU32::new(passages),
        })
    }

    /// Runs nothing on the way out: no destructor, no flush, no farewell to database or broker.
    pub fn reach(&self, point: Point) {
        if self.point == Some(point) && self.passages_left.fetch_sub(1, Ordering::SeqCst) == 1 {
            std::process::abort();
        }
    }
}

/// Forwards everything.
pub struct FragileInbox<S> {
    inner: S,
    plan: Arc<Plan>,
}

impl<S> FragileInbox<S> {
    pub const fn new(inner: S, plan: Arc<Plan>) -> Self {
        Self { inner, plan }
    }
}

impl<S: InboxStore> InboxStore for FragileInbox<S> {
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
        self.plan.reach(Point::Begin);
        let begun = self.inner.begin().await?;
        self.plan.reach(Point::Begun);
        Ok(begun)
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
        self.plan.reach(Point::Record);
        let recorded = self.inner.record(transaction, consumer, keys).await?;
        self.plan.reach(Point::Recorded);
        Ok(recorded)
    }

    async fn is_recorded(&self, consumer: &str, key: &str) -> Result<bool> {
        self.inner.is_recorded(consumer, key).await
    }

    async fn note_start(&self, consumer: &str, key: &str, run: &str) -> Result<bool> {
        self.plan.reach(Point::Note);
        let earlier = self.inner.note_start(consumer, key, run).await?;
        self.plan.reach(Point::Noted);
        Ok(earlier)
    }

    async fn forget_start(&self, consumer: &str, key: &str) -> Result<()> {
        self.plan.reach(Point::Forget);
        self.inner.forget_start(consumer, key).await?;
        self.plan.reach(Point::Forgotten);
        Ok(())
    }

    async fn commit(&self, transaction: Self::Transaction) -> Result<()> {
        self.plan.reach(Point::Commit);
        self.inner.commit(transaction).await?;
        self.plan.reach(Point::Committed);
        Ok(())
    }

    async fn commit_and_begin(
        &self,
        transaction: Self::Transaction,
    ) -> Result<Option<Self::Transaction>> {
        self.plan.reach(Point::Commit);
        let next = self.inner.commit_and_begin(transaction).await?;
        self.plan.reach(Point::Committed);
        if next.is_some() {
            self.plan.reach(Point::Begin);
            self.plan.reach(Point::Begun);
        }
        Ok(next)
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
