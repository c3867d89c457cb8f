//! Settings of a consumer, checked once at start.

use std::time::Duration;

use crate::backoff::{DelayPolicy, Jitter};
use crate::broker::{Retention, Subscriber, SubscriberCapabilities, TopologyMode};
use crate::error::{Error, Result, within};

use super::guard::FailureGuard;
use super::job::InboxKey;

/// A shorter silence is that of a busy machine.
const SILENCE_MIN: Duration = Duration::from_millis(100);

/// A shorter lease would end while its holder is only busy.
const WAITING_LEASE_MIN: Duration = Duration::from_secs(1);

/// More samples would be a load without news.
#[cfg(feature = "metrics")]
const SAMPLE_INTERVAL_MIN: Duration = Duration::from_millis(10);

/// What happens to a message without a usable id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MissingId {
    /// It becomes a dead letter with reason `missing-id`.
    #[default]
    DeadLetter,
    /// Its place at the broker (topic, partition, offset) is its id: a copy published again is another message. Refused at
    /// start where the broker has no [positions](crate::broker::SubscriberCapabilities::positions): there a message that
    /// comes again could not be told from another.
    BrokerCoordinates,
}

/// Settings of a [`Consumer`](super::Consumer).
#[derive(Debug, Clone)]
pub struct ConsumerConfig {
    pub(super) concurrency: usize,
    pub(super) in_flight_max: usize,
    pub(super) in_flight_bytes_max: usize,
    pub(super) handler_timeout: Duration,
    pub(super) shutdown_deadline: Duration,
    pub(super) backoff: DelayPolicy,
    pub(super) topology: TopologyMode,
    pub(super) inbox_key: InboxKey,
    pub(super) missing_id: MissingId,
    pub(super) inbox_retention: Duration,
    pub(super) failure_guard: Option<FailureGuard>,
    pub(super) source_retention: Option<Duration>,
    pub(super) silence_max: Duration,
    pub(super) waiting_lease: Duration,
    #[cfg(feature = "metrics")]
    pub(super) sample_interval: Option<Duration>,
}

impl Default for ConsumerConfig {
    fn default() -> Self {
        Self {
            concurrency: 8,
            in_flight_max: 256,
            in_flight_bytes_max: 64 * 1_024 * 1_024,
            handler_timeout: Duration::from_secs(60),
            shutdown_deadline: Duration::from_secs(30),
            backoff: DelayPolicy::exponential(Duration::from_millis(100))
                .with_jitter(Jitter::Equal)
                .with_cap(Duration::from_secs(10)),
            topology: TopologyMode::Create,
            inbox_key: InboxKey::MessageId,
            missing_id: MissingId::DeadLetter,
            inbox_retention: Duration::from_secs(30 * 86_400),
            failure_guard: Some(FailureGuard::default()),
            source_retention: None,
            silence_max: Duration::from_secs(30),
            waiting_lease: Duration::from_secs(30),
            #[cfg(feature = "metrics")]
            sample_interval: Some(Duration::from_secs(15)),
        }
    }
}

impl ConsumerConfig {
    /// Handlers at a time, of different keys (default 8). Give the pool at least as many connections; with one to spare
    /// PostgreSQL is asked for less. On SQLite it is 1 whatever is set: a handler holds the only write lock.
    ///
    /// A handler is free once its transaction is committed: acknowledgements on their way are not counted.
    #[must_use]
    pub fn with_concurrency(mut self, handlers: usize) -> Self {
        self.concurrency = handlers;
        self
    }

    /// Deliveries taken and not yet settled (default 256).
    #[must_use]
    pub fn with_in_flight_max(mut self, deliveries: usize) -> Self {
        self.in_flight_max = deliveries;
        self
    }

    /// Bytes of deliveries taken and not yet settled (default 64 MiB); one delivery is always taken.
    #[must_use]
    pub fn with_in_flight_bytes_max(mut self, bytes: usize) -> Self {
        self.in_flight_bytes_max = bytes;
        self
    }

    /// How long a handler may take (default 60 s); then it has failed, and its connection is closed.
    #[must_use]
    pub fn with_handler_timeout(mut self, timeout: Duration) -> Self {
        self.handler_timeout = timeout;
        self
    }

    /// How long a stop waits for running handlers (default 30 s). What is unfinished then comes again.
    #[must_use]
    pub fn with_shutdown_deadline(mut self, deadline: Duration) -> Self {
        self.shutdown_deadline = deadline;
        self
    }

    /// Delays while the database is away or a copy is not confirmed (default 100 ms doubling to 10 s).
    #[must_use]
    pub fn with_backoff(mut self, backoff: DelayPolicy) -> Self {
        self.backoff = backoff;
        self
    }

    /// Whether rungs and dead letter destinations are created or only verified (default created).
    #[must_use]
    pub fn with_topology(mut self, topology: TopologyMode) -> Self {
        self.topology = topology;
        self
    }

    /// What the inbox remembers messages by (default their ids). Changing it makes every message new to the inbox.
    #[must_use]
    pub fn with_inbox_key(mut self, key: InboxKey) -> Self {
        self.inbox_key = key;
        self
    }

    /// When to pause because most attempts fail (default: [`FailureGuard::default`]).
    #[must_use]
    pub fn with_failure_guard(mut self, guard: FailureGuard) -> Self {
        self.failure_guard = Some(guard);
        self
    }

    /// Never pauses because most attempts fail.
    #[must_use]
    pub fn without_failure_guard(mut self) -> Self {
        self.failure_guard = None;
        self
    }

    /// The rule for messages without a usable id, or that the key's function makes no usable key of (default dead letter).
    #[must_use]
    pub fn with_missing_id(mut self, rule: MissingId) -> Self {
        self.missing_id = rule;
        self
    }

    /// How long ids are remembered (default 30 days). Must be longer than any source may deliver a message again plus the
    /// whole ladder, or a late copy has its effect twice: refused at start, where the broker
    /// [is asked](Subscriber::retention). A queue, which lets go of what is acknowledged, needs only more than the ladder;
    /// a copy that waits in it unsettled for longer than this is not recognised. With [`TopologyMode::Unchecked`] nobody is
    /// asked: there, state it.
    #[must_use]
    pub fn with_inbox_retention(mut self, retention: Duration) -> Self {
        self.inbox_retention = retention;
        self
    }

    /// States for how long after it was stored any of the sources may deliver a message, instead of asking the broker (the
    /// default). For a source that keeps messages for ever, a broker that does not tell, or a user who may not ask.
    ///
    /// This is your word: a message that is delivered again later than that, because a consumer's place was lost or put
    /// back, may have its effect twice.
    #[must_use]
    pub fn with_source_retention(mut self, retention: Duration) -> Self {
        self.source_retention = Some(retention);
        self
    }

    /// Refuses an inbox that forgets a message which one of these sources may deliver again.
    ///
    /// Asks the broker, unless the answer is stated or the broker is to be asked for nothing.
    pub(super) async fn outlasts(
        &self,
        broker: &dyn Subscriber,
        sources: &[String],
        ladder: Duration,
    ) -> Result<()> {
        for source in sources {
            let retention = match (self.source_retention, self.topology) {
                (Some(stated), _) => Retention::Bounded(stated),
                (None, TopologyMode::Unchecked) => continue,
                (None, _) => broker.retention(source).await?,
            };
            self.remembers(source, retention, ladder)?;
        }
        Ok(())
    }

    fn remembers(&self, source: &str, retention: Retention, ladder: Duration) -> Result<()> {
        let keeps = match retention {
            Retention::UntilSettled => return Ok(()),
            Retention::Bounded(kept) if self.inbox_retention > kept.saturating_add(ladder) => {
                return Ok(());
            }
            Retention::Bounded(kept) => format!("keeps messages ({kept:?}) and the whole ladder ({ladder:?})"),
            Retention::Unbounded => {
                "keeps messages, which is for ever: bound it there, or state a bound (with_source_retention)".into()
            }
            Retention::Unknown => {
                "keeps messages, which the broker does not tell: state it (with_source_retention)".into()
            }
        };
        Err(Error::configuration(
            "inbox_retention",
            format!("longer than source {source} {keeps}"),
            format!("{:?}", self.inbox_retention),
        ))
    }

    /// How long the loop that takes deliveries may make no turn, its planned pauses not counted, before
    /// [`Consumer::probe`](super::Consumer::probe) calls it stalled (default 30 s).
    #[must_use]
    pub fn with_silence_max(mut self, silence: Duration) -> Self {
        self.silence_max = silence;
        self
    }

    /// For how long a member holds what it has claimed in the waiting room, unless it says that it lives, which it does in a
    /// third of that (default 30 s, at least 1 s). What a member that died had claimed comes again after it.
    #[must_use]
    pub fn with_waiting_lease(mut self, lease: Duration) -> Self {
        self.waiting_lease = lease;
        self
    }

    /// How often lag and dead letters are asked of the broker for the gauges (default every 15 s). Less often where that takes
    /// long: 20 times as long as the answers took passes before the next questions.
    #[cfg(feature = "metrics")]
    #[must_use]
    pub fn with_sample_interval(mut self, interval: Duration) -> Self {
        self.sample_interval = Some(interval);
        self
    }

    /// Samples no gauges: another member does it, or nobody.
    #[cfg(feature = "metrics")]
    #[must_use]
    pub fn without_samples(mut self) -> Self {
        self.sample_interval = None;
        self
    }

    /// Refuses to take coordinates for ids where a message that comes again has others.
    pub(super) fn can_identify(&self, broker: &SubscriberCapabilities) -> Result<()> {
        if self.missing_id == MissingId::BrokerCoordinates && !broker.positions {
            return Err(Error::configuration(
                "missing_id",
                "DeadLetter on a broker without positions",
                format!("BrokerCoordinates on {}", broker.name),
            ));
        }
        Ok(())
    }

    /// Refuses what would break a promise.
    pub(super) fn validate(&self, ladder: Duration, batch_max: usize) -> Result<()> {
        within("concurrency", self.concurrency, 1, 10_000)?;
        // Larger ones would never be full.
        within("batch", batch_max, 1, self.in_flight_max.max(1))?;
        if let Some(guard) = &self.failure_guard {
            guard.validate()?;
        }
        within(
            "in_flight_max",
            self.in_flight_max,
            self.concurrency,
            1_000_000,
        )?;
        within(
            "in_flight_bytes_max",
            self.in_flight_bytes_max,
            1,
            usize::MAX,
        )?;
        if self.handler_timeout.is_zero() {
            return Err(Error::configuration(
                "handler_timeout",
                "more than zero",
                "0",
            ));
        }
        if self.silence_max < SILENCE_MIN {
            return Err(Error::configuration(
                "silence_max",
                format!("at least {SILENCE_MIN:?}"),
                format!("{:?}", self.silence_max),
            ));
        }
        if self.waiting_lease < WAITING_LEASE_MIN {
            return Err(Error::configuration(
                "waiting_lease",
                format!("at least {WAITING_LEASE_MIN:?}"),
                format!("{:?}", self.waiting_lease),
            ));
        }
        #[cfg(feature = "metrics")]
        if self
            .sample_interval
            .is_some_and(|interval| interval < SAMPLE_INTERVAL_MIN)
        {
            return Err(Error::configuration(
                "sample_interval",
                format!("at least {SAMPLE_INTERVAL_MIN:?}"),
                format!("{:?}", self.sample_interval),
            ));
        }
        if self.inbox_retention <= ladder {
            return Err(Error::configuration(
                "inbox_retention",
                format!("longer than the whole ladder ({ladder:?})"),
                format!("{:?}", self.inbox_retention),
            ));
        }
        Ok(())
    }
}

/// What a consumer's name must look like: it becomes part of topic and queue names.
pub(crate) fn validate_name(name: &str) -> Result<()> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if (1..=100).contains(&name.len()) && name.bytes().all(plain) {
        return Ok(());
    }
    Err(Error::configuration(
        "consumer name",
        "1 to 100 of a-z, A-Z, 0-9, '.', '_' and '-'",
        name,
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_are_no_ids_on_a_broker_without_positions() {
        let mut broker = SubscriberCapabilities::new("queues");
        broker.positions = false;
        let config = ConsumerConfig::default();
        config.can_identify(&broker).unwrap();
        let config = config.with_missing_id(MissingId::BrokerCoordinates);
        let error = config.can_identify(&broker).unwrap_err();
        assert_eq!(error.violation().unwrap().field, "missing_id");
        broker.positions = true;
        config.can_identify(&broker).unwrap();
    }

    #[test]
    fn an_inbox_must_remember_for_longer_than_a_source_delivers() {
        let second = Duration::from_secs(1);
        let config = ConsumerConfig::default().with_inbox_retention(10 * second);
        let kept = |retention| config.remembers("orders", retention, 3 * second);
        kept(Retention::Bounded(6 * second)).unwrap();
        kept(Retention::UntilSettled).unwrap();
        for (retention, told) in [
            (Retention::Bounded(7 * second), "7s"),
            (Retention::Bounded(Duration::MAX), "ladder (3s)"),
            (Retention::Unbounded, "for ever"),
            (Retention::Unknown, "does not tell"),
        ] {
            let error = kept(retention).unwrap_err();
            let violation = error.violation().unwrap();
            assert_eq!(
                (violation.field, violation.value.as_str()),
                ("inbox_retention", "10s")
            );
            assert!(violation.limit.contains("orders"), "{error}");
            assert!(violation.limit.contains(told), "{error}");
        }
    }

    #[test]
    fn settings_that_break_a_promise_are_refused_by_name() {
        let hour = Duration::from_secs(3600);
        let refused = |config: ConsumerConfig| {
            let error = config.validate(hour, 1).unwrap_err();
            error.violation().unwrap().field
        };
        let config = ConsumerConfig::default;
        assert_eq!(refused(config().with_concurrency(0)), "concurrency");
        assert_eq!(refused(config().with_in_flight_max(7)), "in_flight_max");
        assert_eq!(
            refused(config().with_in_flight_bytes_max(0)),
            "in_flight_bytes_max"
        );
        assert_eq!(
            refused(config().with_handler_timeout(Duration::ZERO)),
            "handler_timeout"
        );
        assert_eq!(
            refused(config().with_inbox_retention(hour)),
            "inbox_retention"
        );
        assert_eq!(
            refused(config().with_silence_max(Duration::ZERO)),
            "silence_max"
        );
        assert_eq!(
            refused(config().with_waiting_lease(Duration::ZERO)),
            "waiting_lease"
        );
        #[cfg(feature = "metrics")]
        assert_eq!(
            refused(config().with_sample_interval(Duration::ZERO)),
            "sample_interval"
        );
        config().validate(hour, 256).unwrap();
        assert!(config().validate(hour, 257).is_err());
        let guard = FailureGuard::default().with_percent(0);
        assert_eq!(
            refused(config().with_failure_guard(guard)),
            "failure_guard percent"
        );
        assert!(validate_name("billing-2.eu").is_ok());
        assert!(validate_name("").is_err());
        assert!(validate_name("a b").is_err());
    }
}
