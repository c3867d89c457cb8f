//! An effect outside of the database: a payment, once for each order, though processes die and answers get lost.
//!
//! An inbox cannot take back what a payment provider did, and a provider's answer may never come. So the handler only
//! writes what is to be done; a loop does it, with a key by which the provider knows a repeat. `payment/till.rs` is the
//! pattern, `payment/provider.rs` the provider.
//!
//! ```sh
//! cargo run --example payment
//! ```

#[path = "payment/provider.rs"]
mod provider;
#[path = "payment/till.rs"]
mod till;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use relaybox::broker::memory::MemoryBroker;
use relaybox::store::OutboxStore;
use relaybox::store::sqlite::SqliteStore;
use relaybox::{Consumer, Message, Outbox, Relay, typed_fn};
use serde_json::json;

use provider::{FakeProvider, Trouble};
use till::{Payer, Step};

type Anyhow<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// How long anything here may take before the story is called broken.
const PATIENCE: Duration = Duration::from_secs(60);

const ORDERS: usize = 6;

#[tokio::main]
async fn main() -> ExitCode {
    match tokio::time::timeout(PATIENCE, tell()).await {
        Ok(Ok(true)) => ExitCode::SUCCESS,
        Ok(Ok(false)) => ExitCode::FAILURE,
        Ok(Err(error)) => {
            eprintln!("payment failed: {error}");
            ExitCode::FAILURE
        }
        Err(_) => {
            eprintln!("payment failed: not done after {PATIENCE:?}");
            ExitCode::FAILURE
        }
    }
}

async fn tell() -> Anyhow<bool> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("shop.db");
    let store = SqliteStore::connect(&path).await?;
    store.migrate().await?;
    sqlx::raw_sql(till::TABLE).execute(store.pool()).await?;
    let broker = MemoryBroker::new();
    broker.create_topic("orders", 1)?;
    broker.create_topic("payments", 1)?;

    place_orders(&store).await?;
    relay(&store, &broker).await?;
    let intended = async {
        while count(&store, "intended").await < ORDERS as i64 {
            pause().await
        }
    };
    Consumer::new("till", "orders", broker.clone(), store.clone())
        .run_until(typed_fn((), till::intend), intended)
        .await?;
    println!("{ORDERS} orders are intents now: committed, and nobody has been called.");

    let troubles = [
        Trouble::HangsBefore,
        Trouble::HangsAfter,
        Trouble::NotReached,
        Trouble::AnswerLost,
    ];
    let provider = FakeProvider::default().with_troubles(troubles);
    for when in ["before it charged", "after it charged"] {
        killed_while_calling(&path, &provider).await?;
        println!("A payer called the provider and was killed {when}.");
    }
    let settled = async {
        while count(&store, "intended").await != 0 {
            pause().await
        }
    };
    tokio::select! {
        ended = life(&path, &provider) => ended?,
        () = settled => {}
    }
    println!(
        "The next one met a broken connection and a lost answer, and went on until all were settled."
    );
    relay(&store, &broker).await?;
    conclude(&store, &broker, &provider).await
}

async fn place_orders(store: &SqliteStore) -> Anyhow<()> {
    let outbox = Outbox::new(store.clone());
    let mut tx = store.pool().begin().await?;
    for number in 1..=ORDERS {
        // One is beyond what the provider lends.
        let cents = if number == ORDERS { 200_000 } else { 4_200 };
        let message = Message::new("orders", "OrderPlaced")
            .with_key(format!("order-{number}"))
            .with_json(&json!({ "order": format!("order-{number}"), "cents": cents }))?;
        outbox.enqueue(&mut tx, message).await?;
    }
    tx.commit().await?;
    Ok(())
}

async fn relay(store: &SqliteStore, broker: &MemoryBroker) -> Anyhow<()> {
    let sent = async {
        while !store.pending(1).await.is_ok_and(|left| left == 0) {
            pause().await
        }
    };
    Relay::new(store.clone(), broker.clone())
        .run_until(sent)
        .await?;
    Ok(())
}

/// A process of its own, as far as the database can tell: connections that end with it.
async fn life(path: &Path, provider: &FakeProvider) -> Anyhow<()> {
    let payer = Payer::new(SqliteStore::connect(path).await?, provider.clone());
    loop {
        if payer.step().await? != Step::Settled {
            pause().await;
        }
    }
}

async fn killed_while_calling(path: &Path, provider: &FakeProvider) -> Anyhow<()> {
    tokio::select! {
        ended = life(path, provider) => ended,
        // To drop it is its death: nothing of it runs any more.
        () = provider.hangs() => Ok(()),
    }
}

async fn conclude(
    store: &SqliteStore,
    broker: &MemoryBroker,
    provider: &FakeProvider,
) -> Anyhow<bool> {
    let charged = provider.charged();
    let mut once = charged.clone();
    once.sort();
    once.dedup();
    let told = broker.log("payments");
    let taken = told
        .iter()
        .filter(|told| told.message.event_type == "PaymentTaken");
    let causes = taken.filter_map(|told| told.message.causation_id()).count();
    println!(
        "orders={ORDERS} calls={} charges={} charged_twice={} taken={} declined={} told={}",
        provider.calls(),
        charged.len(),
        charged.len() - once.len(),
        count(store, "taken").await,
        count(store, "declined").await,
        told.len(),
    );
    Ok(charged.len() == ORDERS - 1
        && once.len() == charged.len()
        && causes == charged.len()
        && told.len() == ORDERS)
}

/// Payments in this state; a database that cannot be asked just now is asked again.
async fn count(store: &SqliteStore, state: &str) -> i64 {
    let counted = sqlx::query_scalar("SELECT count(*) FROM payment WHERE state = ?")
        .bind(state)
        .fetch_one(store.pool())
        .await;
    counted.unwrap_or(-1)
}

async fn pause() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}
