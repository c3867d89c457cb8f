//! RabbitMQ itself: what only a real broker shows.

mod consuming;
mod exchanges;
mod ladder;
mod publishing;
mod trouble;

use std::future::Future;
use std::time::Duration;

use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ConnectionProperties};
use relaybox::Message;
use relaybox::broker::rabbitmq::{QueueKind, RabbitMq, RabbitMqConfig};
use relaybox::broker::{
    Delivery, PublishOutcome, Publisher, Settlement, Subscriber, Subscription, SubscriptionRequest,
};
use relaybox::envelope::Outgoing;
use relaybox_testcontainers as services;
use relaybox_testcontainers::{RabbitMqOptions, shared_rabbitmq, unique_name};

pub const SECOND: Duration = Duration::from_secs(1);
/// Longest wait for what must happen.
pub const DEADLINE: Duration = Duration::from_secs(180);

pub fn config(url: String) -> RabbitMqConfig {
    RabbitMqConfig::new(url)
        .with_heartbeat(2 * SECOND)
        .with_drain_deadline(SECOND)
}

pub async fn connect() -> RabbitMq {
    let url = shared_rabbitmq().await.url();
    RabbitMq::connect(config(url)).await.unwrap()
}

/// A node that a test breaks.
pub async fn own_node() -> services::RabbitMq {
    let options = RabbitMqOptions::default().with_local_process();
    services::RabbitMq::start_with(options).await.unwrap()
}

pub async fn queue(rabbitmq: &RabbitMq, prefix: &str) -> String {
    let name = unique_name(prefix);
    rabbitmq
        .declare_queue(&name, QueueKind::Quorum)
        .await
        .unwrap();
    name
}

/// The client alone, for what the adapter never does. The connection lives as long as the channel.
pub async fn raw(url: &str) -> Channel {
    let connection = Connection::connect(url, ConnectionProperties::default())
        .await
        .unwrap();
    connection.create_channel().await.unwrap()
}

pub async fn raw_queue(channel: &Channel, name: &str, arguments: &[(&str, AMQPValue)]) {
    let mut table = FieldTable::default();
    for (name, value) in arguments {
        table.insert((*name).into(), value.clone());
    }
    let durable = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(name.into(), durable, table)
        .await
        .unwrap();
}

pub async fn delete_queue(channel: &Channel, name: &str) {
    channel
        .queue_delete(name.into(), QueueDeleteOptions::default())
        .await
        .unwrap();
}

pub async fn consumers(channel: &Channel, name: &str) -> u32 {
    let passive = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    let found = channel
        .queue_declare(name.into(), passive, FieldTable::default())
        .await
        .unwrap();
    found.consumer_count()
}

pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {DEADLINE:?}"),
    }
}

pub async fn eventually<A: Future<Output = bool>>(what: &str, condition: impl FnMut() -> A) {
    relaybox::testing::eventually(DEADLINE, what, condition).await;
}

pub fn message(destination: &str, payload: impl Into<String>) -> Outgoing {
    Message::new(destination, "T")
        .with_key("k")
        .with_payload(payload.into())
        .into()
}

pub async fn publish(rabbitmq: &RabbitMq, batch: &[Outgoing]) -> Vec<PublishOutcome> {
    within("outcomes", rabbitmq.publish(batch)).await
}

pub async fn publish_all(rabbitmq: &RabbitMq, batch: &[Outgoing]) {
    for (at, outcome) in publish(rabbitmq, batch).await.iter().enumerate() {
        assert!(outcome.is_confirmed(), "{at}: {outcome:?}");
    }
}

/// Sends it until it is confirmed, as a relay would.
pub async fn until_confirmed(rabbitmq: &RabbitMq, message: &Outgoing) {
    let batch = std::slice::from_ref(message);
    eventually("a message is confirmed", || async move {
        publish(rabbitmq, batch).await[0].is_confirmed()
    })
    .await;
}

pub fn request(queue: &str) -> SubscriptionRequest {
    SubscriptionRequest::new(unique_name("consumer"), vec![queue.to_owned()])
}

pub async fn subscribe(rabbitmq: &RabbitMq, request: SubscriptionRequest) -> Box<dyn Subscription> {
    within("a subscription", rabbitmq.subscribe(request))
        .await
        .unwrap()
}

pub async fn receive(subscription: &mut Box<dyn Subscription>, count: usize) -> Vec<Delivery> {
    let mut all = Vec::new();
    within("deliveries", async {
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
    let settling = delivery.receipt.settle(Settlement::Acknowledge);
    within("a settlement", settling).await.unwrap();
}

/// The payloads of so many messages, acknowledged.
pub async fn take(subscription: &mut Box<dyn Subscription>, count: usize) -> Vec<String> {
    let mut all = Vec::new();
    for delivery in receive(subscription, count).await {
        all.push(text(&delivery));
        acknowledge(delivery).await;
    }
    all
}

pub fn text(delivery: &Delivery) -> String {
    let payload = delivery.incoming.message.payload.as_deref();
    String::from_utf8(payload.unwrap_or_default().to_vec()).unwrap()
}
