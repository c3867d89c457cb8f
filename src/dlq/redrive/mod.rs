//! Redrive: the way back from the dead letters, for an operator.
//!
//! The table is the desk: [`collect`](Redrive::collect) brings letters there from a broker, and every verb works on its
//! entries. A redriven message goes to the consumer that failed it, over its [way back](super::DeadLetters::way_back), and to
//! nobody else. It has its id, bytes, key and headers; its attempts begin anew.

mod canary;
mod collect;
mod desk;
mod judge;
mod pace;
mod plan;
mod run;
mod worker;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backoff::{DelayPolicy, Jitter};
use crate::broker::Publisher;
use crate::clock::{Clock, SystemClock};
use crate::consumer::InboxKey;
use crate::error::{Error, Result, within};
use crate::store::{AuditEntry, InboxStore, LetterEntry, LetterFilter, RedriveStore, WholeLetter};

use super::DeadLetters;
use canary::{Witness, Witnessed};

pub use collect::{CollectLimits, Collected, Unwrap};
pub use desk::Discarded;
pub use judge::Refusal;
pub use plan::{Canary, Order, Tally};
pub use run::Run;

/// An operator's desk over the dead letters of one consumer.
///
/// ```
/// # #[cfg(all(feature = "sqlite", feature = "memory"))]
/// # mod example {
/// use relaybox::broker::memory::MemoryBroker;
/// use relaybox::dlq::redrive::{Order, Redrive};
/// use relaybox::store::sqlite::SqliteStore;
/// use relaybox::store::LetterFilter;
/// use relaybox::story::Reason;
///
/// async fn send_back(broker: MemoryBroker, store: SqliteStore) -> relaybox::Result<()> {
///     let desk = Redrive::new("billing", "orders", broker, store);
///     let failed = LetterFilter::all().with_reason(Reason::new(Reason::RETRIES_EXHAUSTED));
///     let planned = desk.plan("ann", &Order::of(failed)).await?;
///     println!("{} would go, {:?} would not", planned.would.send, planned.would.refuse);
///     let done = desk.run("ann", planned.row.id, |run| println!("{} sent", run.row.sent)).await?;
///     println!("{}: {} sent", done.row.state.as_str(), done.row.sent);
///     Ok(())
/// }
/// # }
/// ```
#[derive(Clone)]
pub struct Redrive {
    consumer: String,
    sources: Vec<String>,
    publisher: Arc<dyn Publisher>,
    store: Arc<dyn RedriveStore>,
    dead_letters: DeadLetters,
    config: RedriveConfig,
    inbox: Option<Arc<dyn Witness>>,
    inbox_key: InboxKey,
    unwrap: Option<Unwrap>,
    clock: Arc<dyn Clock>,
}

impl Redrive {
    /// A desk for the letters of `consumer`, which reads `source`, in `store`; what goes back goes through `publisher`.
    pub fn new(
        consumer: impl Into<String>,
        source: impl Into<String>,
        publisher: impl Publisher,
        store: impl RedriveStore,
    ) -> Self {
        Self {
            consumer: consumer.into(),
            sources: vec![source.into()],
            publisher: Arc::new(publisher),
            store: Arc::new(store),
            dead_letters: DeadLetters::topic(),
            config: RedriveConfig::default(),
            inbox: None,
            inbox_key: InboxKey::default(),
            unwrap: None,
            clock: Arc::new(SystemClock),
        }
    }

    /// Another source of the consumer. Of several, the letter's origin tells which way it goes back.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<String>) -> Self {
        self.sources.push(source.into());
        self
    }

    /// Takes the names of destination and way back from the consumer's own setting (default [`DeadLetters::topic`]).
    #[must_use]
    pub fn with_dead_letters(mut self, dead_letters: DeadLetters) -> Self {
        self.dead_letters = dead_letters;
        self
    }

    /// Takes other settings.
    #[must_use]
    pub fn with_config(mut self, config: RedriveConfig) -> Self {
        self.config = config;
        self
    }

    /// The consumer's inbox, which a [`Canary`] is looked for in, and the consumer's rule for keys.
    #[must_use]
    pub fn with_inbox(mut self, inbox: impl InboxStore, key: InboxKey) -> Self {
        self.inbox = Some(Arc::new(Witnessed(inbox)));
        self.inbox_key = key;
        self
    }

    /// Turns what others wrapped a message in back into the message when it is [collected](Self::collect); `None` for what is
    /// no wrapper.
    ///
    /// What comes a second time after a crash is known by its id: give the message its own, or leave that of the wrapper.
    #[must_use]
    pub fn with_unwrap(
        mut self,
        unwrap: impl Fn(&crate::Incoming) -> Option<crate::Incoming> + Send + Sync + 'static,
    ) -> Self {
        self.unwrap = Some(Arc::new(unwrap));
        self
    }

    /// Uses another clock for ages and pauses.
    #[must_use]
    pub fn with_clock(mut self, clock: impl Clock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Up to `count_max` (at most [`LETTERS_MAX`](crate::store::LETTERS_MAX)) entries that match after position `after`, oldest
    /// first.
    ///
    /// # Errors
    /// [`Invalid`](crate::ErrorKind::Invalid) for a filter that no entry can match; else as the database's.
    pub async fn list(
        &self,
        filter: &LetterFilter,
        after: i64,
        count_max: usize,
    ) -> Result<Vec<LetterEntry>> {
        plan::validate_filter(filter)?;
        self.store
            .entries(&self.consumer, filter, (after, i64::MAX), count_max)
            .await
    }

    /// One entry with all of its message; `None` when it is not there (any more).
    ///
    /// # Errors
    /// As the database's.
    pub async fn show(&self, position: i64) -> Result<Option<WholeLetter>> {
        let filter = LetterFilter::all().with_position(position);
        let range = (i64::MIN, i64::MAX);
        let letters = self
            .store
            .letters(&self.consumer, &filter, range, 1, usize::MAX);
        Ok(letters.await?.pop())
    }

    /// Up to `count_max` rows of the audit after position `after`, oldest first.
    ///
    /// # Errors
    /// As the database's.
    pub async fn audit(&self, after: i64, count_max: usize) -> Result<Vec<AuditEntry>> {
        self.store.audit(&self.consumer, after, count_max).await
    }

    /// Deletes what the audit knows of the consumer that is at least `age` old, and runs that ended so long ago, in bites of
    /// a transaction each. What left before may be [collected](Self::collect) once more: keep the audit for longer than the
    /// broker keeps dead letters.
    ///
    /// # Errors
    /// As the database's; what is deleted by then stays so.
    pub async fn clean_up_audit(&self, age: Duration) -> Result<u64> {
        const ROWS_MAX: usize = 1_000;
        let mut all = 0;
        loop {
            let deleted = self.store.clean_up_audit(&self.consumer, age, ROWS_MAX);
            let deleted = deleted.await?;
            all += deleted;
            if deleted < ROWS_MAX as u64 {
                return Ok(all);
            }
        }
    }

    fn validate(&self) -> Result<()> {
        crate::consumer::validate_name(&self.consumer)?;
        self.config.validate()
    }
}

impl fmt::Debug for Redrive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redrive")
            .field("consumer", &self.consumer)
            .field("sources", &self.sources)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// Settings of a [`Redrive`].
#[derive(Debug, Clone)]
pub struct RedriveConfig {
    batch_max: usize,
    batch_bytes_max: usize,
    rate_max: u32,
    attempts_max: u32,
    backoff: DelayPolicy,
    redrives_max: u32,
    inbox_retention: Duration,
}

impl Default for RedriveConfig {
    fn default() -> Self {
        Self {
            batch_max: 100,
            batch_bytes_max: 8 * 1_024 * 1_024,
            rate_max: 100,
            attempts_max: 6,
            backoff: DelayPolicy::exponential(Duration::from_millis(200))
                .with_jitter(Jitter::Equal)
                .with_cap(Duration::from_secs(5)),
            redrives_max: 3,
            inbox_retention: Duration::from_secs(30 * 86_400),
        }
    }
}

impl RedriveConfig {
    /// Entries sent and settled together (default 100, at most 1,000).
    #[must_use]
    pub const fn with_batch_max(mut self, entries: usize) -> Self {
        self.batch_max = entries;
        self
    }

    /// Bytes of a batch (default 8 MiB), but for its first message.
    #[must_use]
    pub const fn with_batch_bytes_max(mut self, bytes: usize) -> Self {
        self.batch_bytes_max = bytes;
        self
    }

    /// Messages a second that one run sends at most (default 100), so that the consumer keeps room for its other work.
    #[must_use]
    pub const fn with_rate_max(mut self, messages: u32) -> Self {
        self.rate_max = messages;
        self
    }

    /// How often a batch is tried that broker or database do not take, before the run stops (default 6).
    #[must_use]
    pub const fn with_attempts_max(mut self, attempts: u32) -> Self {
        self.attempts_max = attempts;
        self
    }

    /// Delays between these tries (default 200 ms doubling to 5 s).
    #[must_use]
    pub const fn with_backoff(mut self, backoff: DelayPolicy) -> Self {
        self.backoff = backoff;
        self
    }

    /// Entries that were redriven so often are refused unless forced (default 3): a message that always fails must not go
    /// round for ever.
    #[must_use]
    pub const fn with_redrives_max(mut self, redrives: u32) -> Self {
        self.redrives_max = redrives;
        self
    }

    /// How long the consumer's inbox remembers (default 30 days, as the consumer's). An entry whose first failure is as old is
    /// refused unless forced: its effect may be there, with nobody left to tell.
    #[must_use]
    pub const fn with_inbox_retention(mut self, retention: Duration) -> Self {
        self.inbox_retention = retention;
        self
    }

    fn validate(&self) -> Result<()> {
        within("batch_max", self.batch_max, 1, crate::store::LETTERS_MAX)?;
        within("batch_bytes_max", self.batch_bytes_max, 1, usize::MAX)?;
        if self.rate_max == 0 {
            return Err(Error::configuration("rate_max", "at least 1", "0"));
        }
        if self.attempts_max == 0 {
            return Err(Error::configuration("attempts_max", "at least 1", "0"));
        }
        Ok(())
    }
}
