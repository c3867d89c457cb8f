//! The bare sqlx loop: fetch by lane, delete by ctid. It has no leases, its floor loses rows that commit late, and it
//! keeps no outcome.

use std::sync::Arc;

use sqlx::PgPool;
use sqlx::types::time::OffsetDateTime;

use super::backlog::{Backlog, TOPIC, relay_like_pool};
use super::checked::Checked;
use super::drain::BATCH;
use super::report::{Report, Run};

/// Which statements it runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Statements {
    /// The relay's own, as `src/store/postgres/sql.rs` has them where nothing is set aside: what is left is the cost of the library.
    Same,
    /// The simplest that do: no fence, no view of the data, no limit of bytes.
    Simplest,
}

const LANES: i32 = 16;

pub async fn once(
    report: &Report,
    backlog: &Backlog,
    rows: u32,
    workers: usize,
    statements: Statements,
) -> Run {
    let url = backlog.database(rows, TOPIC).await;
    let checked = Arc::new(Checked::new(rows));
    let mut pools = Vec::new();
    for _ in 0..workers {
        pools.push(relay_like_pool(&url).await);
    }
    let start = report.start();
    let tasks: Vec<_> = pools
        .into_iter()
        .enumerate()
        .map(|(worker, pool)| {
            let lanes = (0..LANES).filter(|lane| *lane as usize % workers == worker);
            let bare = Bare::new(pool, lanes.collect());
            tokio::spawn(bare.run(statements, checked.clone()))
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let run = start.end();
    assert!(checked.is_complete());
    run
}

struct Bare {
    pool: PgPool,
    lanes: Vec<i32>,
    floors: Vec<i64>,
}

type Message = (
    Option<i32>,
    Option<i64>,
    Option<String>,
    Option<String>,
    Option<Vec<u8>>,
    Option<String>,
    Option<String>,
    Option<String>,
    Option<Vec<u8>>,
    Option<i64>,
    Option<OffsetDateTime>,
);

impl Bare {
    fn new(pool: PgPool, lanes: Vec<i32>) -> Self {
        let floors = vec![0; lanes.len()];
        Self {
            pool,
            lanes,
            floors,
        }
    }

    async fn run(mut self, statements: Statements, checked: Arc<Checked>) {
        loop {
            let mut rows = match statements {
                Statements::Same => self.fetch_same().await,
                Statements::Simplest => self.fetch_simplest().await,
            };
            rows.retain(|row| row.0.is_some());
            if rows.is_empty() {
                return;
            }
            checked.see(
                rows.iter()
                    .map(|row| (row.4.as_deref().unwrap(), row.9.unwrap())),
            );
            let places = rows.iter().map(|row| (row.0.unwrap(), row.1.unwrap()));
            let (lanes, positions): (Vec<i32>, Vec<i64>) = places.unzip();
            for (lane, position) in lanes.iter().zip(&positions) {
                let at = self.lanes.iter().position(|own| own == lane).unwrap();
                self.floors[at] = self.floors[at].max(*position);
            }
            let deleted = match statements {
                Statements::Same => self.settle_same(lanes, positions).await,
                Statements::Simplest => self.settle_simplest(lanes, positions).await,
            };
            assert_eq!(deleted, rows.len() as u64);
        }
    }

    fn of_each<T: Clone>(&self, value: T) -> Vec<T> {
        vec![value; self.lanes.len()]
    }

    fn rows_of_a_lane(&self) -> i64 {
        (BATCH / self.lanes.len()) as i64
    }

    async fn fetch_simplest(&self) -> Vec<Message> {
        sqlx::query_as(
            "SELECT o.lane, o.position, message_id, destination, key, event_type, content_type, headers, payload, version, occurred_at
             FROM unnest($1::int[], $2::bigint[]) AS l(lane, floor) CROSS JOIN LATERAL
             (SELECT * FROM relaybox_outbox o WHERE o.lane = l.lane AND o.position > l.floor ORDER BY o.position LIMIT $3) o",
        )
        .bind(&self.lanes)
        .bind(&self.floors)
        .bind(self.rows_of_a_lane())
        .fetch_all(&self.pool)
        .await
        .unwrap()
    }

    async fn settle_simplest(&self, lanes: Vec<i32>, positions: Vec<i64>) -> u64 {
        sqlx::query(
            "DELETE FROM relaybox_outbox WHERE ctid = ANY (ARRAY(
                SELECT x.ctid FROM unnest($1::int[], $2::bigint[]) AS d(lane, position) CROSS JOIN LATERAL
                (SELECT o.ctid FROM relaybox_outbox o WHERE o.lane = d.lane AND o.position = d.position LIMIT 1) x))",
        )
        .bind(lanes)
        .bind(positions)
        .execute(&self.pool)
        .await
        .unwrap()
        .rows_affected()
    }

    async fn fetch_same(&self) -> Vec<Message> {
        sqlx::query_as(
            "SELECT NULL::int, NULL::bigint, NULL::text, NULL::text, NULL::bytea, NULL::text, NULL::text, NULL::text,
                NULL::bytea, NULL::bigint, NULL::timestamptz, NULL::int, NULL::bool, NULL::text,
                pg_current_snapshot()::text, CASE WHEN NOT pg_is_in_recovery() THEN pg_postmaster_start_time() END,
                NULL::text[], ARRAY[]::int[], ARRAY[]::int[]
             UNION ALL
             SELECT o.lane, o.position, message_id, destination, key, event_type, content_type,
                CASE WHEN o.size <= l.bytes_max / l.rows_max THEN headers END,
                CASE WHEN o.size <= l.bytes_max / l.rows_max THEN payload END,
                version, occurred_at, o.size, NOT (o.size <= l.bytes_max / l.rows_max),
                CASE WHEN o.position <= l.known THEN o.xid::text END, NULL, NULL, NULL, NULL, NULL
             FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[])
                AS l(lane, token, floor, known, rows_max, bytes_max)
             JOIN relaybox_outbox_lane z ON z.lane = l.lane AND z.token = l.token
             CROSS JOIN LATERAL (SELECT * FROM relaybox_outbox o
                WHERE o.lane = l.lane AND o.position > l.floor AND true
                ORDER BY o.position LIMIT l.rows_max) o",
        )
        .bind(&self.lanes)
        .bind(self.of_each(0_i64))
        .bind(&self.floors)
        .bind(&self.floors)
        .bind(self.of_each(self.rows_of_a_lane()))
        .bind(self.of_each(1_048_576_i64))
        .fetch_all(&self.pool)
        .await
        .unwrap()
    }

    async fn settle_same(&self, lanes: Vec<i32>, positions: Vec<i64>) -> u64 {
        sqlx::query(
            "WITH held AS MATERIALIZED (
                SELECT z.lane FROM relaybox_outbox_lane z
                JOIN unnest($1::int[], $2::bigint[]) AS l(lane, token) ON z.lane = l.lane AND z.token = l.token
                FOR KEY SHARE OF z)
             DELETE FROM relaybox_outbox WHERE ctid = ANY (ARRAY(
                SELECT x.ctid FROM unnest($3::int[], $4::bigint[]) AS d(lane, position)
                CROSS JOIN LATERAL (SELECT o.ctid FROM relaybox_outbox o
                    WHERE o.lane = d.lane AND o.position = d.position LIMIT 1) x
                WHERE d.lane = ANY (ARRAY(SELECT lane FROM held))))",
        )
        .bind(&self.lanes)
        .bind(self.of_each(0_i64))
        .bind(lanes)
        .bind(positions)
        .execute(&self.pool)
        .await
        .unwrap()
        .rows_affected()
    }
}
