//! The brokers' own clients, used as a careful program would use them: what an adapter is measured beside.
//!
//! Each publishes a batch, waits for every confirm, and goes on; each consumes with the same number in flight as the adapter
//! and acknowledges every message.

use std::time::{Duration, Instant};

use async_nats::jetstream;
use futures_util::StreamExt;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Connection, ConnectionProperties};
use rdkafka::ClientConfig;
use rdkafka::consumer::{Consumer, StreamConsumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::FutureRecord;

use super::backlog::{KEYS, PAYLOAD_BYTES};
use super::drain::BATCH;
use super::kafka::producer_of;

/// Deliveries on their way and not acknowledged.
pub const IN_FLIGHT: u16 = 256;

fn key(number: u32) -> String {
    format!("key-{}", number % KEYS)
}

fn batches(rows: u32) -> impl Iterator<Item = std::ops::Range<u32>> {
    let batch = u32::try_from(BATCH).unwrap();
    (0..rows)
        .step_by(BATCH)
        .map(move |first| first..rows.min(first + batch))
}

pub async fn publish_to_kafka(brokers: &str, topic: &str, rows: u32) -> Duration {
    let producer = producer_of(brokers);
    let payload = vec![0xab; PAYLOAD_BYTES];
    let started = Instant::now();
    for batch in batches(rows) {
        let mut waiting = Vec::with_capacity(BATCH);
        for number in batch {
            let key = key(number);
            loop {
                let record = FutureRecord::to(topic).key(&key).payload(&payload);
                match producer.send_result(record) {
                    Ok(delivery) => break waiting.push(delivery),
                    Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => {
                        tokio::task::yield_now().await;
                    }
                    Err((error, _)) => panic!("{error}"),
                }
            }
        }
        for delivery in waiting {
            delivery.await.unwrap().unwrap();
        }
    }
    started.elapsed()
}

pub async fn consume_from_kafka(brokers: &str, topic: &str, rows: u32) -> Duration {
    let consumer: StreamConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", format!("bare-{:08x}", fastrand::u32(..)))
        .set("auto.offset.reset", "earliest")
        .set("enable.auto.offset.store", "false")
        .create()
        .unwrap();
    consumer.subscribe(&[topic]).unwrap();
    let mut started = None;
    for _ in 0..rows {
        let record = consumer.recv().await.unwrap();
        // Joining the group takes its time, and is no matter of throughput.
        started.get_or_insert_with(Instant::now);
        consumer.store_offset_from_message(&record).unwrap();
    }
    started.map_or(Duration::ZERO, |started| started.elapsed())
}

async fn amqp(url: &str) -> Connection {
    Connection::connect(url, ConnectionProperties::default())
        .await
        .unwrap()
}

/// To a queue, by the default exchange.
pub async fn publish_to_rabbitmq(url: &str, queue: &str, rows: u32) -> Duration {
    let connection = amqp(url).await;
    let channel = connection.create_channel().await.unwrap();
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await
        .unwrap();
    let payload = vec![0xab; PAYLOAD_BYTES];
    let options = BasicPublishOptions {
        mandatory: true,
        ..BasicPublishOptions::default()
    };
    let started = Instant::now();
    for batch in batches(rows) {
        let mut waiting = Vec::with_capacity(BATCH);
        for number in batch {
            let mut headers = FieldTable::default();
            headers.insert(
                "key".into(),
                lapin::types::AMQPValue::LongString(key(number).into()),
            );
            let properties = BasicProperties::default()
                .with_delivery_mode(2)
                .with_headers(headers);
            let confirm = channel
                .basic_publish("".into(), queue.into(), options, &payload, properties)
                .await
                .unwrap();
            waiting.push(confirm);
        }
        for confirm in waiting {
            assert!(confirm.await.unwrap().is_ack());
        }
    }
    started.elapsed()
}

pub async fn consume_from_rabbitmq(url: &str, queue: &str, rows: u32) -> Duration {
    let connection = amqp(url).await;
    let channel = connection.create_channel().await.unwrap();
    channel
        .basic_qos(IN_FLIGHT, BasicQosOptions::default())
        .await
        .unwrap();
    let mut consumer = channel
        .basic_consume(
            queue.into(),
            "".into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await
        .unwrap();
    let mut started = None;
    for _ in 0..rows {
        let delivery = consumer.next().await.unwrap().unwrap();
        started.get_or_insert_with(Instant::now);
        delivery
            .acker
            .ack(BasicAckOptions::default())
            .await
            .unwrap();
    }
    started.map_or(Duration::ZERO, |started| started.elapsed())
}

pub async fn publish_to_nats(url: &str, subject: &str, rows: u32) -> Duration {
    let client = async_nats::connect(url).await.unwrap();
    let context = jetstream::new(client);
    let payload = bytes::Bytes::from(vec![0xab; PAYLOAD_BYTES]);
    let started = Instant::now();
    for batch in batches(rows) {
        let mut waiting = Vec::with_capacity(BATCH);
        for number in batch {
            let message = jetstream::message::PublishMessage::build()
                .payload(payload.clone())
                .header("key", key(number).as_str())
                .message_id(format!("{number}"));
            waiting.push(
                context
                    .send_publish(subject.to_owned(), message)
                    .await
                    .unwrap(),
            );
        }
        for acknowledged in waiting {
            acknowledged.await.unwrap();
        }
    }
    started.elapsed()
}

pub async fn consume_from_nats(url: &str, stream: &str, rows: u32) -> Duration {
    let client = async_nats::connect(url).await.unwrap();
    let stream = jetstream::new(client.clone())
        .get_stream(stream)
        .await
        .unwrap();
    let config = jetstream::consumer::pull::Config {
        durable_name: Some(format!("bare-{:08x}", fastrand::u32(..))),
        max_ack_pending: IN_FLIGHT.into(),
        ..Default::default()
    };
    let consumer = stream.create_consumer(config).await.unwrap();
    let mut messages = consumer.messages().await.unwrap();
    let mut started = None;
    for _ in 0..rows {
        let message = messages.next().await.unwrap().unwrap();
        started.get_or_insert_with(Instant::now);
        message.ack().await.unwrap();
    }
    client.flush().await.unwrap();
    started.map_or(Duration::ZERO, |started| started.elapsed())
}
