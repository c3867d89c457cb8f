//! Settings of a relay, checked once at start.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::backoff::{DelayPolicy, Jitter};
use crate::broker::PublisherCapabilities;
use crate::error::{Error, Result, within};

/// Spare time between the publish deadline and the end of a lease, for the settling statement.
pub(super) const LEASE_MARGIN: Duration = Duration::from_secs(1);

/// The longest lease: how long the lanes of a relay that died could wait.
const LEASE_MAX: Duration = Duration::from_secs(86_400);

/// A shorter patience would take every broker for a slow one.
const PATIENCE_MIN: Duration = Duration::from_millis(10);

/// A shorter silence is that of a busy machine.
const SILENCE_MIN: Duration = Duration::from_millis(100);

/// More samples would be a load without news.
#[cfg(feature = "metrics")]
const SAMPLE_INTERVAL_MIN: Duration = Duration::from_millis(10);

/// How a relay keeps order on a publisher whose failures leave gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OrderMode {
    /// One unconfirmed message per (scope, key) unless the publisher is a `Prefix` one.
    #[default]
    Strict,
    /// Everything pipelined; after a failure later messages of a key may be first.
    Relaxed,
}

/// What becomes of a key's later messages when one of them can never be sent.
///
/// In the scope of that message: what its destination orders together with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeadHead {
    /// They go on; the dead one is parked.
    #[default]
    Skip,
    /// They wait until an operator requeues the dead one (it then goes first) or discards it.
    Hold,
    /// They are parked with it, each for an operator. Requeued, they go in their order.
    Park,
}

/// What becomes of a message whose destination is not there, or leads nowhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unroutable {
    /// It waits, with all others for that destination, and is tried again with growing pauses.
    #[default]
    Hold,
    /// It is parked, as one that can never be sent.
    Park,
    /// It counts as sent: nobody wants it.
    Accept,
}

/// Settings of a [`Relay`](super::Relay).
#[derive(Debug, Clone)]
pub struct RelayConfig {
    pub(super) name: String,
    pub(super) workers: usize,
    pub(super) batch_rows_max: usize,
    pub(super) batch_bytes_max: usize,
    pub(super) lease: Duration,
    pub(super) idle_poll_max: Duration,
    pub(super) shutdown_deadline: Duration,
    pub(super) backoff: DelayPolicy,
    pub(super) order: OrderMode,
    pub(super) dead_head: DeadHead,
    pub(super) patience: Duration,
    pub(super) silence_max: Duration,
    #[cfg(feature = "metrics")]
    pub(super) sample_interval: Option<Duration>,
    unroutable: Unroutable,
    unroutable_at: BTreeMap<String, Unroutable>,
}

impl Default for RelayConfig {
    fn default() -> Self {
        Self {
            name: format!("relay-{}", uuid::Uuid::now_v7()),
            workers: 1,
            batch_rows_max: 1_000,
            batch_bytes_max: 16 * 1_024 * 1_024,
            lease: Duration::from_secs(30),
            idle_poll_max: Duration::from_millis(200),
            shutdown_deadline: Duration::from_secs(15),
            backoff: DelayPolicy::exponential(Duration::from_millis(100))
                .with_jitter(Jitter::Equal)
                .with_cap(Duration::from_secs(10)),
            order: OrderMode::Strict,
            dead_head: DeadHead::Skip,
            patience: Duration::from_secs(1),
            silence_max: Duration::from_secs(30),
            #[cfg(feature = "metrics")]
            sample_interval: Some(Duration::from_secs(15)),
            unroutable: Unroutable::Hold,
            unroutable_at: BTreeMap::new(),
        }
    }
}

impl RelayConfig {
    /// Name of this relay in the lease table, for people (default random). Two relays may share it.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Workers over disjoint lanes (default 1, at most the number of lanes).
    #[must_use]
    pub fn with_workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Most rows in a batch (default 1,000, at least one a lane: 16).
    #[must_use]
    pub fn with_batch_rows_max(mut self, rows: usize) -> Self {
        self.batch_rows_max = rows;
        self
    }

    /// Most bytes in a batch (default 16 MiB).
    #[must_use]
    pub fn with_batch_bytes_max(mut self, bytes: usize) -> Self {
        self.batch_bytes_max = bytes;
        self
    }

    /// How long a lane stays ours without renewal (default 30 s): how long a killed relay's lanes wait.
    ///
    /// At least twice the publisher's deadline plus two seconds: a page is published only under leases that outlast the
    /// deadline and the settling, and half a lease may have passed since the last renewal.
    #[must_use]
    pub fn with_lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Longest pause between polls when nothing is pending (default 200 ms). It begins at 10 ms and doubles.
    ///
    /// With a store that wakes its relays it may be seconds: it is then how long a message waits when a wake-up is lost.
    #[must_use]
    pub fn with_idle_poll_max(mut self, pause: Duration) -> Self {
        self.idle_poll_max = pause;
        self
    }

    /// How long a stop waits for confirms (default 15 s). What is unconfirmed then stays pending.
    #[must_use]
    pub fn with_shutdown_deadline(mut self, deadline: Duration) -> Self {
        self.shutdown_deadline = deadline;
        self
    }

    /// Delays after a failure of the broker, a destination or the database (default 100 ms doubling to 10 s).
    #[must_use]
    pub fn with_backoff(mut self, backoff: DelayPolicy) -> Self {
        self.backoff = backoff;
        self
    }

    /// How order is kept (default strict).
    #[must_use]
    pub fn with_order(mut self, order: OrderMode) -> Self {
        self.order = order;
        self
    }

    /// What becomes of a key's later messages when one of them can never be sent (default: they go on).
    #[must_use]
    pub fn with_dead_head(mut self, dead_head: DeadHead) -> Self {
        self.dead_head = dead_head;
        self
    }

    /// How long a batch waits for a destination that does not answer before it is settled without it (default 1 s).
    /// Messages for that destination are then set aside until it answers, or the publisher's deadline has passed.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// How long a loop of the relay may make no turn, its planned pauses not counted, before
    /// [`Relay::probe`](super::Relay::probe) calls it stalled (default 30 s).
    #[must_use]
    pub fn with_silence_max(mut self, silence: Duration) -> Self {
        self.silence_max = silence;
        self
    }

    /// How often the gauges of the outbox are sampled (default every 15 s), by one query each time. Less often where that
    /// takes long: 20 times as long as the query took passes before the next one.
    #[cfg(feature = "metrics")]
    #[must_use]
    pub fn with_sample_interval(mut self, interval: Duration) -> Self {
        self.sample_interval = Some(interval);
        self
    }

    /// Samples no gauges of the outbox: another relay does it, or nobody.
    #[cfg(feature = "metrics")]
    #[must_use]
    pub fn without_samples(mut self) -> Self {
        self.sample_interval = None;
        self
    }

    /// What becomes of messages whose destination is not there, or leads nowhere (default: they wait).
    #[must_use]
    pub fn with_unroutable(mut self, rule: Unroutable) -> Self {
        self.unroutable = rule;
        self
    }

    /// The same for one destination.
    #[must_use]
    pub fn with_unroutable_at(mut self, destination: impl Into<String>, rule: Unroutable) -> Self {
        self.unroutable_at.insert(destination.into(), rule);
        self
    }

    pub(super) fn unroutable(&self, destination: &str) -> Unroutable {
        let rule = self.unroutable_at.get(destination);
        rule.copied().unwrap_or(self.unroutable)
    }

    /// Refuses what would break a promise.
    pub(super) fn validate(&self, publisher: &PublisherCapabilities) -> Result<()> {
        within("name", self.name.len(), 1, 200)?;
        let lanes = usize::try_from(crate::lane::LANES).unwrap_or(1);
        within("workers", self.workers, 1, lanes)?;
        // Each lane has a part of each batch: one that gets none would have to wait for its turn.
        within("batch_rows_max", self.batch_rows_max, lanes, 100_000)?;
        within("batch_bytes_max", self.batch_bytes_max, 1, 1 << 30)?;
        let least = publisher.publish_deadline.saturating_add(LEASE_MARGIN);
        let least = least.saturating_mul(2);
        if self.lease < least || self.lease > LEASE_MAX {
            return Err(Error::configuration(
                "lease",
                format!(
                    "at least {least:?} (twice the publish deadline and a second), at most {LEASE_MAX:?}"
                ),
                format!("{:?}", self.lease),
            ));
        }
        if self.patience < PATIENCE_MIN {
            return Err(Error::configuration(
                "patience",
                format!("at least {PATIENCE_MIN:?}"),
                format!("{:?}", self.patience),
            ));
        }
        if self.silence_max < SILENCE_MIN {
            return Err(Error::configuration(
                "silence_max",
                format!("at least {SILENCE_MIN:?}"),
                format!("{:?}", self.silence_max),
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
        if self.idle_poll_max < super::pace::IDLE_POLL_MIN {
            return Err(Error::configuration(
                "idle_poll_max",
                format!("at least {:?}", super::pace::IDLE_POLL_MIN),
                format!("{:?}", self.idle_poll_max),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn refused(config: RelayConfig) -> &'static str {
        let publisher = PublisherCapabilities::new("test"); // its deadline is 10 s
        let error = config.validate(&publisher).unwrap_err();
        error.violation().unwrap().field
    }

    #[test]
    fn settings_that_break_a_promise_are_refused_by_name() {
        let config = RelayConfig::default;
        assert_eq!(
            refused(config().with_lease(Duration::from_secs(21))),
            "lease"
        );
        assert_eq!(refused(config().with_lease(Duration::MAX)), "lease");
        let mut endless = PublisherCapabilities::new("test");
        endless.publish_deadline = Duration::MAX;
        assert!(config().validate(&endless).is_err());
        assert_eq!(refused(config().with_workers(0)), "workers");
        assert_eq!(refused(config().with_workers(17)), "workers");
        assert_eq!(refused(config().with_batch_rows_max(15)), "batch_rows_max");
        assert_eq!(refused(config().with_batch_bytes_max(0)), "batch_bytes_max");
        assert_eq!(refused(config().with_name("")), "name");
        assert_eq!(refused(config().with_patience(Duration::ZERO)), "patience");
        assert_eq!(
            refused(config().with_silence_max(Duration::ZERO)),
            "silence_max"
        );
        #[cfg(feature = "metrics")]
        assert_eq!(
            refused(config().with_sample_interval(Duration::ZERO)),
            "sample_interval"
        );
        assert_eq!(
            refused(config().with_idle_poll_max(Duration::ZERO)),
            "idle_poll_max"
        );
        let publisher = PublisherCapabilities::new("test");
        config().validate(&publisher).unwrap();
    }
}
