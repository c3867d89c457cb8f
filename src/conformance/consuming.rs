//! Cases about one member of a consumer.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::broker::{Rung, Settlement, SubscriptionRequest, TopologyMode};
use crate::envelope::Outgoing;
use crate::story::Story;
use crate::{ErrorKind, Message};

use super::{
    DEADLINE, Fixture, GLANCE, acknowledge, close, fresh, number, numbered, numbers, publish_all,
    receive, receive_count, subscribe, within,
};

/// Subscription rule 1: what was stored before is delivered, and so is what comes later.
pub(super) async fn a_first_subscription_begins_at_the_oldest(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let publisher = fixture.publisher();
    publish_all(&*publisher, &[numbered(&topic, "a", 0)]).await;
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic.clone()]);
    let mut subscription = subscribe(fixture, request).await;
    let first = receive_count(&mut *subscription, 1).await;
    publish_all(&*publisher, &[numbered(&topic, "a", 1)]).await;
    let second = receive_count(&mut *subscription, 1).await;
    assert_eq!((numbers(&first), numbers(&second)), (vec![0], vec![1]));
    assert!(!first[0].redelivered, "nobody has seen it before");
}

/// Publisher rule 5 and subscription rule 2, over several partitions and batches.
pub(super) async fn messages_of_a_key_keep_their_order(fixture: &dyn Fixture) {
    let topic = fixture.topic(3).await;
    let publisher = fixture.publisher();
    let all: Vec<_> = (0..200)
        .map(|n| numbered(&topic, &format!("key-{}", n % 10), n))
        .collect();
    for batch in all.chunks(37) {
        publish_all(&*publisher, batch).await;
    }
    let mut request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    request.in_flight_max = 16;
    let mut subscription = subscribe(fixture, request).await;
    let mut seen = Vec::new();
    while seen.len() < all.len() {
        for delivery in within("the next delivery", receive(&mut *subscription, 16)).await {
            seen.push(number(&delivery));
            acknowledge(delivery).await;
        }
    }
    for key in 0..10 {
        let of_key: Vec<_> = seen.iter().copied().filter(|n| n % 10 == key).collect();
        let sent: Vec<_> = (0..200).filter(|n| n % 10 == key).collect();
        assert_eq!(of_key, sent, "key-{key}");
    }
}

/// Subscription rule 1: acknowledged ones from the oldest on stay away, everything unsettled comes again.
pub(super) async fn what_is_acknowledged_stays_away_and_the_rest_comes_again(
    fixture: &dyn Fixture,
) {
    let topic = fixture.topic(1).await;
    let batch: Vec<_> = (0..5).map(|n| numbered(&topic, "a", n)).collect();
    publish_all(&*fixture.publisher(), &batch).await;
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    let mut subscription = subscribe(fixture, request.clone()).await;
    let mut held = Vec::new();
    for delivery in receive_count(&mut *subscription, 5).await {
        match number(&delivery) {
            0 | 1 | 3 => acknowledge(delivery).await,
            _ => held.push(delivery),
        }
    }
    close(subscription).await;

    let mut again = subscribe(fixture, request).await;
    let mut seen = BTreeSet::new();
    // Kept: a delivery that is dropped comes once more, for ever.
    let mut kept = Vec::new();
    while !seen.is_superset(&BTreeSet::from([2, 4])) {
        kept.extend(within("2 and 4 once more", receive(&mut *again, 5)).await);
        seen.extend(numbers(&kept));
    }
    assert!(!seen.contains(&0) && !seen.contains(&1), "{seen:?}");
    for delivery in held {
        assert!(!delivery.receipt.is_current(), "its subscription is closed");
        acknowledge(delivery).await;
    }
}

/// Subscription rule 5, without a word of farewell.
pub(super) async fn what_a_dropped_subscription_held_comes_again(fixture: &dyn Fixture) {
    let topic = fixture.topic(2).await;
    let batch: Vec<_> = (0..6)
        .map(|n| numbered(&topic, &n.to_string(), n))
        .collect();
    publish_all(&*fixture.publisher(), &batch).await;
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    let mut subscription = subscribe(fixture, request.clone()).await;
    let held = receive_count(&mut *subscription, 6).await;
    drop(subscription);
    drop(held);
    let marks = fixture.subscriber().capabilities().marks_redelivery;
    let mut again = subscribe(fixture, request).await;
    let deliveries = receive_count(&mut *again, 6).await;
    let mut seen = numbers(&deliveries);
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
    assert!(!marks || deliveries.iter().all(|delivery| delivery.redelivered));
}

/// A delivery that is dropped without being settled is released.
pub(super) async fn a_dropped_delivery_comes_again(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    publish_all(&*fixture.publisher(), &[numbered(&topic, "a", 0)]).await;
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    let mut subscription = subscribe(fixture, request).await;
    drop(receive_count(&mut *subscription, 1).await);
    let again = receive_count(&mut *subscription, 1).await;
    assert_eq!(numbers(&again), [0]);
}

/// `Release` brings it again, not before its delay has passed.
pub(super) async fn a_released_delivery_comes_again_after_its_delay(fixture: &dyn Fixture) {
    const DELAY: Duration = Duration::from_millis(700);
    let topic = fixture.topic(1).await;
    publish_all(&*fixture.publisher(), &[numbered(&topic, "a", 0)]).await;
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    let mut subscription = subscribe(fixture, request).await;
    let delivery = receive_count(&mut *subscription, 1).await.remove(0);
    let released = Instant::now();
    let settling = delivery
        .receipt
        .settle(Settlement::Release { delay: DELAY });
    within("a settlement", settling).await.unwrap();
    let again = receive_count(&mut *subscription, 1).await;
    let waited = released.elapsed();
    assert_eq!(numbers(&again), [0]);
    assert!(waited >= DELAY, "came after {waited:?}");
}

/// A copy that waits on a rung.
fn waiting(rung: &Rung, consumer: &str, number: usize) -> Outgoing {
    let Outgoing { message, .. } = numbered(&rung.destination, "a", number);
    let story = Story {
        consumer: Some(consumer.to_owned()),
        ..Story::default()
    };
    let story = story.due(message.occurred_at + rung.delay);
    Outgoing { message, story }
}

/// Subscription rule 3: a long rung does not keep a short one or the source waiting.
pub(super) async fn a_rung_is_never_early_and_blocks_nobody(fixture: &dyn Fixture) {
    let source = fixture.topic(1).await;
    let rung = |seconds| Rung {
        destination: format!("{source}.retry.{seconds}s"),
        delay: Duration::from_secs(seconds),
        source: source.clone(),
    };
    let (long, short) = (rung(6), rung(3));
    let consumer = fresh("consumer");
    let mut request = SubscriptionRequest::new(&consumer, vec![source.clone()]);
    request.rungs = vec![long.clone(), short.clone()];
    let mut subscription = subscribe(fixture, request).await;
    // Once one has come, those that follow do not wait for the membership to begin.
    publish_all(&*fixture.publisher(), &[numbered(&source, "a", 9)]).await;
    let first = receive_count(&mut *subscription, 1).await.remove(0);
    acknowledge(first).await;

    let waiting = |rung, n| waiting(rung, &consumer, n);
    let batch = [
        waiting(&long, 3),
        waiting(&short, 1),
        waiting(&short, 2),
        numbered(&source, "a", 0),
    ];
    publish_all(&*fixture.publisher(), &batch).await;
    for expected in 0..4 {
        let delivery = receive_count(&mut *subscription, 1).await.remove(0);
        let now = Message::new("now", "T").occurred_at;
        assert_eq!(number(&delivery), expected);
        let due = delivery.incoming.story.due_at;
        assert!(due.is_none_or(|due| now >= due), "{now} is before {due:?}");
        acknowledge(delivery).await;
    }
}

/// What a later ladder does not name would wait there for ever.
pub(super) async fn a_rung_that_nobody_reads_is_named_or_comes_back_by_itself(
    fixture: &dyn Fixture,
) {
    let source = fixture.topic(1).await;
    let consumer = fresh("consumer");
    let prefix = format!("{source}.{consumer}.");
    let rung = Rung {
        destination: format!("{prefix}earlier"),
        delay: Duration::from_secs(1),
        source: source.clone(),
    };
    let plain = || SubscriptionRequest::new(&consumer, vec![source.clone()]);
    let mut request = plain();
    request.rungs = vec![rung.clone()];
    close(subscribe(fixture, request).await).await;
    let subscriber = fixture.subscriber();
    let named = within("names", subscriber.destinations(&prefix)).await;
    let named = named.unwrap();
    let others = format!("{prefix}earlier.than");
    let others = within("names", subscriber.destinations(&others)).await;
    assert_eq!(others.unwrap(), Vec::<String>::new());
    if !named.is_empty() {
        assert_eq!(named, [rung.destination]);
        return;
    }
    publish_all(&*fixture.publisher(), &[waiting(&rung, &consumer, 1)]).await;
    let mut subscription = subscribe(fixture, plain()).await;
    let back = receive_count(&mut *subscription, 1).await;
    assert_eq!(numbers(&back), [1]);
}

/// Subscription rule 4.
pub(super) async fn no_more_than_in_flight_max_are_unsettled(fixture: &dyn Fixture) {
    let topic = fixture.topic(2).await;
    let batch: Vec<_> = (0..6)
        .map(|n| numbered(&topic, &n.to_string(), n))
        .collect();
    publish_all(&*fixture.publisher(), &batch).await;
    let mut request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    request.in_flight_max = 2;
    let mut subscription = subscribe(fixture, request).await;
    let mut seen = BTreeSet::new();
    let mut held = receive_count(&mut *subscription, 2).await;
    while seen.len() < 4 {
        let third = tokio::time::timeout(GLANCE, receive(&mut *subscription, 10)).await;
        assert!(third.is_err(), "a third while two are unsettled");
        let settled = held.remove(0);
        seen.insert(number(&settled));
        acknowledge(settled).await;
        held.extend(receive_count(&mut *subscription, 1).await);
    }
    seen.extend(numbers(&held));
    assert_eq!(seen, (0..6).collect());
}

/// `receive` is cancel safe.
pub(super) async fn an_abandoned_receive_loses_nothing(fixture: &dyn Fixture) {
    let topic = fixture.topic(2).await;
    let publisher = fixture.publisher();
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic.clone()]);
    let mut subscription = subscribe(fixture, request).await;
    let started = Instant::now();
    let mut seen = BTreeSet::new();
    let mut sent = 0;
    while seen.len() < 30 {
        assert!(started.elapsed() < DEADLINE, "saw only {seen:?}");
        let glance = Duration::from_micros(500);
        if let Ok(deliveries) = tokio::time::timeout(glance, receive(&mut *subscription, 3)).await {
            for delivery in deliveries {
                seen.insert(number(&delivery));
                acknowledge(delivery).await;
            }
        }
        if sent < 30 {
            publish_all(&*publisher, &[numbered(&topic, &sent.to_string(), sent)]).await;
            sent += 1;
        }
    }
    assert_eq!(seen, (0..30).collect());
}

pub(super) async fn create_makes_rungs_and_dead_letters(fixture: &dyn Fixture) {
    let source = fixture.topic(1).await;
    let mut request = SubscriptionRequest::new(fresh("consumer"), vec![source.clone()]);
    let own = [format!("{source}.retry.5s"), format!("{source}.DLQ")];
    request.rungs = vec![Rung {
        destination: own[0].clone(),
        delay: Duration::from_secs(5),
        source: source.clone(),
    }];
    request.dead_letters = vec![own[1].clone()];
    request.topology = TopologyMode::Create;
    close(subscribe(fixture, request.clone()).await).await;
    within("a check", fixture.publisher().check(&own))
        .await
        .unwrap();
    // What is there already is left as it is, in both modes.
    close(subscribe(fixture, request.clone()).await).await;
    request.topology = TopologyMode::Verify;
    close(subscribe(fixture, request).await).await;
}

/// A deadline is a duration, and the longest one is further off than any clock can tell.
pub(super) async fn a_member_closes_though_its_deadline_never_comes(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let publisher = fixture.publisher();
    publish_all(&*publisher, &[numbered(&topic, "a", 0)]).await;
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic]);
    let mut subscription = subscribe(fixture, request).await;
    for delivery in receive_count(&mut *subscription, 1).await {
        acknowledge(delivery).await;
    }
    let closing = subscription.close(Duration::MAX);
    within("a close", closing).await.unwrap();
    let closing = publisher.close(Duration::MAX);
    within("a close", closing).await.unwrap();
}

pub(super) async fn verify_names_everything_missing(fixture: &dyn Fixture) {
    let present = fixture.topic(1).await;
    let missing = [fresh("source"), fresh("rung"), fresh("DLQ")];
    let sources = vec![present.clone(), missing[0].clone()];
    let mut request = SubscriptionRequest::new(fresh("consumer"), sources);
    request.rungs = vec![Rung {
        destination: missing[1].clone(),
        delay: Duration::from_secs(5),
        source: present.clone(),
    }];
    request.dead_letters = vec![missing[2].clone()];
    request.topology = TopologyMode::Verify;
    let error = refused(fixture, request).await;
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    let text = error.to_string();
    assert!(missing.iter().all(|name| text.contains(name)), "{text}");
    assert!(!text.contains(&present), "{text}");
    let check = within("a check", fixture.publisher().check(&missing)).await;
    assert!(check.is_err(), "verifying created something");
}

pub(super) async fn a_missing_source_is_never_created(fixture: &dyn Fixture) {
    let missing = [fresh("source"), fresh("source")];
    let mut request = SubscriptionRequest::new(fresh("consumer"), missing.to_vec());
    request.topology = TopologyMode::Create;
    let error = refused(fixture, request).await;
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    let text = error.to_string();
    assert!(missing.iter().all(|name| text.contains(name)), "{text}");
    let check = within("a check", fixture.publisher().check(&missing)).await;
    assert!(check.is_err(), "subscribing created a source");
}

async fn refused(fixture: &dyn Fixture, request: SubscriptionRequest) -> crate::Error {
    let subscriber = fixture.subscriber();
    match within("an answer", subscriber.subscribe(request)).await {
        Ok(_) => panic!("subscribed to what does not exist"),
        Err(error) => error,
    }
}

pub(super) async fn unchecked_topology_takes_what_is_there(fixture: &dyn Fixture) {
    let source = fixture.topic(1).await;
    let mut request = SubscriptionRequest::new(fresh("consumer"), vec![source.clone()]);
    request.rungs = vec![Rung {
        destination: format!("{source}.retry.5s"),
        delay: Duration::from_secs(5),
        source: source.clone(),
    }];
    close(subscribe(fixture, request.clone()).await).await;
    request.topology = TopologyMode::Unchecked;
    let mut subscription = subscribe(fixture, request).await;
    publish_all(&*fixture.publisher(), &[numbered(&source, "a", 0)]).await;
    let deliveries = receive_count(&mut *subscription, 1).await;
    assert_eq!(numbers(&deliveries), [0]);
}

/// A redrive begins like this.
pub(super) async fn dead_letters_are_read_by_their_name(fixture: &dyn Fixture) {
    let source = fixture.topic(1).await;
    let mut request = SubscriptionRequest::new(fresh("consumer"), vec![source.clone()]);
    let dead = format!("{source}.DLQ");
    request.dead_letters = vec![dead.clone()];
    close(subscribe(fixture, request).await).await;
    publish_all(&*fixture.publisher(), &[numbered(&dead, "a", 7)]).await;
    let request = SubscriptionRequest::new(fresh("redrive"), vec![dead.clone()]);
    let mut subscription = subscribe(fixture, request).await;
    let delivery = receive_count(&mut *subscription, 1).await.remove(0);
    assert_eq!((number(&delivery), &delivery.source), (7, &dead));
    acknowledge(delivery).await;
}
