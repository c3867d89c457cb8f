//! From a real broker: commits, rungs, members.

use std::collections::HashMap;
use std::time::Instant;

use relaybox::ErrorKind;
use relaybox::broker::kafka::{Kafka, KafkaConfig};
use relaybox::broker::{
    PublishOutcome, Publisher, Rung, Settlement, Stored, Subscriber, TopologyMode,
};
use relaybox_testcontainers::{KafkaOptions, shared_kafka, unique_name};

use super::*;

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
        source: source.clone(),
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
            source: source.clone(),
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
        .with_drain_deadline(SECOND)
        .with_answer_deadline(SECOND);
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
