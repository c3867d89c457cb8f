//! Handlers in batches and outside of the transaction, and what the inbox remembers messages by.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use relaybox::Message;
use relaybox::consumer::{Consumer, Failure, InboxKey, MissingId, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::ladder::Ladder;
use relaybox::store::NoInbox;
use relaybox::testing::eventually;
use sqlx::sqlite::SqliteConnection;

use super::support::{
    DEADLINE, House, Running, Shared, loaded, names, numbered, quick, run, write_effect,
};

fn of(incoming: &Incoming) -> String {
    incoming.message.id.to_string()
}

/// Notes which messages came together, writes their effects, and fails if one of them is called `bad`.
async fn write_all(
    batches: &Shared<Vec<String>>,
    db: &mut SqliteConnection,
    batch: &[&Incoming],
) -> Outcome {
    let ids: Vec<String> = batch.iter().map(|incoming| of(incoming)).collect();
    let bad = ids.iter().any(|id| id.starts_with("bad"));
    batches.lock().unwrap().push(ids);
    for incoming in batch {
        write_effect(db, "billing", incoming).await;
    }
    if bad {
        return Outcome::Retry(Failure::new("one of them is bad"));
    }
    Outcome::Done
}

fn keyed(count: usize) -> Vec<Message> {
    let key = |n| format!("k-{}", n % 4);
    let of_key = |n: usize| numbered(&key(n), "m", n + 1).pop();
    (0..count).filter_map(of_key).collect()
}

#[tokio::test]
async fn batches_do_each_message_once_and_in_the_order_of_its_key() {
    let house = House::new().await;
    let messages = keyed(40);
    house.publish(&messages).await;
    house.publish(&messages[..20]).await;
    let consumer = house.consumer("billing");
    let counts = consumer.counts();
    let batches = Shared::<Vec<String>>::default();
    let handler = handler_fn(batches.clone(), write_all);
    let consumer = Running::start(|stop| consumer.run_batches_until(10, handler, stop));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();

    let effects = house.effects("billing").await;
    let distinct: HashSet<&String> = effects.iter().collect();
    assert_eq!((effects.len(), distinct.len()), (40, 40));
    for key in 0..4 {
        let of_key = |id: &&String| id[2..].parse::<usize>().unwrap() % 4 == key;
        let order: Vec<&String> = effects.iter().filter(of_key).collect();
        let expected = names("m", (0..40).filter(|n| n % 4 == key));
        assert_eq!(order, expected.iter().collect::<Vec<_>>());
    }
    assert_eq!(loaded(&counts.handled), 40);
    assert_eq!(loaded(&counts.duplicates), 20);
    let sizes: Vec<usize> = batches.lock().unwrap().iter().map(Vec::len).collect();
    assert!(
        sizes.iter().all(|size| (1..=10).contains(size)),
        "{sizes:?}"
    );
    assert!(sizes.iter().any(|size| *size > 1), "{sizes:?}");
}

#[tokio::test]
async fn a_batch_that_fails_harms_only_the_message_that_fails_alone() {
    let house = House::new().await;
    let mut messages = keyed(12);
    messages[5].id = "bad".into();
    house.publish(&messages).await;
    let consumer = house.consumer("billing");
    let batches = Shared::<Vec<String>>::default();
    let handler = handler_fn(batches.clone(), write_all);
    let consumer = Running::start(|stop| consumer.run_batches_until(100, handler, stop));
    eventually(DEADLINE, "all ended", || async {
        house.effects("billing").await.len() + house.dead("billing").len() == 12
    })
    .await;
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();

    let effects = house.effects("billing").await;
    assert!(!effects.iter().any(|id| id == "bad"));
    let dead = house.dead("billing");
    assert_eq!(dead.len(), 1);
    assert_eq!(of(&dead[0]), "bad");
    assert_eq!(dead[0].story.retry_count, 3, "a failed batch is no attempt");
    // The others of its key kept their order among each other.
    let of_key: Vec<_> = effects
        .iter()
        .filter(|id| ["m-1", "m-9"].contains(&&***id))
        .collect();
    assert_eq!(of_key, ["m-1", "m-9"]);
    let batches = batches.lock().unwrap();
    assert!(
        batches
            .iter()
            .any(|batch| batch.len() > 1 && batch.contains(&"bad".to_owned()))
    );
}

#[tokio::test]
async fn a_batch_larger_than_what_may_be_in_flight_is_refused() {
    let house = House::new().await;
    let handler = handler_fn(Shared::default(), write_all);
    let consumer = house.consumer("billing");
    let ended = consumer.run_batches_until(257, handler, std::future::pending());
    let error = ended.await.unwrap_err();
    assert_eq!(error.violation().unwrap().field, "batch");
}

async fn call(calls: &Shared<String>, incoming: &Incoming) -> Outcome {
    calls.lock().unwrap().push(of(incoming));
    match incoming.message.payload.as_deref() {
        Some(b"fail") => Outcome::Permanent(Failure::new("no")),
        _ => Outcome::Done,
    }
}

#[tokio::test]
async fn work_outside_of_a_transaction_is_remembered_once_it_is_done() {
    let house = House::new().await;
    let mut messages = numbered("k", "m", 3);
    messages[1].payload = Some("fail".into());
    house.publish(&messages).await;
    house.publish(&messages).await;
    let consumer = house.consumer("billing");
    let counts = consumer.counts();
    let calls = Shared::<String>::default();
    let handler = handler_fn(calls.clone(), call);
    let consumer = Running::start(|stop| consumer.run_outside_until(handler, stop));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(*calls.lock().unwrap(), ["m-0", "m-1", "m-2", "m-1"]);
    assert_eq!(loaded(&counts.duplicates), 2);
    assert_eq!(
        house.dead("billing").len(),
        2,
        "what failed is not remembered"
    );
}

#[tokio::test]
async fn work_outside_is_not_done_again_because_it_could_not_be_recorded() {
    let house = House::new().await;
    house.publish(&numbered("k", "m", 1)).await;
    sqlx::raw_sql("CREATE TRIGGER full BEFORE INSERT ON relaybox_inbox BEGIN SELECT RAISE(ABORT, 'full'); END")
        .execute(house.store.pool())
        .await
        .unwrap();
    let calls = Shared::<String>::default();
    let handler = handler_fn(calls.clone(), call);
    let consumer = house.consumer("billing");
    let consumer = Running::start(|stop| consumer.run_outside_until(handler, stop));
    eventually(DEADLINE, "it was called", || async {
        !calls.lock().unwrap().is_empty()
    })
    .await;
    let read: u64 = house.broker.committed("billing", "orders").iter().sum();
    assert_eq!(read, 0, "what is not recorded is not acknowledged");
    sqlx::raw_sql("DROP TRIGGER full")
        .execute(house.store.pool())
        .await
        .unwrap();
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(*calls.lock().unwrap(), ["m-0"]);
}

#[tokio::test]
async fn a_consumer_without_a_database_has_its_ladder_and_dead_letters() {
    let house = House::new().await;
    let mut messages = numbered("k", "m", 2);
    messages[1].payload = Some("fail".into());
    house.publish(&messages).await;
    house.publish(&messages[..1]).await;
    let calls = Shared::<String>::default();
    let handler = handler_fn(calls.clone(), call);
    let consumer = Consumer::new("billing", "orders", house.broker.clone(), NoInbox);
    let consumer = Running::start(|stop| consumer.run_outside_until(handler, stop));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(*calls.lock().unwrap(), ["m-0", "m-1", "m-0"]);
    assert_eq!(house.dead("billing").len(), 1);
}

// What the inbox remembers

async fn effect(_: &(), db: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    write_effect(db, "billing", incoming).await;
    Outcome::Done
}

fn payment(id: &str, number: &str) -> Message {
    Message::new("orders", "Pay")
        .with_id(id)
        .with_key("k")
        .with_payload(number.to_owned())
}

fn number(incoming: &Incoming) -> Option<String> {
    let payload = incoming.message.payload.as_deref()?;
    let number = std::str::from_utf8(payload).ok()?;
    assert_ne!(number, "panic");
    Some(number.to_owned())
}

#[tokio::test]
async fn two_messages_for_one_thing_have_one_effect_by_a_business_key() {
    for (rule, dead, effects) in [
        (MissingId::DeadLetter, 3, vec!["a", "c"]),
        (
            MissingId::BrokerCoordinates,
            0,
            vec!["a", "c", "d", "e", "f"],
        ),
    ] {
        let house = House::new().await;
        let long = "x".repeat(256);
        house
            .publish(&[
                payment("a", "17"),
                payment("b", "17"),
                payment("c", "18"),
                payment("d", " "),
                payment("e", &long),
                payment("f", "panic"),
            ])
            .await;
        let config = quick()
            .with_inbox_key(InboxKey::business(number))
            .with_missing_id(rule);
        let consumer = house.consumer("billing").with_config(config);
        let consumer = run(consumer, handler_fn((), effect));
        house.consumed("billing", "orders").await;
        consumer.stop().await.unwrap();
        assert_eq!(house.effects("billing").await, effects);
        let letters = house.dead("billing");
        assert_eq!(letters.len(), dead);
        for letter in letters {
            assert_eq!(letter.story.reason.unwrap().as_str(), "missing-id");
        }
    }
}

#[tokio::test]
async fn coordinates_name_a_message_for_good_also_after_a_rung() {
    let house = House::new().await;
    house.publish(&[payment("a", "none")]).await;
    let config = quick()
        .with_inbox_key(InboxKey::business(|_| None))
        .with_missing_id(MissingId::BrokerCoordinates);
    let consumer = house
        .consumer("billing")
        .with_config(config)
        .with_ladder(Ladder::rungs([std::time::Duration::from_millis(50)]));
    async fn once(
        calls: &Arc<AtomicU64>,
        db: &mut SqliteConnection,
        incoming: &Incoming,
    ) -> Outcome {
        write_effect(db, "billing", incoming).await;
        match calls.fetch_add(1, Ordering::SeqCst) {
            0 => Outcome::Retry(Failure::new("not yet")),
            _ => Outcome::Done,
        }
    }
    let consumer = run(consumer, handler_fn(Arc::default(), once));
    eventually(DEADLINE, "it is done", || async {
        house.effects("billing").await.len() == 1
    })
    .await;
    consumer.stop().await.unwrap();
    let keys: Vec<String> = sqlx::query_scalar("SELECT message_id FROM relaybox_inbox")
        .fetch_all(house.store.pool())
        .await
        .unwrap();
    let [key] = &keys[..] else { panic!("{keys:?}") };
    assert!(key.starts_with("orders/"), "{key}");
}
