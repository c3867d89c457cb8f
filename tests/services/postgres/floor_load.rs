//! The scan floor under load: what it reads, how much it looks at, and how many statements it takes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use relaybox::store::postgres::PostgresStore;
use relaybox::store::{Enqueue, InboxStore, Lease, OutboxReader, OutboxStore};
use sqlx::{Connection, Executor};

use crate::store_contract::{Harness, confirm, enqueue, keyed, lease_all, request};

use super::*;

const AGGREGATES: u64 = 200;

/// One writer: locks its aggregate, at times holds it open, uses savepoints, prepares, or rolls back.
async fn write(
    store: PostgresStore,
    seed: u64,
    stop: Arc<AtomicBool>,
    committed: Arc<AtomicUsize>,
) {
    let mut dice = fastrand::Rng::with_seed(seed);
    let mut round = 0;
    while !stop.load(Ordering::SeqCst) {
        round += 1;
        let mut session = store.pool().acquire().await.unwrap();
        let id = dice.u64(0..AGGREGATES);
        assert!(Postgres::execute(&mut session, "BEGIN").await);
        if dice.bool() {
            // An id of its own, older than the lock that it waits for.
            assert!(Postgres::execute(&mut session, "SELECT pg_current_xact_id()").await);
        }
        let lock = format!(
            "UPDATE aggregate SET version = version + 1 WHERE id = {id} RETURNING version::bigint"
        );
        let version = <Postgres as Harness>::number(&mut session, &lock).await;
        if dice.u8(0..5) == 0 {
            assert!(Postgres::execute(&mut session, "SAVEPOINT s").await);
            let undone = keyed(&id.to_string(), "-1");
            store.insert(&mut session, &[undone]).await.unwrap();
            assert!(Postgres::execute(&mut session, "ROLLBACK TO s").await);
        }
        let message = keyed(&id.to_string(), &version.to_string());
        store.insert(&mut session, &[message]).await.unwrap();
        let hold = match dice.u8(0..20) {
            0 => dice.u64(100..1_500),
            1..8 => dice.u64(1..40),
            _ => 0,
        };
        tokio::time::sleep(Duration::from_millis(hold)).await;
        if dice.u8(0..7) == 0 {
            assert!(Postgres::execute(&mut session, "ROLLBACK").await);
            continue;
        }
        if dice.u8(0..40) == 0 {
            let name = format!("w{seed}-{round}");
            assert!(
                Postgres::execute(&mut session, &format!("PREPARE TRANSACTION '{name}'")).await
            );
            tokio::time::sleep(Duration::from_millis(dice.u64(1..300))).await;
            assert!(Postgres::execute(&mut session, &format!("COMMIT PREPARED '{name}'")).await);
        } else {
            assert!(Postgres::execute(&mut session, "COMMIT").await);
        }
        committed.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forty_writers_for_ten_seconds_lose_repeat_and_reorder_nothing() {
    const WRITERS: u64 = 40;
    let h = Postgres::start().await;
    let create = format!(
        "CREATE TABLE aggregate AS SELECT id, 0 AS version FROM generate_series(0, {AGGREGATES}) id; \
         ALTER TABLE aggregate ADD PRIMARY KEY (id)"
    );
    h.pool()
        .execute(sqlx::raw_sql(sqlx::AssertSqlSafe(create)))
        .await
        .unwrap();
    let pool = PgPoolOptions::new()
        .max_connections(44)
        .connect(&h.url)
        .await
        .unwrap();
    let store = PostgresStore::new(pool).with_sweep_pause(Duration::from_millis(500));
    let seed = fastrand::u64(..1 << 32);
    println!("seed {seed}");
    let (stop, committed) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicUsize::new(0)),
    );
    let writers: Vec<_> = (0..WRITERS)
        .map(|n| {
            tokio::spawn(write(
                store.clone(),
                seed + n,
                stop.clone(),
                committed.clone(),
            ))
        })
        .collect();

    let leases = lease_all(&store).await;
    fill_relay_pool(&store).await;
    let mut halves = [store.reader(), store.reader()];
    let leases = [leases[..8].to_vec(), leases[8..].to_vec()];
    let mut last: HashMap<String, i64> = HashMap::new();
    let (mut seen, mut polls, mut late) = (0, 0, 0);
    let (mut highest, mut idle) = (0, 0);
    let started = Instant::now();
    while idle < 4 {
        if started.elapsed() > Duration::from_secs(10) {
            stop.store(true, Ordering::SeqCst);
        }
        let done = writers.iter().all(tokio::task::JoinHandle::is_finished);
        let mut moved = false;
        for (reader, leases) in halves.iter_mut().zip(&leases) {
            let mut request = request(leases);
            request.rows_max = [16, 256, 1_000][polls % 3];
            let page = reader.fetch(&request).await.unwrap();
            polls += 1;
            for row in &page.rows {
                let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
                let key = text(row.message.key.as_ref().unwrap());
                let version: i64 = text(row.message.payload.as_ref().unwrap()).parse().unwrap();
                let before = last.insert(key.clone(), version).unwrap_or(0);
                assert_eq!(version, before + 1, "aggregate {key}, seed {seed}");
                late += usize::from(row.place.position < highest);
                highest = highest.max(row.place.position);
                seen += 1;
                moved = true;
            }
            let settled = reader.settle(&confirm(leases, &page)).await.unwrap();
            assert_eq!(settled.fenced, 0);
        }
        idle = if done && !moved { idle + 1 } else { 0 };
    }
    for writer in writers {
        writer.await.unwrap();
    }
    let committed = committed.load(Ordering::SeqCst);
    println!("{committed} committed, {seen} read in {polls} pages, {late} after a higher position");
    assert_eq!(seen, committed);
    assert_eq!(store.pending(1).await.unwrap(), 0);
    assert_eq!(store.floor_alarms(), 0);
}

async fn drain(reader: &mut Box<dyn OutboxReader>, leases: &[Lease]) {
    loop {
        let page = reader.fetch(&request(leases)).await.unwrap();
        if page.rows.is_empty() {
            break;
        }
        reader.settle(&confirm(leases, &page)).await.unwrap();
    }
}

/// Ends all sessions but this one, so that all they counted is in the statistics, and returns how many index entries
/// scans of the outbox came by.
async fn visited(pin: &mut PgConnection) -> i64 {
    let others =
        "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    let kill = format!("SELECT pg_terminate_backend(pid) {others}");
    assert!(Postgres::execute(pin, &kill).await);
    let left = format!("SELECT count(*) {others}");
    let anew = "SELECT pg_stat_clear_snapshot()";
    while <Postgres as Harness>::number(pin, &left).await != 0 {
        assert!(Postgres::execute(pin, anew).await);
    }
    assert!(Postgres::execute(pin, anew).await);
    let read = "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE relname = 'relaybox_outbox'";
    <Postgres as Harness>::number(pin, read).await
}

#[tokio::test]
async fn an_old_snapshot_does_not_make_a_fetch_walk_over_what_is_settled() {
    const BATCH: usize = 2_000;
    const ROWS: i64 = 10 * BATCH as i64;
    const POLLS: i64 = 100;
    let h = Postgres::start().await;
    let store = h.store();
    let mut pin = PgConnection::connect(&h.url).await.unwrap();
    let snapshot = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1";
    assert!(Postgres::execute(&mut pin, snapshot).await);
    let messages: Vec<_> = (0..BATCH).map(|n| keyed(&n.to_string(), "x")).collect();
    let leases = lease_all(&store).await;
    let mut reader = store.reader();
    for _ in 0..10 {
        enqueue::<Postgres>(&store, &messages).await;
        drain(&mut reader, &leases).await;
    }
    let filled = visited(&mut pin).await;
    // The sessions are new ones, so that the first fetches begin at the first row; the others must not.
    fill_relay_pool(&store).await;
    while reader.fetch(&request(&leases)).await.is_err() {}
    for _ in 0..4 {
        enqueue::<Postgres>(&store, &messages[..64]).await;
        drain(&mut reader, &leases).await;
    }
    for _ in 0..POLLS {
        let page = reader.fetch(&request(&leases)).await.unwrap();
        assert!(page.rows.is_empty());
    }
    let cost = visited(&mut pin).await - filled;
    println!("{ROWS} rows settled under the snapshot; {POLLS} fetches visited {cost}");
    assert!(cost >= ROWS, "nothing kept them: {cost}");
    assert!(cost < 40 * ROWS, "{cost}");
}

/// Every statement of a relay is a transaction of its own, so the database's count tells.
#[tokio::test]
async fn a_batch_of_any_size_takes_three_statements_at_most() {
    const BATCHES: i64 = 1_200;
    let server = server_without_autovacuum().await;
    let url = server.create_database("statements").await.unwrap();
    let store = PostgresStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    let h = Postgres { url, store };
    let store = h.store();
    let leases = lease_all(&store).await;
    let mut reader = store.reader();
    let messages: Vec<_> = (0..200).map(|n| keyed(&n.to_string(), "x")).collect();
    let count = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()";
    let mut sessions = Vec::new();
    for _ in 0..=BATCHES {
        let mut late = store.begin().await.unwrap();
        let connection = PostgresStore::connection(&mut late);
        store.insert(connection, &messages[..20]).await.unwrap();
        sessions.push(late);
        // A late commit for each batch, so that each reads below its floor.
        enqueue::<Postgres>(&store, &messages).await;
        if sessions.len() == 3 {
            store.commit(sessions.remove(0)).await.unwrap();
        }
        let page = reader.fetch(&request(&leases)).await.unwrap();
        assert!(page.rows.len() >= 200);
        reader.settle(&confirm(&leases, &page)).await.unwrap();
    }
    for late in sessions {
        store.commit(late).await.unwrap();
    }
    drain(&mut reader, &leases).await;
    h.terminate_others().await;
    let all = h.number(count).await;
    // Two transactions a batch are of the writers. Some hundreds are of new connections, each of which prepares its
    // statements and makes the reader begin anew; a fourth statement would add one for every batch.
    let writers = 2 * (BATCHES + 1);
    println!("{all} transactions for {BATCHES} batches, {writers} of writers");
    assert!(all - writers <= 3 * BATCHES + 800, "{all}");
}

/// A server of the test's own, because autovacuum counts its transactions with everybody's.
async fn server_without_autovacuum() -> relaybox_testcontainers::Postgres {
    let options = relaybox_testcontainers::PostgresOptions::default().with_local_process();
    let server = relaybox_testcontainers::Postgres::start_with(options)
        .await
        .unwrap();
    let pool = PgPool::connect(&server.url()).await.unwrap();
    for sql in [
        "ALTER SYSTEM SET autovacuum = off",
        "SELECT pg_reload_conf()",
    ] {
        sqlx::query(sql).execute(&pool).await.unwrap();
    }
    relaybox::testing::eventually(Duration::from_secs(30), "autovacuum is off", || async {
        let setting: String = sqlx::query_scalar("SHOW autovacuum")
            .fetch_one(&pool)
            .await
            .unwrap();
        setting == "off"
    })
    .await;
    server
}
