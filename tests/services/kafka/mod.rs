//! Kafka itself: what only a real broker shows.

mod consuming;
mod contents;
mod faults;
mod interop;
mod marks;
mod membership;
mod publishing;
mod raw;
mod rebalancing;
mod refusals;
mod retention;
mod security;
mod topology;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers as _};
use rdkafka::{ClientConfig, Message as _, Offset, TopicPartitionList};
use relaybox::Message;
use relaybox::broker::kafka::{Kafka, KafkaConfig};
use relaybox::broker::{Delivery, Publisher, Settlement, Subscription, SubscriptionRequest};
use relaybox::envelope::Outgoing;
use relaybox_testcontainers::{shared_kafka, unique_name};

pub const SECOND: Duration = Duration::from_secs(1);

pub fn config(brokers: &str) -> KafkaConfig {
    KafkaConfig::new(brokers)
        .with_commit_interval(Duration::from_millis(200))
        .with_session_timeout(Duration::from_secs(6))
}

pub async fn connect() -> Kafka {
    Kafka::connect(config(&shared_kafka().await.brokers()))
        .await
        .unwrap()
}

pub async fn with(change: impl FnOnce(KafkaConfig) -> KafkaConfig) -> Kafka {
    let config = config(&shared_kafka().await.brokers());
    Kafka::connect(change(config)).await.unwrap()
}

pub async fn topic(prefix: &str, partitions: i32) -> String {
    shared_kafka()
        .await
        .create_topic(prefix, partitions)
        .await
        .unwrap()
}

pub async fn within<T>(limit: Duration, what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(limit, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {limit:?}"),
    }
}

pub fn message(topic: &str, key: &str, payload: impl Into<String>) -> Outgoing {
    Message::new(topic, "T")
        .with_key(key)
        .with_payload(payload.into())
        .into()
}

pub fn numbered(topic: &str, key: &str, range: std::ops::Range<usize>) -> Vec<Outgoing> {
    range.map(|n| message(topic, key, n.to_string())).collect()
}

pub async fn publish_all(kafka: &Kafka, batch: &[Outgoing]) {
    for (at, outcome) in kafka.publish(batch).await.iter().enumerate() {
        assert!(outcome.is_confirmed(), "{at}: {outcome:?}");
    }
}

pub fn request(consumer: &str, topic: &str) -> SubscriptionRequest {
    SubscriptionRequest::new(consumer, vec![topic.to_owned()])
}

pub async fn receive(subscription: &mut Box<dyn Subscription>, count: usize) -> Vec<Delivery> {
    let mut all = Vec::new();
    within(60 * SECOND, "receive", async {
        while all.len() < count {
            match subscription.receive(count - all.len()).await {
                Ok(some) => all.extend(some),
                Err(error) if error.is_transient() => {}
                Err(error) => panic!("{error}"),
            }
        }
    })
    .await;
    all
}

pub async fn acknowledge(delivery: Delivery) {
    delivery
        .receipt
        .settle(Settlement::Acknowledge)
        .await
        .unwrap();
}

pub fn text(delivery: &Delivery) -> String {
    let payload = delivery.incoming.message.payload.as_deref();
    String::from_utf8(payload.unwrap_or_default().to_vec()).unwrap()
}

pub fn client(brokers: &str) -> BaseConsumer {
    ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", unique_name("reader"))
        .set("enable.auto.commit", "false")
        .set("enable.partition.eof", "true")
        .create()
        .unwrap()
}

/// Everything in a topic, by partition and in order: key, payload and id.
pub async fn log(brokers: String, topic: String) -> BTreeMap<i32, Vec<(String, String, String)>> {
    tokio::task::spawn_blocking(move || {
        let mut out = BTreeMap::new();
        let partitions = each_record(&brokers, &topic, |record| {
            let string = |bytes: Option<&[u8]>| {
                String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
            };
            let id = record
                .headers()
                .and_then(|h| h.iter().find(|h| h.key == "x-message-id"))
                .map(|h| string(h.value))
                .unwrap_or_default();
            out.entry(record.partition())
                .or_insert_with(Vec::new)
                .push((string(record.key()), string(record.payload()), id));
        });
        for partition in 0..partitions {
            out.entry(partition).or_default();
        }
        out
    })
    .await
    .unwrap()
}

/// Shows every record that is in a topic now, in the order of its partition. Returns how many partitions there are.
pub fn each_record(brokers: &str, topic: &str, mut see: impl FnMut(&BorrowedMessage<'_>)) -> i32 {
    let consumer = client(brokers);
    let metadata = consumer.fetch_metadata(Some(topic), 10 * SECOND).unwrap();
    let partitions = metadata.topics()[0].partitions().len() as i32;
    let mut list = TopicPartitionList::new();
    let mut left = HashSet::new();
    for partition in 0..partitions {
        let watermarks = consumer.fetch_watermarks(topic, partition, 10 * SECOND);
        let (low, high) = watermarks.unwrap();
        if high > low {
            left.insert(partition);
            list.add_partition_offset(topic, partition, Offset::Beginning)
                .unwrap();
        }
    }
    consumer.assign(&list).unwrap();
    let until = Instant::now() + 60 * SECOND;
    while !left.is_empty() {
        assert!(
            Instant::now() < until,
            "{left:?} are not read to their ends"
        );
        match consumer.poll(SECOND) {
            Some(Ok(record)) => see(&record),
            Some(Err(KafkaError::PartitionEOF(partition))) => drop(left.remove(&partition)),
            Some(Err(_)) | None => {}
        }
    }
    partitions
}

pub fn committed(brokers: &str, group: &str, topic: &str, partition: i32) -> Option<i64> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", group)
        .create()
        .unwrap();
    let mut list = TopicPartitionList::new();
    list.add_partition(topic, partition);
    let found = consumer.committed_offsets(list, 10 * SECOND).unwrap();
    found.elements()[0].offset().to_raw().filter(|o| *o >= 0)
}

/// First appearances of each key's payloads, which are numbers, must ascend without gaps.
pub fn assert_prefix_order(log: &BTreeMap<i32, Vec<(String, String, String)>>, count: usize) {
    let mut next: HashMap<&str, usize> = HashMap::new();
    let mut seen: HashSet<(&str, usize)> = HashSet::new();
    for (key, payload, _) in log.values().flatten() {
        let n: usize = payload.parse().unwrap();
        if seen.insert((key, n)) {
            let expected = next.entry(key).or_default();
            assert_eq!(n, *expected, "key {key} out of order");
            *expected += 1;
        }
    }
    for (key, n) in next {
        assert_eq!(n, count, "key {key} lost something");
    }
}
