//! The helpers for users' own tests do what they say.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

use std::time::Duration;

use relaybox::Message;
use relaybox::broker::memory::MemoryBroker;
use relaybox::broker::{FailureScope, PublishOutcome, Publisher, RejectionScope, Stored};
use relaybox::envelope::Outgoing;
use relaybox::testing::{Fault, FaultyPublisher, Signal, eventually};

const DEADLINE: Duration = Duration::from_secs(180);

fn broker() -> MemoryBroker {
    let broker = MemoryBroker::new();
    broker.create_topic("orders", 1).unwrap();
    broker
}

/// Messages of these keys; the id of each is its place, from 1.
fn batch(keys: &[&str]) -> Vec<Outgoing> {
    (1..)
        .zip(keys)
        .map(|(n, key)| {
            Message::new("orders", "T")
                .with_id(n.to_string())
                .with_key(key)
                .into()
        })
        .collect()
}

fn stored(broker: &MemoryBroker) -> Vec<String> {
    broker
        .log("orders")
        .iter()
        .map(|incoming| incoming.message.id.as_str().to_owned())
        .collect()
}

fn word(outcome: &PublishOutcome) -> &'static str {
    match outcome {
        PublishOutcome::Confirmed => "confirmed",
        PublishOutcome::Rejected {
            scope: RejectionScope::Message,
            ..
        } => "message rejected",
        PublishOutcome::Rejected { .. } => "destination rejected",
        PublishOutcome::Failed {
            stored: Stored::Unknown,
            ..
        } => "unknown",
        PublishOutcome::Failed {
            scope: FailureScope::Broker,
            ..
        } => "broker failed",
        PublishOutcome::Withheld => "withheld",
        PublishOutcome::Failed { .. } => "destination failed",
    }
}

async fn publish(publisher: &impl Publisher, batch: &[Outgoing]) -> Vec<&'static str> {
    publisher.publish(batch).await.iter().map(word).collect()
}

#[tokio::test]
async fn each_planned_message_meets_its_fault_and_no_other() {
    let broker = broker();
    let publisher = FaultyPublisher::new(broker.clone())
        .with_fault(2, Fault::Reject(RejectionScope::Message))
        .with_fault(3, Fault::Reject(RejectionScope::Destination))
        .with_fault(4, Fault::Fail(FailureScope::Destination))
        .with_fault(5, Fault::Fail(FailureScope::Broker))
        .with_fault(6, Fault::LoseConfirm)
        .with_fault(7, Fault::Duplicate);
    let all = batch(&["a", "b", "c", "d", "e", "f", "g", "h"]);
    // The count goes on over calls.
    let mut words = publish(&publisher, &all[..3]).await;
    words.extend(publish(&publisher, &all[3..]).await);
    assert_eq!(
        words,
        [
            "confirmed",
            "message rejected",
            "destination rejected",
            "destination failed",
            "broker failed",
            "unknown",
            "confirmed",
            "confirmed",
        ]
    );
    assert_eq!(stored(&broker), ["1", "6", "7", "7", "8"]);
    assert_eq!(publisher.published(), 8);
    let again = publish(&publisher, &all[1..6]).await;
    assert_eq!(again, ["confirmed"; 5], "each fault happens once");
}

#[tokio::test]
async fn the_order_of_a_prefix_publisher_is_kept_behind_a_fault() {
    let broker = broker();
    let publisher = FaultyPublisher::new(broker.clone())
        .with_fault(1, Fault::LoseConfirm)
        .with_fault(4, Fault::Fail(FailureScope::Destination));
    let words = publish(&publisher, &batch(&["a", "a", "b", "b", "b", "c"])).await;
    assert_eq!(
        words,
        [
            "unknown",
            "withheld",
            "confirmed",
            "destination failed",
            "withheld",
            "confirmed"
        ]
    );
    assert_eq!(stored(&broker), ["1", "3", "6"]);
}

#[tokio::test]
async fn random_faults_are_the_same_for_the_same_seed() {
    let run = async |seed| {
        let publisher =
            FaultyPublisher::new(broker()).with_random_faults(seed, 30, Fault::LoseConfirm);
        let keys: Vec<_> = (0..200).map(|n| n.to_string()).collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        publish(&publisher, &batch(&keys)).await
    };
    let first = run(7).await;
    assert_eq!(first, run(7).await);
    assert_ne!(first, run(8).await);
    let lost = first.iter().filter(|word| **word == "unknown").count();
    assert!((30..=90).contains(&lost), "{lost} of 200");
}

#[tokio::test]
async fn a_hanging_message_is_stored_only_after_its_release() {
    let broker = broker();
    let (reached, release) = (Signal::new(), Signal::new());
    let fault = Fault::Hang {
        reached: reached.clone(),
        release: release.clone(),
    };
    let publisher = FaultyPublisher::new(broker.clone()).with_fault(1, fault);
    let publishing = tokio::spawn(async move { publish(&publisher, &batch(&["a"])).await });
    reached.wait().await;
    assert!(stored(&broker).is_empty());
    release.set();
    assert_eq!(publishing.await.unwrap(), ["confirmed"]);
    assert_eq!(stored(&broker), ["1"]);
}

#[tokio::test]
async fn a_crash_point_is_reached_after_the_confirm_and_never_left() {
    let broker = broker();
    let crashed = Signal::new();
    let fault = Fault::crash({
        let crashed = crashed.clone();
        move || crashed.set()
    });
    let publisher = FaultyPublisher::new(broker.clone()).with_fault(1, fault);
    let publishing = tokio::spawn(async move { publish(&publisher, &batch(&["a", "b"])).await });
    crashed.wait().await;
    assert_eq!(stored(&broker), ["1", "2"]);
    assert!(!publishing.is_finished());
    publishing.abort();
    assert!(publishing.await.unwrap_err().is_cancelled());
}

#[tokio::test]
async fn a_message_that_was_not_confirmed_crashes_nothing() {
    let broker = broker();
    broker.set_available(false);
    let publisher = FaultyPublisher::new(broker)
        .with_fault(1, Fault::crash(|| panic!("the message was never stored")));
    assert_eq!(publish(&publisher, &batch(&["a"])).await, ["broker failed"]);
}

#[tokio::test]
async fn everything_else_is_forwarded() {
    let broker = broker();
    let publisher = FaultyPublisher::new(broker.clone());
    let (own, inner) = (publisher.capabilities(), Publisher::capabilities(&broker));
    assert_eq!(
        (own.name, own.limits, own.order),
        (inner.name, inner.limits, inner.order)
    );
    assert_eq!(publisher.scope("orders"), "orders");
    publisher.check(&["orders".into()]).await.unwrap();
    assert!(publisher.check(&["nothing".into()]).await.is_err());
    publisher.close(DEADLINE).await.unwrap();
}

#[tokio::test]
async fn eventually_asks_until_it_is_true() {
    let mut left = 3;
    eventually(DEADLINE, "the countdown ends", || {
        left -= 1;
        async move { left == 0 }
    })
    .await;
    assert_eq!(left, 0);
}

#[tokio::test]
#[should_panic(expected = "until pigs fly")]
async fn eventually_names_what_it_waited_for() {
    eventually(Duration::from_millis(20), "pigs fly", async || false).await;
}

#[tokio::test]
#[should_panic(expected = "until it answers")]
async fn eventually_does_not_hang_on_a_condition_that_never_answers() {
    eventually(
        Duration::from_millis(20),
        "it answers",
        std::future::pending,
    )
    .await;
}
