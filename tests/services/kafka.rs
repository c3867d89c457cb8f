//! The Kafka adapter against a real broker.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "what a test did not expect fails it"
)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Headers as _;
use rdkafka::{ClientConfig, Message as _, Offset, TopicPartitionList};
use relaybox::broker::kafka::{Kafka, KafkaConfig};
use relaybox::broker::{
    Delivery, FailureScope, PublishOutcome, Publisher, RejectionScope, Rung, Settlement, Stored,
    Subscriber, Subscription, SubscriptionRequest, TopologyMode,
};
use relaybox::envelope::Outgoing;
use relaybox::{ErrorKind, Message};
use relaybox_testcontainers::{KafkaOptions, shared_kafka, unique_name};

const SECOND: Duration = Duration::from_secs(1);

fn config(brokers: &str) -> KafkaConfig {
    KafkaConfig::new(brokers)
        .with_commit_interval(Duration::from_millis(200))
        .with_session_timeout(Duration::from_secs(6))
}

async fn connect() -> Kafka {
    Kafka::connect(config(&shared_kafka().await.brokers()))
        .await
        .unwrap()
}

async fn topic(prefix: &str, partitions: i32) -> String {
    shared_kafka()
        .await
        .create_topic(prefix, partitions)
        .await
        .unwrap()
}

async fn within<T>(limit: Duration, what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(limit, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {limit:?}"),
    }
}

fn message(topic: &str, key: &str, payload: impl Into<String>) -> Outgoing {
    Message::new(topic, "T")
        .with_key(key)
        .with_payload(payload.into())
        .into()
}

fn numbered(topic: &str, key: &str, range: std::ops::Range<usize>) -> Vec<Outgoing> {
    range.map(|n| message(topic, key, n.to_string())).collect()
}

async fn publish_all(kafka: &Kafka, batch: &[Outgoing]) {
    for (at, outcome) in kafka.publish(batch).await.iter().enumerate() {
        assert!(outcome.is_confirmed(), "{at}: {outcome:?}");
    }
}

fn request(consumer: &str, topic: &str) -> SubscriptionRequest {
    SubscriptionRequest::new(consumer, vec![topic.to_owned()])
}

async fn receive(subscription: &mut Box<dyn Subscription>, count: usize) -> Vec<Delivery> {
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

async fn acknowledge(delivery: Delivery) {
    delivery
        .receipt
        .settle(Settlement::Acknowledge)
        .await
        .unwrap();
}

fn text(delivery: &Delivery) -> String {
    let payload = delivery.incoming.message.payload.as_deref();
    String::from_utf8(payload.unwrap_or_default().to_vec()).unwrap()
}

fn client(brokers: &str) -> BaseConsumer {
    ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", unique_name("reader"))
        .set("enable.auto.commit", "false")
        .create()
        .unwrap()
}

/// Everything in a topic, by partition and in order: key, payload and id.
async fn log(brokers: String, topic: String) -> BTreeMap<i32, Vec<(String, String, String)>> {
    tokio::task::spawn_blocking(move || {
        let consumer = client(&brokers);
        let metadata = consumer.fetch_metadata(Some(&topic), 10 * SECOND).unwrap();
        let mut out = BTreeMap::new();
        let mut left = 0;
        let mut list = TopicPartitionList::new();
        for partition in metadata.topics()[0].partitions() {
            let (low, high) = consumer
                .fetch_watermarks(&topic, partition.id(), 10 * SECOND)
                .unwrap();
            left += high - low;
            out.insert(partition.id(), Vec::new());
            list.add_partition_offset(&topic, partition.id(), Offset::Beginning)
                .unwrap();
        }
        consumer.assign(&list).unwrap();
        let until = Instant::now() + 60 * SECOND;
        while left > 0 {
            assert!(Instant::now() < until, "{left} records missing");
            let Some(Ok(record)) = consumer.poll(SECOND) else {
                continue;
            };
            left -= 1;
            let string = |bytes: Option<&[u8]>| {
                String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
            };
            let id = record
                .headers()
                .and_then(|h| h.iter().find(|h| h.key == "x-message-id"))
                .map(|h| string(h.value))
                .unwrap_or_default();
            out.entry(record.partition()).or_default().push((
                string(record.key()),
                string(record.payload()),
                id,
            ));
        }
        out
    })
    .await
    .unwrap()
}

fn committed(brokers: &str, group: &str, topic: &str, partition: i32) -> Option<i64> {
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
fn assert_prefix_order(log: &BTreeMap<i32, Vec<(String, String, String)>>, count: usize) {
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_sent_arrives_byte_for_byte() {
    let kafka = connect().await;
    let topic = topic("fidelity", 1).await;
    let long = "n".repeat(255);
    let mut full = Message::new(&topic, "OrderPlaced")
        .with_key("")
        .with_payload("")
        .with_content_type("application/json")
        .with_version(-3)
        .with_trace("00-aa-bb-01", Some("v=1".into()))
        .with_header("a", "1")
        .with_header("a", vec![0xff, 0, b'\r', b'\n'])
        .with_header("empty", Vec::new())
        .with_header(long.as_str(), " leading space");
    full.headers.push_optional("null", None);
    let tombstone = Message::new(&topic, "OrderDeleted").with_key([0, 0xff]);
    let bare = Message::new(&topic, "T").with_payload(vec![0, 1, 2, 0xff]);
    let sent = [full, tombstone, bare];
    let batch: Vec<Outgoing> = sent.iter().cloned().map(Outgoing::from).collect();
    publish_all(&kafka, &batch).await;
    let mut subscription = kafka.subscribe(request("fidelity", &topic)).await.unwrap();
    let received = receive(&mut subscription, 3).await;
    for (received, sent) in received.iter().zip(&sent) {
        assert_eq!(&received.incoming.message, sent);
        assert_eq!(received.incoming.message.payload, sent.payload);
        assert!(!received.incoming.id_missing && !received.redelivered);
    }
    assert_eq!(received[2].coordinates.to_string(), format!("{topic}/0/2"));
    drop(received);
    subscription.close(10 * SECOND).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_topic_is_refused_within_seconds_and_harms_no_other() {
    let kafka = connect().await;
    let topic = topic("known", 3).await;
    let nowhere = unique_name("nowhere");
    let batch = [
        message(&topic, "k", "0"),
        message(&nowhere, "k", "1"),
        message(&topic, "k", "2"),
        message("not a topic", "k", "3"),
        Message::new(&topic, "T").with_header("a\0b", "v").into(),
    ];
    let outcomes = within(5 * SECOND, "publish", kafka.publish(&batch)).await;
    assert!(outcomes[0].is_confirmed() && outcomes[2].is_confirmed());
    for at in [1, 3] {
        assert!(
            matches!(
                outcomes[at],
                PublishOutcome::Rejected {
                    scope: RejectionScope::Destination,
                    ..
                }
            ),
            "{:?}",
            outcomes[at]
        );
    }
    assert!(matches!(
        outcomes[4],
        PublishOutcome::Rejected {
            scope: RejectionScope::Message,
            ..
        }
    ));
    let names = [topic.clone(), nowhere.clone(), "other-missing".to_owned()];
    let error = kafka.check(&names).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let shown = error.to_string();
    assert!(shown.contains(&nowhere) && shown.contains("other-missing"));
    assert!(!shown.contains(&topic));
    kafka.check(&[topic]).await.unwrap();
}

/// Publishes until everything is confirmed or rejected as a message; returns the rejected payload numbers.
async fn publish_until_done(kafka: &Kafka, mut batch: Vec<Outgoing>) -> Vec<Outgoing> {
    let mut rejected = Vec::new();
    let until = Instant::now() + 120 * SECOND;
    while !batch.is_empty() {
        assert!(Instant::now() < until, "{} left", batch.len());
        let outcomes = kafka.publish(&batch).await;
        let mut again = Vec::new();
        for (outgoing, outcome) in batch.into_iter().zip(outcomes) {
            match outcome {
                PublishOutcome::Confirmed => {}
                PublishOutcome::Failed { .. } => again.push(outgoing),
                PublishOutcome::Rejected {
                    scope: RejectionScope::Message,
                    ..
                } => rejected.push(outgoing),
                other => panic!("{other:?}"),
            }
        }
        batch = again;
    }
    rejected
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_oversized_message_is_refused_and_its_neighbours_keep_their_order() {
    let kafka = connect().await;
    let brokers = shared_kafka().await.brokers();
    let topic = shared_kafka()
        .await
        .create_topic_with("small", 1, &[("max.message.bytes", "20000")])
        .await
        .unwrap();
    let mut batch = Vec::new();
    for n in 0..30 {
        batch.extend(numbered(&topic, &format!("k{}", n % 3), n / 3..n / 3 + 1));
    }
    // Larger than the topic takes, smaller than the client's own bound.
    let big = message(&topic, "big", "x".repeat(30_000));
    batch.insert(15, big.clone());
    // Larger than the client's own bound.
    let huge = message(&topic, "huge", "x".repeat(990_000));
    batch.insert(3, huge.clone());
    let rejected = publish_until_done(&kafka, batch).await;
    assert_eq!(rejected, [huge, big]);
    let log = log(brokers, topic).await;
    assert_prefix_order(&log, 10);
    assert_eq!(log[&0].len(), 30);
}

/// The very first batch of a producer id is refused while the second one is under way. A broker that knows nothing of
/// the producer would store the second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_a_key_is_stored_behind_a_refused_first_batch() {
    let brokers = shared_kafka().await.brokers();
    // Batches of single messages, as large messages make them: the client has up to five of them under way.
    let config = config(&brokers).with_property("batch.num.messages", "1");
    let kafka = Kafka::connect(config).await.unwrap();
    let topic = shared_kafka()
        .await
        .create_topic_with("first", 1, &[("max.message.bytes", "20000")])
        .await
        .unwrap();
    let mut batch = vec![message(&topic, "k", "x".repeat(30_000))];
    batch.extend(numbered(&topic, "k", 0..100));
    let outcomes = kafka.publish(&batch).await;
    assert!(matches!(
        outcomes[0],
        PublishOutcome::Rejected {
            scope: RejectionScope::Message,
            ..
        }
    ));
    for outcome in &outcomes[1..] {
        assert!(matches!(outcome, PublishOutcome::Withheld), "{outcome:?}");
    }
    assert!(log(brokers.clone(), topic.clone()).await[&0].is_empty());
    assert!(
        publish_until_done(&kafka, batch.split_off(1))
            .await
            .is_empty()
    );
    assert_prefix_order(&log(brokers, topic).await, 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_killed_under_way_costs_no_message_and_no_order() {
    let options = KafkaOptions::default().with_local_process();
    let server = relaybox_testcontainers::Kafka::start_with(options)
        .await
        .unwrap();
    let topic = server.create_topic("killed", 3).await.unwrap();
    let config = config(&server.brokers()).with_publish_deadline(3 * SECOND);
    let kafka = Kafka::connect(config).await.unwrap();
    const KEYS: usize = 7;
    const EACH: usize = 300;
    let mut batch = Vec::new();
    for n in 0..EACH {
        for key in 0..KEYS {
            batch.push(message(&topic, &format!("k{key}"), n.to_string()));
        }
    }
    let mut pending: Vec<Outgoing> = batch;
    let mut unknown = 0;
    let mut round = 0;
    let until = Instant::now() + 120 * SECOND;
    while !pending.is_empty() {
        assert!(Instant::now() < until, "{} left", pending.len());
        round += 1;
        // A slice, as the relay would take it; the whole key order is kept by taking a prefix.
        let slice: Vec<Outgoing> = pending.iter().take(300).cloned().collect();
        let outcomes = match round {
            // Takes the requests and answers none of them in time; going on, it stores what it has of the old
            // producer, while the new one sends the same again.
            2 => {
                server.stop().await.unwrap();
                let outcomes = kafka.publish(&slice).await;
                assert!(!outcomes.iter().any(PublishOutcome::is_confirmed));
                server.cont().await.unwrap();
                outcomes
            }
            // Dies with requests in its hands, and is away when the deadline comes.
            4 => {
                server.stop().await.unwrap();
                let (outcomes, ()) = tokio::join!(kafka.publish(&slice), async {
                    tokio::time::sleep(SECOND).await;
                    server.kill().await.unwrap();
                });
                assert!(outcomes.iter().all(|outcome| matches!(
                    outcome,
                    PublishOutcome::Failed {
                        scope: FailureScope::Broker,
                        ..
                    }
                )));
                server.start_again().await.unwrap();
                outcomes
            }
            _ => kafka.publish(&slice).await,
        };
        let mut kept = Vec::new();
        for (outgoing, outcome) in slice.into_iter().zip(outcomes) {
            match outcome {
                PublishOutcome::Confirmed => {}
                PublishOutcome::Failed { stored, .. } => {
                    unknown += usize::from(stored == Stored::Unknown);
                    kept.push(outgoing);
                }
                other => panic!("{other:?}"),
            }
        }
        kept.extend(pending.into_iter().skip(300));
        pending = kept;
    }
    assert!(unknown > 0);
    let log = log(server.brokers(), topic).await;
    let stored: usize = log.values().map(Vec::len).sum();
    println!("{round} rounds, {unknown} unknown, {stored} stored");
    assert_prefix_order(&log, EACH);
    let ids: HashSet<_> = log.values().flatten().map(|(_, _, id)| id).collect();
    assert_eq!(ids.len(), KEYS * EACH);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_finished_prefix_is_committed() {
    let kafka = connect().await;
    let brokers = shared_kafka().await.brokers();
    let topic = topic("prefix", 1).await;
    let consumer = unique_name("prefix");
    publish_all(&kafka, &numbered(&topic, "k", 0..100)).await;
    let mut subscription = kafka.subscribe(request(&consumer, &topic)).await.unwrap();
    let mut stuck = None;
    for delivery in receive(&mut subscription, 100).await {
        if text(&delivery) == "17" {
            stuck = Some(delivery);
        } else {
            acknowledge(delivery).await;
        }
    }
    subscription.close(10 * SECOND).await.unwrap();
    let group = consumer.clone();
    let (brokers, named) = (brokers, topic.clone());
    let found = tokio::task::spawn_blocking(move || committed(&brokers, &group, &named, 0)).await;
    assert_eq!(found.unwrap(), Some(17));
    // Too late: the subscription is gone, and it does nothing.
    acknowledge(stuck.unwrap()).await;
    let mut next = kafka.subscribe(request(&consumer, &topic)).await.unwrap();
    let again = receive(&mut next, 83).await;
    assert_eq!(text(&again[0]), "17");
    drop(again);
    next.close(10 * SECOND).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rung_waits_until_due_and_holds_up_nobody_else() {
    let kafka = connect().await;
    let source = topic("ladder", 2).await;
    let consumer = unique_name("ladder");
    let rung = format!("{source}.{consumer}.retry.4s");
    let mut asked = request(&consumer, &source);
    asked.rungs = vec![Rung {
        destination: rung.clone(),
        delay: 4 * SECOND,
    }];
    asked.dead_letters = vec![format!("{source}.{consumer}.DLQ")];
    let mut subscription = kafka.subscribe(asked.clone()).await.unwrap();
    // The copy that fits the source at its largest fits the rung too.
    let due = time::OffsetDateTime::now_utc() + 4 * SECOND;
    let mut late = message(&rung, "late", "late");
    late.story = late.story.due(due);
    publish_all(&kafka, &[late]).await;
    publish_all(&kafka, &numbered(&source, "k", 0..50)).await;
    // Already due: delivered at once, wherever it lies.
    let mut past = message(&rung, "past-key-elsewhere", "past");
    past.story = past.story.due(due - 10 * SECOND);
    for delivery in receive(&mut subscription, 50).await {
        assert_ne!(text(&delivery), "late");
        acknowledge(delivery).await;
    }
    assert!(time::OffsetDateTime::now_utc() < due, "too slow to tell");
    let late = receive(&mut subscription, 1).await.remove(0);
    assert!(time::OffsetDateTime::now_utc() >= due);
    assert_eq!(text(&late), "late");
    assert_eq!(late.coordinates.topic, rung);
    acknowledge(late).await;
    // The partition goes on.
    publish_all(&kafka, &[past]).await;
    assert_eq!(text(&receive(&mut subscription, 1).await[0]), "past");
    subscription.close(10 * SECOND).await.unwrap();
    // A second member finds everything in place.
    asked.topology = TopologyMode::Verify;
    let second = kafka.subscribe(asked).await.unwrap();
    second.close(10 * SECOND).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_released_delivery_comes_again_after_its_delay() {
    let kafka = connect().await;
    let topic = topic("release", 1).await;
    publish_all(&kafka, &numbered(&topic, "k", 0..3)).await;
    let mut subscription = kafka.subscribe(request("release", &topic)).await.unwrap();
    let mut first = receive(&mut subscription, 3).await;
    let delay = 2 * SECOND;
    let released = Instant::now();
    let held = first.remove(0);
    held.receipt
        .settle(Settlement::Release { delay })
        .await
        .unwrap();
    // Dropped: comes again at once.
    drop(first.remove(0));
    let again = receive(&mut subscription, 1).await.remove(0);
    assert_eq!((text(&again).as_str(), again.redelivered), ("1", true));
    assert!(released.elapsed() < delay);
    acknowledge(again).await;
    acknowledge(first.remove(0)).await;
    let again = receive(&mut subscription, 1).await.remove(0);
    assert!(released.elapsed() >= delay);
    assert_eq!((text(&again).as_str(), again.redelivered), ("0", true));
    acknowledge(again).await;
    subscription.close(10 * SECOND).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_member_takes_over_without_losing_or_rewinding() {
    let brokers = shared_kafka().await.brokers();
    let kafka = Kafka::connect(config(&brokers).with_drain_deadline(SECOND))
        .await
        .unwrap();
    let topic = topic("rebalance", 4).await;
    let consumer = unique_name("rebalance");
    for key in 0..16 {
        publish_all(&kafka, &numbered(&topic, &format!("k{key}"), 0..25)).await;
    }
    let mut asked = request(&consumer, &topic);
    asked.in_flight_max = 1_000;
    let mut first = kafka.subscribe(asked.clone()).await.unwrap();
    let mut working = receive(&mut first, 400).await;
    // Three stay in work for good, the rest is done.
    let mut stuck = Vec::new();
    for delivery in working.drain(..) {
        match delivery.coordinates.offset.as_deref() {
            Some("7") => stuck.push(delivery),
            _ => acknowledge(delivery).await,
        }
    }
    let stuck_count = stuck.len();
    assert!(stuck_count > 1);
    let mut second = kafka.subscribe(asked).await.unwrap();
    // The new member gets a share, which begins at what was stuck there.
    let taken = receive(&mut second, 1).await.remove(0);
    assert_eq!(taken.coordinates.offset.as_deref(), Some("7"));
    let lost: Vec<_> = stuck
        .iter()
        .position(|d| d.coordinates == taken.coordinates)
        .map(|at| stuck.remove(at))
        .into_iter()
        .collect();
    assert!(!lost[0].receipt.is_current());
    // The old member's late word changes nothing.
    for delivery in lost {
        acknowledge(delivery).await;
    }
    let partition = taken.coordinates.partition.clone().unwrap();
    let number: i32 = partition.parse().unwrap();
    acknowledge(taken).await;
    let mut offsets = HashMap::from([(number, 8)]);
    let kept: Vec<_> = stuck
        .into_iter()
        .filter(|d| d.receipt.is_current())
        .collect();
    assert!(!kept.is_empty());
    for delivery in kept {
        acknowledge(delivery).await;
    }
    // Everything of the taken partitions is delivered by the second member.
    let ends = shared_kafka()
        .await
        .topic_end_offsets(&topic)
        .await
        .unwrap();
    within(30 * SECOND, "take over", async {
        while offsets
            .iter()
            .any(|(partition, next)| *next < ends[*partition as usize])
        {
            for delivery in second.receive(100).await.unwrap() {
                let partition: i32 = delivery
                    .coordinates
                    .partition
                    .clone()
                    .unwrap()
                    .parse()
                    .unwrap();
                let offset: i64 = delivery
                    .coordinates
                    .offset
                    .clone()
                    .unwrap()
                    .parse()
                    .unwrap();
                let next = offsets.entry(partition).or_insert(7);
                assert_eq!(offset, *next, "no rewind and no gap");
                *next += 1;
                acknowledge(delivery).await;
            }
        }
    })
    .await;
    first.close(10 * SECOND).await.unwrap();
    second.close(10 * SECOND).await.unwrap();
    let found = tokio::task::spawn_blocking(move || {
        (0..4)
            .map(|partition| committed(&brokers, &consumer, &topic, partition).unwrap_or(0))
            .collect::<Vec<_>>()
    })
    .await
    .unwrap();
    assert_eq!(found, ends);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_rung_is_named_within_seconds() {
    let kafka = connect().await;
    let source = topic("verify", 1).await;
    let mut asked = request("verify", &source);
    asked.topology = TopologyMode::Verify;
    asked.rungs = ["5s", "1m"]
        .map(|delay| Rung {
            destination: format!("{source}.retry.{delay}"),
            delay: 5 * SECOND,
        })
        .to_vec();
    asked.dead_letters = vec![format!("{source}.DLQ")];
    let error = within(5 * SECOND, "subscribe", kafka.subscribe(asked.clone()))
        .await
        .map(drop)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let shown = error.to_string();
    for name in [".retry.5s", ".retry.1m", ".DLQ"] {
        assert!(shown.contains(&format!("{source}{name}")), "{shown}");
    }
    // A rung that would lose messages is refused with both values.
    shared_kafka()
        .await
        .create_topic_named(&format!("{source}.DLQ"), 1, &[])
        .await
        .unwrap();
    shared_kafka()
        .await
        .create_topic_named(&format!("{source}.retry.1m"), 1, &[])
        .await
        .unwrap();
    shared_kafka()
        .await
        .create_topic_named(
            &format!("{source}.retry.5s"),
            1,
            &[("cleanup.policy", "compact")],
        )
        .await
        .unwrap();
    let error = kafka.subscribe(asked).await.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
    let violation = error.violation().unwrap();
    assert_eq!(
        (violation.field, violation.value.as_str()),
        ("cleanup.policy", "compact")
    );
    // A missing source is never made.
    let mut asked = request("verify", &unique_name("absent"));
    asked.topology = TopologyMode::Create;
    let error = kafka.subscribe(asked).await.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_membership_outlives_a_receiver_that_does_not_call() {
    let brokers = shared_kafka().await.brokers();
    let config = config(&brokers)
        .with_session_timeout(2 * SECOND)
        .with_poll_interval_max(3 * SECOND)
        .with_drain_deadline(SECOND);
    let kafka = Kafka::connect(config).await.unwrap();
    let topic = topic("idle", 1).await;
    let consumer = unique_name("idle");
    publish_all(&kafka, &numbered(&topic, "k", 0..50)).await;
    let mut asked = request(&consumer, &topic);
    asked.in_flight_max = 10;
    let mut subscription = kafka.subscribe(asked).await.unwrap();
    let held = receive(&mut subscription, 10).await;
    // Longer than the poll interval; time itself is what is tested here.
    tokio::time::sleep(5 * SECOND).await;
    assert!(held.iter().all(|delivery| delivery.receipt.is_current()));
    let mut numbers: Vec<String> = held.iter().map(text).collect();
    for delivery in held {
        acknowledge(delivery).await;
    }
    while numbers.len() < 50 {
        for delivery in receive(&mut subscription, 1).await {
            numbers.push(text(&delivery));
            acknowledge(delivery).await;
        }
    }
    let expected: Vec<String> = (0..50).map(|n| n.to_string()).collect();
    assert_eq!(numbers, expected);
    subscription.close(10 * SECOND).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_without_a_broker_returns_at_the_deadline() {
    let options = KafkaOptions::default().with_local_process();
    let server = relaybox_testcontainers::Kafka::start_with(options)
        .await
        .unwrap();
    let topic = server.create_topic("away", 1).await.unwrap();
    // No commit by the timer: the last one is what is tested.
    let config = config(&server.brokers())
        .with_commit_interval(60 * SECOND)
        .with_publish_deadline(3 * SECOND);
    let kafka = Kafka::connect(config).await.unwrap();
    publish_all(&kafka, &numbered(&topic, "k", 0..5)).await;
    let mut subscription = kafka.subscribe(request("away", &topic)).await.unwrap();
    let mut deliveries = receive(&mut subscription, 5).await;
    server.stop().await.unwrap();
    acknowledge(deliveries.remove(0)).await;
    let began = Instant::now();
    let error = subscription.close(2 * SECOND).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(began.elapsed() < 3 * SECOND, "{:?}", began.elapsed());
    // The publisher keeps its deadline too, and does not claim to know.
    let began = Instant::now();
    let outcomes = kafka.publish(&numbered(&topic, "k", 5..6)).await;
    assert!(matches!(outcomes[0], PublishOutcome::Failed { .. }));
    assert!(began.elapsed() < 4 * SECOND);
    let began = Instant::now();
    kafka.close(SECOND).await.unwrap();
    assert!(began.elapsed() < 2 * SECOND);
    assert!(matches!(
        kafka.publish(&numbered(&topic, "k", 6..7)).await[0],
        PublishOutcome::Failed {
            stored: Stored::No,
            ..
        }
    ));
    let error = Kafka::connect(KafkaConfig::new(server.brokers()))
        .await
        .map(drop)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains(&server.brokers()));
    server.cont().await.unwrap();
}

/// Java's `Utils.murmur2`.
fn murmur2(data: &[u8]) -> i32 {
    const M: u32 = 0x5bd1_e995;
    let mut h: u32 = 0x9747_b28c ^ data.len() as u32;
    let chunks = data.chunks_exact(4);
    let rest = chunks.remainder();
    for chunk in chunks {
        let mut k = u32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]);
        k = k.wrapping_mul(M);
        k ^= k >> 24;
        k = k.wrapping_mul(M);
        h = h.wrapping_mul(M);
        h ^= k;
    }
    for (at, byte) in rest.iter().enumerate().rev() {
        h ^= u32::from(*byte) << (8 * at);
    }
    if !rest.is_empty() {
        h = h.wrapping_mul(M);
    }
    h ^= h >> 13;
    h = h.wrapping_mul(M);
    h ^= h >> 15;
    h as i32
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_meets_the_partition_java_would_choose() {
    // Vectors of Kafka's own UtilsTest.
    for (text, hash) in [
        ("21", -973_932_308),
        ("foobar", -790_332_482),
        ("a-little-bit-long-string", -985_981_536),
        ("a-little-bit-longer-string", -1_486_304_829),
        (
            "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8",
            -58_897_971,
        ),
        ("abc", 479_470_107),
    ] {
        assert_eq!(murmur2(text.as_bytes()), hash, "{text}");
    }
    let kafka = connect().await;
    let topic = topic("murmur", 15).await;
    let keys: Vec<String> = (0..40)
        .map(|n| format!("cart-{n}"))
        .chain(["é".to_owned(), String::new()])
        .collect();
    let batch: Vec<Outgoing> = keys.iter().map(|key| message(&topic, key, "x")).collect();
    publish_all(&kafka, &batch).await;
    for (partition, records) in log(shared_kafka().await.brokers(), topic).await {
        for (key, ..) in records {
            let expected = (murmur2(key.as_bytes()) & 0x7fff_ffff) % 15;
            assert_eq!(partition, expected, "{key:?}");
        }
    }
}
