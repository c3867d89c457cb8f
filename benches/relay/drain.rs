//! How fast a backlog leaves when publishing costs nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use relaybox::Result;
use relaybox::broker::{PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder};
use relaybox::envelope::Outgoing;
use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::OutboxStore;
use relaybox::store::postgres::PostgresStore;
use sqlx::PgPool;

use super::Size;
use super::backlog::{Backlog, TOPIC, relay_like_pool};
use super::checked::Checked;
use super::report::Report;

pub const BATCH: usize = 1_000;

pub async fn measure(report: &mut Report, backlog: &Backlog, size: Size) {
    for relays in [1, 4] {
        let mut ours = Vec::new();
        let mut twin = Vec::new();
        for _ in 0..size.pairs {
            ours.push(ours_once(backlog, size.drain_rows, relays).await);
            twin.push(twin_once(backlog, size.drain_rows, relays).await);
        }
        let what = format!("drain to a no-op publisher, {relays} relay(s), batch {BATCH}");
        report.rate(&what, size.drain_rows, &ours, "bare loop", &twin);
    }
}

pub async fn ours_once(backlog: &Backlog, rows: u32, relays: usize) -> Duration {
    let url = backlog.database(rows, TOPIC).await;
    let checked = Arc::new(Checked::new(rows));
    let mut stores = Vec::new();
    for _ in 0..relays {
        stores.push(PostgresStore::connect(&url).await.unwrap());
    }
    let started = Instant::now();
    let stop = when_done(&checked);
    let tasks: Vec<_> = stores
        .iter()
        .map(|store| {
            let config = RelayConfig::default().with_batch_rows_max(BATCH);
            let relay = Relay::new(store.clone(), Noop(checked.clone())).with_config(config);
            tokio::spawn(relay.run_until(stop.clone()))
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    let took = started.elapsed();
    assert!(checked.is_complete());
    assert_eq!(stores[0].pending(10).await.unwrap(), 0);
    took
}

/// Completes for everybody once everything was seen.
fn when_done(checked: &Arc<Checked>) -> futures_util::future::Shared<BoxFuture<'static, ()>> {
    let checked = checked.clone();
    let stop: BoxFuture<'static, ()> = Box::pin(async move { checked.done.notified().await });
    futures_util::FutureExt::shared(stop)
}

/// The two statements by hand: fetch by lane, delete by ctid. No leases, no checks, no outcomes.
async fn twin_once(backlog: &Backlog, rows: u32, workers: usize) -> Duration {
    let url = backlog.database(rows, TOPIC).await;
    let checked = Arc::new(Checked::new(rows));
    let mut pools = Vec::new();
    for _ in 0..workers {
        pools.push(relay_like_pool(&url).await);
    }
    let started = Instant::now();
    let tasks: Vec<_> = pools
        .into_iter()
        .enumerate()
        .map(|(worker, pool)| tokio::spawn(bare_loop(pool, worker, workers, checked.clone())))
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let took = started.elapsed();
    assert!(checked.is_complete());
    took
}

async fn bare_loop(pool: PgPool, worker: usize, workers: usize, checked: Arc<Checked>) {
    let lanes: Vec<i32> = (0..16)
        .filter(|lane| lane % workers as i32 == worker as i32)
        .collect();
    let per_lane = (BATCH / lanes.len()) as i64;
    let mut floors = vec![0i64; lanes.len()];
    type Row = (
        i32,
        i64,
        String,
        String,
        Option<Vec<u8>>,
        String,
        Option<String>,
        Option<String>,
        Option<Vec<u8>>,
        Option<i64>,
        sqlx::types::time::OffsetDateTime,
    );
    loop {
        let rows: Vec<Row> = sqlx::query_as(
            "SELECT o.lane, o.position, message_id, destination, key, event_type, content_type, headers, payload, version, occurred_at
             FROM unnest($1::int[], $2::bigint[]) AS l(lane, floor) CROSS JOIN LATERAL
             (SELECT * FROM relaybox_outbox o WHERE o.lane = l.lane AND o.position > l.floor ORDER BY o.position LIMIT $3) o",
        )
        .bind(&lanes)
        .bind(&floors)
        .bind(per_lane)
        .fetch_all(&pool)
        .await
        .unwrap();
        if rows.is_empty() {
            return;
        }
        checked.see(
            rows.iter()
                .map(|row| (row.4.as_deref().unwrap(), row.9.unwrap())),
        );
        for row in &rows {
            let at = lanes.iter().position(|lane| *lane == row.0).unwrap();
            floors[at] = floors[at].max(row.1);
        }
        let (lane, position): (Vec<i32>, Vec<i64>) = rows.iter().map(|row| (row.0, row.1)).unzip();
        sqlx::query(
            "DELETE FROM relaybox_outbox WHERE ctid = ANY (ARRAY(
                SELECT x.ctid FROM unnest($1::int[], $2::bigint[]) AS d(lane, position) CROSS JOIN LATERAL
                (SELECT o.ctid FROM relaybox_outbox o WHERE o.lane = d.lane AND o.position = d.position LIMIT 1) x))",
        )
        .bind(lane)
        .bind(position)
        .execute(&pool)
        .await
        .unwrap();
    }
}

/// Confirms everything, and holds it against the order.
struct Noop(Arc<Checked>);

impl Publisher for Noop {
    fn capabilities(&self) -> PublisherCapabilities {
        let mut capabilities = PublisherCapabilities::new("noop");
        capabilities.order = PublisherOrder::Prefix;
        capabilities
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        let sent = batch.iter().map(|sent| &sent.message);
        self.0
            .see(sent.map(|message| (message.key.as_deref().unwrap(), message.version.unwrap())));
        let outcomes = batch.iter().map(|_| PublishOutcome::Confirmed).collect();
        Box::pin(std::future::ready(outcomes))
    }

    fn check<'a>(&'a self, _: &'a [String]) -> BoxFuture<'a, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn close(&self, _: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
