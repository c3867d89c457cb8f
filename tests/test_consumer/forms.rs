//! All forms of handlers, and one that kills its process.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use relaybox::broker::{PublishOutcome, Publisher};
use relaybox::store::NoInbox;
use relaybox::testing::{CrashPoint, ManualClock, MemoryInbox, Step, TestConsumer};
use relaybox::{Failure, Incoming, MessageId, Outcome, handler_fn};

use super::{Bookings, broker, consumer, once, order};

/// All or nothing: one that fails sends its batch back, to be handled each alone.
#[tokio::test]
async fn a_batch_that_fails_is_told_message_by_message() {
    async fn book(sizes: &Sizes, bookings: &mut Bookings, batch: &[&Incoming]) -> Outcome {
        sizes.lock().unwrap().push(batch.len());
        for incoming in batch {
            let id = incoming.message.id.to_string();
            *bookings.entry(id).or_default() += 1;
        }
        let poisoned = |incoming: &&Incoming| incoming.message.event_type == "Poison";
        match batch.iter().copied().any(|incoming| poisoned(&incoming)) {
            true => Outcome::Permanent(Failure::new("pointless")),
            false => Outcome::Done,
        }
    }
    type Sizes = Arc<Mutex<Vec<usize>>>;
    let clock = ManualClock::default();
    let inbox = MemoryInbox::new(Bookings::new());
    let (broker, store, sizes) = (broker(&clock), inbox.clone(), Sizes::default());
    let make = move |broker| consumer(broker, store.clone());
    let handler = handler_fn(Arc::clone(&sizes), book);
    let started = TestConsumer::start_batches(broker, clock, make, 10, handler);
    let mut consumer = started.await.unwrap();
    let mut batch: Vec<_> = (0..5).map(|n| order(&format!("o-{n}"), "")).collect();
    batch[2].event_type = "Poison".into();
    let batch: Vec<_> = batch.into_iter().map(Into::into).collect();
    let outcomes = consumer.broker().publish(&batch).await;
    assert!(outcomes.iter().all(PublishOutcome::is_confirmed));
    consumer.settle().await;
    for n in 0..5 {
        let fate = consumer.fate(&MessageId::new(format!("o-{n}")));
        let expected = if n == 2 { "dead: permanent" } else { "done" };
        assert_eq!(fate.to_string(), expected, "o-{n}");
    }
    assert_eq!(inbox.state().len(), 4);
    assert!(inbox.state().values().all(|times| *times == 1));
    let sizes = sizes.lock().unwrap();
    assert!(sizes.iter().any(|size| *size > 1), "{sizes:?}");
}

/// Nothing to remember it by: neither a database nor a retention is asked for.
#[tokio::test]
async fn work_outside_of_transactions_is_told_too() {
    async fn call(calls: &Arc<AtomicU32>, incoming: &Incoming) -> Outcome {
        calls.fetch_add(1, Ordering::SeqCst);
        match incoming.story.retry_count {
            0 => Outcome::Retry(Failure::new("no answer")),
            _ => Outcome::Done,
        }
    }
    let clock = ManualClock::default();
    let calls = Arc::default();
    let make = |broker| consumer(broker, NoInbox);
    let handler = handler_fn(Arc::clone(&calls), call);
    let started = TestConsumer::start_outside(broker(&clock), clock, make, handler);
    let mut consumer = started.await.unwrap();
    for _ in 0..2 {
        let fate = consumer.deliver(order("o-1", "")).await;
        let expected = "retried on orders.billing.retry.5s, done";
        assert_eq!((fate.to_string().as_str(), fate.attempts), (expected, 2));
    }
    assert_eq!(calls.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn a_message_that_kills_its_process_is_found_and_others_go_on() {
    async fn kill(crash: &CrashPoint, bookings: &mut Bookings, incoming: &Incoming) -> Outcome {
        let id = incoming.message.id.to_string();
        if id == "deadly" {
            crash.crash::<()>().await;
        }
        bookings.insert(id, 1);
        Outcome::Done
    }
    let clock = ManualClock::default();
    let (inbox, crash) = (MemoryInbox::new(Bookings::new()), CrashPoint::new());
    let store = inbox.clone();
    let make = move |broker| consumer(broker, store.clone());
    let handler = handler_fn(crash.clone(), kill);
    let started = TestConsumer::start(broker(&clock), clock, make, handler);
    let mut consumer = started.await.unwrap();
    consumer.crash_on(&crash);
    for id in ["o-1", "deadly", "o-2"] {
        consumer.send(order(id, "").with_key(id)).await;
    }
    consumer.settle().await;
    let fate = consumer.fate(&MessageId::new("deadly"));
    let end = fate.end();
    assert!(matches!(end, Some(Step::Dead { reason, .. }) if reason == "retries-exhausted"));
    assert!(fate.error().unwrap().starts_with("crash: "), "{fate:?}");
    assert!(crash.reached() >= 3, "{fate}");
    let booked: Vec<_> = inbox.state().into_iter().collect();
    assert_eq!(booked, once(&["o-1", "o-2"]));
}
