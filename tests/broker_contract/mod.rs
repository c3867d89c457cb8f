//! The rules of `Publisher`, `Subscriber` and `Subscription` as cases that every broker adapter runs.
//!
//! `broker_contract!(fixture)` makes one test of each case; the expression is evaluated anew in every test and may
//! await. A case skips a part only by a declared capability. Time is the machine's: where a rule says "not before" the
//! case measures, where it says "at least once" it waits, up to [`DEADLINE`].

#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

pub mod consuming;
pub mod publishing;
pub mod sharing;

use std::sync::Arc;
use std::time::Duration;

use relaybox::broker::{
    Delivery, PublishOutcome, Publisher, Settlement, Subscriber, Subscription, SubscriptionRequest,
};
use relaybox::envelope::Outgoing;
use relaybox::{Message, MessageId};

/// Longest wait for anything that must happen. Generous: it only passes when a case fails.
pub const DEADLINE: Duration = Duration::from_secs(90);

/// How long a case looks for what must not happen. Short: a longer look makes no passing broker fail.
pub const GLANCE: Duration = Duration::from_millis(300);

/// A broker under test.
pub trait Fixture {
    /// Makes a new, empty topic with this many partitions (or what is closest to it), ready for use.
    async fn topic(&self, partitions: usize) -> String;

    fn publisher(&self) -> Arc<dyn Publisher>;

    fn subscriber(&self) -> Arc<dyn Subscriber>;
}

/// A name that nobody used before, valid as topic and as consumer.
pub fn fresh(what: &str) -> String {
    format!("{what}-{}", MessageId::generate())
}

/// A message whose payload is its number.
pub fn numbered(topic: &str, key: &str, number: usize) -> Outgoing {
    Message::new(topic, "Numbered")
        .with_key(key)
        .with_payload(number.to_string())
        .into()
}

pub fn number(delivery: &Delivery) -> usize {
    let payload = delivery.incoming.message.payload.as_deref().unwrap();
    std::str::from_utf8(payload).unwrap().parse().unwrap()
}

pub fn numbers(deliveries: &[Delivery]) -> Vec<usize> {
    deliveries.iter().map(number).collect()
}

pub async fn publish(publisher: &dyn Publisher, batch: &[Outgoing]) -> Vec<PublishOutcome> {
    let outcomes = within("an outcome per message", publisher.publish(batch)).await;
    assert_eq!(outcomes.len(), batch.len(), "one outcome per message");
    outcomes
}

pub async fn publish_all(publisher: &dyn Publisher, batch: &[Outgoing]) {
    for outcome in publish(publisher, batch).await {
        assert!(outcome.is_confirmed(), "{outcome:?}");
    }
}

pub async fn subscribe(
    fixture: &impl Fixture,
    request: SubscriptionRequest,
) -> Box<dyn Subscription> {
    let subscriber = fixture.subscriber();
    within("a subscription", subscriber.subscribe(request))
        .await
        .unwrap()
}

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

pub async fn acknowledge(delivery: Delivery) {
    let settling = delivery.receipt.settle(Settlement::Acknowledge);
    within("a settlement", settling).await.unwrap();
}

pub async fn close(subscription: Box<dyn Subscription>) {
    within("a close", subscription.close(DEADLINE))
        .await
        .unwrap();
}

/// One test per case. The module stands at the root of the test crate, as `mod broker_contract`.
macro_rules! broker_contract {
    ($fixture:expr) => {
        $crate::broker_contract::broker_contract!(@ $fixture, publishing:
            every_byte_arrives
            a_batch_has_one_outcome_per_message
            an_unknown_destination_rejects_only_itself
            an_oversized_message_rejects_only_itself
            no_message_makes_it_panic
            check_names_every_missing_destination
            closing_twice_is_harmless
        );
        $crate::broker_contract::broker_contract!(@ $fixture, consuming:
            a_first_subscription_begins_at_the_oldest
            messages_of_a_key_keep_their_order
            what_is_acknowledged_stays_away_and_the_rest_comes_again
            what_a_dropped_subscription_held_comes_again
            a_dropped_delivery_comes_again
            a_released_delivery_comes_again_after_its_delay
            a_rung_is_never_early_and_blocks_nobody
            no_more_than_in_flight_max_are_unsettled
            an_abandoned_receive_loses_nothing
            create_makes_rungs_and_dead_letters
            verify_names_everything_missing
            a_missing_source_is_never_created
        );
        $crate::broker_contract::broker_contract!(@ $fixture, sharing:
            two_consumers_each_get_everything
            two_members_share_and_nothing_is_lost_when_one_leaves
            a_receipt_is_void_once_its_message_went_to_another_member
        );
    };
    (@ $fixture:expr, $module:ident: $($case:ident)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                $crate::broker_contract::$module::$case(&$fixture).await;
            }
        )+
    };
}
pub(crate) use broker_contract;
