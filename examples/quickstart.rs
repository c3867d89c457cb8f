//! The whole idea in one process without any service: a web shop, its outbox in a SQLite file, a broker in memory, and
//! a billing service with its inbox in another SQLite file. A relay dies at the worst moment, some handlers fail, and
//! one message never succeeds.
//!
//! ```sh
//! cargo run --example quickstart
//! ```

mod story;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::broker::memory::MemoryBroker;
use relaybox::broker::{PublishOutcome, Publisher, PublisherCapabilities};
use relaybox::consumer::{Consumer, Failure, Outcome, handler_fn};
use relaybox::envelope::{Incoming, Outgoing};
use relaybox::ladder::Ladder;
use relaybox::outbox::Outbox;
use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::OutboxStore;
use relaybox::store::sqlite::SqliteStore;
use relaybox::{Message, Result};
use serde::Deserialize;
use sqlx::sqlite::{SqliteConnection, SqlitePool};
use tokio::sync::Notify;

use story::{Tally, out_of_order};

type Anyhow<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// How long anything here may take before the story is called broken.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Deserialize)]
struct Event {
    event: String,
    key: String,
    payload: serde_json::Value,
}

#[tokio::main]
async fn main() -> ExitCode {
    match tokio::time::timeout(PATIENCE, tell()).await {
        Ok(Ok(tally)) => {
            println!("{tally}");
            ExitCode::from(u8::from(!tally.is_good()))
        }
        Ok(Err(error)) => {
            eprintln!("quickstart failed: {error}");
            ExitCode::FAILURE
        }
        Err(_) => {
            eprintln!("quickstart failed: not done after {PATIENCE:?}");
            ExitCode::FAILURE
        }
    }
}

async fn tell() -> Anyhow<Tally> {
    let directory = tempfile::tempdir()?;
    let shop = open(directory.path(), "shop.db").await?;
    let billing = open(directory.path(), "billing.db").await?;
    let notebook = open(directory.path(), "notebook.db").await?;
    prepare(&shop, &billing, &notebook).await?;
    let broker = MemoryBroker::new();
    broker.create_topic("orders", 3)?;

    let events: Vec<Event> = include_str!("story/shop.jsonl")
        .lines()
        .map(serde_json::from_str)
        .collect::<std::result::Result<_, _>>()?;
    place_orders(&shop, &broker, &events).await?;
    relay_dies_and_another_takes_over(&shop, &broker).await?;
    consume(&billing, &notebook, &broker, events.len()).await?;
    count(&shop, &billing, &notebook, &broker).await
}

async fn open(directory: &Path, file: &str) -> Result<SqliteStore> {
    let store = SqliteStore::connect(directory.join(file)).await?;
    store.migrate().await?;
    Ok(store)
}

async fn prepare(shop: &SqliteStore, billing: &SqliteStore, notebook: &SqliteStore) -> Anyhow<()> {
    sqlx::raw_sql("CREATE TABLE event (number INTEGER PRIMARY KEY, name TEXT, order_id TEXT)")
        .execute(shop.pool())
        .await?;
    sqlx::raw_sql("CREATE TABLE booking (number INTEGER, message_id TEXT, order_id TEXT)")
        .execute(billing.pool())
        .await?;
    // An observer's notebook of handler calls. Outside the handler's transaction, so that failed attempts are seen too.
    sqlx::raw_sql("CREATE TABLE attempt (n INTEGER PRIMARY KEY, order_id TEXT, number INTEGER)")
        .execute(notebook.pool())
        .await?;
    Ok(())
}

/// Business fact and message, in one transaction each.
async fn place_orders(shop: &SqliteStore, broker: &MemoryBroker, events: &[Event]) -> Anyhow<()> {
    let outbox = Outbox::new(shop.clone()).with_rules_of(broker);
    for (number, event) in (1i64..).zip(events) {
        let mut tx = shop.pool().begin().await?;
        sqlx::query("INSERT INTO event (number, name, order_id) VALUES (?, ?, ?)")
            .bind(number)
            .bind(&event.event)
            .bind(&event.key)
            .execute(&mut *tx)
            .await?;
        let message = Message::new("orders", &event.event)
            .with_key(&event.key)
            .with_header("number", number.to_string())
            .with_json(&event.payload)?;
        outbox.enqueue(&mut tx, message).await?;
        tx.commit().await?;
    }
    println!(
        "The shop wrote {} events, each with its message in one transaction.",
        events.len()
    );

    let mut tx = shop.pool().begin().await?;
    outbox
        .enqueue(
            &mut tx,
            Message::new("orders", "OrderPlaced").with_key("order-1006"),
        )
        .await?;
    tx.rollback().await?;
    println!("One more was rolled back: its message is gone with it.");

    let mut tx = shop.pool().begin().await?;
    let refused = outbox
        .enqueue(&mut tx, Message::new("", "OrderPlaced"))
        .await;
    if let Err(error) = refused {
        println!("One without a destination was refused at once: {error}.");
    }
    tx.rollback().await?;
    Ok(())
}

async fn relay_dies_and_another_takes_over(
    shop: &SqliteStore,
    broker: &MemoryBroker,
) -> Anyhow<()> {
    let config = || {
        RelayConfig::default()
            .with_batch_rows_max(64)
            .with_lease(Duration::from_secs(4))
    };
    let dying = DiesBeforeMarking {
        broker: broker.clone(),
        confirmed: Arc::default(),
        died: Arc::default(),
    };
    let died = dying.died.clone();
    let confirmed = dying.confirmed.clone();
    let first = Relay::new(shop.clone(), dying).with_config(config());
    tokio::select! {
        ended = first.run_until(std::future::pending()) => ended?,
        // Dropping the relay here is its death: nothing of it runs any more.
        () = died.notified() => {}
    }
    println!(
        "The first relay published {} messages and died before it could mark them: they are still pending.",
        confirmed.load(Ordering::SeqCst)
    );

    let second = Relay::new(shop.clone(), broker.clone()).with_config(config());
    let drained = async {
        // A store that cannot be asked just now is asked again; `PATIENCE` bounds it.
        while !matches!((shop.pending(1).await, shop.aside(1).await), (Ok(0), Ok(0))) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    second.run_until(drained).await?;
    let resent = broker.log("orders").len();
    println!(
        "A second relay waited for the dead one's lease to end and sent everything pending: the topic now holds {resent} \
         records, some of them twice, each copy with the same id."
    );
    Ok(())
}

async fn consume(
    billing: &SqliteStore,
    notebook: &SqliteStore,
    broker: &MemoryBroker,
    events: usize,
) -> Anyhow<()> {
    let handler = handler_fn(notebook.pool().clone(), book);
    let consumer = Consumer::new("billing", "orders", broker.clone(), billing.clone())
        .with_ladder(Ladder::rungs([300, 900].map(Duration::from_millis)));
    let settled = async {
        loop {
            let effects: i64 = sqlx::query_scalar("SELECT count(*) FROM booking")
                .fetch_one(billing.pool())
                .await
                .unwrap_or(0);
            let dead = broker.log("orders.billing.DLQ").len();
            if usize::try_from(effects).unwrap_or(0) + dead >= events && is_read_to_the_end(broker)
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    println!(
        "Billing begins. Its bank does not answer at the first attempt, and one voucher can never be booked."
    );
    consumer.run_until(handler, settled).await?;
    let letters = broker.log("orders.billing.DLQ");
    let copies = letters.len();
    for letter in letters.into_iter().take(1) {
        println!(
            "Dead letter: {} of {}, after {} attempts, reason {}: {}.",
            letter.message.event_type,
            letter.message.key_str().unwrap_or_default(),
            letter.story.retry_count,
            letter
                .story
                .reason
                .as_ref()
                .map_or("none", |reason| reason.as_str()),
            letter.story.last_error.as_deref().unwrap_or("no error"),
        );
        if copies > 1 {
            println!(
                "It lies there {copies} times: the resent copy failed as well. Both have one id."
            );
        }
    }
    Ok(())
}

fn is_read_to_the_end(broker: &MemoryBroker) -> bool {
    broker
        .topics()
        .iter()
        .filter(|topic| !topic.ends_with(".DLQ"))
        .all(|topic| {
            let read: u64 = broker.committed("billing", topic).iter().sum();
            read == broker.log(topic).len() as u64
        })
}

/// Billing's handler: one booking per message, in the transaction of the inbox.
async fn book(
    notebook: &SqlitePool,
    db: &mut SqliteConnection,
    incoming: &Incoming,
) -> std::result::Result<Outcome, sqlx::Error> {
    let message = &incoming.message;
    let order = message.key_str().unwrap_or_default();
    let number: i64 = message
        .headers
        .get_str("number")
        .and_then(|number| number.parse().ok())
        .unwrap_or_default();
    sqlx::query("INSERT INTO attempt (order_id, number) VALUES (?, ?)")
        .bind(order)
        .bind(number)
        .execute(notebook)
        .await?;
    sqlx::query("INSERT INTO booking (number, message_id, order_id) VALUES (?, ?, ?)")
        .bind(number)
        .bind(message.id.as_str())
        .bind(order)
        .execute(db)
        .await?;
    // Failing after the insert is the harder case: the rollback has something to undo.
    Ok(
        match (message.event_type.as_str(), incoming.story.retry_count) {
            ("VoucherRedeemed", _) => Outcome::Retry(Failure::new("the voucher has no amount")),
            ("PaymentTaken" | "RefundIssued", 0) if order != "order-1003" => {
                println!(
                    "  {} of {order} failed; it waits on a rung while others go on.",
                    message.event_type
                );
                Outcome::Retry(Failure::new("the bank did not answer"))
            }
            _ => Outcome::Done,
        },
    )
}

async fn count(
    shop: &SqliteStore,
    billing: &SqliteStore,
    notebook: &SqliteStore,
    broker: &MemoryBroker,
) -> Anyhow<Tally> {
    let one = |pool: &SqlitePool, sql: &'static str| {
        let pool = pool.clone();
        async move { sqlx::query_scalar::<_, i64>(sql).fetch_one(&pool).await }
    };
    let distinct = |topics: &[&str]| {
        let mut ids: Vec<_> = topics
            .iter()
            .flat_map(|topic| broker.log(topic))
            .map(|record| record.message.id)
            .collect();
        ids.sort();
        ids.dedup();
        ids.len() as u64
    };
    let bookings = one(billing.pool(), "SELECT count(*) FROM booking").await?;
    let booked = one(
        billing.pool(),
        "SELECT count(DISTINCT message_id) FROM booking",
    )
    .await?;
    let attempts: Vec<(String, i64)> =
        sqlx::query_as("SELECT order_id, number FROM attempt ORDER BY n")
            .fetch_all(notebook.pool())
            .await?;
    let delivered = broker.deliveries("billing");
    Ok(Tally {
        committed: one(shop.pool(), "SELECT count(*) FROM event")
            .await?
            .try_into()?,
        published: distinct(&["orders"]),
        delivered,
        duplicates: delivered.saturating_sub(attempts.len() as u64),
        effects: booked.try_into()?,
        retried: distinct(&["orders.billing.retry.300ms", "orders.billing.retry.900ms"]),
        dead: distinct(&["orders.billing.DLQ"]),
        doubled: (bookings - booked).try_into()?,
        out_of_order: out_of_order(attempts),
    })
}

/// A publisher whose process dies once the broker has confirmed a batch, before anybody hears of it.
struct DiesBeforeMarking {
    broker: MemoryBroker,
    confirmed: Arc<AtomicUsize>,
    died: Arc<Notify>,
}

impl Publisher for DiesBeforeMarking {
    fn capabilities(&self) -> PublisherCapabilities {
        Publisher::capabilities(&self.broker)
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            let outcomes = self.broker.publish(batch).await;
            let confirmed = outcomes
                .iter()
                .filter(|outcome| outcome.is_confirmed())
                .count();
            self.confirmed.fetch_add(confirmed, Ordering::SeqCst);
            self.died.notify_one();
            std::future::pending().await
        })
    }

    fn health(&self) -> relaybox::broker::Health {
        relaybox::broker::Health::up()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.broker.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        self.broker.close(deadline)
    }
}
