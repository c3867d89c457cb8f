//! A handler under test over a real database: what it wrote, what it enqueued, and what of it is left after trouble.

use std::time::Duration;

use relaybox::broker::memory::{MemoryBroker, MemoryConfig};
use relaybox::consumer::{Consumer, Failure, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::ladder::Ladder;
use relaybox::outbox::Outbox;
use relaybox::store::sqlite::SqliteStore;
use relaybox::testing::{
    CrashPoint, FaultyInbox, InboxCall, InboxFault, ManualClock, TestConsumer, relay_all,
};
use relaybox::{ErrorKind, Message};
use sqlx::sqlite::SqliteConnection;

use super::support::{House, numbered, write_effect};

/// An effect and an answer in one transaction. The first attempt fails behind both.
async fn answer(
    outbox: &Outbox<SqliteStore>,
    db: &mut SqliteConnection,
    incoming: &Incoming,
) -> Result<Outcome, relaybox::Error> {
    write_effect(db, "billing", incoming).await;
    let id = incoming.message.id.as_str();
    let invoice = Message::new("invoices", "Invoiced").with_id(format!("invoice-of-{id}"));
    outbox.enqueue(db, invoice).await?;
    Ok(match incoming.story.retry_count {
        0 => Outcome::Retry(Failure::new("not yet")),
        _ => Outcome::Done,
    })
}

async fn started(
    house: &House,
    wrap: impl FnOnce(SqliteStore) -> FaultyInbox<SqliteStore>,
) -> (TestConsumer<MemoryBroker>, MemoryBroker) {
    let clock = ManualClock::default();
    let config = MemoryConfig::default().with_clock(clock.clone());
    let broker = MemoryBroker::with_config(config).unwrap();
    for topic in ["orders", "invoices"] {
        broker.create_topic(topic, 1).unwrap();
    }
    let inbox = wrap(house.store.clone());
    let make = move |broker| {
        Consumer::new("billing", "orders", broker, inbox.clone())
            .with_ladder(Ladder::rungs([Duration::from_secs(600)]))
    };
    let handler = handler_fn(Outbox::new(house.store.clone()), answer);
    let consumer = TestConsumer::start(broker.clone(), clock, make, handler);
    (consumer.await.unwrap(), broker)
}

async fn order(consumer: &mut TestConsumer<MemoryBroker>) -> String {
    let order = numbered("k", "m", 1).remove(0);
    consumer.deliver(order).await.to_string()
}

#[tokio::test]
async fn what_a_handler_wrote_and_enqueued_is_there_once() {
    let house = House::new().await;
    let (mut consumer, broker) = started(&house, FaultyInbox::new).await;
    let climbed = "retried on orders.billing.retry.10m";
    assert_eq!(order(&mut consumer).await, format!("{climbed}, done"));
    assert_eq!(order(&mut consumer).await, "duplicate");
    relay_all(&house.store, consumer.broker()).await.unwrap();
    relay_all(&house.store, consumer.broker()).await.unwrap();
    assert_eq!(house.effects("billing").await, ["m-0"]);
    let invoices = broker.log("invoices");
    assert_eq!(invoices.len(), 1);
    assert_eq!(invoices[0].message.id.as_str(), "invoice-of-m-0");
    assert_eq!(consumer.published("invoices").len(), 1);
    consumer.stop().await.unwrap();
}

/// The first commit is of the second attempt.
#[tokio::test]
async fn trouble_of_a_real_database_doubles_nothing() {
    let crash = CrashPoint::new();
    let crashing = InboxFault::crash({
        let crash = crash.clone();
        move || crash.reach()
    });
    let climbed = "retried on orders.billing.retry.10m";
    for (call, fault, fate) in [
        (InboxCall::Begin, InboxFault::LoseAnswer, "done"),
        (
            InboxCall::Begin,
            InboxFault::Fail(ErrorKind::Unavailable),
            "done",
        ),
        (
            InboxCall::Commit,
            InboxFault::Fail(ErrorKind::Conflict),
            "done",
        ),
        (InboxCall::Commit, InboxFault::LoseAnswer, "done"),
        (InboxCall::Commit, crashing, "crashed, duplicate"),
    ] {
        let house = House::new().await;
        let case = format!("{call:?} {fault:?}");
        let (mut consumer, broker) = started(&house, |store| {
            FaultyInbox::new(store).with_fault(call, 1, fault)
        })
        .await;
        consumer.crash_on(&crash);
        let fate = format!("{climbed}, {fate}");
        assert_eq!(order(&mut consumer).await, fate, "{case}");
        relay_all(&house.store, consumer.broker()).await.unwrap();
        assert_eq!(house.effects("billing").await, ["m-0"], "{case}");
        assert_eq!(broker.log("invoices").len(), 1, "{case}");
    }
}
