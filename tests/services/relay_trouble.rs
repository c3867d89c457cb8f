//! A relay in a database that makes trouble: conflicts, killed connections, settings and tables of others.

use std::str::FromStr;
use std::time::Duration;

use relaybox::backoff::DelayPolicy;
use relaybox::broker::RejectionScope;
use relaybox::broker::memory::MemoryBroker;
use relaybox::relay::Relay;
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{AsideFilter, Mode, OutboxAdmin};
use relaybox::testing::{Fault, FaultyPublisher, eventually};
use sqlx::postgres::{PgConnectOptions, PgPool};
use sqlx::{AssertSqlSafe, Executor};

use crate::ledger::Ledger;
use crate::postgres::Postgres;
use crate::relay_process::{
    DEADLINE, FETCHING, REGISTERING, RENEWING, Running, SETTLING, Sent, brisk,
    database_with_ledger, drained, entries, judge, numbered,
};
use crate::store_contract::{Harness, enqueue, keyed};

const KEYS: u32 = 10;

/// A relay whose own sessions are called `relay`, so that nobody else's are hit. Its lease is longer than any lock that a test
/// holds, also on a busy machine: a lane that is lost is sent again.
async fn start_relay(h: &Postgres) -> Running {
    let options = PgConnectOptions::from_str(&h.url).unwrap();
    let pool = PgPool::connect_with(options.application_name("relay"));
    let config = brisk()
        .with_lease(Duration::from_secs(15))
        .with_backoff(DelayPolicy::exponential(Duration::from_millis(10)));
    let ledger = Ledger::new(h.pool().clone());
    let store = PostgresStore::new(pool.await.unwrap());
    Running::start(Relay::new(store, ledger).with_config(config))
}

/// Everything was sent once and in order, and the relay still runs.
async fn judge_and_stop(h: &Postgres, relay: Running, count: u32) {
    drained(&h.store).await;
    assert!(!relay.has_ended());
    relay.stop().await;
    let all = entries(h.pool()).await.into_iter();
    let all: Vec<Sent> = all.map(|entry| entry.sent).collect();
    let repeated = judge("trouble", &all, KEYS, count);
    assert!(repeated.is_empty(), "sent twice: {repeated:?}");
}

/// Fails the first four statements on each of the tables that a relay writes to, as the server would.
const CONFLICTS: &str = "
    CREATE SEQUENCE conflicts_outbox;
    CREATE SEQUENCE conflicts_outbox_lane;
    CREATE SEQUENCE conflicts_relay;
    CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        n bigint := nextval(replace(TG_TABLE_NAME, 'relaybox', 'conflicts'));
    BEGIN
        IF n <= 4 THEN
            RAISE EXCEPTION 'made up' USING ERRCODE = CASE n % 2 WHEN 0 THEN '40001' ELSE '40P01' END;
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER conflict BEFORE DELETE ON relaybox_outbox FOR EACH STATEMENT EXECUTE FUNCTION conflict();
    CREATE TRIGGER conflict BEFORE UPDATE ON relaybox_outbox_lane FOR EACH STATEMENT EXECUTE FUNCTION conflict();
    CREATE TRIGGER conflict BEFORE INSERT ON relaybox_relay FOR EACH STATEMENT EXECUTE FUNCTION conflict();";

#[tokio::test]
async fn conflicts_in_each_statement_of_a_relay_stop_nothing_and_repeat_nothing() {
    let h = database_with_ledger().await;
    h.pool().execute(sqlx::raw_sql(CONFLICTS)).await.unwrap();
    enqueue::<Postgres>(&h.store, &numbered("orders", KEYS, 0..3)).await;
    let relay = start_relay(&h).await;
    judge_and_stop(&h, relay, 3).await;
    let met =
        "SELECT count(*) FROM pg_sequences WHERE sequencename LIKE 'conflicts%' AND last_value > 4";
    assert_eq!(h.number(met).await, 3);
}

/// Waits until a session of the relay waits for a lock with such a statement: it is under way for certain.
async fn waiting(h: &Postgres, statement: &str) {
    let waiting = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
         AND application_name = 'relay' AND wait_event_type = 'Lock' AND query LIKE '{statement}'"
    );
    eventually(DEADLINE, statement, || async {
        h.number(&waiting).await > 0
    })
    .await;
}

#[tokio::test]
async fn connections_killed_under_every_statement_stop_nothing_and_repeat_nothing() {
    const LANES: &str = "SELECT FROM relaybox_outbox_lane FOR UPDATE";
    const KILL: &str = "SELECT count(pg_terminate_backend(pid, 10000)) FROM pg_stat_activity \
        WHERE datname = current_database() AND application_name = 'relay'";
    let h = database_with_ledger().await;
    let relay = start_relay(&h).await;
    let mut count = 0;
    let mut next = || {
        count += 1;
        numbered("orders", KEYS, count - 1..count)
    };
    enqueue::<Postgres>(&h.store, &next()).await;
    drained(&h.store).await;
    // What keeps a statement waiting, and which one that is.
    for (lock, statement) in [
        (LANES, SETTLING),
        (LANES, RENEWING),
        ("LOCK TABLE relaybox_outbox", FETCHING),
        ("LOCK TABLE relaybox_relay", REGISTERING),
    ] {
        let mut locker = h.pool().begin().await.unwrap();
        locker.execute(lock).await.unwrap();
        if statement == SETTLING {
            enqueue::<Postgres>(&h.store, &next()).await;
        }
        for _ in 0..3 {
            waiting(&h, statement).await;
            assert!(<Postgres as Harness>::number(&mut locker, KILL).await > 0);
        }
        locker.rollback().await.unwrap();
        enqueue::<Postgres>(&h.store, &next()).await;
        drained(&h.store).await;
    }
    judge_and_stop(&h, relay, count).await;
}

/// Somebody takes a lock, a statement of the relay waits for it with another one in hand, and that one is wanted too.
#[tokio::test]
async fn deadlocks_with_statements_of_a_relay_stop_nothing_and_repeat_nothing() {
    let h = database_with_ledger().await;
    enqueue::<Postgres>(&h.store, &numbered("orders", KEYS, 0..2)).await;
    let mut relay = None;
    let mut count = 2;
    for (first, statement, second) in [
        (
            "SELECT FROM relaybox_outbox FOR UPDATE",
            SETTLING,
            "SELECT FROM relaybox_outbox_lane FOR UPDATE",
        ),
        (
            "LOCK TABLE relaybox_outbox",
            FETCHING,
            "LOCK TABLE relaybox_outbox_lane",
        ),
        (
            "SELECT FROM relaybox_outbox_lane WHERE lane = 9 FOR UPDATE",
            RENEWING,
            "SELECT FROM relaybox_outbox_lane WHERE lane = 0 FOR UPDATE",
        ),
    ] {
        let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
        let before = h.number(deadlocks).await;
        let mut other = h.pool().begin().await.unwrap();
        // The relay looks first, and so it is the one to give way.
        let timeout = "SET LOCAL deadlock_timeout = '1min'";
        other.execute(timeout).await.unwrap();
        other.execute(first).await.unwrap();
        if relay.is_none() {
            relay = Some(start_relay(&h).await);
        }
        waiting(&h, statement).await;
        other.execute(second).await.unwrap();
        other.rollback().await.unwrap();
        eventually(DEADLINE, "a deadlock is counted", || async {
            h.number(deadlocks).await > before
        })
        .await;
        enqueue::<Postgres>(&h.store, &numbered("orders", KEYS, count..count + 1)).await;
        count += 1;
        drained(&h.store).await;
    }
    judge_and_stop(&h, relay.unwrap(), count).await;
}

/// What an administrator may have set for a database, and an old client or a report may need.
const SETTINGS: [(&str, &str); 9] = [
    ("default_transaction_isolation", "serializable"),
    ("default_transaction_deferrable", "on"),
    ("timezone", "Asia/Kathmandu"),
    ("datestyle", "SQL, DMY"),
    ("intervalstyle", "sql_standard"),
    ("bytea_output", "escape"),
    ("standard_conforming_strings", "off"),
    ("extra_float_digits", "-15"),
    ("enable_indexscan", "off"),
];

#[tokio::test]
async fn a_relay_does_not_depend_on_the_settings_of_its_database() {
    let h = Postgres::start().await;
    let database: String = sqlx::query_scalar("SELECT current_database()")
        .fetch_one(h.pool())
        .await
        .unwrap();
    for (name, value) in SETTINGS {
        let set = format!(
            "ALTER DATABASE {database} SET {name} = {}",
            format_args!("'{value}'")
        );
        h.pool().execute(AssertSqlSafe(set)).await.unwrap();
    }
    let note = "CREATE TABLE noted (level text);
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN INSERT INTO noted VALUES (current_setting('transaction_isolation')); RETURN NULL; END $$;
        CREATE TRIGGER note AFTER DELETE ON relaybox_outbox FOR EACH STATEMENT EXECUTE FUNCTION note();
        CREATE TRIGGER note AFTER UPDATE ON relaybox_outbox_lane FOR EACH STATEMENT EXECUTE FUNCTION note();";
    h.pool().execute(sqlx::raw_sql(note)).await.unwrap();

    // Its sessions are new, and have all of this.
    let store = PostgresStore::connect(&h.url).await.unwrap();
    let broker = MemoryBroker::new();
    broker.create_topic("orders", 1).unwrap();
    let refusal = Fault::Reject(RejectionScope::Message);
    let publisher = FaultyPublisher::new(broker.clone()).with_fault(1, refusal);
    let messages: Vec<_> = (0..20)
        .map(|n| keyed("\\k\0", &format!("'\\{n}\0")).with_header("h", "\\'\0"))
        .collect();
    enqueue::<Postgres>(&store, &messages).await;
    let relay = Running::start(Relay::new(store.clone(), publisher).with_config(brisk()));
    drained(&store).await;
    let leased = "SELECT count(*) FROM relaybox_outbox_lane \
        WHERE expires_at BETWEEN clock_timestamp() AND clock_timestamp() + interval '6 s'";
    assert_eq!(h.number(leased).await, 16);
    relay.stop().await;
    let sent: Vec<_> = broker
        .log("orders")
        .into_iter()
        .map(|r| r.message)
        .collect();
    assert_eq!(sent, messages[1..]);
    let levels: Vec<String> = sqlx::query_scalar("SELECT DISTINCT level FROM noted")
        .fetch_all(h.pool())
        .await
        .unwrap();
    assert_eq!(levels, ["read committed"]);

    let parked = store.list_aside(&AsideFilter::all(), 0, 10).await.unwrap();
    let age = "SELECT count(*) FROM relaybox_outbox_aside \
        WHERE set_aside_at BETWEEN clock_timestamp() - interval '1 min' AND clock_timestamp()";
    assert_eq!((parked.len(), h.number(age).await), (1, 1));
    let older = AsideFilter::all().with_age(Duration::from_secs(60));
    assert_eq!(store.requeue(&older, Mode::DryRun).await.unwrap(), 0);
    let all = AsideFilter::all();
    assert_eq!(store.requeue(&all, Mode::Apply).await.unwrap(), 1);
}
