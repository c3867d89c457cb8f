//! Order, fences, transactions and plans under real sessions.

use std::slice::from_ref;
use std::str::FromStr;
use std::time::Duration;

use relaybox::lane::lane_of;
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{
    DeadLetterStore, Enqueue, InboxStore, OutboxStore, Prefix, Recorded, SettlementBatch, Verdict,
};
use relaybox::{ErrorKind, Message};
use sqlx::postgres::{PgConnectOptions, PgPool};
use sqlx::{AssertSqlSafe, Connection, Executor};

use crate::store_contract::{Harness, enqueue, keyed, lease_all, pending, request};

use super::*;

#[tokio::test]
async fn a_late_commit_with_a_lower_position_is_fetched_like_any_other() {
    let h = Postgres::start().await;
    let store = h.store();
    let (early, late) = (keyed("k", "1"), keyed("k", "2"));
    let mut open = store.begin().await.unwrap();
    let connection = PostgresStore::connection(&mut open);
    store.insert(connection, from_ref(&early)).await.unwrap();
    enqueue::<Postgres>(&store, from_ref(&late)).await;

    let leases = lease_all(&store).await;
    let mut reader = store.reader();
    let page = reader.fetch(&request(&leases)).await.unwrap();
    assert_eq!(page.rows.len(), 1);
    let passed = page.rows[0].place.position;
    let batch = SettlementBatch {
        leases: leases.clone(),
        verdicts: vec![(page.rows[0].place, Verdict::Confirmed)],
    };
    assert_eq!(reader.settle(&batch).await.unwrap().applied, 1);
    store.commit(open).await.unwrap();
    let page = reader.fetch(&request(&leases)).await.unwrap();
    assert_eq!(page.rows[0].message.id, early.id);
    assert!(page.rows[0].place.position < passed);
}

#[tokio::test]
async fn a_lane_cannot_change_hands_while_its_settlement_is_under_way() {
    let h = Postgres::start().await;
    let store = h.store();
    enqueue::<Postgres>(&store, &[keyed("k", "1")]).await;
    let old = store.lease("old", 16, Duration::ZERO).await.unwrap();
    let mut reader = store.reader();
    let page = reader.fetch(&request(&old)).await.unwrap();
    let place = page.rows[0].place;
    let batch = SettlementBatch {
        leases: old,
        verdicts: vec![(place, Verdict::Confirmed)],
    };
    // Somebody's lock on the row keeps the settlement waiting in the middle.
    let mut locker = h.pool().begin().await.unwrap();
    let lock = "SELECT FROM relaybox_outbox FOR UPDATE";
    assert!(Postgres::execute(&mut locker, lock).await);
    let takeover = async {
        h.blocked().await;
        let new = store
            .lease("new", 16, Duration::from_secs(60))
            .await
            .unwrap();
        assert_eq!(new.len(), 15);
        assert!(new.iter().all(|lease| lease.lane != place.lane));
        locker.rollback().await.unwrap();
    };
    let (settled, ()) = tokio::join!(reader.settle(&batch), takeover);
    assert_eq!(settled.unwrap().applied, 1);
}

#[tokio::test]
async fn an_aborted_transaction_is_never_reported_as_committed() {
    let h = Postgres::start().await;
    let store = h.single().await;
    let mut transaction = store.begin().await.unwrap();
    let keys = ["m-1"];
    store.record(&mut transaction, "c", &keys).await.unwrap();
    let connection = PostgresStore::connection(&mut transaction);
    let insert = "INSERT INTO work (id) VALUES (1)";
    assert!(Postgres::execute(connection, insert).await);
    assert!(!Postgres::execute(connection, insert).await);
    let error = store.commit(transaction).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Handler);
    assert!(!error.is_transient());
    assert!(error.to_string().contains("25P02"), "{error}");
    assert_eq!(h.number("SELECT count(*) FROM work").await, 0);
    let mut transaction = store.begin().await.unwrap();
    let recorded = store.record(&mut transaction, "c", &keys).await.unwrap();
    assert_eq!(recorded, [Recorded::First]);
}

#[tokio::test]
async fn a_handler_keeps_the_lock_timeout_of_its_session() {
    let h = Postgres::start().await;
    let options = PgConnectOptions::from_str(&h.url).unwrap();
    let pool = PgPool::connect_with(options.options([("lock_timeout", "1234ms")]));
    let store = PostgresStore::new(pool.await.unwrap());
    let mut transaction = store.begin().await.unwrap();
    for expected in [Recorded::First, Recorded::Duplicate] {
        let keys = ["m-1"];
        let recorded = store.record(&mut transaction, "c", &keys).await.unwrap();
        assert_eq!(recorded, [expected]);
        let connection = PostgresStore::connection(&mut transaction);
        let timeout: String = sqlx::query_scalar("SELECT current_setting('lock_timeout')")
            .fetch_one(connection)
            .await
            .unwrap();
        assert_eq!(timeout, "1234ms");
    }
}

#[tokio::test]
async fn a_conflict_of_snapshots_asks_to_run_again() {
    let h = Postgres::start().await;
    let store = h.store();
    let keys = ["m-1"];
    let mut transaction = store.begin().await.unwrap();
    let connection = PostgresStore::connection(&mut transaction);
    let level = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT FROM work";
    assert!(Postgres::execute(connection, level).await);
    let mut other = store.begin().await.unwrap();
    store.record(&mut other, "c", &keys).await.unwrap();
    store.commit(other).await.unwrap();
    let error = store
        .record(&mut transaction, "c", &keys)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
}

#[tokio::test]
async fn a_prefix_with_a_schema_makes_tables_of_its_own() {
    let h = Postgres::start().await;
    let other = h
        .store()
        .with_prefix(Prefix::new("messaging.box_").unwrap());
    other.migrate().await.unwrap();
    other.migrate().await.unwrap();
    OutboxStore::check(&other).await.unwrap();
    InboxStore::check(&other).await.unwrap();
    enqueue::<Postgres>(&other, &[keyed("k", "1")]).await;
    assert_eq!(pending(&other).await.rows.len(), 1);
    assert_eq!(other.count("c").await.unwrap(), 0);
    assert!(pending(&h.store()).await.rows.is_empty());
    let applied = h.number("SELECT count(*) FROM messaging.box_migrations");
    assert_eq!(applied.await, 1);
    let foreign = h.number("SELECT count(*) FROM pg_class WHERE relname = '_sqlx_migrations'");
    assert_eq!(foreign.await, 0);
}

#[tokio::test]
async fn instants_do_not_depend_on_the_time_zone_of_the_session() {
    let h = Postgres::start().await;
    let options = PgConnectOptions::from_str(&h.url).unwrap();
    let kathmandu = options.options([("timezone", "Asia/Kathmandu")]);
    let store = PostgresStore::new(PgPool::connect_with(kathmandu).await.unwrap());
    let message = keyed("k", "1");
    enqueue::<Postgres>(&store, from_ref(&message)).await;
    assert_eq!(pending(&store).await.rows[0].message, message);
    assert_eq!(pending(&h.store()).await.rows[0].message, message);
    let leases = store
        .lease("far", 16, Duration::from_secs(60))
        .await
        .unwrap();
    assert_eq!(leases.len(), 16);
    let other = h.store().lease("near", 16, Duration::from_secs(60)).await;
    assert!(other.unwrap().is_empty());
}

#[tokio::test]
async fn stale_statistics_neither_lift_the_limit_nor_cause_a_scan() {
    let h = Postgres::start().await;
    let store = h.store();
    enqueue::<Postgres>(&store, &[keyed("k", "x")]).await;
    h.pool()
        .execute("ANALYZE relaybox_outbox; ANALYZE relaybox_outbox_lane")
        .await
        .unwrap();
    let scans = "SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'relaybox_outbox'";
    h.terminate_others().await;
    let before = h.number(scans).await;

    for _ in 0..20 {
        let leases = store.lease("relay", 1, Duration::ZERO).await.unwrap();
        assert!(leases.len() <= 1);
    }
    let leases = lease_all(&store).await;
    let mut reader = store.reader();
    let mut request = request(&leases);
    // On an almost empty table a scan is the cheapest plan, and the prepared statement would keep it.
    for _ in 0..40 {
        assert_eq!(reader.fetch(&request).await.unwrap().rows.len(), 1);
    }
    let messages: Vec<_> = (1..5_000).map(|n| keyed(&n.to_string(), "x")).collect();
    enqueue::<Postgres>(&store, &messages).await;
    request.rows_max = 1;
    for _ in 0..200 {
        assert!(reader.fetch(&request).await.unwrap().rows.len() <= 1);
    }
    request.rows_max = 1_600;
    let page = reader.fetch(&request).await.unwrap();
    assert_eq!(page.rows.len(), 1_600);
    let verdicts = page.rows.iter();
    let batch = SettlementBatch {
        leases: leases.clone(),
        verdicts: verdicts
            .map(|row| (row.place, Verdict::Confirmed))
            .collect(),
    };
    assert_eq!(reader.settle(&batch).await.unwrap().applied, 1_600);
    store.renew(&leases, Duration::from_secs(60)).await.unwrap();
    store.release(&leases).await.unwrap();
    // A session's counts are sure to be in the view once it has ended.
    h.terminate_others().await;
    assert_eq!(h.number(scans).await, before);
}

#[tokio::test]
async fn the_documented_insert_serves_other_clients() {
    let readme = include_str!("../../../migrations/README.md");
    let begin = readme.find("INSERT INTO relaybox_outbox").unwrap();
    let length = readme[begin..].find("```").unwrap();
    let insert = &readme[begin..begin + length];
    let h = Postgres::start().await;
    let key = "ключ-🚀".as_bytes();
    for key in [Some(key), None] {
        let inserted = sqlx::query(AssertSqlSafe(insert.to_owned()))
            .bind("m-1")
            .bind("orders")
            .bind(key)
            .bind("OrderPlaced")
            .bind("application/json")
            .bind(r#"[["tenant","acme"]]"#)
            .bind(b"{}".as_slice())
            .execute(h.pool())
            .await
            .unwrap();
        assert_eq!(inserted.rows_affected(), 1);
    }
    let page = pending(&h.store()).await;
    assert_eq!(page.rows.len(), 2);
    for row in &page.rows {
        let message = &row.message;
        let spread_by = message.key.as_deref().unwrap_or(b"m-1");
        assert_eq!(row.place.lane, lane_of(spread_by));
        assert_eq!(message.headers.get_str("tenant"), Some("acme"));
        let sizes = format!(
            "SELECT size::bigint FROM relaybox_outbox WHERE position = {}",
            row.place.position
        );
        let size = usize::try_from(h.number(&sizes).await).unwrap();
        assert!(size >= message.bytes(), "{size}");
    }
    let plain = Message::new("orders", "T");
    enqueue::<Postgres>(&h.store(), &[plain]).await;
    assert_eq!(h.store().pending(10).await.unwrap(), 3);
}

/// The store as a role that has only these rights on the tables.
/// Writers lock their aggregate before they enqueue, at times hold it open, use savepoints and roll back; relays share
/// the lanes. The version of an aggregate is the payload.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_writers_and_relays_lose_repeat_and_reorder_nothing() {
    const WRITERS: u64 = 8;
    const TRANSACTIONS: u64 = 80;
    let h = Postgres::start().await;
    let create = "CREATE TABLE aggregate AS SELECT id, 0 AS version FROM generate_series(0, 9) id";
    h.pool().execute(create).await.unwrap();
    let writers = (0..WRITERS).map(|writer| {
        let store = h.store();
        tokio::spawn(async move {
            let mut committed = 0;
            for n in 0..TRANSACTIONS {
                let id = (writer * 7 + n * 3) % 10;
                let mut transaction = store.begin().await.unwrap();
                let connection = PostgresStore::connection(&mut transaction);
                if n % 2 == 0 {
                    // A transaction id of its own, older than the lock that it waits for.
                    <Postgres as Harness>::number(connection, "SELECT pg_current_xact_id()::text::bigint").await;
                }
                let lock = format!(
                    "UPDATE aggregate SET version = version + 1 WHERE id = {id} RETURNING version::bigint"
                );
                let version = <Postgres as Harness>::number(connection, &lock).await;
                let message = keyed(&id.to_string(), &version.to_string());
                if n % 5 == 0 {
                    let mut savepoint = connection.begin().await.unwrap();
                    let undone = keyed(&id.to_string(), "-1");
                    store.insert(&mut savepoint, &[undone]).await.unwrap();
                    savepoint.rollback().await.unwrap();
                }
                store.insert(connection, &[message]).await.unwrap();
                if n % 3 == 0 {
                    Postgres::execute(connection, "SELECT pg_sleep(0.002)").await;
                }
                if n % 7 == 0 {
                    store.rollback(transaction).await.unwrap();
                } else {
                    store.commit(transaction).await.unwrap();
                    committed += 1;
                }
            }
            committed
        })
    });
    let writers: Vec<_> = writers.collect();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let relays: Vec<_> = (0..3)
        .map(|_| {
            let (store, stop, seen) = (h.store(), stop.clone(), seen.clone());
            tokio::spawn(async move {
                let mut reader = store.reader();
                loop {
                    let leases = store
                        .lease("relay", 6, Duration::from_secs(60))
                        .await
                        .unwrap();
                    let last = stop.load(std::sync::atomic::Ordering::SeqCst);
                    for _ in 0..5 {
                        let mut request = request(&leases);
                        request.rows_max = 24;
                        let page = reader.fetch(&request).await.unwrap();
                        let published = page.rows.iter().map(|row| {
                            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
                            let key = text(row.message.key.as_ref().unwrap());
                            let version = text(row.message.payload.as_ref().unwrap());
                            (key, version.parse::<i64>().unwrap())
                        });
                        seen.lock().unwrap().extend(published);
                        let batch = SettlementBatch {
                            leases: leases.clone(),
                            verdicts: page
                                .rows
                                .iter()
                                .map(|row| (row.place, Verdict::Confirmed))
                                .collect(),
                        };
                        assert_eq!(reader.settle(&batch).await.unwrap().fenced, 0);
                    }
                    store.release(&leases).await.unwrap();
                    if last && store.pending(1).await.unwrap() == 0 {
                        break;
                    }
                }
            })
        })
        .collect();
    let mut committed = 0;
    for writer in writers {
        committed += writer.await.unwrap();
    }
    stop.store(true, std::sync::atomic::Ordering::SeqCst);
    for relay in relays {
        relay.await.unwrap();
    }
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), committed);
    let mut last = std::collections::HashMap::new();
    for (key, version) in seen.iter() {
        let before = last.insert(key, *version).unwrap_or(0);
        assert_eq!(*version, before + 1, "key {key}");
    }
}
