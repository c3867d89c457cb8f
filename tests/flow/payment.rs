//! The pattern for effects outside of the database, as the example has it, killed at each point.

use std::future::Future;
use std::path::Path;
use std::task::Poll;

use relaybox::broker::Publisher;
use relaybox::broker::memory::MemoryBroker;
use relaybox::store::sqlite::SqliteStore;
use relaybox::testing::{Signal, eventually};
use relaybox::{Consumer, Incoming, Message, typed_fn};
use serde_json::json;
use sqlx::sqlite::SqliteConnection;

use super::support::{DEADLINE, Running};

#[path = "../../examples/payment/provider.rs"]
mod provider;
#[path = "../../examples/payment/till.rs"]
mod till;

use provider::{FakeProvider, Trouble};
use till::{Payer, Step};

/// Connections that end with it, as a process's do.
async fn process(path: &Path) -> SqliteStore {
    SqliteStore::connect(path).await.unwrap()
}

async fn prepared(directory: &tempfile::TempDir) -> std::path::PathBuf {
    let path = directory.path().join("shop.db");
    let store = process(&path).await;
    store.migrate().await.unwrap();
    sqlx::raw_sql(till::TABLE)
        .execute(store.pool())
        .await
        .unwrap();
    path
}

async fn intend(path: &Path, ids: &[&str]) {
    let store = process(path).await;
    for id in ids {
        let placed = json!({ "order": format!("order of {id}"), "cents": 4200 });
        let message = Message::new("orders", "OrderPlaced")
            .with_id(*id)
            .with_json(&placed);
        let incoming = Incoming::from(message.unwrap());
        let payload = incoming.message.decode().unwrap();
        let mut connection = store.pool().acquire().await.unwrap();
        till::intend(&(), &mut connection, payload, &incoming)
            .await
            .unwrap();
    }
}

/// Steps of one life until nothing is left.
async fn settle(path: &Path, provider: &FakeProvider) {
    let payer = Payer::new(process(path).await, provider.clone());
    while payer.step().await.unwrap() != Step::Idle {}
}

/// Causes of what is told of payments that were taken, in the order they were told.
async fn told(path: &Path) -> Vec<String> {
    let store = process(path).await;
    let headers: Vec<String> = sqlx::query_scalar(
        "SELECT headers FROM relaybox_outbox WHERE event_type = 'PaymentTaken' ORDER BY position",
    )
    .fetch_all(store.pool())
    .await
    .unwrap();
    headers
        .iter()
        .map(|text| {
            let read: Vec<(String, String)> = serde_json::from_str(text).unwrap();
            read.into_iter().next().unwrap().1
        })
        .collect()
}

/// Runs a future, and drops it after so many polls. Whether it ended before.
async fn killed_after(polls: usize, work: impl Future) -> bool {
    let mut work = Box::pin(work);
    let mut done = 0;
    std::future::poll_fn(|cx| {
        if done == polls {
            return Poll::Ready(false);
        }
        done += 1;
        work.as_mut().poll(cx).map(|_| true)
    })
    .await
}

#[tokio::test]
async fn a_payer_that_is_killed_at_any_point_charges_once_and_tells_it_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = prepared(&directory).await;
    let provider = FakeProvider::default();
    let mut expected = Vec::new();
    for polls in 0.. {
        let id = format!("m-{polls}");
        intend(&path, &[&id]).await;
        let payer = Payer::new(process(&path).await, provider.clone());
        let ended = killed_after(polls, payer.step()).await;
        drop(payer);
        settle(&path, &provider).await;
        expected.push(id);
        if ended {
            break;
        }
    }
    // Some polls for each statement and the call.
    assert!(expected.len() > 5, "killed {} times", expected.len());
    assert_eq!(provider.charged(), expected);
    assert_eq!(told(&path).await, expected);
}

#[tokio::test]
async fn whatever_happens_to_a_call_it_charges_once() {
    for trouble in [
        Trouble::NotReached,
        Trouble::AnswerLost,
        Trouble::HangsBefore,
        Trouble::HangsAfter,
    ] {
        let directory = tempfile::tempdir().unwrap();
        let path = prepared(&directory).await;
        intend(&path, &["m-1", "m-2"]).await;
        // Both intents meet it, and one of them again.
        let provider = FakeProvider::default().with_troubles([trouble; 3]);
        while provider.calls() < 3 {
            let payer = Payer::new(process(&path).await, provider.clone());
            tokio::select! {
                step = payer.step() => assert_eq!(step.unwrap(), Step::Unanswered),
                () = provider.hangs() => {}
            }
        }
        assert!(told(&path).await.is_empty());
        settle(&path, &provider).await;
        for mut once in [provider.charged(), told(&path).await] {
            once.sort();
            assert_eq!(once, ["m-1", "m-2"], "{trouble:?}");
        }
    }
}

#[tokio::test]
async fn payers_at_once_charge_and_tell_each_intent_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = prepared(&directory).await;
    let ids: Vec<String> = (0..20).map(|n| format!("m-{n:02}")).collect();
    let names: Vec<&str> = ids.iter().map(String::as_str).collect();
    intend(&path, &names).await;
    let provider = FakeProvider::default();
    tokio::join!(
        settle(&path, &provider),
        settle(&path, &provider),
        settle(&path, &provider)
    );
    for mut once in [provider.charged(), told(&path).await] {
        once.sort();
        assert_eq!(once, ids);
    }
}

struct Killed {
    written: Signal,
}

#[tokio::test]
async fn an_order_is_one_intent_under_duplicates_and_a_killed_consumer() {
    let directory = tempfile::tempdir().unwrap();
    let path = prepared(&directory).await;
    let broker = MemoryBroker::new();
    broker.create_topic("orders", 1).unwrap();
    let placed = json!({ "order": "order-17", "cents": 4200 });
    let message = Message::new("orders", "OrderPlaced").with_id("m-1");
    let message = message.with_json(&placed).unwrap();
    let copies = [message.clone().into(), message.into()];
    for outcome in broker.publish(&copies).await {
        assert!(outcome.is_confirmed());
    }
    let start = |store: SqliteStore| Consumer::new("till", "orders", broker.clone(), store);

    async fn killed(
        killed: &Killed,
        db: &mut SqliteConnection,
        payload: relaybox::Json<till::OrderPlaced>,
        incoming: &Incoming,
    ) -> Result<(), sqlx::Error> {
        till::intend(&(), db, payload, incoming).await?;
        killed.written.set();
        std::future::pending().await
    }
    let written = Signal::new();
    let handler = typed_fn(
        Killed {
            written: written.clone(),
        },
        killed,
    );
    let consumer = start(process(&path).await);
    let first = Running::start(|stop| consumer.run_until(handler, stop));
    written.wait().await;
    first.kill().await;

    let consumer = start(process(&path).await);
    let second = Running::start(|stop| consumer.run_until(typed_fn((), till::intend), stop));
    eventually(DEADLINE, "both copies are settled", || async {
        broker.committed("till", "orders").iter().sum::<u64>() == 2
    })
    .await;
    second.stop().await.unwrap();
    let provider = FakeProvider::default();
    settle(&path, &provider).await;
    assert_eq!(provider.charged(), ["m-1"]);
    assert_eq!(told(&path).await, ["m-1"]);
}
