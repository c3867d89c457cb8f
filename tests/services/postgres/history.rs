//! Days: a place for each of them, and how they are emptied beside everything else.

use std::slice::from_ref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use relaybox::ErrorKind;
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{OutboxAdmin, OutboxStore};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use crate::store_contract::{Harness, Keeps, confirm, enqueue, keyed, lease_all, request};

use super::trouble::restricted;
use super::*;

const DAY: Duration = Duration::from_secs(86_400);

/// Longest wait of an enqueue or a settlement beside the clean-up. Far above what a loaded machine needs; a clean-up that
/// holds a lock of theirs takes seconds.
const WAIT_MAX: Duration = Duration::from_secs(2);

impl Keeps for Postgres {
    fn keeping(&self, duration: Duration) -> PostgresStore {
        self.store().with_keep_published(duration)
    }

    fn days(count: u32) -> String {
        format!("interval '{count} days'")
    }
}

/// Puts rows into the history, at this instant.
async fn published(h: &Postgres, rows: u32, at: &str) {
    let insert = format!(
        "INSERT INTO relaybox_outbox_history \
         SELECT {at}, n, 0, 'm' || n, 'orders', NULL, 'T', NULL, NULL, NULL, 30, NULL, now() \
         FROM generate_series(1, {rows}) n"
    );
    h.pool().execute(AssertSqlSafe(insert)).await.unwrap();
}

async fn left(h: &Postgres) -> i64 {
    h.number("SELECT count(*) FROM relaybox_outbox_history")
        .await
}

/// Sends one message.
async fn send(store: &PostgresStore, key: &str) -> relaybox::MessageId {
    let message = keyed(key, "x");
    enqueue::<Postgres>(store, from_ref(&message)).await;
    let leases = lease_all(store).await;
    let mut reader = store.reader();
    let page = reader.fetch(&request(&leases)).await.unwrap();
    assert_eq!(page.rows.len(), 1);
    let settled = reader.settle(&confirm(&leases, &page)).await.unwrap();
    assert_eq!(settled.applied, 1);
    store.release(&leases).await.unwrap();
    message.id
}

/// What `clean_up_history` says once there is nothing more to do.
async fn clean(store: &PostgresStore) -> relaybox::Result<()> {
    while store.clean_up_history().await? {}
    Ok(())
}

#[tokio::test]
async fn every_day_has_a_place_of_its_own_and_so_has_any_instant() {
    let h = Postgres::start().await;
    // Midnight of UTC parts them, whatever the session's time zone is.
    h.pool()
        .execute(
            "SET TimeZone = 'America/New_York'; \
             INSERT INTO relaybox_outbox_history \
             SELECT at + day * interval '24 hours', day, 0, 'm', 'orders', NULL, 'T', NULL, NULL, NULL, 30, NULL, now() \
             FROM generate_series(0, 9999) day, unnest(ARRAY['2000-01-01 00:00:00+00'::timestamptz, \
                '2000-01-01 23:59:59.999999+00']) at",
        )
        .await
        .unwrap();
    let days = "SELECT count(*) FROM (SELECT tableoid FROM relaybox_outbox_history GROUP BY tableoid \
        HAVING min(position % 32) = max(position % 32)) partitions";
    assert_eq!(h.number(days).await, 32);
    assert_eq!(
        h.number("SELECT count(*) FROM relaybox_outbox_history_other")
            .await,
        0
    );
    // A clock that lost its battery.
    published(&h, 1, "'1970-01-01'::timestamptz").await;
    published(&h, 1, "'1999-12-25'::timestamptz").await;
    assert_eq!(left(&h).await, 20_002);
}

#[tokio::test]
async fn a_message_is_settled_also_where_the_partition_of_its_day_is_missing() {
    let h = Postgres::start().await;
    let store = h.keeping(DAY);
    send(&store, "kept").await;
    for day in 0..32 {
        let drop = format!("DROP TABLE relaybox_outbox_history_{day:02}");
        h.pool().execute(AssertSqlSafe(drop)).await.unwrap();
    }
    let id = send(&store, "kept elsewhere").await;
    assert_eq!(store.find_published(&id, 10).await.unwrap().len(), 1);
    assert_eq!(store.pending(10).await.unwrap(), 0);
    let error = store.check().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
    let error = store.clean_up_history().await.unwrap_err();
    assert!(error.to_string().contains("outbox_history_00"), "{error}");
}

#[tokio::test]
async fn whole_days_go_by_the_databases_clock_and_never_early() {
    let h = Postgres::start().await;
    let store = h.keeping(3 * DAY);
    let begin =
        "date_trunc('day', (now() - interval '3 days') AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'";
    published(&h, 100, begin).await;
    published(&h, 10, "now()").await;
    published(&h, 10, "now() + interval '1 day'").await;
    clean(&store).await.unwrap();
    assert_eq!(left(&h).await, 120);
    for days in [0, 1, 9, 27] {
        let end = format!("{begin} - interval '{days} days 1 microsecond'");
        published(&h, 100, &end).await;
    }
    clean(&store).await.unwrap();
    assert_eq!(left(&h).await, 120);
    // Emptied, not deleted row by row: the file is gone at once.
    let pages = "SELECT count(*) FROM pg_inherits \
        WHERE inhparent = 'relaybox_outbox_history'::regclass AND pg_relation_size(inhrelid) > 0";
    assert!(h.number(pages).await <= 3);
}

#[tokio::test]
async fn a_day_that_comes_round_before_it_was_emptied_loses_its_old_rows_only() {
    let h = Postgres::start().await;
    let store = h.keeping(7 * DAY);
    published(&h, 1_200, "now() - interval '32 days'").await;
    published(&h, 1_200, "now() - interval '64 days'").await;
    published(&h, 30, "now()").await;
    published(&h, 700, "'1970-01-01'::timestamptz").await;
    let mut steps = 1;
    while store.clean_up_history().await.unwrap() {
        steps += 1;
    }
    assert_eq!(left(&h).await, 30);
    assert_eq!(steps, 6);
}

#[tokio::test]
async fn who_has_read_an_old_day_and_stays_stops_no_settlement_and_keeps_that_day_only() {
    let h = Postgres::start().await;
    let store = h.keeping(3 * DAY);
    published(&h, 10, "now() - interval '10 days'").await;
    published(&h, 20, "now() - interval '12 days'").await;
    published(&h, 30, "now() - interval '14 days'").await;
    let mut reader = PgConnection::connect(&h.url).await.unwrap();
    let mut transaction = reader.begin().await.unwrap();
    let name: String = sqlx::query_scalar(
        "SELECT tableoid::regclass::text FROM relaybox_outbox_history WHERE size = 30 \
         GROUP BY 1 HAVING count(*) = 20",
    )
    .fetch_one(h.pool())
    .await
    .unwrap();
    let read = format!("SELECT count(*) FROM {name}");
    assert_eq!(
        <Postgres as Harness>::number(&mut transaction, &read).await,
        20
    );

    let stopped = async || {
        let started = Instant::now();
        let (cleaned, _) = tokio::join!(store.clean_up_history(), send(&store, "k"));
        assert_eq!(cleaned.unwrap_err().kind(), ErrorKind::Busy);
        assert!(started.elapsed() < WAIT_MAX);
    };
    stopped().await;
    assert_eq!(left(&h).await, 20 + 1);
    // Who reads the whole table holds every partition.
    let all = "SELECT count(*) FROM relaybox_outbox_history";
    assert_eq!(
        <Postgres as Harness>::number(&mut transaction, all).await,
        21
    );
    stopped().await;
    transaction.rollback().await.unwrap();
    clean(&store).await.unwrap();
    assert_eq!(left(&h).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cleaners_at_once_under_load_hold_nobody_up() {
    let h = Postgres::start().await;
    let store = h.keeping(7 * DAY);
    for days in 9..25 {
        published(&h, 20_000, &format!("now() - interval '{days} days'")).await;
    }
    published(&h, 10_000, "now() - interval '32 days'").await;
    let stop = Arc::new(AtomicBool::new(false));
    let writer = tokio::spawn({
        let (store, stop) = (store.clone(), stop.clone());
        async move {
            let (mut written, mut longest) = (0, Duration::ZERO);
            while !stop.load(Ordering::SeqCst) {
                let started = Instant::now();
                enqueue::<Postgres>(&store, &[keyed("a", "x"), keyed("b", "x")]).await;
                longest = longest.max(started.elapsed());
                written += 2;
            }
            (written, longest)
        }
    });
    let relay = tokio::spawn({
        let (store, stop) = (store.clone(), stop.clone());
        async move {
            let leases = lease_all(&store).await;
            let (mut reader, mut longest) = (store.reader(), Duration::ZERO);
            loop {
                let last = stop.load(Ordering::SeqCst);
                let page = reader.fetch(&request(&leases)).await.unwrap();
                if page.rows.is_empty() && last {
                    return longest;
                }
                let started = Instant::now();
                let settled = reader.settle(&confirm(&leases, &page)).await.unwrap();
                longest = longest.max(started.elapsed());
                assert_eq!(settled.applied, page.rows.len());
            }
        }
    });
    let cleaners: Vec<_> = (0..3)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let old = "SELECT count(*) FROM relaybox_outbox_history \
                    WHERE published_at < now() - interval '8 days'";
                let left = async || -> i64 {
                    let counted = sqlx::query_scalar(old).fetch_one(store.pool());
                    counted.await.unwrap()
                };
                while left().await > 0 {
                    // A day may be in another one's hand, or in that of the server's own analysis.
                    if let Err(error) = clean(&store).await {
                        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
                    }
                }
            })
        })
        .collect();
    for cleaner in cleaners {
        let cleaned = tokio::time::timeout(30 * WAIT_MAX, cleaner);
        cleaned.await.expect("cleaning up ends").unwrap();
    }
    stop.store(true, Ordering::SeqCst);
    let (written, enqueued) = writer.await.unwrap();
    // The last messages may have been written after the relay had looked.
    let settled = relay.await.unwrap();
    assert!(
        enqueued < WAIT_MAX && settled < WAIT_MAX,
        "{enqueued:?} {settled:?}"
    );
    assert_eq!(
        left(&h).await + h.number("SELECT count(*) FROM relaybox_outbox").await,
        written
    );
}

/// The day comes round between the look at a partition and its lock.
#[tokio::test]
async fn a_row_that_comes_while_its_partition_is_about_to_be_emptied_stays() {
    let h = Postgres::start().await;
    let store = h.keeping(7 * DAY);
    for _ in 0..5 {
        published(&h, 10, "now() - interval '32 days'").await;
        let before = left(&h).await;
        let mut writer = h.pool().begin().await.unwrap();
        let insert = "INSERT INTO relaybox_outbox_history \
            VALUES (now(), 1, 0, 'young', 'orders', NULL, 'T', NULL, NULL, NULL, 30, NULL, now())";
        assert!(Postgres::execute(&mut writer, insert).await);
        let commit = async {
            let waits = tokio::time::timeout(WAIT_MAX, h.blocked());
            waits.await.expect("the clean-up waits for the writer");
            writer.commit().await.unwrap();
        };
        let (cleaned, ()) = tokio::join!(store.clean_up_history(), commit);
        // It may have given up waiting before we noticed that it does.
        assert!(cleaned.is_ok() || cleaned.unwrap_err().kind() == ErrorKind::Busy);
        assert_eq!(left(&h).await, before + 1);
        clean(&store).await.unwrap();
        h.pool()
            .execute("DELETE FROM relaybox_outbox_history")
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn the_documented_rights_are_enough_and_each_is_missed_at_start() {
    let h = Postgres::start().await;
    let readme = include_str!("../../../migrations/README.md");
    let begin = readme
        .find("GRANT INSERT ON relaybox_outbox_history")
        .unwrap();
    let length = readme[begin..].find("\n```").unwrap();
    let documented = &readme[begin..begin + length];
    let needed = [
        "SELECT ON relaybox_outbox_lane",
        "SELECT ON relaybox_outbox",
        "SELECT ON relaybox_outbox_aside",
        "SELECT ON relaybox_outbox_destination",
        "SELECT ON relaybox_relay",
    ];
    let relay = restricted(&h, "relay", &needed).await;
    OutboxStore::check(&relay).await.unwrap();
    let keeping = relay.with_keep_published(7 * DAY);
    let role: String = sqlx::query_scalar("SELECT current_user::text")
        .fetch_one(keeping.pool())
        .await
        .unwrap();
    for missing in ["INSERT", "SELECT", "UPDATE", "DELETE", "TRUNCATE"] {
        let error = keeping.check().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration);
        let grant = documented.replace("TO relay;", &format!("TO {role};"));
        let grant = grant.replace("TO relay'", &format!("TO {role}'"));
        assert_ne!(grant, documented);
        let without = if missing == "INSERT" {
            format!("REVOKE INSERT ON relaybox_outbox_history FROM {role}")
        } else {
            format!("REVOKE {missing} ON relaybox_outbox_history_07 FROM {role}")
        };
        let mut owner = h.pool().acquire().await.unwrap();
        assert!(Postgres::execute(&mut owner, &grant).await);
        keeping.check().await.unwrap();
        assert!(Postgres::execute(&mut owner, &without).await);
    }
    let error = keeping.check().await.unwrap_err();
    assert!(error.to_string().contains("TRUNCATE"), "{error}");
    let mut owner = h.pool().acquire().await.unwrap();
    let grant = format!("GRANT TRUNCATE ON relaybox_outbox_history_07 TO {role}");
    assert!(Postgres::execute(&mut owner, &grant).await);
    for days in 0..32 {
        published(&h, 3, &format!("now() - interval '{days} days'")).await;
    }
    published(&h, 3, "now() - interval '33 days'").await;
    clean(&keeping).await.unwrap();
    assert_eq!(left(&h).await, 3 * 8);
}
