//! The scan floor, case by case, in real sessions.

use std::time::Duration;

use relaybox::lane::lane_of;
use relaybox::store::Lease;
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{Enqueue, OutboxReader, OutboxStore, Page};
use relaybox_testcontainers::PostgresOptions;
use sqlx::pool::PoolConnection;
use sqlx::{AssertSqlSafe, Executor, PgConnection, Postgres as Driver};

use crate::store_contract::{Harness, confirm, enqueue, keyed, lease_all, request};

use super::*;

/// A relay's worker with a floor, and the payloads it read.
struct Relay {
    reader: Box<dyn OutboxReader>,
    leases: Vec<Lease>,
}

impl Relay {
    async fn new(store: &PostgresStore) -> Self {
        fill_relay_pool(store).await;
        Self {
            reader: store.reader(),
            leases: lease_all(store).await,
        }
    }

    async fn fetch(&mut self) -> Page {
        self.reader.fetch(&request(&self.leases)).await.unwrap()
    }

    /// Reads and settles one page.
    async fn poll(&mut self) -> Vec<String> {
        let page = self.fetch().await;
        if !page.rows.is_empty() {
            let settled = self.reader.settle(&confirm(&self.leases, &page)).await;
            assert_eq!(settled.unwrap().fenced, 0);
        }
        payloads(&page)
    }

    /// Moves the floor of every lane above what is there now: a floor follows at a distance of one settled page.
    async fn settle_in(&mut self, store: &PostgresStore) {
        for round in 0..4 {
            let messages: Vec<_> = (0..64)
                .map(|n| keyed(&format!("filler-{n}"), &format!("filler {round}")))
                .collect();
            enqueue::<Postgres>(store, &messages).await;
            assert_eq!(self.poll().await.len(), 64);
        }
    }
}

fn payloads(page: &Page) -> Vec<String> {
    let text = |row: &relaybox::store::PendingMessage| {
        String::from_utf8(row.message.payload.as_ref().unwrap().to_vec()).unwrap()
    };
    page.rows.iter().map(text).collect()
}

/// A session of its own inside a transaction that has an id.
async fn open(h: &Postgres) -> PoolConnection<Driver> {
    let mut session = h.pool().acquire().await.unwrap();
    assert!(Postgres::execute(&mut session, "BEGIN; SELECT pg_current_xact_id()").await);
    session
}

async fn insert(h: &Postgres, session: &mut PgConnection, payload: &str) {
    let message = keyed("k", payload);
    h.store().insert(session, &[message]).await.unwrap();
}

async fn end(mut session: PoolConnection<Driver>, how: &str) {
    assert!(Postgres::execute(&mut session, how).await);
}

/// A server of its own: on a shared one, the transactions of other databases move `xmax` along.
async fn alone() -> (relaybox_testcontainers::Postgres, Postgres) {
    let options = PostgresOptions::default()
        .with_local_process()
        .with_durable();
    let server = relaybox_testcontainers::Postgres::start_with(options)
        .await
        .unwrap();
    let url = server.create_database("store").await.unwrap();
    let store = PostgresStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    (server, Postgres { url, store })
}

/// Y with the lower id commits first; X runs beyond the snapshot's `xmax` and is in no list of running ones.
#[tokio::test]
async fn a_transaction_that_no_snapshot_listed_is_not_missed() {
    let (_server, h) = alone().await;
    let mut relay = Relay::new(&h.store()).await;
    relay.settle_in(&h.store()).await;
    let mut y = open(&h).await;
    let mut x = open(&h).await;
    insert(&h, &mut x, "x").await;
    insert(&h, &mut y, "y").await;
    end(y, "COMMIT").await;
    assert_eq!(relay.poll().await, ["y"]);
    end(x, "COMMIT").await;
    assert_eq!(relay.poll().await, ["x"]);
    assert_eq!(h.store().pending(10).await.unwrap(), 0);
}

/// ... and turns up in a list only later, when the floor has met its position.
#[tokio::test]
async fn a_transaction_that_a_later_snapshot_lists_is_not_missed() {
    let (_server, h) = alone().await;
    let mut relay = Relay::new(&h.store()).await;
    relay.settle_in(&h.store()).await;
    let mut y = open(&h).await;
    let mut x = open(&h).await;
    insert(&h, &mut x, "x").await;
    insert(&h, &mut y, "y").await;
    end(y, "COMMIT").await;
    assert_eq!(relay.poll().await, ["y"]);
    assert!(relay.poll().await.is_empty());
    relay.settle_in(&h.store()).await;
    assert!(relay.poll().await.is_empty());
    end(x, "COMMIT").await;
    assert_eq!(relay.poll().await, ["x"]);
}

#[tokio::test]
async fn late_commits_below_the_floor_are_read_in_order_and_rolled_back_ones_are_not() {
    let h = Postgres::start().await;
    let mut relay = Relay::new(&h.store()).await;
    relay.settle_in(&h.store()).await;
    let (mut late, mut gone, mut nested) = (open(&h).await, open(&h).await, open(&h).await);
    for n in ["1", "2", "3"] {
        insert(&h, &mut late, n).await;
        insert(&h, &mut gone, "gone").await;
    }
    assert!(Postgres::execute(&mut nested, "SAVEPOINT a").await);
    insert(&h, &mut nested, "undone").await;
    assert!(Postgres::execute(&mut nested, "ROLLBACK TO a; SAVEPOINT b").await);
    insert(&h, &mut nested, "4").await;
    assert!(Postgres::execute(&mut nested, "RELEASE b; SAVEPOINT c").await);
    insert(&h, &mut nested, "5").await;
    relay.settle_in(&h.store()).await;
    end(late, "COMMIT").await;
    end(gone, "ROLLBACK").await;
    enqueue::<Postgres>(&h.store(), &[keyed("k", "6")]).await;
    assert_eq!(relay.poll().await, ["1", "2", "3", "6"]);
    relay.settle_in(&h.store()).await;
    end(nested, "COMMIT").await;
    assert_eq!(relay.poll().await, ["4", "5"]);
    assert_eq!(h.store().floor_alarms(), 0);
}

/// More rows of ended transactions below the floor than one page holds.
#[tokio::test]
async fn late_rows_beyond_one_page_come_page_by_page() {
    let h = Postgres::start().await;
    let mut relay = Relay::new(&h.store()).await;
    let lane = lane_of(b"k");
    relay.leases.retain(|lease| lease.lane == lane);
    let mut late = open(&h).await;
    for n in 0..7 {
        insert(&h, &mut late, &n.to_string()).await;
    }
    for _ in 0..4 {
        enqueue::<Postgres>(&h.store(), &[keyed("k", "filler")]).await;
        assert_eq!(relay.poll().await, ["filler"]);
    }
    end(late, "COMMIT").await;
    enqueue::<Postgres>(&h.store(), &[keyed("k", "7")]).await;
    let mut request = request(&relay.leases);
    request.rows_max = 3;
    for expected in [&["0", "1", "2"][..], &["3", "4", "5"], &["6", "7"], &[]] {
        let page = relay.reader.fetch(&request).await.unwrap();
        assert_eq!(payloads(&page), expected);
        relay
            .reader
            .settle(&confirm(&relay.leases, &page))
            .await
            .unwrap();
    }
}

/// What was not confirmed stays above the floor.
#[tokio::test]
async fn unsettled_rows_are_read_again() {
    let h = Postgres::start().await;
    let mut relay = Relay::new(&h.store()).await;
    relay.settle_in(&h.store()).await;
    let mut late = open(&h).await;
    insert(&h, &mut late, "late").await;
    enqueue::<Postgres>(
        &h.store(),
        &[keyed("k", "1"), keyed("k", "2"), keyed("k", "3")],
    )
    .await;
    for _ in 0..3 {
        let page = relay.fetch().await;
        assert_eq!(payloads(&page), ["1", "2", "3"]);
    }
    let page = relay.fetch().await;
    let mut batch = confirm(&relay.leases, &page);
    batch.verdicts.remove(1);
    relay.reader.settle(&batch).await.unwrap();
    assert_eq!(payloads(&relay.fetch().await), ["2"]);
    relay.settle_in_others(&h.store()).await;
    end(late, "COMMIT").await;
    assert_eq!(relay.poll().await, ["late", "2"]);
}

impl Relay {
    /// Pages of which nothing belongs to the lane of "k" move on, and "k" stays.
    async fn settle_in_others(&mut self, store: &PostgresStore) {
        let lane = lane_of(b"k");
        for _ in 0..3 {
            enqueue::<Postgres>(store, &[keyed("a", "other")]).await;
            let page = self.fetch().await;
            let mut batch = confirm(&self.leases, &page);
            batch.verdicts.retain(|(place, _)| place.lane != lane);
            assert_eq!(self.reader.settle(&batch).await.unwrap().applied, 1);
        }
    }
}

#[tokio::test]
async fn a_settlement_that_changes_nothing_makes_the_reader_begin_anew() {
    let h = Postgres::start().await;
    let mut relay = Relay::new(&h.store()).await;
    relay.settle_in(&h.store()).await;
    let mut late = open(&h).await;
    insert(&h, &mut late, "late").await;
    relay.settle_in(&h.store()).await;
    enqueue::<Postgres>(&h.store(), &[keyed("k", "1")]).await;
    let page = relay.fetch().await;
    let mut batch = confirm(&relay.leases, &page);
    for lease in &mut batch.leases {
        lease.token -= 1;
    }
    assert_eq!(relay.reader.settle(&batch).await.unwrap().applied, 0);
    end(late, "COMMIT").await;
    assert_eq!(relay.poll().await, ["late", "1"]);
}

/// While a lane was with another relay, that one read what had been tracked.
#[tokio::test]
async fn a_lane_that_comes_back_is_read_from_its_first_row() {
    let h = Postgres::start().await;
    let store = h.store();
    let mut relay = Relay::new(&store).await;
    relay.settle_in(&store).await;
    let mut late = open(&h).await;
    insert(&h, &mut late, "late").await;
    relay.settle_in(&store).await;
    store.release(&relay.leases).await.unwrap();
    let mut other = Relay::new(&store).await;
    end(late, "COMMIT").await;
    // The old holder still asks: fenced, and the ended transaction is forgotten.
    assert!(relay.poll().await.is_empty());
    assert_eq!(payloads(&other.fetch().await), ["late"]);
    store.release(&other.leases).await.unwrap();
    relay.leases = lease_all(&store).await;
    assert_eq!(relay.poll().await, ["late"]);
}

/// A prepared transaction runs on over any number of polls and a restart of the server, which new connections notice.
#[tokio::test]
async fn a_prepared_transaction_is_read_when_it_commits() {
    let (server, h) = alone().await;
    let mut relay = Relay::new(&h.store()).await;
    relay.settle_in(&h.store()).await;
    for name in ["one", "two"] {
        let mut session = open(&h).await;
        insert(&h, &mut session, name).await;
        end(session, &format!("PREPARE TRANSACTION '{name}'")).await;
    }
    relay.settle_in(&h.store()).await;
    assert!(relay.poll().await.is_empty());
    h.pool().execute("COMMIT PREPARED 'one'").await.unwrap();
    assert_eq!(relay.poll().await, ["one"]);
    relay.settle_in(&h.store()).await;

    server.kill().await.unwrap();
    server.start_again().await.unwrap();
    while relay.reader.fetch(&request(&relay.leases)).await.is_err() {}
    while h.pool().execute("SELECT 1").await.is_err() {}
    relay.settle_in(&h.store()).await;
    assert!(relay.poll().await.is_empty());
    h.pool().execute("COMMIT PREPARED 'two'").await.unwrap();
    assert_eq!(relay.poll().await, ["two"]);
    assert_eq!(h.store().pending(10).await.unwrap(), 0);
}

/// Positions that go back, as after a fail-over: below the floor, but every connection is a new one.
#[tokio::test]
async fn new_connections_make_the_reader_begin_anew() {
    let h = Postgres::start().await;
    let mut relay = Relay::new(&h.store()).await;
    relay.settle_in(&h.store()).await;
    h.terminate_others().await;
    let back = "ALTER TABLE relaybox_outbox ALTER position RESTART WITH 1";
    while h.pool().execute(back).await.is_err() {}
    enqueue::<Postgres>(&h.store(), &[keyed("k", "1")]).await;
    // Another user of the relay's pool meets the broken connections; this reader sees no error.
    fill_relay_pool(&h.store()).await;
    assert_eq!(relay.poll().await, ["1"]);
    assert_eq!(h.store().floor_alarms(), 0);
}

/// A writer that gives positions itself is found late, and ends the use of floors.
#[tokio::test]
async fn the_sweep_finds_what_should_not_be_there() {
    let h = Postgres::start().await;
    let store = h.store().with_sweep_pause(Duration::from_millis(200));
    let mut relay = Relay::new(&store).await;
    relay.settle_in(&store).await;
    let forge = |position: i64| {
        AssertSqlSafe(format!(
            "INSERT INTO relaybox_outbox (position, lane, message_id, destination, event_type, payload, size) \
             OVERRIDING SYSTEM VALUE VALUES ({position}, {}, 'm', 'orders', 'T', '{position}', 10)",
            lane_of(b"k")
        ))
    };
    h.pool().execute(forge(2)).await.unwrap();
    let mut seen = relay.poll().await;
    while seen.is_empty() {
        tokio::time::sleep(Duration::from_millis(20)).await;
        seen = relay.poll().await;
    }
    assert_eq!((seen, store.floor_alarms()), (vec!["2".to_owned()], 1));
    relay.settle_in(&store).await;
    h.pool().execute(forge(1)).await.unwrap();
    assert_eq!(relay.poll().await, ["1"]);
    assert_eq!(store.floor_alarms(), 1);
}

#[tokio::test]
async fn a_hot_lane_gets_what_quiet_ones_leave() {
    let h = Postgres::start().await;
    let mut relay = Relay::new(&h.store()).await;
    let messages: Vec<_> = (0..400).map(|n| keyed("k", &n.to_string())).collect();
    enqueue::<Postgres>(&h.store(), &messages).await;
    let mut request = request(&relay.leases);
    request.rows_max = 160;
    let mut read = Vec::new();
    for expected in [10, 145, 145, 100] {
        let page = relay.reader.fetch(&request).await.unwrap();
        assert_eq!(page.rows.len(), expected);
        read.extend(payloads(&page));
        let batch = confirm(&relay.leases, &page);
        relay.reader.settle(&batch).await.unwrap();
    }
    let all: Vec<String> = (0..400).map(|n| n.to_string()).collect();
    assert_eq!(read, all);
}
