//! Versions of an aggregate in work at many handlers at once, in any order.

use std::sync::atomic::Ordering;
use std::time::Duration;

use relaybox::broker::Publisher;
use relaybox::broker::memory::MemoryBroker;
use relaybox::consumer::{Consumer, Outcome, Unversioned, VersionGuard, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{InboxStore, VersionStore};
use relaybox::testing::eventually;
use relaybox::{Ladder, Message};
use sqlx::PgConnection;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use super::Postgres;
use crate::relay_process::DEADLINE;
use crate::store_contract::Harness;

const AGGREGATES: i64 = 3;
const VERSIONS: i64 = 80;

/// Numbers what is applied, by a sequence that is drawn while the aggregate is locked.
async fn apply(_: &(), db: &mut PgConnection, incoming: &Incoming) -> Result<Outcome, sqlx::Error> {
    sqlx::query("INSERT INTO applied (aggregate, version) VALUES ($1, $2)")
        .bind(incoming.message.headers.get_str("aggregate"))
        .bind(incoming.message.version)
        .execute(&mut *db)
        .await?;
    Ok(Outcome::Done)
}

/// Every version of every aggregate, shuffled; without keys, so that nothing keeps them apart.
fn shuffled(seed: u64) -> Vec<Message> {
    let mut messages: Vec<_> = (0..AGGREGATES * VERSIONS)
        .map(|n| {
            Message::new("orders", "Moved")
                .with_header("aggregate", (n % AGGREGATES).to_string())
                .with_version(n / AGGREGATES)
        })
        .collect();
    fastrand::Rng::with_seed(seed).shuffle(&mut messages);
    messages
}

async fn no_older_version_is_applied_after_a_newer(isolation: &str) {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let h = Postgres::start().await;
    let create =
        "CREATE TABLE applied (n bigserial, aggregate text NOT NULL, version bigint NOT NULL)";
    Postgres::autocommit(&h.store, create).await;
    let broker = MemoryBroker::new();
    broker.create_topic("orders", 4).unwrap();
    let batch: Vec<_> = shuffled(seed).into_iter().map(Into::into).collect();
    for outcome in broker.publish(&batch).await {
        assert!(outcome.is_confirmed(), "{outcome:?}");
    }
    let options: PgConnectOptions = h.url.parse().unwrap();
    let options = options.options([("default_transaction_isolation", isolation)]);
    let (mut stops, mut members, mut older) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..2 {
        let pool = PgPoolOptions::new().max_connections(10);
        let store = PostgresStore::new(pool.connect_with(options.clone()).await.unwrap());
        let rule = Unversioned::DeadLetter;
        let guard = VersionGuard::new("billing", store.clone(), rule, handler_fn((), apply));
        let guard =
            guard.with_aggregate(|incoming| incoming.message.headers.get("aggregate").cloned());
        older.push(guard.older());
        let consumer = Consumer::new("billing", "orders", broker.clone(), store)
            .with_ladder(Ladder::rungs([10, 20, 30, 40].map(Duration::from_millis)));
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        stops.push(stop);
        members.push(tokio::spawn(consumer.run_until(guard, async {
            let _ = stopped.await;
        })));
    }
    eventually(DEADLINE, "all is handled", || async {
        h.number("SELECT count(*) FROM relaybox_inbox").await == AGGREGATES * VERSIONS
    })
    .await;
    drop(stops);
    for member in members {
        member.await.unwrap().unwrap();
    }
    let applied = h.number("SELECT count(*) FROM applied").await;
    let skipped: u64 = older.iter().map(|older| older.load(Ordering::SeqCst)).sum();
    assert!(applied + skipped as i64 >= AGGREGATES * VERSIONS);
    let disordered = "SELECT count(*) FROM applied earlier JOIN applied later USING (aggregate) \
         WHERE later.n > earlier.n AND later.version < earlier.version";
    assert_eq!(h.number(disordered).await, 0);
    let last = format!(
        "SELECT count(*) FROM (SELECT max(version) last FROM applied GROUP BY aggregate) a \
         WHERE last = {}",
        VERSIONS - 1
    );
    assert_eq!(h.number(&last).await, AGGREGATES);
    assert!(broker.log("orders.billing.DLQ").is_empty());
}

#[tokio::test]
async fn no_older_version_is_applied_after_a_newer_one_by_handlers_at_once() {
    no_older_version_is_applied_after_a_newer("read committed").await;
}

#[tokio::test]
async fn nor_in_transactions_of_a_stricter_isolation() {
    no_older_version_is_applied_after_a_newer("repeatable read").await;
}

#[tokio::test]
async fn most_advances_of_a_known_aggregate_touch_no_index() {
    let h = Postgres::start().await;
    let mut transaction = h.store.begin().await.unwrap();
    let connection = PostgresStore::connection(&mut transaction);
    for version in 0..11 {
        let advanced = h.store.advance(connection, "billing", b"17", version);
        advanced.await.unwrap();
    }
    let light = "SELECT n_tup_hot_upd FROM pg_stat_xact_user_tables \
         WHERE relname = 'relaybox_aggregate_version'";
    // All ten, or nine while an hour begins.
    assert!(<Postgres as Harness>::number(connection, light).await >= 9);
    h.store.rollback(transaction).await.unwrap();
}
