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

/// What is not due and what stands behind others is in nobody's way, whatever the planner knew when it planned.
#[tokio::test]
async fn what_waits_for_its_time_or_its_turn_is_not_read_by_a_claim() {
    use relaybox::store::WaitingStore;

    let h = Postgres::start().await;
    let room: &dyn WaitingStore = &h.store;
    let hour = std::time::Duration::from_secs(3_600);
    assert!(room.claim("c", 10, hour).await.unwrap().rows.is_empty());
    let fill = |state: &str, line: &str, due: &str, count: u32| {
        let sql = format!(
            "INSERT INTO relaybox_waiting (consumer, identity, line, state, source, due_at, visible_at, \
                redrive_count, retry_count, message_id, destination, event_type, size, occurred_at) \
             SELECT 'c', decode(md5('{state}' || n), 'hex'), {line}, '{state}', 's', {due}, {due}, 0, 1, n::text, \
                's', 'T', 1, now() \
             FROM generate_series(1, {count}) n"
        );
        async {
            let sql = sqlx::raw_sql(AssertSqlSafe(sql));
            h.pool().execute(sql).await.unwrap();
        }
    };
    fill("due", "decode(md5('k'), 'hex')", "now()", 1).await;
    fill("behind", "decode(md5('k'), 'hex')", "NULL", 100_000).await;
    let later = "INSERT INTO relaybox_waiting (consumer, identity, state, source, due_at, visible_at, redrive_count, \
            retry_count, message_id, destination, event_type, size, occurred_at) \
         SELECT 'c', decode(md5('later' || n), 'hex'), 'due', 's', now() + interval '1 hour', \
            now() + interval '1 hour', 0, 1, n::text, 's', 'T', 1, now() FROM generate_series(1, 100000) n";
    h.pool().execute(later).await.unwrap();
    let read = || async {
        h.terminate_others().await;
        h.number(
            "SELECT sum(idx_tup_read + coalesce((SELECT seq_tup_read FROM pg_stat_user_tables t WHERE t.relid = i.relid), 0))::bigint \
             FROM pg_stat_user_indexes i WHERE relname = 'relaybox_waiting'",
        )
        .await
    };
    let before = read().await;
    // Each connection that was ended fails once.
    for _ in 0..10 {
        let _ = room.check().await;
    }
    for _ in 0..20 {
        let claims = room.claim("c", 10, hour).await.unwrap();
        assert_eq!(claims.rows.len(), 1);
        let finished = room.finish(claims.rows[0].claim).await.unwrap();
        assert!(finished.held && finished.promoted);
    }
    let entries = read().await - before;
    assert!(entries < 5_000, "{entries} entries read");
}
