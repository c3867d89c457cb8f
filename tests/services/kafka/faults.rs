//! A line to the broker that breaks in the worst moments.

use relaybox::broker::kafka::Kafka;
use relaybox::broker::{
    ConnectionState, FailureScope, PublishOutcome, Publisher, Stored, Subscriber,
};
use relaybox::envelope::Outgoing;
use relaybox::testing::eventually;
use relaybox_testcontainers::KafkaLine;

use super::*;

async fn line() -> KafkaLine {
    let line = shared_kafka().await.line().await.unwrap();
    line.expect("a local process: only there a line can be broken")
}

async fn over(line: &KafkaLine) -> Kafka {
    let config = config(&line.brokers()).with_publish_deadline(4 * SECOND);
    Kafka::connect(config).await.unwrap()
}

fn is_unknown(outcome: &PublishOutcome) -> bool {
    let unknown = Stored::Unknown;
    matches!(outcome, PublishOutcome::Failed { stored, .. } if *stored == unknown)
}

/// The broker has stored and the client never hears: within the call the client sends again, and the broker knows the
/// number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_stored_and_not_confirmed_is_there_once_when_the_line_is_back_in_time() {
    let line = line().await;
    let brokers = shared_kafka().await.brokers();
    let config = config(&line.brokers()).with_publish_deadline(60 * SECOND);
    let kafka = Kafka::connect(config).await.unwrap();
    let topic = topic("once", 1).await;
    publish_all(&kafka, &numbered(&topic, "k", 0..1)).await;
    line.proxy().cut_after_from_server(0);
    let batch = numbered(&topic, "k", 1..4);
    let publishing = kafka.publish(&batch);
    let mending = async {
        eventually(60 * SECOND, "the answer is lost", || async {
            line.proxy().has_cut()
        })
        .await;
        line.proxy().pass();
    };
    let (outcomes, ()) = tokio::join!(publishing, mending);
    assert!(
        outcomes.iter().all(PublishOutcome::is_confirmed),
        "{outcomes:?}"
    );
    let log = log(brokers, topic).await;
    let payloads: Vec<&str> = log[&0]
        .iter()
        .map(|(_, payload, _)| payload.as_str())
        .collect();
    assert_eq!(payloads, ["0", "1", "2", "3"]);
}

/// The line is not back in time: nobody claims to know, and the same message under the same id comes again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_stored_and_not_confirmed_in_time_is_unknown_and_sent_again_under_its_id() {
    let line = line().await;
    let kafka = over(&line).await;
    let topic = topic("unknown", 1).await;
    publish_all(&kafka, &numbered(&topic, "k", 0..1)).await;
    line.proxy().cut_after_from_server(0);
    let batch = numbered(&topic, "k", 1..4);
    let outcomes = kafka.publish(&batch).await;
    assert!(line.proxy().has_cut());
    assert!(outcomes.iter().all(is_unknown), "{outcomes:?}");
    let broker = FailureScope::Broker;
    assert!(matches!(&outcomes[0], PublishOutcome::Failed { scope, .. } if *scope == broker));
    let health = kafka_health(&kafka);
    assert_eq!(health.state, ConnectionState::Down);
    assert!(health.detail.is_some());
    line.proxy().pass();
    eventually(60 * SECOND, "confirmed", || async {
        let outcomes = kafka.publish(&batch).await;
        outcomes.iter().all(PublishOutcome::is_confirmed)
    })
    .await;
    let log = log(shared_kafka().await.brokers(), topic).await;
    assert_prefix_order(&log, 4);
    let ids: HashSet<&String> = log[&0].iter().map(|(_, _, id)| id).collect();
    assert_eq!(ids.len(), 4, "a copy has the id of its first");
}

fn kafka_health(kafka: &Kafka) -> relaybox::broker::Health {
    Publisher::health(kafka)
}

/// Cut, silent, and back, while a batch after the other is sent: all arrives, each key in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_line_that_comes_and_goes_costs_no_message_and_no_order() {
    const KEYS: usize = 5;
    const EACH: usize = 120;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let line = line().await;
    let kafka = over(&line).await;
    let topic = topic("comes_and_goes", 3).await;
    let mut pending: Vec<Outgoing> = (0..EACH)
        .flat_map(|n| (0..KEYS).map(move |key| (key, n)))
        .map(|(key, n)| message(&topic, &format!("k{key}"), n.to_string()))
        .collect();
    let until = Instant::now() + 180 * SECOND;
    let mut round = 0;
    while !pending.is_empty() {
        assert!(Instant::now() < until, "{} left", pending.len());
        round += 1;
        let slice: Vec<Outgoing> = pending.iter().take(60).cloned().collect();
        let proxy = line.proxy();
        match round % 5 {
            1 => proxy.cut_after_from_server(random.u64(0..400)),
            3 => proxy.blackhole(),
            _ => proxy.pass(),
        }
        let (outcomes, ()) = tokio::join!(kafka.publish(&slice), async {
            // In the middle of the call, mostly.
            tokio::time::sleep(Duration::from_millis(random.u64(0..3_000))).await;
            if round % 2 == 0 {
                proxy.cut();
                proxy.pass();
            }
        });
        proxy.pass();
        let mut left = Vec::new();
        for (outgoing, outcome) in slice.into_iter().zip(outcomes) {
            match outcome {
                PublishOutcome::Confirmed => {}
                PublishOutcome::Failed { .. } => left.push(outgoing),
                other => panic!("{other:?}"),
            }
        }
        left.extend(pending.into_iter().skip(60));
        pending = left;
    }
    let log = log(shared_kafka().await.brokers(), topic).await;
    assert_prefix_order(&log, EACH);
    let ids: HashSet<_> = log.values().flatten().map(|(_, _, id)| id).collect();
    assert_eq!(ids.len(), KEYS * EACH);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_follows_the_line_of_one_who_does_nothing() {
    let line = line().await;
    let kafka = over(&line).await;
    let topic = topic("health", 1).await;
    let subscription = kafka.subscribe(request("health", &topic)).await.unwrap();
    let state = || (kafka_health(&kafka).state, subscription.health().state);
    for (break_it, expected) in [(true, ConnectionState::Down), (false, ConnectionState::Up)] {
        if break_it {
            line.proxy().cut();
        } else {
            line.proxy().pass();
        }
        let both = (expected, expected);
        eventually(60 * SECOND, "health follows", || async { state() == both }).await;
    }
    kafka.close(SECOND).await.unwrap();
    assert_eq!(kafka_health(&kafka).state, ConnectionState::Closed);
    subscription.close(10 * SECOND).await.unwrap();
}
