//! An older relay beside a newer one, on the tables of the newer.

use relaybox::broker::RejectionScope;
use relaybox::broker::memory::MemoryBroker;
use relaybox::relay::Relay;
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{AsideFilter, InboxStore, Mode, OutboxAdmin, OutboxStore};
use relaybox::testing::{Fault, FaultyPublisher, eventually};
use sqlx::Executor;

use crate::postgres::Postgres;
use crate::relay_process::{DEADLINE, Running, brisk, drained};
use crate::store_contract::{Harness, enqueue, keyed};

/// Columns that have defaults, a state and a registration of which this version knows nothing, and its migration.
const NEWER: &str = "
    ALTER TABLE relaybox_outbox ADD later text NOT NULL DEFAULT 'x';
    ALTER TABLE relaybox_outbox_aside ADD later text NOT NULL DEFAULT 'x';
    ALTER TABLE relaybox_outbox_lane ADD later text NOT NULL DEFAULT 'x';
    ALTER TABLE relaybox_relay ADD later text NOT NULL DEFAULT 'x';
    ALTER TABLE relaybox_inbox ADD later text NOT NULL DEFAULT 'x';
    ALTER TABLE relaybox_inbox_start ADD later text NOT NULL DEFAULT 'x';
    ALTER TABLE relaybox_aggregate_version ADD later text NOT NULL DEFAULT 'x';
    ALTER TABLE relaybox_dead_letter ADD later text NOT NULL DEFAULT 'x';
    CREATE TABLE relaybox_later (position bigint);
    INSERT INTO relaybox_outbox_aside
        (state, reason, due_at, attempts, lane, message_id, destination, key, event_type, size, occurred_at)
        VALUES ('later', 'later', now() + interval '1 h', 3, 0, 'd-1', 'orders', 'k', 'T', 1, now());
    INSERT INTO relaybox_relay (id, name, expires_at, later)
        VALUES ('newer', 'newer', clock_timestamp() + interval '2 s', 'y');
    INSERT INTO relaybox_migrations (version, description, success, checksum, execution_time)
        VALUES (1000, 'later', true, 'x', 1);";

#[tokio::test]
async fn a_relay_goes_on_beside_a_newer_one_and_leaves_alone_what_it_does_not_know() {
    let h = Postgres::start().await;
    let broker = MemoryBroker::new();
    broker.create_topic("orders", 1).unwrap();
    let refusal = Fault::Reject(RejectionScope::Message);
    let publisher = FaultyPublisher::new(broker.clone()).with_fault(30, refusal);
    let messages: Vec<_> = (0..30).map(|n| keyed(&n.to_string(), "x")).collect();
    // Prepared statements of before, and of a process that starts on the new tables.
    let running = Running::start(Relay::new(h.store(), publisher).with_config(brisk()));
    enqueue::<Postgres>(&h.store, &messages[..10]).await;
    drained(&h.store).await;
    h.pool().execute(sqlx::raw_sql(NEWER)).await.unwrap();
    enqueue::<Postgres>(&h.store, &messages[10..20]).await;
    drained(&h.store).await;
    assert!(!running.has_ended());

    let started = PostgresStore::connect(&h.url).await.unwrap();
    started.migrate().await.unwrap();
    OutboxStore::check(&started).await.unwrap();
    InboxStore::check(&started).await.unwrap();
    enqueue::<Postgres>(&started, &messages[20..]).await;
    drained(&started).await;
    eventually(DEADLINE, "one is parked", || async {
        started.aside(10).await.unwrap() == 2
    })
    .await;
    running.stop().await;
    assert_eq!(broker.log("orders").len(), 29);

    let all = AsideFilter::all();
    let listed = started.list_aside(&all, 0, 10).await.unwrap();
    let states: Vec<_> = listed.iter().map(|entry| entry.state.as_str()).collect();
    assert_eq!(states, ["later", "parked"]);
    assert_eq!(started.requeue(&all, Mode::Apply).await.unwrap(), 1);
    assert_eq!(started.discard(&all, "test", Mode::Apply).await.unwrap(), 0);
    assert_eq!(started.aside(10).await.unwrap(), 1);
}
