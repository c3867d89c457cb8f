//! What a successor is told about a member that died, and that it is told nothing about one that went in order.

use rdkafka::consumer::{CommitMode, Consumer};
use relaybox::broker::kafka::Kafka;
use relaybox::broker::{Rung, Settlement, Subscriber};
use relaybox::testing::eventually;
use relaybox_testcontainers::{KafkaLine, shared_kafka, unique_name};

use super::membership::{ASSIGNORS, named};
use super::*;

const IN_FLIGHT: usize = 20;
const ALL: usize = 300;
const NONE: [i64; 0] = [];

/// A member whose process is gone as far as the broker can see: neither a commit nor a farewell gets through.
struct Mortal {
    line: KafkaLine,
    kafka: Kafka,
}

impl Mortal {
    async fn new(change: impl FnOnce(KafkaConfig) -> KafkaConfig) -> Self {
        let line = shared_kafka().await.line().await.unwrap();
        let line = line.expect("a local process: only there a line can be broken");
        let kafka = Kafka::connect(change(config(&line.brokers())))
            .await
            .unwrap();
        Self { line, kafka }
    }
}

/// The committed offset and the end of an open mark.
pub async fn mark(group: &str, topic: &str, partition: i32) -> Option<(i64, Option<i64>)> {
    let (group, topic) = (group.to_owned(), topic.to_owned());
    let brokers = shared_kafka().await.brokers();
    tokio::task::spawn_blocking(move || {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", brokers)
            .set("group.id", group)
            .create()
            .unwrap();
        let mut list = TopicPartitionList::new();
        list.add_partition(&topic, partition);
        let found = consumer.committed_offsets(list, 10 * SECOND).unwrap();
        let element = found.find_partition(&topic, partition)?;
        let Offset::Offset(offset) = element.offset() else {
            return None;
        };
        let open = element.metadata().strip_prefix("relaybox/1 open ");
        Some((offset, open.map(|until| until.parse().unwrap())))
    })
    .await
    .unwrap()
}

/// Cuts the member off once so much is committed. The end of its mark, which nothing moves any more.
async fn die_at(mortal: &Mortal, group: &str, topic: &str, point: i64) -> i64 {
    eventually(60 * SECOND, "the commit", || async {
        let found = mark(group, topic, 0).await;
        found.is_some_and(|found| found.0 == point)
    })
    .await;
    mortal.line.proxy().cut();
    mark(group, topic, 0).await.unwrap().1.unwrap()
}

pub fn offset(delivery: &Delivery) -> i64 {
    let offset = delivery.coordinates.offset.as_deref();
    offset.unwrap().parse().unwrap()
}

/// The offsets that are said to have been delivered before, of so many from the first on.
fn redelivered(deliveries: &[Delivery]) -> Vec<i64> {
    let mut offsets: Vec<i64> = deliveries
        .iter()
        .filter(|delivery| delivery.redelivered)
        .map(offset)
        .collect();
    offsets.sort_unstable();
    offsets
}

/// Receives with `in_flight_max` so many, acknowledges the first few, and dies.
async fn receive_and_die(mortal: &Mortal, asked: &SubscriptionRequest, acknowledged: usize) -> i64 {
    let mut asked = asked.clone();
    asked.in_flight_max = IN_FLIGHT;
    let mut subscription = mortal.kafka.subscribe(asked.clone()).await.unwrap();
    let mut in_work = receive(&mut subscription, IN_FLIGHT).await;
    assert_eq!(redelivered(&in_work), NONE, "nobody has seen any");
    let rest = in_work.split_off(acknowledged);
    for delivery in in_work {
        acknowledge(delivery).await;
    }
    let (group, topic) = (&asked.consumer, &asked.sources[0]);
    let until = die_at(mortal, group, topic, acknowledged as i64).await;
    drop(subscription);
    drop(rest);
    until
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exactly_what_a_dead_member_may_have_had_in_work_is_redelivered() {
    for assignor in ASSIGNORS {
        // Before anything was committed at all, and later.
        for acknowledged in [0, 3] {
            let mortal = Mortal::new(|c| c.with_assignor(assignor)).await;
            let kafka = with(|c| c.with_assignor(assignor)).await;
            let topic = topic("mortal", 1).await;
            publish_all(&kafka, &numbered(&topic, "k", 0..ALL)).await;
            let mut asked = request(&unique_name("mortal"), &topic);
            let until = receive_and_die(&mortal, &asked, acknowledged).await;
            let bounds = IN_FLIGHT as i64..ALL as i64 / 2;
            assert!(bounds.contains(&until), "{until}");
            asked.in_flight_max = ALL;
            let mut next = kafka.subscribe(asked).await.unwrap();
            let deliveries = receive(&mut next, ALL - acknowledged).await;
            let expected: Vec<i64> = (acknowledged as i64..until).collect();
            assert_eq!(redelivered(&deliveries), expected, "{assignor:?}");
            for delivery in deliveries {
                acknowledge(delivery).await;
            }
            next.close(10 * SECOND).await.unwrap();
        }
    }
}

/// It is back under its name before anybody has missed it, and no rebalance tells of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_member_that_is_back_is_told_of_its_own_death() {
    let mortal = Mortal::new(|c| named(c, "a").with_session_timeout(60 * SECOND)).await;
    let kafka = with(|c| named(c, "a").with_session_timeout(60 * SECOND)).await;
    let topic = topic("back", 1).await;
    publish_all(&kafka, &numbered(&topic, "k", 0..ALL)).await;
    let mut asked = request(&unique_name("back"), &topic);
    let until = receive_and_die(&mortal, &asked, 3).await;
    asked.in_flight_max = ALL;
    let mut next = kafka.subscribe(asked.clone()).await.unwrap();
    let deliveries = receive(&mut next, ALL - 3).await;
    assert_eq!(redelivered(&deliveries), (3..until).collect::<Vec<_>>());
    for delivery in deliveries {
        acknowledge(delivery).await;
    }
    next.close(10 * SECOND).await.unwrap();
    assert_eq!(
        mark(&asked.consumer, &topic, 0).await,
        Some((ALL as i64, None))
    );
}

/// Suspects that the second member did not get to are suspect for the third, however orderly the second went.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_in_work_at_a_death_stays_suspect_until_it_is_finished() {
    let mortal = Mortal::new(|c| c).await;
    let kafka = connect().await;
    let topic = topic("suspect", 1).await;
    publish_all(&kafka, &numbered(&topic, "k", 0..ALL)).await;
    let mut asked = request(&unique_name("suspect"), &topic);
    let until = receive_and_die(&mortal, &asked, 3).await;
    asked.in_flight_max = 5;
    let mut second = kafka.subscribe(asked.clone()).await.unwrap();
    for delivery in receive(&mut second, 5).await {
        acknowledge(delivery).await;
    }
    second.close(10 * SECOND).await.unwrap();
    asked.in_flight_max = ALL;
    let mut third = kafka.subscribe(asked).await.unwrap();
    let deliveries = receive(&mut third, ALL - 8).await;
    assert_eq!(redelivered(&deliveries), (8..until).collect::<Vec<_>>());
    drop(deliveries);
    third.close(10 * SECOND).await.unwrap();
}

/// Neither what was never taken nor what was given back was in anybody's work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_an_orderly_end_nothing_is_redelivered() {
    for assignor in ASSIGNORS {
        let kafka = with(|c| c.with_assignor(assignor)).await;
        let topic = topic("orderly", 1).await;
        publish_all(&kafka, &numbered(&topic, "k", 0..ALL)).await;
        let mut asked = request(&unique_name("orderly"), &topic);
        asked.in_flight_max = IN_FLIGHT;
        let mut first = kafka.subscribe(asked.clone()).await.unwrap();
        let mut taken = receive(&mut first, 10).await;
        let given_back = taken.pop().unwrap();
        let delay = 60 * SECOND;
        let settled = given_back.receipt.settle(Settlement::Release { delay });
        settled.await.unwrap();
        for delivery in taken {
            acknowledge(delivery).await;
        }
        first.close(10 * SECOND).await.unwrap();
        assert_eq!(mark(&asked.consumer, &topic, 0).await, Some((9, None)));
        asked.in_flight_max = ALL;
        let mut second = kafka.subscribe(asked).await.unwrap();
        let deliveries = receive(&mut second, ALL - 9).await;
        assert_eq!(redelivered(&deliveries), NONE, "{assignor:?}");
        drop(deliveries);
        second.close(10 * SECOND).await.unwrap();
    }
}

/// A member that closes with deliveries unsettled tells of those that it handed over, and of no others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_unsettled_at_the_end_is_redelivered() {
    let kafka = connect().await;
    let topic = topic("unsettled", 1).await;
    publish_all(&kafka, &numbered(&topic, "k", 0..ALL)).await;
    let mut asked = request(&unique_name("unsettled"), &topic);
    asked.in_flight_max = IN_FLIGHT;
    let mut first = kafka.subscribe(asked.clone()).await.unwrap();
    let mut taken = receive(&mut first, 10).await;
    acknowledge(taken.remove(0)).await;
    acknowledge(taken.remove(3)).await;
    first.close(10 * SECOND).await.unwrap();
    asked.in_flight_max = ALL;
    let mut second = kafka.subscribe(asked).await.unwrap();
    let deliveries = receive(&mut second, ALL - 1).await;
    assert_eq!(redelivered(&deliveries), (1..10).collect::<Vec<_>>());
    drop(deliveries);
    second.close(10 * SECOND).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rung_tells_of_a_death_as_a_source_does() {
    let mortal = Mortal::new(|c| c).await;
    let kafka = connect().await;
    let source = topic("rung_mark", 1).await;
    let rung = format!("{source}.retry");
    let mut asked = request(&unique_name("rung_mark"), &source);
    asked.rungs = vec![Rung {
        destination: rung.clone(),
        delay: SECOND,
        source,
    }];
    asked.in_flight_max = IN_FLIGHT;
    let mut first = mortal.kafka.subscribe(asked.clone()).await.unwrap();
    let due = time::OffsetDateTime::now_utc();
    let copies: Vec<Outgoing> = numbered(&rung, "k", 0..ALL)
        .into_iter()
        .map(|mut copy| {
            copy.story = copy.story.due(due);
            copy
        })
        .collect();
    publish_all(&kafka, &copies).await;
    let in_work = receive(&mut first, IN_FLIGHT).await;
    let until = die_at(&mortal, &asked.consumer, &rung, 0).await;
    drop(first);
    drop(in_work);
    asked.in_flight_max = ALL;
    let mut next = kafka.subscribe(asked).await.unwrap();
    let deliveries = receive(&mut next, ALL).await;
    assert_eq!(redelivered(&deliveries), (0..until).collect::<Vec<_>>());
    drop(deliveries);
    next.close(10 * SECOND).await.unwrap();
}

/// As after an upgrade, or when a tool has moved the group: what is not ours says nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_with_another_text_counts_as_clean() {
    for text in ["", "written by another"] {
        let kafka = connect().await;
        let brokers = shared_kafka().await.brokers();
        let topic = topic("foreign", 1).await;
        publish_all(&kafka, &numbered(&topic, "k", 0..30)).await;
        let asked = request(&unique_name("foreign"), &topic);
        let (group, named) = (asked.consumer.clone(), topic.clone());
        tokio::task::spawn_blocking(move || {
            let tool: BaseConsumer = ClientConfig::new()
                .set("bootstrap.servers", brokers)
                .set("group.id", group)
                .set("enable.auto.commit", "false")
                .create()
                .unwrap();
            let mut list = TopicPartitionList::new();
            let mut element = list.add_partition(&named, 0);
            element.set_offset(Offset::Offset(10)).unwrap();
            if !text.is_empty() {
                element.set_metadata(text);
            }
            tool.commit(&list, CommitMode::Sync).unwrap();
        })
        .await
        .unwrap();
        let mut subscription = kafka.subscribe(asked).await.unwrap();
        let deliveries = receive(&mut subscription, 20).await;
        assert_eq!(offset(&deliveries[0]), 10);
        assert_eq!(redelivered(&deliveries), NONE, "{text:?}");
        drop(deliveries);
        subscription.close(10 * SECOND).await.unwrap();
    }
}

/// Nothing is handed over before the broker has confirmed that it may be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_delivery_of_all_is_marked_before_it_is_handed_over() {
    let kafka = with(|c| c.with_commit_interval(60 * SECOND)).await;
    let topic = topic("marked", 1).await;
    publish_all(&kafka, &numbered(&topic, "k", 0..1)).await;
    let asked = request(&unique_name("marked"), &topic);
    let mut subscription = kafka.subscribe(asked.clone()).await.unwrap();
    let first = receive(&mut subscription, 1).await;
    let found = mark(&asked.consumer, &topic, 0).await;
    assert!(
        matches!(found, Some((0, Some(until))) if until > 0),
        "{found:?}"
    );
    drop(first);
    subscription.close(10 * SECOND).await.unwrap();
}
