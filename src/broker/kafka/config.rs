//! Settings of the Kafka adapter, checked once.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::properties::allowed;
use crate::error::{Error, Result};
use crate::message::Limits;

/// Room on top of the largest message for the envelope, the story (4 KiB) and the record's own framing.
pub(super) const ENVELOPE_BYTES_MAX: usize = 64 * 1_024;

/// The client's own bound of `message.max.bytes`.
pub(super) const CLIENT_BYTES_MAX: usize = 1_000_000_000;

/// Which partition a message with a key goes to. Messages without a key are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Partitioner {
    /// murmur2, as Java's default partitioner: the same key meets the same partition from both (the default).
    #[default]
    Murmur2,
    /// CRC32, as librdkafka's own default with keys that are not empty.
    Crc32,
    /// FNV-1a, as Go's sarama.
    Fnv1a,
}

impl Partitioner {
    pub(super) const fn property(self) -> &'static str {
        match self {
            Self::Murmur2 => "murmur2_random",
            Self::Crc32 => "consistent_random",
            Self::Fnv1a => "fnv1a_random",
        }
    }
}

/// How the members of a consumer share its partitions. All members of one consumer must have the same, or they refuse
/// one another: change it with the consumer stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Assignor {
    /// A rebalance takes away only the partitions that move (`cooperative-sticky`, the default).
    #[default]
    CooperativeSticky,
    /// A rebalance takes away all partitions, as with Java's older default (`range`): for a consumer whose other
    /// members have it.
    Range,
    /// The brokers share them out and say how long a session lasts (`group.protocol=consumer`, KIP-848): Kafka 4.0 or
    /// later. [The session timeout](KafkaConfig::with_session_timeout) means nothing then.
    Broker,
}

impl Assignor {
    pub(super) const fn strategy(self) -> Option<&'static str> {
        match self {
            Self::CooperativeSticky => Some("cooperative-sticky"),
            Self::Range => Some("range"),
            Self::Broker => None,
        }
    }
}

/// How to reach a Kafka cluster and how to behave there.
///
/// | setting | default | bounds |
/// |---|---|---|
/// | brokers | (required) | at least one `host:port`, separated by commas |
/// | client id | `relaybox` | not empty |
/// | partitioner | [`Partitioner::Murmur2`] | |
/// | linger | 5 ms | at most 1 s and below the publish deadline |
/// | publish deadline | 10 s | 1 s to 10 min |
/// | limits | [`Limits::default`] | destination at most 249 bytes, message at most 900 MB |
/// | answer deadline | 5 s | 100 ms to 1 min |
/// | commit interval | 1 s | 50 ms to 1 min |
/// | assignor | [`Assignor::CooperativeSticky`] | |
/// | instance id | none | not empty, no NUL |
/// | session timeout | 45 s | 1 s to 30 min |
/// | poll interval | 5 min | at least the session timeout, at most 24 h |
/// | drain deadline | 20 s | below the poll interval |
/// | prefetch | 8 MiB | 1 KiB to 1 GiB |
/// | dead letter retention | for ever | at least 1 s |
///
/// Everything else of librdkafka can be set by [`with_property`](Self::with_property), for example
/// `security.protocol`, `sasl.mechanisms` and `ssl.ca.location`, except what would break a promise.
#[derive(Clone)]
pub struct KafkaConfig {
    pub(super) brokers: String,
    pub(super) client_id: String,
    pub(super) partitioner: Partitioner,
    pub(super) linger: Duration,
    pub(super) publish_deadline: Duration,
    pub(super) limits: Limits,
    pub(super) answer_deadline: Duration,
    pub(super) commit_interval: Duration,
    pub(super) assignor: Assignor,
    pub(super) instance_id: Option<String>,
    pub(super) session_timeout: Duration,
    pub(super) poll_interval_max: Duration,
    pub(super) drain_deadline: Duration,
    pub(super) prefetch_bytes_max: usize,
    pub(super) dead_letter_retention: Option<Duration>,
    pub(super) properties: BTreeMap<String, String>,
}

impl KafkaConfig {
    /// Defaults for the brokers given as `host:port`, separated by commas.
    pub fn new(brokers: impl Into<String>) -> Self {
        Self {
            brokers: brokers.into(),
            client_id: "relaybox".into(),
            partitioner: Partitioner::default(),
            linger: Duration::from_millis(5),
            publish_deadline: Duration::from_secs(10),
            limits: Limits::default(),
            answer_deadline: Duration::from_secs(5),
            commit_interval: Duration::from_secs(1),
            assignor: Assignor::default(),
            instance_id: None,
            session_timeout: Duration::from_secs(45),
            poll_interval_max: Duration::from_secs(300),
            drain_deadline: Duration::from_secs(20),
            prefetch_bytes_max: 8 * 1_024 * 1_024,
            dead_letter_retention: None,
            properties: BTreeMap::new(),
        }
    }

    /// The name under which the broker logs and meters this client.
    #[must_use]
    pub fn with_client_id(mut self, client_id: impl Into<String>) -> Self {
        self.client_id = client_id.into();
        self
    }

    /// Which partition a key goes to. Every producer of a topic must agree, or keys lose their order.
    #[must_use]
    pub const fn with_partitioner(mut self, partitioner: Partitioner) -> Self {
        self.partitioner = partitioner;
        self
    }

    /// How long a record waits for company before it is sent.
    #[must_use]
    pub const fn with_linger(mut self, linger: Duration) -> Self {
        self.linger = linger;
        self
    }

    /// The longest that one publish call takes. The relay's lease must be more than twice as long.
    #[must_use]
    pub const fn with_publish_deadline(mut self, deadline: Duration) -> Self {
        self.publish_deadline = deadline;
        self
    }

    /// What a message may be at most. With room of 64 KiB on top it must fit `max.message.bytes` of the topics.
    #[must_use]
    pub const fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// How long the broker may take to answer questions about topics, at start and when a topic is met first.
    #[must_use]
    pub const fn with_answer_deadline(mut self, deadline: Duration) -> Self {
        self.answer_deadline = deadline;
        self
    }

    /// How often finished work is committed: what a crash delivers again at most.
    #[must_use]
    pub const fn with_commit_interval(mut self, interval: Duration) -> Self {
        self.commit_interval = interval;
        self
    }

    /// After how long without a heartbeat the broker gives this member's partitions to others.
    #[must_use]
    pub const fn with_session_timeout(mut self, timeout: Duration) -> Self {
        self.session_timeout = timeout;
        self
    }

    /// After how long without a poll the member leaves. Polling needs no calls of the user, so this is a guard
    /// against a stuck process, and the bound of a rebalance.
    #[must_use]
    pub const fn with_poll_interval_max(mut self, interval: Duration) -> Self {
        self.poll_interval_max = interval;
        self
    }

    /// How the members of a consumer share its partitions.
    #[must_use]
    pub const fn with_assignor(mut self, assignor: Assignor) -> Self {
        self.assignor = assignor;
        self
    }

    /// Names this member, for good, in every consumer it joins (static membership): one that ends and is back under
    /// the same name within the session timeout finds its partitions as they were, and the others notice nothing.
    /// Until then nobody reads those.
    ///
    /// No two members of a consumer may have the same name at a time. The older ends with an error; with
    /// [`Assignor::Broker`] the newer does, also when the older was killed and its session is not over.
    ///
    /// Needs [`Assignor::Range`] or [`Assignor::Broker`]: with `CooperativeSticky`, the default, a member that dies while
    /// it gives partitions up and is back under its name leaves them to nobody, and the group never notices.
    #[must_use]
    pub fn with_instance_id(mut self, id: impl Into<String>) -> Self {
        self.instance_id = Some(id.into());
        self
    }

    /// How long a partition that is taken away waits for deliveries in work, so that they need not come twice. Meanwhile
    /// the member receives nothing else, and the group waits for it.
    #[must_use]
    pub const fn with_drain_deadline(mut self, deadline: Duration) -> Self {
        self.drain_deadline = deadline;
        self
    }

    /// Most bytes fetched ahead per subscription, over the one batch a fetch always returns.
    #[must_use]
    pub const fn with_prefetch_bytes_max(mut self, bytes_max: usize) -> Self {
        self.prefetch_bytes_max = bytes_max;
        self
    }

    /// How long dead letters are kept in a topic that is made here. Without this: for ever.
    #[must_use]
    pub const fn with_dead_letter_retention(mut self, retention: Duration) -> Self {
        self.dead_letter_retention = Some(retention);
        self
    }

    /// Sets a property of librdkafka, for producers and consumers alike. Values are never shown.
    ///
    /// What would break a promise (acks, idempotence, offsets, group, ...) is refused by [`check`](Self::check).
    #[must_use]
    pub fn with_property(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.insert(key.into(), value.into());
        self
    }

    /// Checks every setting.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) naming the first setting that breaks a bound, the bound and
    /// the value.
    pub fn check(&self) -> Result<()> {
        if self.brokers.split(',').all(|b| b.trim().is_empty()) {
            return Err(Error::configuration(
                "brokers",
                "at least one host:port",
                &self.brokers,
            ));
        }
        if self.client_id.is_empty() {
            return Err(Error::configuration("client_id", "not empty", ""));
        }
        if let Some(id) = &self.instance_id
            && (id.is_empty() || id.contains('\0'))
        {
            return Err(Error::configuration(
                "instance_id",
                "a name without NUL",
                id,
            ));
        }
        if self.instance_id.is_some() && self.assignor == Assignor::CooperativeSticky {
            return Err(Error::configuration(
                "assignor",
                "Range or Broker for a member with an instance_id",
                "CooperativeSticky",
            ));
        }
        let second = Duration::from_secs(1);
        let minute = Duration::from_secs(60);
        let milli = Duration::from_millis(1);
        between("linger", self.linger, Duration::ZERO, second)?;
        between(
            "publish_deadline",
            self.publish_deadline,
            second,
            10 * minute,
        )?;
        between("answer_deadline", self.answer_deadline, 100 * milli, minute)?;
        between("commit_interval", self.commit_interval, 50 * milli, minute)?;
        between("session_timeout", self.session_timeout, second, 30 * minute)?;
        let day = 24 * 60 * minute;
        between(
            "poll_interval_max",
            self.poll_interval_max,
            self.session_timeout,
            day,
        )?;
        // A rebalance waits for what is in work, and then for a commit under way.
        let longest = self.poll_interval_max.saturating_sub(self.answer_deadline);
        if self.drain_deadline >= longest {
            return Err(Error::configuration(
                "drain_deadline",
                format!("below poll_interval_max less answer_deadline ({longest:?})"),
                format!("{:?}", self.drain_deadline),
            ));
        }
        if let Some(retention) = self.dead_letter_retention {
            between("dead_letter_retention", retention, second, Duration::MAX)?;
        }
        bytes(
            "limits.destination_bytes_max",
            self.limits.destination_bytes_max,
            1,
            249,
        )?;
        let largest = CLIENT_BYTES_MAX - 100_000_000;
        bytes(
            "limits.message_bytes_max",
            self.limits.message_bytes_max,
            1_000,
            largest,
        )?;
        bytes(
            "prefetch_bytes_max",
            self.prefetch_bytes_max,
            1_024,
            1 << 30,
        )?;
        self.properties.keys().try_for_each(|key| allowed(key))
    }

    /// What was tried, for errors.
    pub(super) fn brokers(&self) -> &str {
        &self.brokers
    }
}

/// Shows no property's value: passwords are among them.
impl fmt::Debug for KafkaConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaConfig")
            .field("brokers", &self.brokers)
            .field("client_id", &self.client_id)
            .field("partitioner", &self.partitioner)
            .field("publish_deadline", &self.publish_deadline)
            .field("limits", &self.limits)
            .field("properties", &self.properties.keys().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

fn between(field: &'static str, value: Duration, least: Duration, most: Duration) -> Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let limit = if most == Duration::MAX {
        format!("at least {least:?}")
    } else {
        format!("{least:?} to {most:?}")
    };
    Err(Error::configuration(field, limit, format!("{value:?}")))
}

fn bytes(field: &'static str, value: usize, least: usize, most: usize) -> Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(Error::configuration(
        field,
        format!("{least} to {most} bytes"),
        value.to_string(),
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn refused(config: &KafkaConfig) -> &'static str {
        let error = config.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration);
        error.violation().unwrap().field
    }

    fn good() -> KafkaConfig {
        KafkaConfig::new("localhost:9092")
    }

    #[test]
    fn defaults_pass_and_make_every_client() {
        good().check().unwrap();
        let config = good().with_property("compression.type", "lz4");
        config.check().unwrap();
        assert_eq!(config.producer().get("acks"), Some("all"));
        assert_eq!(config.producer().get("message.timeout.ms"), Some("0"));
        assert_eq!(config.producer().get("compression.type"), Some("lz4"));
        assert_eq!(config.consumer("g").get("group.id"), Some("g"));
    }

    #[test]
    fn the_brokers_assignor_leaves_out_what_is_the_brokers_to_say() {
        let theirs = good().with_assignor(Assignor::Broker).with_instance_id("a");
        theirs.check().unwrap();
        let theirs = theirs.consumer("g");
        assert_eq!(theirs.get("group.protocol"), Some("consumer"));
        assert_eq!(theirs.get("group.instance.id"), Some("a"));
        for key in [
            "session.timeout.ms",
            "heartbeat.interval.ms",
            "partition.assignment.strategy",
        ] {
            assert_eq!(theirs.get(key), None);
            assert!(good().consumer("g").get(key).is_some());
        }
    }

    #[test]
    fn one_who_only_reads_commits_nothing_and_is_no_member() {
        let named = good().with_instance_id("a");
        assert_eq!(refused(&named), "assignor");
        let reader = named.with_assignor(Assignor::Range).reader(Some("g"));
        assert_eq!(reader.get("enable.auto.commit"), Some("false"));
        assert_eq!(reader.get("group.instance.id"), None);
    }

    #[test]
    fn whatever_breaks_a_promise_is_refused_by_name() {
        for key in crate::broker::kafka::properties::REFUSED {
            assert_eq!(refused(&good().with_property(*key, "x")), "property");
        }
        let mock = good().with_property("test.mock.num.brokers", "3");
        assert_eq!(refused(&mock), "property");
        assert_eq!(refused(&KafkaConfig::new(" , ")), "brokers");
        assert_eq!(refused(&good().with_instance_id("")), "instance_id");
        assert_eq!(refused(&good().with_client_id("")), "client_id");
        let zero = Duration::ZERO;
        assert_eq!(
            refused(&good().with_publish_deadline(zero)),
            "publish_deadline"
        );
        assert_eq!(
            refused(&good().with_linger(Duration::from_secs(2))),
            "linger"
        );
        assert_eq!(
            refused(&good().with_session_timeout(zero)),
            "session_timeout"
        );
        assert_eq!(
            refused(&good().with_drain_deadline(Duration::from_secs(300))),
            "drain_deadline"
        );
        assert_eq!(
            refused(&good().with_prefetch_bytes_max(0)),
            "prefetch_bytes_max"
        );
        let limits = Limits {
            destination_bytes_max: 250,
            ..Limits::default()
        };
        assert_eq!(
            refused(&good().with_limits(limits)),
            "limits.destination_bytes_max"
        );
    }

    #[test]
    fn debug_shows_no_secret() {
        let config = good().with_property("sasl.password", "hunter2");
        let shown = format!("{config:?}");
        assert!(shown.contains("sasl.password") && !shown.contains("hunter2"));
    }
}
