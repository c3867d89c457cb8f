//! Deliveries: queues that vanish, messages of others, several queues, shards.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::BasicPublishOptions;
use lapin::types::{AMQPValue, FieldArray, FieldTable};
use relaybox::Message;
use relaybox::broker::rabbitmq::{QueueKind, RabbitMq};
use relaybox::broker::{Settlement, Subscriber, SubscriptionRequest};
use relaybox::envelope::Outgoing;
use relaybox_testcontainers::{shared_rabbitmq, unique_name};
use time::OffsetDateTime;
use time::macros::datetime;

use super::{
    DEADLINE, acknowledge, config, connect, delete_queue, message, publish_all, queue, raw,
    receive, request, subscribe, take, text, until_confirmed, within,
};

#[tokio::test]
async fn a_queue_deleted_and_made_again_is_consumed_again() {
    let rabbitmq = connect().await;
    let name = queue(&rabbitmq, "orders").await;
    let mut subscription = subscribe(&rabbitmq, request(&name)).await;
    publish_all(&rabbitmq, &[message(&name, "0")]).await;
    assert_eq!(take(&mut subscription, 1).await, ["0"]);
    let channel = raw(&shared_rabbitmq().await.url()).await;
    delete_queue(&channel, &name).await;
    let report = within("a report", subscription.receive(1)).await;
    assert!(report.unwrap_err().is_transient());
    rabbitmq
        .declare_queue(&name, QueueKind::Quorum)
        .await
        .unwrap();
    until_confirmed(&rabbitmq, &message(&name, "1")).await;
    assert_eq!(take(&mut subscription, 1).await, ["1"]);
    assert!(subscription.health().is_up());
}

#[tokio::test]
async fn messages_of_others_are_read_and_each_has_an_id_of_its_own() {
    let rabbitmq = connect().await;
    let name = queue(&rabbitmq, "foreign").await;
    let channel = raw(&shared_rabbitmq().await.url()).await;
    let mut odd = FieldTable::default();
    odd.insert("n".into(), AMQPValue::LongLongInt(-1));
    odd.insert("t".into(), AMQPValue::Timestamp(1));
    odd.insert(
        "nested".into(),
        AMQPValue::FieldTable(FieldTable::default()),
    );
    odd.insert("list".into(), AMQPValue::FieldArray(FieldArray::default()));
    odd.insert("x-headers".into(), AMQPValue::LongString("broken".into()));
    odd.insert("x-due-at".into(), AMQPValue::Boolean(true));
    odd.insert("x-retry-count".into(), AMQPValue::LongInt(-3));
    odd.insert("x-null-payload".into(), AMQPValue::Void);
    let none = BasicProperties::default;
    for (properties, body) in [
        (none(), &b""[..]),
        (none(), b"no headers"),
        (none().with_headers(odd), b"odd"),
        (none().with_message_id("theirs".into()), b"named"),
    ] {
        let options = BasicPublishOptions::default();
        channel
            .basic_publish("".into(), name.as_str().into(), options, body, properties)
            .await
            .unwrap();
    }
    let mut subscription = subscribe(&rabbitmq, request(&name)).await;
    let mut ids = BTreeSet::new();
    let mut bodies = Vec::new();
    for delivery in receive(&mut subscription, 4).await {
        let incoming = &delivery.incoming;
        assert_eq!(incoming.id_missing, text(&delivery) != "named");
        assert!(!incoming.id_missing || incoming.message.id.as_str().contains(&name));
        ids.insert(incoming.message.id.clone());
        bodies.push(text(&delivery));
        acknowledge(delivery).await;
    }
    assert_eq!(ids.len(), 4);
    assert!(ids.iter().any(|id| id.as_str() == "theirs"));
    assert_eq!(bodies, ["", "no headers", "odd", "named"]);
}

/// Subscription rule 4 counts all queues together.
#[tokio::test]
async fn several_queues_share_one_bound() {
    let rabbitmq = connect().await;
    let queues = [queue(&rabbitmq, "a").await, queue(&rabbitmq, "b").await];
    for name in &queues {
        let batch: Vec<_> = (0..5).map(|n| message(name, n.to_string())).collect();
        publish_all(&rabbitmq, &batch).await;
    }
    let mut request = SubscriptionRequest::new(unique_name("consumer"), queues.to_vec());
    request.in_flight_max = 3;
    let mut subscription = subscribe(&rabbitmq, request).await;
    let mut held = receive(&mut subscription, 3).await;
    let mut seen = 3;
    while seen < 10 {
        let glance = Duration::from_millis(100);
        let more = tokio::time::timeout(glance, subscription.receive(10)).await;
        assert!(more.is_err(), "a fourth while three are unsettled");
        acknowledge(held.remove(0)).await;
        held.extend(receive(&mut subscription, 1).await);
        seen += 1;
    }
}

/// A long delay is cut to what the broker's patience allows, and never loses the message.
#[tokio::test]
async fn a_release_beyond_the_bound_comes_back_at_the_bound() {
    let url = shared_rabbitmq().await.url();
    let config = config(url).with_release_hold_max(Duration::from_secs(1));
    let rabbitmq = RabbitMq::connect(config).await.unwrap();
    let name = queue(&rabbitmq, "orders").await;
    publish_all(&rabbitmq, &[message(&name, "0")]).await;
    let mut subscription = subscribe(&rabbitmq, request(&name)).await;
    let delivery = receive(&mut subscription, 1).await.remove(0);
    let released = Instant::now();
    let delay = Duration::from_secs(3_600);
    let settling = delivery.receipt.settle(Settlement::Release { delay });
    settling.await.unwrap();
    let again = receive(&mut subscription, 1).await.remove(0);
    assert!(released.elapsed() >= Duration::from_secs(1));
    assert!(again.redelivered);
}

/// Only what this consumer failed itself waits; anybody may write anything into a header.
#[tokio::test]
async fn a_due_time_of_others_holds_nothing_back() {
    let rabbitmq = connect().await;
    let name = queue(&rabbitmq, "orders").await;
    let mut request = request(&name);
    request.in_flight_max = 2;
    let due = |number: usize, consumer: Option<&str>, due: OffsetDateTime| {
        let mut message = message(&name, number.to_string());
        message.story.consumer = consumer.map(str::to_owned);
        message.story.due_at = Some(due);
        message
    };
    let never = datetime!(9999-01-01 0:00 UTC);
    let soon = OffsetDateTime::now_utc() + Duration::from_secs(2);
    let own = due(0, Some(&request.consumer), soon);
    let others = [due(1, None, never), due(2, Some("another"), never)];
    publish_all(&rabbitmq, &[own]).await;
    publish_all(&rabbitmq, &others).await;
    let mut subscription = subscribe(&rabbitmq, request).await;
    // The own one takes one of two places meanwhile.
    for expected in ["1", "2", "0"] {
        assert_eq!(take(&mut subscription, 1).await, [expected]);
    }
    assert!(OffsetDateTime::now_utc() >= soon);
}

fn keyed(name: &str, key: usize, number: usize) -> Outgoing {
    Message::new(name, "T")
        .with_key(format!("key-{key}"))
        .with_payload(format!("{key}:{number}"))
        .into()
}

/// A second member joins and takes shards over while messages flow; each key's are first seen in their order.
#[tokio::test]
async fn two_members_of_a_queue_with_shards_keep_every_keys_order() {
    const KEYS: usize = 12;
    const ROUNDS_AT_LEAST: usize = 25;
    let name = unique_name("sharded");
    let config = config(shared_rabbitmq().await.url()).with_shards(&name, 4);
    let rabbitmq = RabbitMq::connect(config).await.unwrap();
    rabbitmq
        .declare_queue(&name, QueueKind::Quorum)
        .await
        .unwrap();
    assert!(rabbitmq.key_affinity(&name));
    let request = request(&name);
    let mut members = [
        subscribe(&rabbitmq, request.clone()).await,
        subscribe(&rabbitmq, request).await,
    ];
    let mut order: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    let mut handled = [0; 2];
    let (mut rounds, mut seen) = (0, 0);
    let started = Instant::now();
    let flows = |handled: &[usize; 2], rounds| rounds < ROUNDS_AT_LEAST || handled.contains(&0);
    while flows(&handled, rounds) || seen < KEYS * rounds {
        assert!(
            started.elapsed() < DEADLINE,
            "{handled:?} of {rounds} rounds"
        );
        if flows(&handled, rounds) {
            let batch: Vec<_> = (0..KEYS).map(|key| keyed(&name, key, rounds)).collect();
            publish_all(&rabbitmq, &batch).await;
            rounds += 1;
        }
        for (member, handled) in members.iter_mut().zip(&mut handled) {
            let glance = Duration::from_millis(50);
            let got = tokio::time::timeout(glance, member.receive(5)).await;
            for delivery in got.into_iter().flatten().flatten() {
                if !delivery.receipt.is_current() {
                    continue;
                }
                let text = text(&delivery);
                let (key, number) = text.split_once(':').unwrap();
                let number: usize = number.parse().unwrap();
                let of_key = order.entry(key.parse().unwrap()).or_default();
                if !of_key.contains(&number) {
                    of_key.push(number);
                    seen += 1;
                }
                *handled += 1;
                acknowledge(delivery).await;
            }
        }
    }
    println!("{handled:?} in {rounds} rounds");
    for (key, numbers) in order {
        assert_eq!(numbers, (0..rounds).collect::<Vec<_>>(), "key-{key}");
    }
}
