//! Rungs and dead letters.

use std::time::Duration;

use lapin::types::AMQPValue;
use relaybox::ErrorKind;
use relaybox::broker::rabbitmq::{QueueKind, RabbitMq};
use relaybox::broker::{Rung, Subscriber, TopologyMode};
use relaybox::envelope::Outgoing;
use relaybox::story::Reason;
use relaybox_testcontainers::{shared_rabbitmq, unique_name};

use super::{
    acknowledge, config, connect, message, publish_all, queue, raw, raw_queue, receive, request,
    subscribe, take, text,
};

fn rung(source: &str, delay: Duration) -> Rung {
    Rung {
        destination: format!("{source}.retry.{}ms", delay.as_millis()),
        delay,
        source: source.to_owned(),
    }
}

/// A loop that the broker takes for an endless one would be dropped in silence.
#[tokio::test]
async fn fifty_trips_over_a_rung_lose_nothing() {
    let rabbitmq = connect().await;
    let name = queue(&rabbitmq, "orders").await;
    let rung = rung(&name, Duration::from_millis(20));
    let mut request = request(&name);
    request.rungs = vec![rung.clone()];
    let mut subscription = subscribe(&rabbitmq, request).await;
    let sent = message(&name, "kept");
    publish_all(&rabbitmq, std::slice::from_ref(&sent)).await;
    for trip in 0..50 {
        let delivery = receive(&mut subscription, 1).await.remove(0);
        let incoming = delivery.incoming.clone();
        assert_eq!(incoming.story.retry_count, trip);
        assert_eq!(incoming.message.id, sent.message.id);
        assert!(
            incoming.message.headers.is_empty(),
            "{:?}",
            incoming.message.headers
        );
        let now = relaybox::Message::new("now", "T").occurred_at;
        let mut copy = Outgoing {
            story: incoming
                .story
                .failed("billing", &delivery.coordinates, "handler", "no", now)
                .due(now + rung.delay),
            message: incoming.message,
        };
        copy.message.destination = rung.destination.clone();
        publish_all(&rabbitmq, &[copy]).await;
        acknowledge(delivery).await;
    }
    assert_eq!(take(&mut subscription, 1).await, ["kept"]);
}

#[tokio::test]
async fn a_rung_with_another_delay_is_named() {
    let rabbitmq = connect().await;
    let name = queue(&rabbitmq, "orders").await;
    let channel = raw(&shared_rabbitmq().await.url()).await;
    let rung = rung(&name, Duration::from_secs(30));
    let text = |text: &str| AMQPValue::LongString(text.into());
    let arguments = [
        ("x-queue-type", text("quorum")),
        ("x-message-ttl", AMQPValue::LongInt(10_000)),
        ("x-dead-letter-exchange", text("")),
        ("x-dead-letter-routing-key", text(&name)),
        ("x-dead-letter-strategy", text("at-least-once")),
        ("x-overflow", text("reject-publish")),
    ];
    raw_queue(&channel, &rung.destination, &arguments).await;
    for topology in [TopologyMode::Create, TopologyMode::Verify] {
        let mut request = request(&name);
        request.rungs = vec![rung.clone()];
        request.topology = topology;
        let Err(error) = rabbitmq.subscribe(request).await else {
            panic!("subscribed with another delay");
        };
        assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
        let said = error.to_string();
        for part in [&*rung.destination, "x-message-ttl", "30000", "10000"] {
            assert!(said.contains(part), "{part} is not in {said}");
        }
    }
}

/// Whoever collects dead letters and ends with some in hand has used up a delivery of each: beyond a limit they would be dropped.
#[tokio::test]
async fn dead_letters_have_no_delivery_limit_but_that_of_never() {
    let url = shared_rabbitmq().await.url();
    let name = queue(&connect().await, "orders").await;
    let subscribed = async |limit: Option<i64>| {
        let config = match limit {
            Some(limit) => config(url.clone()).with_delivery_limit(limit),
            None => config(url.clone()),
        };
        let mut request = request(&name);
        request.dead_letters = vec![format!("{name}.DLQ")];
        let rabbitmq = RabbitMq::connect(config).await.unwrap();
        rabbitmq.subscribe(request).await.map(drop)
    };
    subscribed(Some(7)).await.unwrap();
    // The queue is as one without any.
    subscribed(None).await.unwrap();
    let said = subscribed(Some(-1)).await.unwrap_err().to_string();
    for part in [".DLQ", "x-delivery-limit"] {
        assert!(said.contains(part), "{part} is not in {said}");
    }
}

/// A copy comes back to the shard of its key, and a dead letter is byte for byte the message.
#[tokio::test]
async fn a_rung_of_a_queue_with_shards_comes_back_to_the_keys_shard() {
    let name = unique_name("sharded");
    let config = config(shared_rabbitmq().await.url()).with_shards(&name, 3);
    let rabbitmq = RabbitMq::connect(config).await.unwrap();
    rabbitmq
        .declare_queue(&name, QueueKind::Quorum)
        .await
        .unwrap();
    let rung = rung(&name, Duration::from_millis(300));
    let dead = format!("{name}.DLQ");
    let mut request = request(&name);
    request.rungs = vec![rung.clone()];
    request.dead_letters = vec![dead.clone()];
    let mut subscription = subscribe(&rabbitmq, request).await;
    let batch: Vec<Outgoing> = (0..9)
        .map(|n| {
            let key = format!("key-{n}");
            relaybox::Message::new(&name, "T")
                .with_key(key)
                .with_payload(n.to_string())
                .into()
        })
        .collect();
    publish_all(&rabbitmq, &batch).await;
    let mut shards = std::collections::BTreeMap::new();
    for delivery in receive(&mut subscription, 9).await {
        shards.insert(text(&delivery), delivery.coordinates.partition.clone());
        assert_eq!(delivery.source, name);
        let mut copy = Outgoing::from(delivery.incoming.message.clone());
        copy.message.destination = rung.destination.clone();
        publish_all(&rabbitmq, &[copy]).await;
        acknowledge(delivery).await;
    }
    assert!(
        shards
            .values()
            .collect::<std::collections::BTreeSet<_>>()
            .len()
            > 1
    );
    for delivery in receive(&mut subscription, 9).await {
        assert_eq!(delivery.coordinates.partition, shards[&text(&delivery)]);
        let mut letter = Outgoing::from(delivery.incoming.message.clone());
        letter.message.destination = dead.clone();
        letter.story = letter.story.dead(Reason::new(Reason::PERMANENT));
        publish_all(&rabbitmq, &[letter]).await;
        acknowledge(delivery).await;
    }
    assert_eq!(rabbitmq.depth(&dead).await.unwrap().messages, 9);
}
