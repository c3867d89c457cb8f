//! A database that was restored: into a fresh server, and under a relay that goes on running.

use std::path::Path;
use std::process::{Command, Stdio};
use std::slice::from_ref;
use std::time::Duration;

use relaybox::broker::RejectionScope;
use relaybox::relay::Relay;
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{AsideFilter, InboxStore, Mode, OutboxAdmin, OutboxStore, Recorded};
use relaybox::testing::{Fault, FaultyPublisher, eventually};
use relaybox_testcontainers::{Postgres as Server, PostgresOptions};
use sqlx::postgres::PgPool;
use sqlx::{AssertSqlSafe, Executor};

use crate::ledger::Ledger;
use crate::postgres::Postgres;
use crate::relay_process::{
    CREATE_LEDGER, DEADLINE, LEASE, Running, Sent, brisk, drained, entries, judge, numbered,
};
use crate::store_contract::{enqueue, keyed};

const KEYS: u32 = 10;

/// Durable, so that a killed one comes back with all that it had acknowledged.
async fn server() -> Server {
    let options = PostgresOptions::default()
        .with_local_process()
        .with_durable();
    Server::start_with(options).await.unwrap()
}

async fn number(pool: &PgPool, sql: &str) -> i64 {
    let query = sqlx::query_scalar(AssertSqlSafe(sql.to_owned()));
    query.fetch_one(pool).await.unwrap()
}

async fn enqueue_numbers(store: &PostgresStore, numbers: std::ops::Range<u32>) {
    enqueue::<Postgres>(store, &numbered("orders", KEYS, numbers)).await;
}

/// Everything so far was sent once and in order.
async fn judge_ledger(pool: &PgPool, count: u32) {
    let all = entries(pool).await.into_iter();
    let all: Vec<Sent> = all.map(|entry| entry.sent).collect();
    assert!(
        judge("restored", &all, KEYS, count).is_empty(),
        "sent twice"
    );
}

/// `pg_dump`, and `psql` over what it wrote.
fn copy_database(server: &Server, from: &str, to: &str) {
    let mut dump = Command::new(server.program("pg_dump").unwrap())
        .args(["--dbname", from])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let restored = Command::new(server.program("psql").unwrap())
        .args(["--quiet", "--set", "ON_ERROR_STOP=1", "--dbname", to])
        .stdin(dump.stdout.take().unwrap())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(dump.wait().unwrap().success() && restored.success());
}

/// Transaction ids mean nothing on another server, and those that come with the rows are of its future.
#[tokio::test]
async fn a_dump_in_a_server_with_lower_transaction_ids_is_relayed_as_any_other() {
    let (old, new) = (server().await, server().await);
    let from = old.create_database("shop").await.unwrap();
    let store = PostgresStore::connect(&from).await.unwrap();
    store.migrate().await.unwrap();
    let burn =
        "DO $$ BEGIN FOR n IN 1..20000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$";
    store.pool().execute(burn).await.unwrap();
    store.pool().execute(CREATE_LEDGER).await.unwrap();
    // Sent, parked and handled.
    let refusal = Fault::Reject(RejectionScope::Message);
    let ledger = Ledger::new(store.pool().clone());
    let publisher = FaultyPublisher::new(ledger).with_fault(1, refusal);
    let refused = keyed("refused", "0").with_id("refused");
    enqueue::<Postgres>(&store, from_ref(&refused)).await;
    let relay = Relay::new(store.clone(), publisher).with_config(brisk());
    let relay = Running::start(relay);
    drained(&store).await;
    enqueue_numbers(&store, 0..3).await;
    drained(&store).await;
    relay.stop().await;
    let handled = ["m-1"];
    let mut transaction = store.begin().await.unwrap();
    store.record(&mut transaction, "c", &handled).await.unwrap();
    store.commit(transaction).await.unwrap();
    // Pending, under a relay that will not be seen again.
    store.heartbeat("gone", "gone", LEASE).await.unwrap();
    assert_eq!(store.lease("gone", 9, LEASE).await.unwrap().len(), 9);
    enqueue_numbers(&store, 3..6).await;

    let to = new.create_database("shop").await.unwrap();
    copy_database(&old, &from, &to);
    // Often enough that it would find what a floor hides.
    let store = PostgresStore::connect(&to).await.unwrap();
    let store = store.with_sweep_pause(Duration::from_millis(10));
    let of_the_future = "SELECT count(*) FROM relaybox_outbox WHERE xid > pg_current_xact_id()";
    assert_eq!(
        number(store.pool(), of_the_future).await,
        i64::from(3 * KEYS)
    );
    let ledger = Ledger::new(store.pool().clone());
    let config = brisk().with_batch_rows_max(16);
    let relay = Running::start(Relay::new(store.clone(), ledger).with_config(config));
    drained(&store).await;
    // The floors rise, with transactions of this server.
    for n in 6..16 {
        enqueue_numbers(&store, n..n + 1).await;
        drained(&store).await;
    }
    judge_ledger(store.pool(), 16).await;
    assert_eq!(store.floor_alarms(), 0);

    let mut transaction = store.begin().await.unwrap();
    let recorded = store.record(&mut transaction, "c", &handled).await.unwrap();
    assert_eq!(recorded, [Recorded::Duplicate]);
    store.rollback(transaction).await.unwrap();
    let all = AsideFilter::all();
    assert_eq!(store.requeue(&all, Mode::Apply).await.unwrap(), 1);
    drained(&store).await;
    let requeued = "SELECT count(*) FROM sent WHERE message_id = 'refused'";
    assert_eq!(number(store.pool(), requeued).await, 1);
    relay.stop().await;
}

fn copy_directory(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status();
    assert!(copied.unwrap().success());
}

/// Positions, transaction ids and tokens go back, and the relay is not told.
#[tokio::test]
async fn a_backup_put_back_under_a_running_relay_is_read_from_its_first_row() {
    let server = server().await;
    let url = server.create_database("shop").await.unwrap();
    // Only the sweep would help a relay that trusted its floors.
    let store = PostgresStore::connect(&url).await.unwrap();
    let store = store.with_sweep_pause(Duration::from_secs(3_600));
    store.migrate().await.unwrap();
    // What was sent is not taken back with the database.
    let outside = Postgres::empty().await;
    outside.pool().execute(CREATE_LEDGER).await.unwrap();
    let ledger = Ledger::new(outside.pool().clone());
    let relay = Relay::new(store.clone(), ledger).with_config(brisk());
    let relay = Running::start(relay);
    enqueue_numbers(&store, 0..3).await;
    drained(&store).await;

    let data = server.directory().unwrap().join("data");
    let backup = server.directory().unwrap().join("backup");
    server.kill().await.unwrap();
    copy_directory(&data, &backup);
    server.start_again().await.unwrap();
    for n in 3..10 {
        eventually(DEADLINE, "the server answers", || async {
            store.pending(1).await.is_ok()
        })
        .await;
        enqueue_numbers(&store, n..n + 1).await;
        drained(&store).await;
    }
    let last = "SELECT last_value FROM relaybox_outbox_position_seq";
    let before = number(store.pool(), last).await;

    server.kill().await.unwrap();
    std::fs::remove_dir_all(&data).unwrap();
    copy_directory(&backup, &data);
    server.start_again().await.unwrap();
    let after = PgPool::connect(&url).await.unwrap();
    assert!(number(&after, last).await < before);
    enqueue_numbers(&PostgresStore::new(after), 10..12).await;
    drained(&store).await;
    assert!(!relay.has_ended());
    relay.stop().await;
    judge_ledger(outside.pool(), 12).await;
    assert_eq!(store.floor_alarms(), 0);
}
