//! The properties of librdkafka: those that our promises stand on, and those that nobody may change.

use rdkafka::ClientConfig;

use super::config::{CLIENT_BYTES_MAX, ENVELOPE_BYTES_MAX, KafkaConfig};
use crate::error::{Error, Result};

/// How long the client waits before it fetches again, once enough is fetched ahead.
const FETCH_PAUSE: &str = "fetch.queue.backoff.ms";

impl KafkaConfig {
    fn base(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        for (key, value) in &self.properties {
            config.set(key, value);
        }
        config
            .set("bootstrap.servers", &self.brokers)
            .set("client.id", &self.client_id)
            // The client's default of 10 s would let a broker that is back wait for its clients.
            .set("reconnect.backoff.max.ms", "1000")
            // A misspelt destination must not come into being.
            .set("allow.auto.create.topics", "false");
        config
    }

    /// For a client whose events nobody serves.
    pub(super) fn admin(&self) -> ClientConfig {
        self.base()
    }

    /// For a client that tells, by its statistics, the states of its connections: health is made of them.
    pub(super) fn asking(&self) -> ClientConfig {
        let mut config = self.base();
        config.set("statistics.interval.ms", "1000");
        config
    }

    /// The settings that [`PublisherOrder::Prefix`](crate::broker::PublisherOrder::Prefix) stands on.
    ///
    /// Records never expire by themselves (`message.timeout.ms=0`): an expired record leaves a gap that
    /// `enable.gapless.guarantee` does not cover. Our own deadline retires the whole producer instead.
    pub(super) fn producer(&self) -> ClientConfig {
        let record_bytes_max = self.limits.message_bytes_max + ENVELOPE_BYTES_MAX;
        let mut config = self.asking();
        config
            .set("enable.idempotence", "true")
            .set("enable.gapless.guarantee", "true")
            .set("acks", "all")
            .set("message.timeout.ms", "0")
            .set("linger.ms", self.linger.as_millis().to_string())
            .set("partitioner", self.partitioner.property())
            // Whether a record is too large is for the topic to say: what came from it must fit a rung too, whoever
            // wrote it and whatever our own limit of new messages is.
            .set("message.max.bytes", CLIENT_BYTES_MAX.to_string())
            // The client's own default is a gibibyte. A full queue waits for answers.
            .set(
                "queue.buffering.max.kbytes",
                (4 * record_bytes_max / 1_024).max(64 * 1_024).to_string(),
            )
            // A topic's max.message.bytes bounds the batch, not the record.
            .set("batch.size", record_bytes_max.to_string());
        config
    }

    /// For records that are sent one by one, each answered before the next: a refused one ends nothing.
    pub(super) fn careful_producer(&self) -> ClientConfig {
        let mut config = self.producer();
        config
            .set("enable.gapless.guarantee", "false")
            .set("linger.ms", "0");
        config
    }

    pub(super) fn consumer(&self, group: &str) -> ClientConfig {
        let mut config = self.asking();
        config
            .set("group.id", group)
            // Each commit carries a mark, and deliveries wait for its confirmation: neither can the client's timer do.
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("auto.offset.reset", "earliest")
            .set("isolation.level", "read_committed")
            .set(
                "max.poll.interval.ms",
                self.poll_interval_max.as_millis().to_string(),
            )
            .set("queued.min.messages", "1000")
            .set(
                "queued.max.messages.kbytes",
                (self.prefetch_bytes_max / 1_024).to_string(),
            );
        // The client's default of 1 s is made for a hundred times as much fetched ahead: ours is worked off long before
        // the next fetch then, and nothing comes for the rest of the second.
        if !self.properties.contains_key(FETCH_PAUSE) {
            config.set(FETCH_PAUSE, "20");
        }
        if let Some(id) = &self.instance_id {
            config.set("group.instance.id", id);
        }
        match self.assignor.strategy() {
            Some(strategy) => {
                config
                    .set("group.protocol", "classic")
                    .set("partition.assignment.strategy", strategy)
                    .set(
                        "session.timeout.ms",
                        self.session_timeout.as_millis().to_string(),
                    )
                    .set(
                        "heartbeat.interval.ms",
                        (self.session_timeout.as_millis() / 10)
                            .clamp(100, 3_000)
                            .to_string(),
                    );
            }
            // Session, heartbeat and strategy are the broker's then, and the client refuses to have them set.
            None => {
                config.set("group.protocol", "consumer");
            }
        }
        config
    }

    /// For questions about a group's commits, and for single records. Never a member, and commits nothing.
    pub(super) fn reader(&self, group: Option<&str>) -> ClientConfig {
        let mut config = self.base();
        config
            // The client assigns nothing without a name; without a consumer any will do.
            .set("group.id", group.unwrap_or(&self.client_id))
            .set("enable.auto.commit", "false")
            .set("auto.offset.reset", "earliest")
            .set("enable.partition.eof", "true")
            // One record of each partition is wanted.
            .set("queued.min.messages", "1")
            .set("fetch.message.max.bytes", "1024");
        config
    }
}

/// Properties that a promise stands on, or that have a setting of their own.
pub(super) const REFUSED: &[&str] = &[
    "acks",
    "request.required.acks",
    "enable.idempotence",
    "enable.gapless.guarantee",
    "max.in.flight",
    "max.in.flight.requests.per.connection",
    "retries",
    "message.send.max.retries",
    "message.timeout.ms",
    "delivery.timeout.ms",
    "transactional.id",
    "queuing.strategy",
    "produce.offset.report",
    // A record that is stored would never be answered.
    "delivery.report.only.error",
    "partitioner",
    "linger.ms",
    "queue.buffering.max.ms",
    "queue.buffering.max.kbytes",
    "message.max.bytes",
    "batch.size",
    "allow.auto.create.topics",
    "bootstrap.servers",
    "metadata.broker.list",
    "client.id",
    "reconnect.backoff.max.ms",
    "group.id",
    "group.instance.id",
    "group.protocol",
    "group.protocol.type",
    "group.remote.assignor",
    "enable.auto.commit",
    "auto.commit.enable",
    "enable.auto.offset.store",
    "auto.commit.interval.ms",
    "auto.offset.reset",
    "offset.store.method",
    "partition.assignment.strategy",
    "session.timeout.ms",
    "heartbeat.interval.ms",
    "max.poll.interval.ms",
    "queued.min.messages",
    "queued.max.messages.kbytes",
    "isolation.level",
    "enable.partition.eof",
    "enabled_events",
    "statistics.interval.ms",
];

pub(super) fn allowed(key: &str) -> Result<()> {
    if key.is_empty() || key.contains('\0') {
        return Err(Error::configuration(
            "property",
            "the name of a librdkafka property",
            key,
        ));
    }
    if REFUSED.contains(&key) || key.starts_with("test.") {
        return Err(Error::configuration(
            "property",
            "none that relaybox's promises stand on or that has a setting of its own",
            key,
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_fetch_comes_soon_unless_the_user_says_otherwise() {
        let config = KafkaConfig::new("localhost:9092");
        assert_eq!(config.consumer("g").get(FETCH_PAUSE), Some("20"));
        let slower = config.with_property(FETCH_PAUSE, "500");
        assert_eq!(slower.consumer("g").get(FETCH_PAUSE), Some("500"));
    }
}
