//! Cases about a broken line between adapter and broker.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{
    DEADLINE, Fixture, GLANCE, Line, acknowledge, eventually, fresh, number, numbered, publish,
    publish_all, receive, receive_count, subscribe, within,
};
use crate::ErrorKind;
use crate::broker::{PublishOutcome, Settlement, Stored, Subscription, SubscriptionRequest};

/// Beyond a deadline of the adapter's own, for a machine that has other things to do.
const SLACK: Duration = Duration::from_secs(20);

const POLL: Duration = Duration::from_millis(20);

fn line(fixture: &dyn Fixture) -> Arc<dyn Line> {
    fixture.line().expect("a line, which the case needs")
}

/// Publisher rule 2, and [`health`](crate::broker::Publisher::health).
pub(super) async fn a_broken_line_confirms_nothing_and_is_told(fixture: &dyn Fixture) {
    let (topic, publisher) = (fixture.topic(1).await, fixture.publisher());
    publish_all(&*publisher, &[numbered(&topic, "a", 0)]).await;
    line(fixture).cut().await;
    let outcomes = publish(&*publisher, &[numbered(&topic, "a", 1)]).await;
    let failed = matches!(outcomes[0], PublishOutcome::Failed { .. });
    assert!(failed, "{outcomes:?}");
    let trouble = || async { !publisher.health().is_up() };
    eventually("health tells of the trouble", trouble).await;
    line(fixture).pass().await;
    until_confirmed(fixture, &topic).await;
    assert!(publisher.health().is_up(), "{:?}", publisher.health());
}

/// Publisher rule 6.
pub(super) async fn a_silent_line_ends_the_call_at_its_deadline(fixture: &dyn Fixture) {
    let (topic, publisher) = (fixture.topic(1).await, fixture.publisher());
    publish_all(&*publisher, &[numbered(&topic, "a", 0)]).await;
    let deadline = publisher.capabilities().publish_deadline;
    line(fixture).silence().await;
    let started = Instant::now();
    let batch: Vec<_> = (1..20).map(|n| numbered(&topic, "a", n)).collect();
    let outcomes = publish(&*publisher, &batch).await;
    let took = started.elapsed();
    assert!(took < deadline + SLACK, "took {took:?} of {deadline:?}");
    assert!(!outcomes.iter().any(PublishOutcome::is_confirmed));
    let first_unknown = outcomes.iter().find_map(|outcome| match outcome {
        PublishOutcome::Failed { stored, .. } => Some(*stored),
        _ => None,
    });
    // What is surely not stored may be said to be so, as far as the adapter knows.
    assert!(
        matches!(first_unknown, Some(Stored::Unknown | Stored::No)),
        "{outcomes:?}"
    );
    line(fixture).pass().await;
    until_confirmed(fixture, &topic).await;
}

/// Nothing has to be restarted, and what was refused meanwhile can be sent again, in order.
pub(super) async fn publishing_goes_on_when_the_line_is_back(fixture: &dyn Fixture) {
    let (topic, publisher) = (fixture.topic(1).await, fixture.publisher());
    let mut sent = 0;
    for _ in 0..3 {
        line(fixture).cut().await;
        drop(publish(&*publisher, &[numbered(&topic, "a", sent)]).await);
        line(fixture).pass().await;
        for _ in 0..10 {
            until_stored(fixture, &topic, sent).await;
            sent += 1;
        }
    }
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    let mut subscription = subscribe(fixture, request).await;
    let mut first = Vec::new();
    while first.len() < sent {
        for delivery in receive_count(&mut *subscription, 1).await {
            let number = number(&delivery);
            if !first.contains(&number) {
                first.push(number);
            }
            acknowledge(delivery).await;
        }
    }
    assert_eq!(first, (0..sent).collect::<Vec<_>>());
}

/// Subscription rule 6.
pub(super) async fn deliveries_go_on_after_a_broken_line(fixture: &dyn Fixture) {
    let broken = |line: Arc<dyn Line>| async move { line.cut().await };
    deliveries_go_on(fixture, broken).await;
}

/// Subscription rule 6, where nobody says that anything ended.
pub(super) async fn deliveries_go_on_after_a_silent_line(fixture: &dyn Fixture) {
    let silent = |line: Arc<dyn Line>| async move { line.silence().await };
    deliveries_go_on(fixture, silent).await;
}

async fn deliveries_go_on<Done: Future<Output = ()>>(
    fixture: &dyn Fixture,
    breaking: impl Fn(Arc<dyn Line>) -> Done,
) {
    let topic = fixture.topic(1).await;
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic.clone()]);
    let mut subscription = subscribe(fixture, request).await;
    until_stored(fixture, &topic, 0).await;
    handle_until(&mut *subscription, 0).await;
    for number in 1..3 {
        breaking(line(fixture)).await;
        // Long enough for the adapter to meet the trouble in the middle of a wait.
        drop(tokio::time::timeout(GLANCE, receive(&mut *subscription, 10)).await);
        line(fixture).pass().await;
        until_stored(fixture, &topic, number).await;
        handle_until(&mut *subscription, number).await;
    }
    let subscription = &mut *subscription;
    within("health that is up again", async move {
        while !subscription.health().is_up() {
            tokio::time::sleep(POLL).await;
        }
    })
    .await;
}

/// Whatever a settlement meets: it fails or does nothing, and what did not reach the broker comes again.
pub(super) async fn a_settlement_over_a_broken_line_loses_nothing(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let batch: Vec<_> = (0..6).map(|n| numbered(&topic, "a", n)).collect();
    publish_all(&*fixture.publisher(), &batch).await;
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    let mut subscription = subscribe(fixture, request.clone()).await;
    let mut held = receive_count(&mut *subscription, 6).await;
    line(fixture).cut().await;
    // Some settle while it is broken, some after. Released ones were not dealt with.
    let mut dealt_with = BTreeSet::new();
    let late = held.split_off(3);
    for delivery in held {
        dealt_with.insert(number(&delivery));
        let settling = delivery.receipt.settle(Settlement::Acknowledge);
        drop(within("a settlement", settling).await);
    }
    line(fixture).pass().await;
    let never: BTreeSet<_> = late.iter().map(number).collect();
    for delivery in late {
        let delay = Duration::ZERO;
        let settling = delivery.receipt.settle(Settlement::Release { delay });
        drop(within("a settlement", settling).await);
    }
    let started = Instant::now();
    let mut seen = BTreeSet::new();
    while !seen.is_superset(&never) {
        assert!(started.elapsed() < DEADLINE, "{never:?} is not in {seen:?}");
        for delivery in within("what was not dealt with", receive(&mut *subscription, 6)).await {
            seen.insert(number(&delivery));
            let settling = delivery.receipt.settle(Settlement::Acknowledge);
            drop(within("a settlement", settling).await);
        }
    }
    assert!(
        seen.iter()
            .all(|n| never.contains(n) || dealt_with.contains(n))
    );
}

/// `check` and `subscribe` name what was tried.
pub(super) async fn an_unreachable_broker_is_named_within_seconds(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let (publisher, subscriber) = (fixture.publisher(), fixture.subscriber());
    line(fixture).cut().await;
    let asked = [topic.clone()];
    let check = within("a check", publisher.check(&asked))
        .await
        .unwrap_err();
    assert_eq!(check.kind(), ErrorKind::Unavailable, "{check}");
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic.clone()]);
    let subscribing = subscriber.subscribe(request);
    let Err(error) = within("an answer", subscribing).await else {
        panic!("subscribed to nothing");
    };
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    for counting in [
        within("a depth", subscriber.depth(&topic)).await,
        within("a lag", subscriber.lag("consumer", &topic)).await,
    ] {
        assert_eq!(counting.unwrap_err().kind(), ErrorKind::Unavailable);
    }
}

pub(super) async fn closing_ends_by_its_deadline_whatever_the_line_does(fixture: &dyn Fixture) {
    let short = Duration::from_secs(1);
    let topic = fixture.topic(1).await;
    let publisher = fixture.publisher();
    publish_all(&*publisher, &[numbered(&topic, "a", 0)]).await;
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic.clone()]);
    let mut subscription = subscribe(fixture, request).await;
    let held = receive_count(&mut *subscription, 1).await;
    line(fixture).silence().await;
    for delivery in held {
        let settling = delivery.receipt.settle(Settlement::Acknowledge);
        drop(within("a settlement", settling).await);
    }
    let started = Instant::now();
    // Whether it says that something was left undone depends on what it knows; it ends either way.
    drop(within("a close", subscription.close(short)).await);
    drop(within("a close", publisher.close(short)).await);
    let took = started.elapsed();
    assert!(took < 2 * short + SLACK, "took {took:?}");
    line(fixture).pass().await;
}

/// Sends the message until it is confirmed, as a relay would.
async fn until_stored(fixture: &dyn Fixture, topic: &str, number: usize) {
    let publisher = fixture.publisher();
    let message = [numbered(topic, "a", number)];
    let (publisher, message) = (&publisher, &message);
    eventually("a message is confirmed", || async move {
        publish(&**publisher, message).await[0].is_confirmed()
    })
    .await;
}

async fn until_confirmed(fixture: &dyn Fixture, topic: &str) {
    until_stored(fixture, topic, 1_000).await;
}

/// Receives and acknowledges until this one has come.
async fn handle_until(subscription: &mut dyn Subscription, awaited: usize) {
    loop {
        for delivery in within("the next delivery", receive(subscription, 10)).await {
            let number = number(&delivery);
            let settling = delivery.receipt.settle(Settlement::Acknowledge);
            drop(within("a settlement", settling).await);
            if number == awaited {
                return;
            }
        }
    }
}
