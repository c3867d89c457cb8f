//! What is asked of a Kafka over its own protocol. All of it blocks, with deadlines.

use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::types::RDKafkaErrorCode;
use tokio::runtime::Handle;

const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const TOPIC_WITHIN: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(20);
/// The broker's own default: one copy on one node, whatever a cluster by URL is set to.
const DEFAULT_REPLICATION: i32 = -1;

fn config(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers)
        // The client's own back-off would double the time a start takes.
        .set("reconnect.backoff.ms", "20")
        .set("reconnect.backoff.max.ms", "100");
    config
}

fn consumer(brokers: &str) -> Result<BaseConsumer, String> {
    config(brokers).create().map_err(|error| error.to_string())
}

/// Whether a metadata request is answered and names a broker. An open port is no readiness: a broker that the
/// controller still fences accepts connections and serves nobody.
pub(super) fn answers(brokers: &str) -> Result<(), String> {
    let metadata = consumer(brokers)?
        .fetch_metadata(None, ANSWER_WITHIN)
        .map_err(|error| error.to_string())?;
    if metadata.brokers().is_empty() {
        return Err("the metadata names no broker".to_owned());
    }
    Ok(())
}

pub(super) fn create_topic(
    runtime: &Handle,
    brokers: &str,
    name: &str,
    partitions: i32,
    settings: &[(String, String)],
) -> Result<(), String> {
    let admin: AdminClient<DefaultClientContext> = config(brokers)
        .create()
        .map_err(|error| error.to_string())?;
    let mut topic = NewTopic::new(
        name,
        partitions,
        TopicReplication::Fixed(DEFAULT_REPLICATION),
    );
    for (key, value) in settings {
        topic = topic.set(key, value);
    }
    let options = AdminOptions::new()
        .request_timeout(Some(TOPIC_WITHIN))
        .operation_timeout(Some(TOPIC_WITHIN));
    let results = runtime
        .block_on(admin.create_topics([&topic], &options))
        .map_err(|error| error.to_string())?;
    for result in results {
        result.map_err(|(topic, code)| format!("{topic}: {code}"))?;
    }
    until_led(brokers, name, partitions)
}

fn until_led(brokers: &str, name: &str, partitions: i32) -> Result<(), String> {
    let consumer = consumer(brokers)?;
    let deadline = Instant::now() + TOPIC_WITHIN;
    let expected = usize::try_from(partitions).map_err(|error| error.to_string())?;
    loop {
        let led = consumer
            .fetch_metadata(Some(name), ANSWER_WITHIN)
            .is_ok_and(|metadata| {
                metadata.topics().iter().any(|topic| {
                    topic.error().is_none()
                        && topic.partitions().len() == expected
                        && topic
                            .partitions()
                            .iter()
                            .all(|partition| partition.error().is_none() && partition.leader() >= 0)
                })
            });
        if led {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(format!(
                "{name}: not every partition has a leader after {TOPIC_WITHIN:?}"
            ));
        }
        std::thread::sleep(POLL);
    }
}

pub(super) fn end_offsets(brokers: &str, name: &str) -> Result<Vec<i64>, String> {
    let consumer = consumer(brokers)?;
    let metadata = consumer
        .fetch_metadata(Some(name), TOPIC_WITHIN)
        .map_err(|error| error.to_string())?;
    let topic = metadata
        .topics()
        .first()
        .ok_or_else(|| format!("{name}: not in the metadata"))?;
    if let Some(error) = topic.error() {
        return Err(format!("{name}: {error:?}"));
    }
    let mut partitions: Vec<i32> = topic
        .partitions()
        .iter()
        .map(|partition| partition.id())
        .collect();
    partitions.sort_unstable();
    partitions
        .into_iter()
        .map(|partition| end_offset(&consumer, name, partition))
        .collect()
}

/// A topic that was just made may have no leader that knows of it yet.
fn end_offset(consumer: &BaseConsumer, name: &str, partition: i32) -> Result<i64, String> {
    let until = Instant::now() + TOPIC_WITHIN;
    loop {
        match consumer.fetch_watermarks(name, partition, TOPIC_WITHIN) {
            Ok((_, end)) => return Ok(end),
            Err(error)
                if error.rdkafka_error_code() == Some(RDKafkaErrorCode::NotLeaderForPartition)
                    && Instant::now() < until =>
            {
                std::thread::sleep(POLL);
            }
            Err(error) => return Err(format!("{name}, partition {partition}: {error}")),
        }
    }
}
