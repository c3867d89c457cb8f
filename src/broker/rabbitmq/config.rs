//! Settings of the RabbitMQ adapter, checked once.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use lapin::tcp::OwnedTLSConfig;
use lapin::uri::AMQPUri;

use super::QueueKind;
use super::place::queue;
use crate::error::{Error, Result, within};
use crate::lane::LANES;
use crate::message::Limits;

/// Room on top of the largest message for the envelope and the story: properties and headers of one frame.
pub(super) const ENVELOPE_BYTES_MAX: usize = 64 * 1_024;

/// How to reach a RabbitMQ and how to behave there.
///
/// | setting | default | bounds |
/// |---|---|---|
/// | urls | (required) | at least one `amqp://` or `amqps://`; tried in turn |
/// | connection name | `relaybox` | 1 to 255 bytes |
/// | heartbeat | 10 s | whole seconds, 1 s to 10 min; a `heartbeat=` in a URL wins |
/// | channels | 8 | 1 to 64 kept for publishing |
/// | publish deadline | 10 s | 1 s to 10 min |
/// | answer deadline | 5 s | 100 ms to 1 min |
/// | limits | [`Limits::default`], destination 511 | message and 64 KiB at most the broker's largest, headers 60 KiB |
/// | broker's largest message | 16 MiB | 64 KiB to 512 MiB |
/// | queue kind | [`QueueKind::Quorum`] | of rungs and dead letters |
/// | delivery limit | the broker's | of quorum queues made here |
/// | release hold | 60 s | 1 s to 20 min, and below the broker's `consumer_timeout` |
/// | shards | none | 1 to 16 a name |
/// | drain deadline | 20 s | at most 20 min; of a shard that goes to another member |
///
/// Everything else the client knows goes into the URL, for example `?auth_mechanism=external` and `?frame_max=`.
#[derive(Clone)]
pub struct RabbitMqConfig {
    pub(super) urls: Vec<String>,
    pub(super) connection_name: String,
    pub(super) heartbeat: Duration,
    pub(super) channels: usize,
    pub(super) publish_deadline: Duration,
    pub(super) answer_deadline: Duration,
    pub(super) limits: Limits,
    pub(super) broker_message_bytes_max: usize,
    pub(super) queue_kind: QueueKind,
    pub(super) delivery_limit: Option<i64>,
    pub(super) release_hold_max: Duration,
    pub(super) shards: BTreeMap<String, u16>,
    pub(super) drain_deadline: Duration,
    pub(super) tls: OwnedTLSConfig,
}

impl RabbitMqConfig {
    /// Defaults for the broker at this URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            urls: vec![url.into()],
            connection_name: "relaybox".into(),
            heartbeat: Duration::from_secs(10),
            channels: 8,
            publish_deadline: Duration::from_secs(10),
            answer_deadline: Duration::from_secs(5),
            limits: Limits {
                destination_bytes_max: 511,
                ..Limits::default()
            },
            broker_message_bytes_max: 16 * 1_024 * 1_024,
            queue_kind: QueueKind::Quorum,
            delivery_limit: None,
            release_hold_max: Duration::from_secs(60),
            shards: BTreeMap::new(),
            drain_deadline: Duration::from_secs(20),
            tls: OwnedTLSConfig::default(),
        }
    }

    /// Adds another node of the same cluster, tried when those before it do not answer.
    #[must_use]
    pub fn with_url(mut self, url: impl Into<String>) -> Self {
        self.urls.push(url.into());
        self
    }

    /// The name under which the broker lists and logs the connections.
    #[must_use]
    pub fn with_connection_name(mut self, name: impl Into<String>) -> Self {
        self.connection_name = name.into();
        self
    }

    /// How often both sides show that they live. A connection that is silent for twice as long is made anew.
    #[must_use]
    pub const fn with_heartbeat(mut self, heartbeat: Duration) -> Self {
        self.heartbeat = heartbeat;
        self
    }

    /// How many idle channels are kept for publishing. A call takes one for each exchange or queue that it publishes to,
    /// so that none waits for another's; up to 64 are in use at a time.
    #[must_use]
    pub const fn with_channels(mut self, channels: usize) -> Self {
        self.channels = channels;
        self
    }

    /// The longest that one publish call takes. The relay's lease must be more than twice as long.
    #[must_use]
    pub const fn with_publish_deadline(mut self, deadline: Duration) -> Self {
        self.publish_deadline = deadline;
        self
    }

    /// How long the broker may take to answer everything else: to connect, to open a channel, to declare a queue.
    #[must_use]
    pub const fn with_answer_deadline(mut self, deadline: Duration) -> Self {
        self.answer_deadline = deadline;
        self
    }

    /// What a message may be at most.
    #[must_use]
    pub const fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// The broker's own `max_message_size`: 16 MiB since version 4, 128 MiB before.
    #[must_use]
    pub const fn with_broker_message_bytes_max(mut self, bytes_max: usize) -> Self {
        self.broker_message_bytes_max = bytes_max;
        self
    }

    /// The kind of queue that rungs and dead letters are made as. Classic ones may lose a message on its way from a rung
    /// to its source when the broker ends in between.
    #[must_use]
    pub const fn with_queue_kind(mut self, kind: QueueKind) -> Self {
        self.queue_kind = kind;
        self
    }

    /// How often the broker redelivers from a quorum queue made with [`declare_queue`](super::RabbitMq::declare_queue)
    /// before it drops a message or sends it to the queue's dead letter exchange; negative for never, from version 4 on, and
    /// then for queues of dead letters too.
    ///
    /// Nothing here gives a message back in order to try it again, but what a member held when it ended counts. Without
    /// this the broker's default holds: no limit before version 4, and 20 since, which loses messages of a queue without
    /// a dead letter exchange after as many crashes or lost connections. Say -1 for a broker of version 4; it is no default,
    /// since older ones do not know it. For queues made elsewhere set it there.
    #[must_use]
    pub const fn with_delivery_limit(mut self, limit: i64) -> Self {
        self.delivery_limit = Some(limit);
        self
    }

    /// How long a released delivery stays away at most: longer delays are cut to it. It waits unacknowledged in this
    /// process, since giving it back would bring it again at once, and the broker closes a channel that keeps a delivery
    /// for longer than its `consumer_timeout`. While it waits it takes one of the places that the broker fills.
    #[must_use]
    pub const fn with_release_hold_max(mut self, hold_max: Duration) -> Self {
        self.release_hold_max = hold_max;
        self
    }

    /// Splits the queue `name` into `count` queues, `name.0` and so on, each with a single active consumer: messages of
    /// one key go to one of them, and so to one member of a consumer at a time. Its rungs are split alike.
    ///
    /// Everybody who publishes to it must agree on the count; changing it moves keys.
    #[must_use]
    pub fn with_shards(mut self, name: impl Into<String>, count: u16) -> Self {
        self.shards.insert(name.into(), count);
        self
    }

    /// How long a shard that is given to another member waits for deliveries in work, so that they need not come twice.
    #[must_use]
    pub const fn with_drain_deadline(mut self, deadline: Duration) -> Self {
        self.drain_deadline = deadline;
        self
    }

    /// Certificates and identity for `amqps://`; without this the system's roots are trusted.
    #[must_use]
    pub fn with_tls(mut self, tls: OwnedTLSConfig) -> Self {
        self.tls = tls;
        self
    }

    /// Checks every setting.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) naming the first setting that breaks a bound, the bound and
    /// the value.
    pub fn check(&self) -> Result<()> {
        if self.urls.is_empty() {
            return Err(Error::configuration("urls", "at least one URL", "none"));
        }
        for url in &self.urls {
            // The parser's own words may repeat the password.
            if url.parse::<AMQPUri>().is_err() {
                let rule = "amqp:// or amqps://user:password@host:port/vhost";
                return Err(Error::configuration("urls", rule, address(url)));
            }
        }
        within("connection_name", self.connection_name.len(), 1, 255)?;
        let second = Duration::from_secs(1);
        let minute = 60 * second;
        between("heartbeat", self.heartbeat, second, 10 * minute)?;
        if self.heartbeat.subsec_nanos() != 0 {
            let value = format!("{:?}", self.heartbeat);
            return Err(Error::configuration("heartbeat", "whole seconds", value));
        }
        within("channels", self.channels, 1, 64)?;
        between(
            "publish_deadline",
            self.publish_deadline,
            second,
            10 * minute,
        )?;
        let least = Duration::from_millis(100);
        between("answer_deadline", self.answer_deadline, least, minute)?;
        between(
            "release_hold_max",
            self.release_hold_max,
            second,
            20 * minute,
        )?;
        let most = 20 * minute;
        between("drain_deadline", self.drain_deadline, Duration::ZERO, most)?;
        let envelope = ENVELOPE_BYTES_MAX;
        within(
            "broker_message_bytes_max",
            self.broker_message_bytes_max,
            2 * envelope,
            512 * 1_024 * 1_024,
        )?;
        within(
            "limits.message_bytes_max",
            self.limits.message_bytes_max,
            1_000,
            self.broker_message_bytes_max - envelope,
        )?;
        let destination = self.limits.destination_bytes_max;
        within("limits.destination_bytes_max", destination, 1, 511)?;
        within("limits.id_bytes_max", self.limits.id_bytes_max, 1, 255)?;
        let headers = self.limits.headers_bytes_max;
        within("limits.headers_bytes_max", headers, 0, 60 * 1_024)?;
        for (name, count) in &self.shards {
            queue(name)?;
            let most = usize::try_from(LANES).unwrap_or(1);
            within("shards", usize::from(*count), 1, most)?;
        }
        Ok(())
    }

    /// What was tried, for errors: without users and passwords.
    pub(super) fn addresses(&self) -> String {
        let addresses: Vec<_> = self.urls.iter().map(|url| address(url)).collect();
        addresses.join(", ")
    }
}

/// `host:port` of a URL, or less of one that is broken: a password may hold any sign, and stand where a port should.
pub(super) fn address(url: &str) -> &str {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let rest = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    match authority.rsplit_once(':') {
        Some((host, port)) if !port.bytes().all(|byte| byte.is_ascii_digit()) => {
            // An IPv6 address without a port ends with its bracket.
            if port.ends_with(']') { authority } else { host }
        }
        _ => authority,
    }
}

/// Shows no user and no password.
impl fmt::Debug for RabbitMqConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RabbitMqConfig")
            .field("addresses", &self.addresses())
            .field("connection_name", &self.connection_name)
            .field("publish_deadline", &self.publish_deadline)
            .field("limits", &self.limits)
            .field("shards", &self.shards)
            .finish_non_exhaustive()
    }
}

fn between(field: &'static str, value: Duration, least: Duration, most: Duration) -> Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let limit = format!("{least:?} to {most:?}");
    Err(Error::configuration(field, limit, format!("{value:?}")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn refused(config: &RabbitMqConfig) -> &'static str {
        config.check().unwrap_err().violation().unwrap().field
    }

    #[test]
    fn every_bound_is_named() {
        let config = || RabbitMqConfig::new("amqp://guest:guest@localhost:5672/%2f");
        config().check().unwrap();
        assert_eq!(refused(&config().with_url("http://x")), "urls");
        assert_eq!(
            refused(&config().with_connection_name("")),
            "connection_name"
        );
        let half = Duration::from_millis(1_500);
        assert_eq!(refused(&config().with_heartbeat(half)), "heartbeat");
        assert_eq!(refused(&config().with_channels(0)), "channels");
        let zero = Duration::ZERO;
        assert_eq!(
            refused(&config().with_publish_deadline(zero)),
            "publish_deadline"
        );
        assert_eq!(
            refused(&config().with_answer_deadline(zero)),
            "answer_deadline"
        );
        assert_eq!(
            refused(&config().with_release_hold_max(zero)),
            "release_hold_max"
        );
        let large = Limits {
            message_bytes_max: 16 * 1_024 * 1_024,
            ..Limits::default()
        };
        assert_eq!(
            refused(&config().with_limits(large)),
            "limits.message_bytes_max"
        );
        assert_eq!(refused(&config().with_shards("orders", 17)), "shards");
        assert_eq!(refused(&config().with_shards("events/a", 2)), "queue");
    }

    #[test]
    fn no_password_is_shown() {
        let config = RabbitMqConfig::new("amqp://user:s3cret@host:5672/%2f")
            .with_url("amqps://user:p@s3cret@other/x");
        assert_eq!(config.addresses(), "host:5672, other");
        assert!(!format!("{config:?}").contains("s3cret"));
        for broken in [
            "amqp//user:s3cret@host",
            "amqp://user:s3cret/more@host",
            "amqp://user:s3cret?more@host",
            "amqp://user:s3cret",
        ] {
            let broken = RabbitMqConfig::new(broken);
            assert!(!format!("{broken:?}").contains("s3cret"), "{broken:?}");
            let error = broken.check().unwrap_err().to_string();
            assert!(!error.contains("s3cret"), "{error}");
        }
        for (url, shown) in [
            ("amqp://user:pa/ss@host:5672/x", "host:5672"),
            ("amqp://[::1]:5672/x", "[::1]:5672"),
            ("amqp://[::1]", "[::1]"),
            ("amqp://host", "host"),
        ] {
            assert_eq!(address(url), shown);
        }
    }
}
