//! What the cases are made of; open to an adapter's own tests.

use std::future::Future;
use std::time::Duration;

use super::Fixture;
use crate::broker::{
    Delivery, PublishOutcome, Publisher, Settlement, Subscription, SubscriptionRequest,
};
use crate::envelope::Outgoing;
use crate::message::{Message, MessageId};

/// Longest wait for anything that must happen. Generous: it only passes when a case fails.
pub const DEADLINE: Duration = Duration::from_secs(90);

/// How long a case looks for what must not happen. Short: a longer look makes no passing broker fail.
pub const GLANCE: Duration = Duration::from_millis(300);

/// A name that nobody used before, valid as topic and as consumer.
#[must_use]
pub fn fresh(what: &str) -> String {
    format!("{what}-{}", MessageId::generate())
}

/// A message whose payload is its number.
#[must_use]
pub fn numbered(topic: &str, key: &str, number: usize) -> Outgoing {
    Message::new(topic, "Numbered")
        .with_key(key)
        .with_payload(number.to_string())
        .into()
}

/// The number of a [`numbered`] message.
#[must_use]
pub fn number(delivery: &Delivery) -> usize {
    let payload = delivery.incoming.message.payload.as_deref().unwrap();
    std::str::from_utf8(payload).unwrap().parse().unwrap()
}

/// The numbers of [`numbered`] messages.
#[must_use]
pub fn numbers(deliveries: &[Delivery]) -> Vec<usize> {
    deliveries.iter().map(number).collect()
}

/// Publishes and checks that there is one outcome per message.
pub async fn publish(publisher: &dyn Publisher, batch: &[Outgoing]) -> Vec<PublishOutcome> {
    let outcomes = within("an outcome per message", publisher.publish(batch)).await;
    assert_eq!(outcomes.len(), batch.len(), "one outcome per message");
    outcomes
}

/// Publishes what must be confirmed.
pub async fn publish_all(publisher: &dyn Publisher, batch: &[Outgoing]) {
    for outcome in publish(publisher, batch).await {
        assert!(outcome.is_confirmed(), "{outcome:?}");
    }
}

/// Subscribes on the fixture.
pub async fn subscribe(
    fixture: &dyn Fixture,
    request: SubscriptionRequest,
) -> Box<dyn Subscription> {
    let subscriber = fixture.subscriber();
    within("a subscription", subscriber.subscribe(request))
        .await
        .unwrap()
}

/// Waits up to [`DEADLINE`].
pub async fn within<T>(awaited: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {DEADLINE:?} in vain for {awaited}"),
    }
}

/// Receives once, passing over transient errors, which are reports.
pub async fn receive(subscription: &mut dyn Subscription, count_max: usize) -> Vec<Delivery> {
    loop {
        match subscription.receive(count_max).await {
            Ok(deliveries) => {
                assert!(!deliveries.is_empty(), "received nothing");
                assert!(deliveries.len() <= count_max, "received too many");
                return deliveries;
            }
            Err(error) if error.is_transient() => {}
            Err(error) => panic!("the subscription ended: {error}"),
        }
    }
}

/// Receives exactly `count` deliveries and keeps them unsettled.
pub async fn receive_count(subscription: &mut dyn Subscription, count: usize) -> Vec<Delivery> {
    let mut all = Vec::new();
    while all.len() < count {
        let awaited = format!("delivery {} of {count}", all.len() + 1);
        all.extend(within(&awaited, receive(subscription, count - all.len())).await);
    }
    all
}

/// Acknowledges.
pub async fn acknowledge(delivery: Delivery) {
    let settling = delivery.receipt.settle(Settlement::Acknowledge);
    within("a settlement", settling).await.unwrap();
}

/// Closes in order.
pub async fn close(subscription: Box<dyn Subscription>) {
    within("a close", subscription.close(DEADLINE))
        .await
        .unwrap();
}
