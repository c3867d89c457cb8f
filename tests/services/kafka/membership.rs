//! One member in awkward moments: partitions that go and come back, names, sessions, waits.

use rdkafka::consumer::Consumer as _;
use rdkafka::mocking::MockCluster;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use relaybox::ErrorKind;
use relaybox::broker::kafka::{Assignor, Kafka, KafkaConfig};
use relaybox::broker::{ConnectionState, Rung, Subscriber, TopologyMode};
use relaybox::testing::eventually;
use relaybox_testcontainers::{shared_kafka, unique_name};

use super::*;

pub const ASSIGNORS: [Assignor; 3] = [
    Assignor::CooperativeSticky,
    Assignor::Range,
    Assignor::Broker,
];

/// A static member, which needs another assignor than the default.
pub fn named(config: KafkaConfig, id: &str) -> KafkaConfig {
    config.with_instance_id(id).with_assignor(Assignor::Range)
}

fn partition(delivery: &Delivery) -> String {
    delivery.coordinates.partition.clone().unwrap()
}

/// Full, so that everything is paused; then a partition goes to another member and comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_comes_back_is_not_silent() {
    for assignor in ASSIGNORS {
        let kafka = with(|c| c.with_assignor(assignor).with_drain_deadline(SECOND)).await;
        let topic = topic("comes_back", 2).await;
        for key in 0..20 {
            publish_all(&kafka, &numbered(&topic, &format!("k{key}"), 0..1)).await;
        }
        let mut asked = request(&unique_name("comes_back"), &topic);
        asked.in_flight_max = 2;
        let mut first = kafka.subscribe(asked.clone()).await.unwrap();
        let held = receive(&mut first, 2).await;
        // Longer than the adapter waits before it pauses.
        let pause = Duration::from_millis(1_500);
        assert!(tokio::time::timeout(pause, first.receive(1)).await.is_err());
        let mut second = kafka.subscribe(asked).await.unwrap();
        drop(receive(&mut second, 1).await);
        second.close(10 * SECOND).await.unwrap();
        let mut seen = HashSet::new();
        for delivery in held {
            if delivery.receipt.is_current() {
                seen.insert(delivery.incoming.message.key.clone());
            }
            acknowledge(delivery).await;
        }
        within(60 * SECOND, "everything comes", async {
            while seen.len() < 20 {
                for delivery in receive(&mut first, 1).await {
                    seen.insert(delivery.incoming.message.key.clone());
                    acknowledge(delivery).await;
                }
            }
        })
        .await;
        first.close(10 * SECOND).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_that_is_later_than_the_drain_changes_nothing() {
    for assignor in ASSIGNORS {
        let kafka = with(|c| c.with_assignor(assignor).with_drain_deadline(SECOND)).await;
        let topic = topic("late", 2).await;
        for key in 0..12 {
            publish_all(&kafka, &numbered(&topic, &format!("k{key}"), 0..5)).await;
        }
        let consumer = unique_name("late");
        let mut first = kafka.subscribe(request(&consumer, &topic)).await.unwrap();
        // What comes first in each partition is done, and the rest is stuck.
        let mut stuck = Vec::new();
        for delivery in receive(&mut first, 60).await {
            match delivery.coordinates.offset.as_deref() {
                Some("0" | "1") => acknowledge(delivery).await,
                _ => stuck.push(delivery),
            }
        }
        let mut second = kafka.subscribe(request(&consumer, &topic)).await.unwrap();
        let taken = receive(&mut second, 1).await.remove(0);
        let offset = taken.coordinates.offset.as_deref();
        assert_eq!(offset, Some("2"), "{assignor:?}");
        assert!(taken.redelivered, "it is in work elsewhere: {assignor:?}");
        let theirs = partition(&taken);
        acknowledge(taken).await;
        let (late, kept): (Vec<_>, Vec<_>) = stuck
            .into_iter()
            .partition(|delivery| partition(delivery) == theirs);
        for delivery in late {
            assert!(!delivery.receipt.is_current(), "{assignor:?}");
            acknowledge(delivery).await;
        }
        drop(kept);
        first.close(10 * SECOND).await.unwrap();
        second.close(10 * SECOND).await.unwrap();
        let brokers = shared_kafka().await.brokers();
        let number: i32 = theirs.parse().unwrap();
        let ask = move || committed(&brokers, &consumer, &topic, number);
        let found = tokio::task::spawn_blocking(ask).await.unwrap();
        assert_eq!(found, Some(3), "{assignor:?}");
    }
}

/// What is in work when a partition is taken away gets its time, and what becomes of it is committed before the next
/// owner begins.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_done_before_the_drain_ends_does_not_come_again() {
    for assignor in ASSIGNORS {
        let kafka = with(|c| c.with_assignor(assignor).with_drain_deadline(60 * SECOND)).await;
        let topic = topic("drained", 2).await;
        let send = async |n: usize| {
            for key in 0..12 {
                publish_all(&kafka, &numbered(&topic, &format!("k{key}"), n..n + 1)).await;
            }
        };
        send(0).await;
        let asked = request(&unique_name("drained"), &topic);
        let mut first = kafka.subscribe(asked.clone()).await.unwrap();
        let in_work = receive(&mut first, 12).await;
        let mut second = kafka.subscribe(asked).await.unwrap();
        eventually(60 * SECOND, "partitions are taken away", || async {
            in_work
                .iter()
                .any(|delivery| !delivery.receipt.is_current())
        })
        .await;
        for delivery in in_work {
            acknowledge(delivery).await;
        }
        send(1).await;
        // Each gets its share of the second round, and nothing of the first.
        for subscription in [&mut first, &mut second] {
            for delivery in receive(subscription, 1).await {
                assert_eq!(text(&delivery), "1", "{assignor:?}");
                assert!(!delivery.redelivered, "{assignor:?}");
                acknowledge(delivery).await;
            }
        }
        first.close(10 * SECOND).await.unwrap();
        second.close(10 * SECOND).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_static_member_that_restarts_finds_its_partitions_and_moves_none() {
    let (topic, consumer) = (topic("static", 2).await, unique_name("static"));
    let member = |id: &'static str| with(move |c| named(c, id).with_session_timeout(60 * SECOND));
    let (a, b) = (member("a").await, member("b").await);
    let publisher = connect().await;
    let send = async |n: usize| {
        let batch: Vec<_> = (0..10)
            .map(|key| message(&topic, &format!("k{key}"), n.to_string()))
            .collect();
        publish_all(&publisher, &batch).await;
    };
    let mut first = a.subscribe(request(&consumer, &topic)).await.unwrap();
    let mut second = b.subscribe(request(&consumer, &topic)).await.unwrap();
    let mut shares = [String::new(), String::new()];
    let mut round = 0;
    within(60 * SECOND, "both share", async {
        while shares[0].is_empty() || shares[1].is_empty() || shares[0] == shares[1] {
            send(round).await;
            round += 1;
            for (at, subscription) in [&mut first, &mut second].into_iter().enumerate() {
                let some = tokio::time::timeout(SECOND, subscription.receive(100)).await;
                for delivery in some.ok().and_then(Result::ok).unwrap_or_default() {
                    if delivery.receipt.is_current() {
                        shares[at] = partition(&delivery);
                        acknowledge(delivery).await;
                    }
                }
            }
        }
    })
    .await;
    second.close(10 * SECOND).await.unwrap();
    let (brokers, group) = (shared_kafka().await.brokers(), consumer.clone());
    let ask = move || {
        let groups = client(&brokers).fetch_group_list(Some(&group), 10 * SECOND);
        groups.unwrap().groups()[0].members().len()
    };
    let members = tokio::task::spawn_blocking(ask).await.unwrap();
    assert_eq!(members, 2, "the one that is away is still a member");
    send(1_000).await;
    let mut second = b.subscribe(request(&consumer, &topic)).await.unwrap();
    let deliveries = receive(&mut second, 1).await;
    assert_eq!(partition(&deliveries[0]), shares[1]);
    // The one that stayed never got the other's, for as long as it was away.
    send(1_001).await;
    let mut seen = false;
    while !seen {
        for delivery in receive(&mut first, 1).await {
            assert_eq!(partition(&delivery), shares[0]);
            seen |= text(&delivery) == "1001";
            acknowledge(delivery).await;
        }
    }
    drop(deliveries);
    first.close(10 * SECOND).await.unwrap();
    second.close(10 * SECOND).await.unwrap();
}

/// Receives until the subscription is over.
async fn end_of(subscription: &mut Box<dyn Subscription>) -> relaybox::Error {
    within(60 * SECOND, "an end", async {
        loop {
            match subscription.receive(1).await {
                Err(error) if !error.is_transient() => return error,
                _ => {}
            }
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_members_with_one_name_one_ends_with_an_error() {
    for assignor in [Assignor::Range, Assignor::Broker] {
        let (topic, consumer) = (topic("twins", 1).await, unique_name("twins"));
        let kafka = with(|c| c.with_instance_id("twin").with_assignor(assignor)).await;
        publish_all(&kafka, &numbered(&topic, "k", 0..1)).await;
        let mut older = kafka.subscribe(request(&consumer, &topic)).await.unwrap();
        drop(receive(&mut older, 1).await);
        let mut newer = kafka.subscribe(request(&consumer, &topic)).await.unwrap();
        let (mut stays, mut ends) = match assignor {
            Assignor::Broker => (older, newer),
            _ => {
                assert_eq!(text(&receive(&mut newer, 1).await[0]), "0");
                (newer, older)
            }
        };
        let error = end_of(&mut ends).await;
        assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
        assert_eq!(error.violation().unwrap().field, "instance_id");
        assert_eq!(ends.health().state, ConnectionState::Closed);
        assert_eq!(text(&receive(&mut stays, 1).await[0]), "0");
        stays.close(10 * SECOND).await.unwrap();
    }
}

/// The group's own bounds are known to nobody before it refuses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_the_group_refuses_ends_with_the_settings_name() {
    let cluster = MockCluster::new(1).unwrap();
    cluster.create_topic("orders", 1, 1).unwrap();
    let refused = RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_SESSION_TIMEOUT;
    cluster.request_errors(RDKafkaApiKey::JoinGroup, &[refused]);
    let kafka = Kafka::connect(config(&cluster.bootstrap_servers()))
        .await
        .unwrap();
    let mut asked = request("refused", "orders");
    asked.topology = TopologyMode::Unchecked;
    let mut subscription = kafka.subscribe(asked).await.unwrap();
    let error = end_of(&mut subscription).await;
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
    assert_eq!(error.violation().unwrap().field, "session_timeout");
}

/// A wait is no silence: the group goes on hearing from the member, and other partitions go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_on_a_rung_longer_than_the_poll_interval_costs_no_membership() {
    let delay = 7 * SECOND;
    let kafka = with(|c| {
        c.with_session_timeout(2 * SECOND)
            .with_poll_interval_max(3 * SECOND)
            .with_drain_deadline(SECOND)
            .with_answer_deadline(SECOND)
    })
    .await;
    let source = topic("patient", 1).await;
    let rung = format!("{source}.retry");
    let mut asked = request(&unique_name("patient"), &source);
    asked.rungs = vec![Rung {
        destination: rung.clone(),
        delay,
        source: source.clone(),
    }];
    let mut subscription = kafka.subscribe(asked).await.unwrap();
    let due = time::OffsetDateTime::now_utc() + delay;
    let mut late = message(&rung, "late", "late");
    late.story = late.story.due(due);
    publish_all(&kafka, &[late]).await;
    publish_all(&kafka, &numbered(&source, "k", 0..1)).await;
    // In work for as long as the other waits: after a rebalance it would be nobody's.
    let held = receive(&mut subscription, 1).await.remove(0);
    assert_eq!(text(&held), "0");
    let mut seen = Vec::new();
    for n in 1.. {
        publish_all(&kafka, &numbered(&source, "other", n..n + 1)).await;
        let next = receive(&mut subscription, 1).await.remove(0);
        seen.push(text(&next));
        acknowledge(next).await;
        if seen.last().is_some_and(|last| last == "late") {
            break;
        }
    }
    assert!(time::OffsetDateTime::now_utc() >= due);
    assert!(seen.len() > 1, "the source went on: {seen:?}");
    assert!(held.receipt.is_current(), "nothing was taken away");
    acknowledge(held).await;
    subscription.close(10 * SECOND).await.unwrap();
}
