//! What only PostgreSQL's administration does, and enqueueing through other clients.

use std::time::Duration;

use relaybox::broker::memory::MemoryBroker;
use relaybox::outbox::Outbox;
use relaybox::relay::Relay;
use relaybox::store::postgres::HolderKind;
use relaybox::store::{AsideFilter, InboxStore, Mode, OutboxAdmin, OutboxStore};
use relaybox::{ErrorKind, Message};
use sqlx::{AssertSqlSafe, Executor};
use time::macros::datetime;

use crate::store_contract::{Harness, enqueue, keyed, pending};

use super::trouble::{drop_role, restricted};
use super::*;

/// One session that does these statements and then nothing.
async fn session(h: &Postgres, name: &str, statements: &str) -> PgConnection {
    let mut connection = PgConnection::connect(&h.url).await.unwrap();
    let all = format!("SET application_name = '{name}'; {statements}");
    assert!(
        Postgres::execute(&mut connection, &all).await,
        "{statements}"
    );
    connection
}

#[tokio::test]
async fn the_horizon_names_who_holds_it_and_for_how_long() {
    let h = Postgres::start().await;
    let quiet = session(&h, "quiet", "BEGIN; SELECT 1").await;
    let mine = |horizon: relaybox::store::postgres::Horizon| -> Vec<_> {
        let slots = |holder: &relaybox::store::postgres::HorizonHolder| {
            holder.kind != HolderKind::ReplicationSlot
        };
        horizon.holders.into_iter().filter(slots).collect()
    };
    assert_eq!(mine(h.store.horizon(10).await.unwrap()), []);

    let snapshot = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 's3cret', pg_backend_pid()";
    let mut old = session(&h, "nightly report", snapshot).await;
    let pid = <Postgres as Harness>::number(&mut old, "SELECT pg_backend_pid()::bigint").await;
    let writer = session(&h, "writer", "BEGIN; INSERT INTO work VALUES (1)").await;
    enqueue::<Postgres>(&h.store(), &[keyed("k", "1")]).await;
    tokio::time::sleep(Duration::from_millis(20)).await;

    let horizon = h.store.horizon(10).await.unwrap();
    assert!(!format!("{horizon:?}").contains("s3cret"));
    let holders = mine(horizon);
    let names: Vec<_> = holders.iter().map(|holder| holder.name.as_str()).collect();
    assert_eq!(names, ["nightly report", "writer"]);
    let first = &holders[0];
    assert_eq!(first.kind, HolderKind::Session);
    assert_eq!(first.pid.map(i64::from), Some(pid));
    assert_eq!(first.state.as_deref(), Some("idle in transaction"));
    assert!(first.age.unwrap() >= Duration::from_millis(20));
    // Equal where another database's transaction is older than both.
    assert!(first.transactions >= holders[1].transactions);
    assert_eq!(h.store.horizon(1).await.unwrap().holders.len(), 1);
    drop((quiet, old, writer));
}

#[tokio::test]
async fn the_horizon_counts_the_dead_rows_of_our_tables() {
    let h = Postgres::start().await;
    let messages: Vec<_> = (0..50).map(|n| keyed(&n.to_string(), "x")).collect();
    enqueue::<Postgres>(&h.store(), &messages).await;
    let delete = "DELETE FROM relaybox_outbox";
    h.pool().execute(delete).await.unwrap();
    // A session's counts are sure to be in the view once it has ended.
    h.terminate_others().await;
    let table = loop {
        let horizon = h.store.horizon(10).await.unwrap();
        assert_eq!(horizon.tables.len(), 7);
        let table = horizon.tables.into_iter().next().unwrap();
        if table.dead > 0 {
            break table;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!((table.table.as_str(), table.dead), ("relaybox_outbox", 50));
}

#[tokio::test]
async fn a_requeue_waits_for_another_ones_step_and_moves_only_what_is_left() {
    let h = Postgres::start().await;
    // A whole step of one key, and then some.
    let messages: Vec<_> = (0..600)
        .map(|n| keyed(if n < 500 { "a" } else { "b" }, "x"))
        .collect();
    park_all(&h, &messages).await;
    let mut other = h.pool().begin().await.unwrap();
    let taken = "DELETE FROM relaybox_outbox_aside WHERE key = 'a'";
    assert!(Postgres::execute(&mut other, taken).await);
    let commit = async {
        h.blocked().await;
        other.commit().await.unwrap();
    };
    let all = AsideFilter::all();
    let (requeued, ()) = tokio::join!(h.store.requeue(&all, Mode::Apply), commit);
    assert_eq!(requeued.unwrap(), 100);
    assert_eq!(h.store.pending(1_000).await.unwrap(), 100);
    assert_eq!(h.store.aside(10).await.unwrap(), 0);
}

#[tokio::test]
async fn the_documented_rights_of_an_operator_are_enough() {
    let h = Postgres::start().await;
    park_all(&h, &[keyed("a", "1"), keyed("a", "2")]).await;
    let rights = [
        "SELECT ON relaybox_outbox",
        "SELECT, UPDATE (state, reason), DELETE ON relaybox_outbox_aside",
        "SELECT, INSERT, UPDATE, DELETE ON relaybox_outbox_destination",
        "INSERT (lane, message_id, destination, key, event_type, content_type, headers, payload, size, version, \
         occurred_at) ON relaybox_outbox",
    ];
    let operator = restricted(&h, "operator", &rights).await;
    let all = AsideFilter::all();
    let entries = operator.list_aside(&all, 0, 10).await.unwrap();
    let first = entries[0].position;
    assert!(operator.show_aside(first).await.unwrap().is_some());
    let one = AsideFilter::all().with_position(first);
    assert_eq!(
        operator
            .discard(&one, "paid twice", Mode::Apply)
            .await
            .unwrap(),
        1
    );
    assert_eq!(operator.requeue(&all, Mode::Apply).await.unwrap(), 1);
    assert_eq!(
        operator.depth(10, 10).await.unwrap().destinations[0].pending,
        1
    );
    assert_eq!(operator.horizon(10).await.unwrap().tables.len(), 7);
    operator
        .pause("orders", "the warehouse moves")
        .await
        .unwrap();
    operator.limit("orders", Some(5), "slowly").await.unwrap();
    operator.resume("orders").await.unwrap();
    drop_role(&h, &operator).await;
}

/// Parks by SQL: what a relay does is shown elsewhere.
async fn park_all(h: &Postgres, messages: &[Message]) {
    enqueue::<Postgres>(&h.store(), messages).await;
    let park = "WITH gone AS (DELETE FROM relaybox_outbox RETURNING *) \
        INSERT INTO relaybox_outbox_aside (state, reason, lane, message_id, destination, key, event_type, \
            content_type, headers, payload, size, version, occurred_at) \
        SELECT 'parked', 'rejected', lane, message_id, destination, key, event_type, content_type, headers, payload, \
            size, version, occurred_at FROM gone ORDER BY position";
    h.pool().execute(park).await.unwrap();
}

#[tokio::test]
async fn a_step_reads_along_the_primary_key_and_not_the_whole_table() {
    let h = Postgres::start().await;
    let messages: Vec<_> = (0..2_000).map(|n| keyed(&n.to_string(), "x")).collect();
    park_all(&h, &messages).await;
    let scans = "SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'relaybox_outbox_aside'";
    h.terminate_others().await;
    let before = h.number(scans).await;
    let all = AsideFilter::all();
    assert_eq!(h.store.requeue(&all, Mode::DryRun).await.unwrap(), 2_000);
    assert_eq!(h.store.requeue(&all, Mode::Apply).await.unwrap(), 2_000);
    assert_eq!(
        h.store.depth(10_000, 10).await.unwrap().destinations[0].pending,
        2_000
    );
    h.terminate_others().await;
    assert_eq!(h.number(scans).await, before);
}

#[tokio::test]
async fn another_client_enqueues_in_its_own_transaction_and_the_relay_sends_every_byte() {
    let h = Postgres::start().await;
    let outbox = Outbox::new(h.store());
    let mut message = keyed("\u{0}not text\u{ff}", "pay")
        .with_payload(vec![0, 1, 0xff, 0xfe])
        .with_content_type("application/json")
        .with_version(-7)
        .with_occurred_at(datetime!(1999-12-31 23:59:59.999999 UTC))
        .with_trace("00-aa-bb-01", Some("v=1".into()))
        .with_header("a", "1")
        .with_header("a", vec![0xff, 0]);
    message.headers.push_optional("d", None);
    let messages = [message, Message::new("orders", "Null")];
    let statement = outbox.statement(&messages).unwrap();

    let (mut client, connection) = tokio_postgres::connect(&h.url, tokio_postgres::NoTls)
        .await
        .unwrap();
    let connection = tokio::spawn(connection);
    for commit in [false, true] {
        let transaction = client.transaction().await.unwrap();
        let insert = "INSERT INTO work (id) VALUES (1)";
        transaction.execute(insert, &[]).await.unwrap();
        let inserted = transaction
            .execute(
                statement.sql,
                &[
                    &statement.lanes,
                    &statement.ids,
                    &statement.destinations,
                    &statement.keys,
                    &statement.event_types,
                    &statement.content_types,
                    &statement.headers,
                    &statement.payloads,
                    &statement.versions,
                    &statement.occurred_at,
                    &statement.sizes,
                ],
            )
            .await
            .unwrap();
        assert_eq!(inserted, 2);
        if commit {
            transaction.commit().await.unwrap();
        } else {
            transaction.rollback().await.unwrap();
            assert_eq!(h.store.pending(10).await.unwrap(), 0);
        }
    }
    drop(client);
    connection.await.unwrap().unwrap();

    let broker = MemoryBroker::new();
    broker.create_topic("orders", 3).unwrap();
    Relay::new(h.store(), broker.clone())
        .run_until(async {
            while h.store.pending(1).await.unwrap() > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap();
    let sent = broker.log("orders");
    assert_eq!(sent.len(), 2);
    for message in &messages {
        let found = sent.iter().find(|sent| sent.message.id == message.id);
        assert!(found.unwrap().message == *message, "{message:?}");
    }

    let error = outbox
        .statement(&[keyed("k", "1").with_id("")])
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let far = keyed("k", "1").with_occurred_at(datetime!(9999-01-01 0:00 UTC));
    let error = outbox.statement(std::slice::from_ref(&far)).unwrap_err();
    assert_eq!(error.violation().unwrap().field, "occurred_at");
}

#[tokio::test]
async fn the_documented_trigger_enqueues_with_the_business_row_and_not_without_it() {
    let readme = include_str!("../../../migrations/README.md");
    let begin = readme.find("CREATE FUNCTION order_placed").unwrap();
    let length = readme[begin..].find("```").unwrap();
    let trigger = AssertSqlSafe(readme[begin..begin + length].to_owned());
    let h = Postgres::start().await;
    let create = "CREATE TABLE shop_order (id bigint PRIMARY KEY, customer text NOT NULL, total numeric NOT NULL)";
    h.pool().execute(create).await.unwrap();
    h.pool().execute(sqlx::raw_sql(trigger)).await.unwrap();
    let place = "INSERT INTO shop_order VALUES (17, 'Zoë \"Z\"', 4.20)";

    let store = h.store();
    let mut transaction = store.begin().await.unwrap();
    let connection = PostgresStore::connection(&mut transaction);
    assert!(Postgres::execute(connection, place).await);
    let written = "SELECT count(*) FROM relaybox_outbox";
    assert_eq!(<Postgres as Harness>::number(connection, written).await, 1);
    store.rollback(transaction).await.unwrap();
    assert_eq!(store.pending(10).await.unwrap(), 0);

    h.pool().execute(place).await.unwrap();
    let page = pending(&store).await;
    assert_eq!(page.rows.len(), 1);
    let message = &page.rows[0].message;
    assert_eq!(message.destination, "orders");
    assert_eq!(message.event_type, "OrderPlaced");
    assert_eq!(message.key.as_deref(), Some(b"17".as_slice()));
    assert_eq!(page.rows[0].place.lane, relaybox::lane::lane_of(b"17"));
    let payload = String::from_utf8(message.payload.as_deref().unwrap().to_vec()).unwrap();
    assert!(payload.contains(r#""total": 4.20"#), "{payload}");
    assert!(payload.contains(r#"Zoë \"Z\""#), "{payload}");
}
