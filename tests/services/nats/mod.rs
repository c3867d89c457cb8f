//! NATS JetStream itself: what only a real server shows.

mod closing;
mod consuming;
mod publishing;
mod security;
mod topology;
mod trouble;

use std::future::Future;
use std::time::Duration;

use async_nats::jetstream::{self, stream};
use relaybox::Message;
use relaybox::broker::nats::{Nats, NatsConfig};
use relaybox::broker::{
    Delivery, PublishOutcome, Publisher, Settlement, Subscriber, Subscription, SubscriptionRequest,
};
use relaybox::envelope::Outgoing;
use relaybox_testcontainers::{NatsOptions, shared_nats, unique_name};

pub const SECOND: Duration = Duration::from_secs(1);
/// Longest wait for anything that must happen; only a failing test waits that long.
pub const DEADLINE: Duration = Duration::from_secs(180);

/// Quick to see trouble.
pub fn config(url: impl Into<String>) -> NatsConfig {
    NatsConfig::new(url)
        .with_ping_interval(SECOND)
        .with_publish_deadline(3 * SECOND)
        .with_heartbeat(SECOND / 2)
        .with_ack_wait(5 * SECOND)
}

pub async fn connect() -> Nats {
    Nats::connect(config(shared_nats().await.url()))
        .await
        .unwrap()
}

/// A server of the test's own, with these lines in its settings.
pub async fn server(settings: &str) -> relaybox_testcontainers::Nats {
    let options = NatsOptions::default().with_local_process();
    relaybox_testcontainers::Nats::start_with(options.with_settings(settings))
        .await
        .unwrap()
}

/// A client of the test's own.
pub async fn client(url: &str) -> jetstream::Context {
    jetstream::new(async_nats::connect(url).await.unwrap())
}

/// A stream of one subject, both of the same name, with these settings otherwise.
pub async fn stream_with(url: &str, prefix: &str, settings: stream::Config) -> String {
    let name = unique_name(prefix);
    let settings = stream::Config {
        name: name.clone(),
        ..settings
    };
    client(url).await.create_stream(settings).await.unwrap();
    name
}

pub async fn stream(prefix: &str) -> String {
    stream_with(
        &shared_nats().await.url(),
        prefix,
        stream::Config::default(),
    )
    .await
}

/// How many messages a stream holds.
pub async fn stored(url: &str, stream: &str) -> u64 {
    let mut stream = client(url).await.get_stream(stream).await.unwrap();
    stream.info().await.unwrap().state.messages
}

pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {DEADLINE:?}"),
    }
}

pub fn message(subject: &str, payload: impl Into<String>) -> Outgoing {
    Message::new(subject, "T")
        .with_key("k")
        .with_payload(payload.into())
        .into()
}

pub fn numbered(subject: &str, range: std::ops::Range<usize>) -> Vec<Outgoing> {
    range.map(|n| message(subject, n.to_string())).collect()
}

pub async fn publish(nats: &Nats, batch: &[Outgoing]) -> Vec<PublishOutcome> {
    within("outcomes", nats.publish(batch)).await
}

pub async fn publish_all(nats: &Nats, batch: &[Outgoing]) {
    for (at, outcome) in publish(nats, batch).await.iter().enumerate() {
        assert!(outcome.is_confirmed(), "{at}: {outcome:?}");
    }
}

pub fn request(consumer: &str, source: &str) -> SubscriptionRequest {
    SubscriptionRequest::new(consumer, vec![source.to_owned()])
}

pub async fn subscribe(nats: &Nats, request: SubscriptionRequest) -> Box<dyn Subscription> {
    within("a subscription", nats.subscribe(request))
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
    delivery
        .receipt
        .settle(Settlement::Acknowledge)
        .await
        .unwrap();
}

pub fn text(delivery: &Delivery) -> String {
    let payload = delivery.incoming.message.payload.as_deref();
    String::from_utf8(payload.unwrap_or_default().to_vec()).unwrap()
}

pub fn texts(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(text).collect()
}
