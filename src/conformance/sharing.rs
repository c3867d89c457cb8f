//! Cases about several consumers and several members of one.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::broker::{Delivery, Subscription, SubscriptionRequest};

use super::{
    DEADLINE, Fixture, acknowledge, fresh, number, numbered, numbers, publish_all, receive,
    receive_count, subscribe, within,
};

/// Subscription rule 1: per consumer.
pub(super) async fn two_consumers_each_get_everything(fixture: &dyn Fixture) {
    let topic = fixture.topic(2).await;
    let batch: Vec<_> = (0..10)
        .map(|n| numbered(&topic, &n.to_string(), n))
        .collect();
    publish_all(&*fixture.publisher(), &batch).await;
    for _ in 0..2 {
        let request = SubscriptionRequest::new(fresh("consumer"), vec![topic.clone()]);
        let mut subscription = subscribe(fixture, request).await;
        let deliveries = receive_count(&mut *subscription, 10).await;
        let mut seen = numbers(&deliveries);
        seen.sort_unstable();
        assert_eq!(seen, (0..10).collect::<Vec<_>>());
        for delivery in deliveries {
            acknowledge(delivery).await;
        }
    }
}

/// Members share the messages; what a member held when it vanished goes to the other.
pub(super) async fn two_members_share_and_nothing_is_lost_when_one_leaves(fixture: &dyn Fixture) {
    let topic = fixture.topic(4).await;
    let publisher = fixture.publisher();
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic.clone()]);
    let mut staying = subscribe(fixture, request.clone()).await;
    let mut leaving = subscribe(fixture, request).await;
    let started = Instant::now();
    let mut handled = BTreeSet::new();
    let mut sent = 0;
    let mut stayed = 0;
    let mut unsettled = Vec::new();
    // The leaving member settles nothing. Messages are sent until both have some.
    while stayed == 0 || unsettled.is_empty() {
        assert!(started.elapsed() < DEADLINE, "they do not share");
        let batch: Vec<_> = (sent..sent + 8)
            .map(|n| numbered(&topic, &n.to_string(), n))
            .collect();
        sent += batch.len();
        publish_all(&*publisher, &batch).await;
        match either(&mut *staying, &mut *leaving).await {
            Some((Member::First, deliveries)) => {
                stayed += deliveries.len();
                handle(deliveries, &mut handled).await;
            }
            Some((Member::Second, deliveries)) => unsettled.extend(deliveries),
            None => {}
        }
    }
    drop(leaving);
    drop(unsettled);
    while handled.len() < sent {
        assert!(started.elapsed() < DEADLINE, "got only {handled:?}");
        let deliveries = within("what the other had", receive(&mut *staying, 50)).await;
        handle(deliveries, &mut handled).await;
    }
    assert_eq!(handled, (0..sent).collect());
}

/// A receipt is no longer current once its message was given to another member; settling it does nothing.
pub(super) async fn a_receipt_is_void_once_its_message_went_to_another_member(
    fixture: &dyn Fixture,
) {
    let topic = fixture.topic(2).await;
    let batch: Vec<_> = (0..20)
        .map(|n| numbered(&topic, &n.to_string(), n))
        .collect();
    publish_all(&*fixture.publisher(), &batch).await;
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    let mut first = subscribe(fixture, request.clone()).await;
    let mut held = receive_count(&mut *first, 20).await;
    assert!(held.iter().all(|delivery| delivery.receipt.is_current()));

    let mut second = subscribe(fixture, request).await;
    let started = Instant::now();
    let moved = loop {
        assert!(started.elapsed() < DEADLINE, "nothing went to the second");
        match either(&mut *first, &mut *second).await {
            Some((Member::Second, deliveries)) => break deliveries,
            Some((Member::First, deliveries)) => held.extend(deliveries),
            None => {}
        }
    };
    let moved_numbers: BTreeSet<_> = moved.iter().map(number).collect();
    for delivery in held.drain(..) {
        if moved_numbers.contains(&number(&delivery)) {
            assert!(!delivery.receipt.is_current(), "{}", number(&delivery));
            acknowledge(delivery).await;
        }
    }
    assert!(moved.iter().all(|delivery| delivery.receipt.is_current()));
}

enum Member {
    First,
    Second,
}

/// Lets both members receive and returns what one of them got, or nothing after a short while.
async fn either(
    first: &mut dyn Subscription,
    second: &mut dyn Subscription,
) -> Option<(Member, Vec<Delivery>)> {
    let both = async {
        tokio::select! {
            deliveries = receive(first, 50) => (Member::First, deliveries),
            deliveries = receive(second, 50) => (Member::Second, deliveries),
        }
    };
    tokio::time::timeout(Duration::from_millis(100), both)
        .await
        .ok()
}

async fn handle(deliveries: Vec<Delivery>, handled: &mut BTreeSet<usize>) {
    for delivery in deliveries {
        // One that moved in the meantime comes again: started nowhere, it is not handled here.
        if delivery.receipt.is_current() {
            handled.insert(number(&delivery));
            acknowledge(delivery).await;
        }
    }
}

/// Key affinity: while a delivery is current, no other member holds one of its key.
pub(super) async fn a_key_is_with_one_member_at_a_time(fixture: &dyn Fixture) {
    let topic = fixture.topic(4).await;
    let publisher = fixture.publisher();
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic.clone()]);
    let mut members = [
        subscribe(fixture, request.clone()).await,
        subscribe(fixture, request).await,
    ];
    let started = Instant::now();
    let mut held: [Vec<Delivery>; 2] = Default::default();
    let mut sent = 0;
    while held.iter().any(|held| held.len() < 5) {
        assert!(started.elapsed() < DEADLINE, "they do not share");
        let batch: Vec<_> = (sent..sent + 16)
            .map(|n| numbered(&topic, &format!("key-{}", n % 16), n))
            .collect();
        sent += batch.len();
        publish_all(&*publisher, &batch).await;
        let [first, second] = &mut members;
        match either(&mut **first, &mut **second).await {
            Some((Member::First, deliveries)) => held[0].extend(deliveries),
            Some((Member::Second, deliveries)) => held[1].extend(deliveries),
            None => {}
        }
        let keys = held.each_mut().map(|held| {
            held.retain(|delivery| delivery.receipt.is_current());
            held.iter()
                .map(|delivery| delivery.incoming.message.key.clone())
                .collect::<BTreeSet<_>>()
        });
        assert!(keys[0].is_disjoint(&keys[1]), "{keys:?}");
    }
}
