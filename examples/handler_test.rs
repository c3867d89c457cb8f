//! How a handler of yours is tested without any service: once over SQLite, in a file that is gone afterwards, and once over
//! a fake of your own.
//!
//! ```sh
//! cargo run --example handler_test --features testing
//! ```
//!
//! In your crate these functions would be tests; here `main` runs them and says what each has shown.

use std::time::Duration;

use relaybox::broker::memory::{MemoryBroker, MemoryConfig};
use relaybox::store::InboxStore;
use relaybox::store::sqlite::SqliteStore;
use relaybox::testing::{
    FaultyInbox, InboxCall, InboxFault, ManualClock, MemoryInbox, TestBroker, TestConsumer,
};
use relaybox::{Consumer, Failure, Incoming, Ladder, Message, Outcome, Result, handler_fn};
use sqlx::SqliteConnection;

/// The service as it would run in production: its names, its ladder, whatever its broker and its database are.
fn billing<S: InboxStore>(broker: TestBroker<MemoryBroker>, store: S) -> Consumer<S> {
    Consumer::new("billing", "orders", broker, store)
        .with_ladder(Ladder::rungs([5, 60, 600].map(Duration::from_secs)))
}

/// Its handler over a real database. It fails after it has written, where a rollback has something to undo.
async fn charge(
    bank: &Bank,
    db: &mut SqliteConnection,
    incoming: &Incoming,
) -> std::result::Result<Outcome, sqlx::Error> {
    let Ok(cents) = incoming.message.json::<u32>() else {
        return Ok(Outcome::Permanent(Failure::new("not an amount")));
    };
    sqlx::query("INSERT INTO charge (cents) VALUES (?)")
        .bind(cents)
        .execute(db)
        .await?;
    if incoming.message.key_str() == Some(bank.silent_about) && incoming.story.retry_count < 2 {
        return Ok(Outcome::Retry(Failure::new("the bank did not answer")));
    }
    Ok(Outcome::Done)
}

/// A bank that answers the third time it is asked about this order.
struct Bank {
    silent_about: &'static str,
}

/// A handler that knows no database but a trait of the service's own, and the fake that stands for it.
trait Accounts {
    fn charge(&mut self, order: &str);
}

#[derive(Clone, Default)]
struct FakeAccounts {
    charged: Vec<String>,
}

impl Accounts for FakeAccounts {
    fn charge(&mut self, order: &str) {
        self.charged.push(order.to_owned());
    }
}

async fn charge_account<A: Accounts>(_: &(), accounts: &mut A, incoming: &Incoming) -> Outcome {
    let Some(order) = incoming.message.key_str() else {
        return Outcome::Permanent(Failure::new("no order"));
    };
    accounts.charge(order);
    Outcome::Done
}

/// A broker whose rungs wait for the clock.
fn broker(clock: &ManualClock) -> Result<MemoryBroker> {
    let config = MemoryConfig::default().with_clock(clock.clone());
    let broker = MemoryBroker::with_config(config)?;
    broker.create_topic("orders", 1)?;
    Ok(broker)
}

fn order(number: u32) -> Message {
    Message::new("orders", "OrderPlaced").with_key(format!("order-{number}"))
}

async fn charged(store: &SqliteStore) -> std::result::Result<Vec<u32>, sqlx::Error> {
    sqlx::query_scalar("SELECT cents FROM charge")
        .fetch_all(store.pool())
        .await
}

type Tested = std::result::Result<(), Box<dyn std::error::Error>>;

/// Over SQLite: a failure that passes, a message that never will, a duplicate.
async fn a_charge_is_made_once_whatever_fails() -> Tested {
    let directory = tempfile::tempdir()?;
    let store = SqliteStore::connect(directory.path().join("billing.db")).await?;
    store.migrate().await?;
    sqlx::raw_sql("CREATE TABLE charge (cents INTEGER)")
        .execute(store.pool())
        .await?;
    let clock = ManualClock::default();
    let inbox = store.clone();
    let mut billing = TestConsumer::start(
        broker(&clock)?,
        clock,
        move |broker| billing(broker, inbox.clone()),
        handler_fn(
            Bank {
                silent_about: "order-1",
            },
            charge,
        ),
    )
    .await?;

    let placed = order(1).with_json(&4_200)?;
    let fate = billing.deliver(placed.clone()).await;
    assert_eq!(
        fate.to_string(),
        "retried on orders.billing.retry.5s, retried on orders.billing.retry.1m, done"
    );
    assert_eq!(charged(&store).await?, [4_200]);
    println!("a bank that was silent twice:  {fate}");

    let fate = billing.deliver(placed).await;
    assert_eq!(fate.to_string(), "duplicate");
    assert_eq!(charged(&store).await?, [4_200]);
    println!("the same message again:        {fate}");

    let fate = billing.deliver(order(2).with_payload("much")).await;
    assert_eq!(fate.to_string(), "dead: permanent");
    assert_eq!(fate.error(), Some("handler: not an amount"));
    let letters = billing.dead_letters();
    assert_eq!(letters[0].message.payload.as_deref(), Some(&b"much"[..]));
    println!("a message that is no amount:   {fate}");

    billing.crash_before_acknowledging();
    let fate = billing.deliver(order(3).with_json(&100)?).await;
    assert_eq!(fate.to_string(), "crashed, duplicate");
    assert_eq!(charged(&store).await?, [4_200, 100]);
    println!("a crash behind the commit:     {fate}");
    Ok(billing.stop().await?)
}

/// Over a fake: no database at all, and one that fails at the worst moments.
async fn an_account_is_charged_once_whatever_the_database_does() -> Tested {
    let accounts = MemoryInbox::new(FakeAccounts::default());
    let store = FaultyInbox::new(accounts.clone())
        .with_fault(
            InboxCall::Begin,
            1,
            InboxFault::Fail(relaybox::ErrorKind::Unavailable),
        )
        .with_fault(InboxCall::Commit, 1, InboxFault::LoseAnswer);
    let clock = ManualClock::default();
    let mut billing = TestConsumer::start(
        broker(&clock)?,
        clock,
        move |broker| billing(broker, store.clone()),
        handler_fn((), charge_account::<FakeAccounts>),
    )
    .await?;

    let fate = billing.deliver(order(1)).await;
    assert_eq!(fate.to_string(), "done");
    assert_eq!(accounts.state().charged, ["order-1"]);
    println!("a database in trouble:         {fate}");

    billing.crash_before_acknowledging();
    let fate = billing.deliver(order(2)).await;
    assert_eq!(fate.to_string(), "crashed, duplicate");
    assert_eq!(accounts.state().charged, ["order-1", "order-2"]);
    println!("a crash behind the commit:     {fate}");
    Ok(billing.stop().await?)
}

#[tokio::main]
async fn main() -> Tested {
    println!("SQLite:");
    a_charge_is_made_once_whatever_fails().await?;
    println!("A fake:");
    an_account_is_charged_once_whatever_the_database_does().await?;
    println!("every test passed, and no service was there");
    Ok(())
}
