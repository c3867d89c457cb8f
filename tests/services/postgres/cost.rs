//! What rows set aside cost those that flow, also under plans made when there were none.

use relaybox::Message;
use relaybox::store::{FetchRequest, OutboxReader, OutboxStore};
use sqlx::{AssertSqlSafe, Executor};

use super::Postgres;
use crate::store_contract::{Harness, enqueue, keyed, lease_all, request};

/// Index entries of rows set aside that were read so far.
async fn entries_read(h: &Postgres) -> i64 {
    h.terminate_others().await;
    h.number(
        "SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes WHERE relname = 'relaybox_outbox_aside'",
    )
    .await
}

/// Puts `count` waiting rows aside, far behind us, as SQL of `n`.
async fn set_aside(h: &Postgres, count: u32, destination: &str, key: &str) {
    let sql = format!(
        "INSERT INTO relaybox_outbox_aside (state, reason, scope, outbox_position, lane, message_id, destination, \
            key, event_type, size, occurred_at) \
         SELECT 'waiting', 'closed', destination, n - 1000000, \
            ('x' || substr(md5(key), 1, 4))::bit(16)::int % 16, 'waiting ' || n, destination, key, 'T', 30, now() \
         FROM (SELECT n, {destination} AS destination, convert_to({key}, 'UTF8') AS key \
            FROM generate_series(1, {count}) n) rows"
    );
    h.pool()
        .execute(sqlx::raw_sql(AssertSqlSafe(sql)))
        .await
        .unwrap();
}

async fn read(h: &Postgres, reader: &mut dyn OutboxReader, closed: Vec<String>) -> usize {
    let leases = lease_all(&h.store).await;
    let request = FetchRequest {
        closed,
        ..request(&leases)
    };
    let page = reader.fetch(&request).await.unwrap();
    h.store.release(&leases).await.unwrap();
    page.rows.len()
}

#[tokio::test]
async fn what_waits_for_a_closed_destination_is_not_read() {
    let h = Postgres::start().await;
    let messages: Vec<_> = (0..100).map(|n| keyed(&n.to_string(), "x")).collect();
    enqueue::<Postgres>(&h.store, &messages).await;
    let closed = || vec!["shut".to_owned()];
    assert_eq!(read(&h, &mut *h.store.reader(), closed()).await, 100);
    set_aside(&h, 20_000, "'shut'", "n::text").await;
    // Under the plan of before, on its connection.
    for _ in 0..3 {
        assert_eq!(read(&h, &mut *h.store.reader(), closed()).await, 100);
    }
    let entries = entries_read(&h).await;
    assert!(entries < 2_000, "{entries} index entries read");
}

#[tokio::test]
async fn what_is_ahead_of_a_row_is_found_along_its_own_line() {
    let h = Postgres::start().await;
    set_aside(&h, 200, "'shut ' || n", "'k'").await;
    let messages: Vec<_> = (0..50)
        .map(|_| Message::new("open", "T").with_key("k"))
        .collect();
    enqueue::<Postgres>(&h.store, &messages).await;
    let closed = (1..=200).map(|n| format!("shut {n}")).collect();
    assert_eq!(read(&h, &mut *h.store.reader(), closed).await, 50);
    // Two steps for each scope of each row, and not one for each row set aside.
    let entries = entries_read(&h).await;
    assert!(entries < 100_000, "{entries} index entries read");
}
