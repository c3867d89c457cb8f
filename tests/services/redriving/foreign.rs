//! What a raw client of each broker put among the dead letters.

use lapin::options::BasicPublishOptions;
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use rdkafka::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use relaybox::dlq::redrive::Order;

use super::*;

over_each_broker! {
    letters_of_a_raw_client_are_taken_in_and_can_be_sent_back
}

const DAMAGED: [(&str, &[u8]); 5] = [
    ("x-redrive-count", b"many"),
    ("x-first-failed-at", b"yesterday"),
    ("x-consumer", b"no such name!"),
    ("x-original-topic", b"nowhere"),
    ("x-version", b"seven"),
];

/// Headers and payload.
type Raw<'a> = (&'a [(&'a str, &'a [u8])], &'a str);

/// Two letters without an id that are equal, one with damaged headers and one wrapped.
async fn put_raw(scene: &Scene) {
    let name = scene.dead_letters();
    let letters: [Raw<'_>; 4] = [
        (&[], "plain"),
        (&[], "plain"),
        (&DAMAGED, "damaged"),
        (&[("wrapped", b"yes")], "inner"),
    ];
    match scene.place.product {
        Product::Kafka => {
            let producer: FutureProducer = ClientConfig::new()
                .set("bootstrap.servers", &scene.place.address)
                .create()
                .unwrap();
            for (headers, payload) in letters {
                let mut all = OwnedHeaders::new();
                for (key, value) in headers {
                    all = all.insert(Header {
                        key,
                        value: Some(*value),
                    });
                }
                let record: FutureRecord<'_, [u8], str> =
                    FutureRecord::to(&name).payload(payload).headers(all);
                producer.send(record, DEADLINE).await.unwrap();
            }
        }
        Product::RabbitMq => {
            let properties = ConnectionProperties::default();
            let connection = Connection::connect(&scene.place.address, properties)
                .await
                .unwrap();
            let channel = connection.create_channel().await.unwrap();
            for (headers, payload) in letters {
                let mut table = FieldTable::default();
                for (name, value) in headers {
                    let value = AMQPValue::LongString(LongString::from(*value));
                    table.insert(ShortString::from(*name), value);
                }
                channel
                    .basic_publish(
                        "".into(),
                        name.as_str().into(),
                        BasicPublishOptions::default(),
                        payload.as_bytes(),
                        BasicProperties::default().with_headers(table),
                    )
                    .await
                    .unwrap()
                    .await
                    .unwrap();
            }
            connection.close(200, "OK".into()).await.unwrap();
        }
        Product::Nats => {
            let client = async_nats::connect(&scene.place.address).await.unwrap();
            let context = async_nats::jetstream::new(client);
            for (headers, payload) in letters {
                let mut map = async_nats::HeaderMap::new();
                for (name, value) in headers {
                    map.append(*name, std::str::from_utf8(value).unwrap());
                }
                let sent = context
                    .publish_with_headers(name.clone(), map, payload.into())
                    .await
                    .unwrap();
                sent.await.unwrap();
            }
        }
    }
}

async fn letters_of_a_raw_client_are_taken_in_and_can_be_sent_back(product: Product) {
    let scene = Scene::new(product).await;
    scene.repair();
    let running = scene.start();
    scene.until_quiet().await;
    put_raw(&scene).await;
    let topic = scene.topic.clone();
    let desk = scene.desk().with_unwrap(move |incoming| {
        incoming.message.headers.get("wrapped")?;
        let mut inner = Incoming::from(Message::new(&topic, "Order").with_id("inner"));
        inner.message.payload.clone_from(&incoming.message.payload);
        Some(inner)
    });
    let limits = CollectLimits {
        idle: Duration::from_secs(2),
        ..CollectLimits::default()
    };
    let until = std::time::Instant::now() + DEADLINE;
    while scene.entries().await < 4 {
        assert!(std::time::Instant::now() < until, "letters are missing");
        desk.collect(&scene.broker, limits).await.unwrap();
    }
    let entries = scene.list().await;
    assert_eq!(entries.len(), 4, "two equal letters without an id are two");
    let foreign = entries.iter().filter(|entry| {
        let reason = entry.story.reason.as_ref().unwrap();
        reason.as_str() == Reason::FOREIGN
    });
    assert_eq!(foreign.count(), 4);
    assert!(entries.iter().all(|entry| entry.story.redrive_count == 0));
    let planned = desk
        .plan("ann", &Order::of(LetterFilter::all()))
        .await
        .unwrap();
    let done = desk.run("ann", planned.row.id, |_| {}).await.unwrap();
    assert_eq!(done.row.sent, 4);
    scene.until_effects(4).await;
    scene.until_quiet().await;
    running.stop().await;
    let seen = scene.app.seen.lock().unwrap();
    let mut payloads: Vec<_> = seen
        .iter()
        .map(|m| m.message.payload.clone().unwrap())
        .collect();
    payloads.sort();
    assert_eq!(payloads, ["damaged", "inner", "plain", "plain"]);
    let damaged = seen
        .iter()
        .find(|m| m.message.payload.as_deref() == Some(b"damaged"))
        .unwrap();
    assert_eq!(damaged.message.headers.get_str("x-version"), Some("seven"));
    assert!(seen.iter().any(|m| m.message.id.as_str() == "inner"));
}
