//! The way back from the dead letters, as an operator goes it: collect, look, plan, send back, and what else there is.
//!
//! ```sh
//! cargo run --example redrive
//! ```
//!
//! A release with a fault makes dead letters of twenty orders. It is repaired; two of the orders are not worth repeating, and
//! one has a wrong amount. The last line counts what the database holds.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use relaybox::broker::Publisher;
use relaybox::broker::memory::MemoryBroker;
use relaybox::consumer::InboxKey;
use relaybox::dlq::redrive::{Canary, CollectLimits, Order, Redrive, Refusal};
use relaybox::store::LetterFilter;
use relaybox::store::sqlite::SqliteStore;
use relaybox::{Consumer, Failure, Incoming, Message, Outcome, handler_fn};
use sqlx::SqliteConnection;
use tokio::sync::oneshot;

type Anyhow<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// How long anything here may take before the story is called broken.
const PATIENCE: Duration = Duration::from_secs(60);
const ORDERS: u32 = 20;

/// The service: it charges what it can read, once it is repaired.
#[derive(Clone, Default)]
struct Billing {
    repaired: Arc<AtomicBool>,
}

async fn charge(
    app: &Billing,
    db: &mut SqliteConnection,
    incoming: &Incoming,
) -> Result<Outcome, sqlx::Error> {
    if !app.repaired.load(Ordering::SeqCst) {
        return Ok(Outcome::Permanent(Failure::new("the release of Monday")));
    }
    let Ok(cents) = incoming.message.json::<u32>() else {
        return Ok(Outcome::Permanent(Failure::new("not an amount")));
    };
    sqlx::query("INSERT INTO charge (cents) VALUES (?)")
        .bind(cents)
        .execute(db)
        .await?;
    Ok(Outcome::Done)
}

#[tokio::main]
async fn main() -> ExitCode {
    match tokio::time::timeout(PATIENCE, tell()).await {
        Ok(Ok(true)) => ExitCode::SUCCESS,
        Ok(Ok(false)) => ExitCode::FAILURE,
        Ok(Err(error)) => {
            eprintln!("redrive failed: {error}");
            ExitCode::FAILURE
        }
        Err(_) => {
            eprintln!("redrive failed: not done after {PATIENCE:?}");
            ExitCode::FAILURE
        }
    }
}

async fn tell() -> Anyhow<bool> {
    let directory = tempfile::tempdir()?;
    let store = SqliteStore::connect(directory.path().join("shop.db")).await?;
    store.migrate().await?;
    sqlx::raw_sql("CREATE TABLE charge (cents INTEGER NOT NULL)")
        .execute(store.pool())
        .await?;
    let broker = MemoryBroker::new();
    broker.create_topic("orders", 3)?;
    for n in 0..ORDERS {
        let payload = if n == 7 {
            "\"seven\"".into()
        } else {
            n.to_string()
        };
        let message = Message::new("orders", "OrderPlaced")
            .with_id(format!("order-{n}"))
            .with_key(format!("customer-{}", n % 4))
            .with_payload(payload);
        broker.publish(&[message.into()]).await;
    }
    let app = Billing::default();
    let (stop, stopped) = oneshot::channel::<()>();
    let consumer = Consumer::new("billing", "orders", broker.clone(), store.clone());
    let running = tokio::spawn(consumer.run_until(handler_fn(app.clone(), charge), async {
        let _ = stopped.await;
    }));
    while broker.log("orders.billing.DLQ").len() < ORDERS as usize {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("{ORDERS} dead letters at the broker");

    // The desk: letters go into the table, where they can be looked at one by one.
    let desk = Redrive::new("billing", "orders", broker.clone(), store.clone())
        .with_inbox(store.clone(), InboxKey::MessageId);
    let limits = CollectLimits {
        idle: Duration::from_millis(300),
        ..CollectLimits::default()
    };
    println!("{:?}", desk.collect(&broker, limits).await?);
    let first = desk.list(&LetterFilter::all(), 0, 1).await?.remove(0);
    println!("{}: {:?}", first.message_id, first.story.last_error);

    for id in ["order-3", "order-4"] {
        let test = LetterFilter::all().with_message_id(id);
        desk.discard("ann", &test, "a test order").await?;
    }
    let seven = LetterFilter::all().with_message_id("order-7");
    let seven = desk.list(&seven, 0, 1).await?.remove(0);
    desk.edit("ann", seven.position, "the amount was a word", |message| {
        message.payload = Some("7".into());
    })
    .await?;

    // Not repaired yet: the first ones come back, and nothing more is sent.
    let careful =
        Order::of(LetterFilter::all().with_error("the release of Monday")).with_canary(Canary {
            count: 2,
            wait: Duration::from_secs(1),
        });
    let planned = desk.plan("ann", &careful).await?;
    println!(
        "plan {}: {} would be sent",
        planned.row.id, planned.would.send
    );
    let paused = desk.run("ann", planned.row.id, |_| {}).await?;
    println!(
        "{}: {}",
        paused.row.state.as_str(),
        paused.row.error.unwrap_or_default()
    );
    desk.cancel("ann", planned.row.id, "not repaired yet")
        .await?;

    app.repaired.store(true, Ordering::SeqCst);
    while broker.log("orders.billing.DLQ").len() < ORDERS as usize + 2 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    desk.collect(&broker, limits).await?;
    let planned = desk.plan("ann", &careful).await?;
    let looping = planned.would.refuse.get(&Refusal::Loop);
    println!(
        "plan {}: {} would be sent, {} would go in circles",
        planned.row.id,
        planned.would.send,
        looping.unwrap_or(&0)
    );
    let done = desk
        .run("ann", planned.row.id, |run| {
            println!("{} sent", run.row.sent)
        })
        .await?;

    let charged = async || -> Anyhow<i64> {
        let count = sqlx::query_scalar("SELECT count(*) FROM charge");
        Ok(count.fetch_one(store.pool()).await?)
    };
    while charged().await? < i64::from(ORDERS) - 2 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let _ = stop.send(());
    running.await??;
    let left = desk.list(&LetterFilter::all(), 0, 100).await?.len();
    let audit = desk.audit(0, 1_000).await?;
    let discarded = audit
        .iter()
        .filter(|entry| entry.outcome == "discarded")
        .count();
    let (charges, state) = (charged().await?, done.row.state.as_str());
    println!("state={state} charges={charges} discarded={discarded} left={left}");
    Ok(charges == i64::from(ORDERS) - 2 && left == 0 && discarded == 2)
}
