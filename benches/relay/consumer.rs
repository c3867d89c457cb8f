//! The consumer with its inbox, beside the loop that one writes by hand: the same statements, and a handler of one UPDATE.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use relaybox::broker::memory::MemoryBroker;
use relaybox::broker::{Delivery, Publisher, Settlement, Subscriber, SubscriptionRequest};
use relaybox::consumer::{Consumer, ConsumerConfig, Outcome, handler_fn};
use relaybox::store::postgres::PostgresStore;
use relaybox::{Incoming, Message};
use sqlx::postgres::{PgConnection, PgPool, PgPoolOptions};
use tokio::sync::mpsc;

use super::Size;
use super::backlog::Backlog;
use super::report::{Report, Run};

const SOURCE: &str = "orders";
const ACCOUNTS: u32 = 1_000;
const BATCH: usize = 100;
const UPDATE: &str = "UPDATE account SET n = n + 1 WHERE id = $1";
const UPDATE_ALL: &str = "UPDATE account a SET n = a.n + b.n \
    FROM (SELECT id, count(*) AS n FROM unnest($1::text[]) AS u(id) GROUP BY id) b WHERE a.id = b.id";

pub async fn measure(report: &mut Report, backlog: &Backlog, size: Size) {
    let rows = size.consumer_rows;
    for workers in [1, 8] {
        let (mut single, mut batch, mut twin) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..size.pairs {
            single.push(ours(report, backlog, rows, workers, 1).await);
            twin.push(by_hand(report, backlog, rows, workers).await);
            batch.push(ours(report, backlog, rows, workers, BATCH).await);
        }
        let times = |runs: &[Run]| runs.iter().map(|run| run.took).collect::<Vec<Duration>>();
        let what = format!("consumer, {workers} at a time");
        report.rate(
            &what,
            rows,
            &times(&single),
            "hand-written loop",
            &times(&twin),
        );
        report.cpu(&what, rows, &single, "hand-written loop", &twin);
        let what = format!("consumer, batches of {BATCH}, {workers} at a time");
        report.rate(
            &what,
            rows,
            &times(&batch),
            "loop of single messages",
            &times(&twin),
        );
    }
}

/// A broker with the messages, and a database with the accounts they are for.
struct World {
    broker: MemoryBroker,
    pool: PgPool,
}

impl World {
    async fn new(backlog: &Backlog, rows: u32, workers: usize) -> Self {
        let url = backlog.migrated().await;
        let connections = u32::try_from(workers).unwrap();
        let pool = PgPoolOptions::new()
            .max_connections(connections + 1)
            .min_connections(connections)
            .connect(&url)
            .await
            .unwrap();
        sqlx::raw_sql(
            "CREATE TABLE account (id text PRIMARY KEY, n bigint NOT NULL) WITH (fillfactor = 50)",
        )
        .execute(&pool)
        .await
        .unwrap();
        sqlx::query("INSERT INTO account SELECT 'account-' || n, 0 FROM generate_series(0, $1) n")
            .bind(i64::from(ACCOUNTS))
            .execute(&pool)
            .await
            .unwrap();
        sqlx::raw_sql("VACUUM ANALYZE account")
            .execute(&pool)
            .await
            .unwrap();
        let broker = MemoryBroker::new();
        broker.create_topic(SOURCE, 8).unwrap();
        let messages = (0..rows).map(|n| {
            let message = Message::new(SOURCE, "Credited").with_payload(vec![0xab; 300]);
            message.with_key(format!("account-{}", n % ACCOUNTS)).into()
        });
        let messages: Vec<_> = messages.collect();
        for batch in messages.chunks(1_000) {
            let outcomes = broker.publish(batch).await;
            assert!(
                outcomes
                    .iter()
                    .all(relaybox::broker::PublishOutcome::is_confirmed)
            );
        }
        Self { broker, pool }
    }

    async fn is_complete(&self, rows: u32) {
        let sum: i64 = sqlx::query_scalar("SELECT sum(n)::bigint FROM account")
            .fetch_one(&self.pool)
            .await
            .unwrap();
        let ids: i64 = sqlx::query_scalar("SELECT count(*) FROM relaybox_inbox")
            .fetch_one(&self.pool)
            .await
            .unwrap();
        assert_eq!((sum, ids), (i64::from(rows), i64::from(rows)));
    }
}

fn account(incoming: &Incoming) -> &str {
    std::str::from_utf8(incoming.message.key.as_deref().unwrap()).unwrap()
}

/// Counts down to the end.
type Left = Arc<mpsc::UnboundedSender<usize>>;

async fn one(
    left: &Left,
    db: &mut PgConnection,
    incoming: &Incoming,
) -> Result<Outcome, sqlx::Error> {
    sqlx::query(UPDATE)
        .bind(account(incoming))
        .execute(db)
        .await?;
    left.send(1).unwrap();
    Ok(Outcome::Done)
}

async fn all(
    left: &Left,
    db: &mut PgConnection,
    batch: &[&Incoming],
) -> Result<Outcome, sqlx::Error> {
    let accounts: Vec<&str> = batch.iter().map(|incoming| account(incoming)).collect();
    sqlx::query(UPDATE_ALL).bind(accounts).execute(db).await?;
    left.send(batch.len()).unwrap();
    Ok(Outcome::Done)
}

async fn ours(report: &Report, backlog: &Backlog, rows: u32, workers: usize, batch: usize) -> Run {
    let world = World::new(backlog, rows, workers).await;
    let store = PostgresStore::new(world.pool.clone());
    let config = ConsumerConfig::default()
        .with_concurrency(workers)
        .with_in_flight_max(256.max(2 * batch * workers));
    let consumer =
        Consumer::new("billing", SOURCE, world.broker.clone(), store).with_config(config);
    let (left, mut counted) = mpsc::unbounded_channel();
    let left = Arc::new(left);
    // The last transactions end within the stop, which is part of the run.
    let done = async move {
        let mut handled = 0;
        while handled < rows as usize {
            handled += counted.recv().await.unwrap();
        }
    };
    let start = report.start();
    let ended = if batch == 1 {
        consumer.run_until(handler_fn(left, one), done).await
    } else {
        let handler = handler_fn(left, all);
        consumer.run_batches_until(batch, handler, done).await
    };
    ended.unwrap();
    let run = start.end();
    world.is_complete(rows).await;
    run
}

/// What one writes without a library: ordered by key, an acknowledgement after each commit; no ladder, no way to tell an
/// outage from a bad message, no stop.
async fn by_hand(report: &Report, backlog: &Backlog, rows: u32, workers: usize) -> Run {
    let world = World::new(backlog, rows, workers).await;
    let mut request = SubscriptionRequest::new("billing", vec![SOURCE.to_owned()]);
    request.in_flight_max = 256;
    let start = report.start();
    let mut subscription = world.broker.subscribe(request).await.unwrap();
    let hash = RandomState::new();
    let mut lines = HashMap::new();
    let mut tasks = Vec::new();
    for worker in 0..workers {
        let (send, line) = mpsc::unbounded_channel();
        lines.insert(worker, send);
        tasks.push(tokio::spawn(work(world.pool.clone(), line)));
    }
    let mut taken = 0;
    while taken < rows {
        for delivery in subscription.receive(256).await.unwrap() {
            taken += 1;
            let key = hash.hash_one(&delivery.incoming.message.key);
            let worker = usize::try_from(key % workers as u64).unwrap();
            lines[&worker].send(delivery).unwrap();
        }
    }
    drop(lines);
    for task in tasks {
        task.await.unwrap();
    }
    subscription.close(Duration::from_secs(10)).await.unwrap();
    let run = start.end();
    world.is_complete(rows).await;
    run
}

async fn work(pool: PgPool, mut line: mpsc::UnboundedReceiver<Delivery>) {
    while let Some(delivery) = line.recv().await {
        let incoming = &delivery.incoming;
        let mut tx = pool.begin().await.unwrap();
        let recorded = sqlx::query(
            "INSERT INTO relaybox_inbox (consumer, message_id) VALUES ('billing', $1) ON CONFLICT DO NOTHING",
        )
        .bind(incoming.message.id.as_str())
        .execute(&mut *tx)
        .await
        .unwrap();
        if recorded.rows_affected() == 1 {
            sqlx::query(UPDATE)
                .bind(account(incoming))
                .execute(&mut *tx)
                .await
                .unwrap();
        }
        tx.commit().await.unwrap();
        delivery
            .receipt
            .settle(Settlement::Acknowledge)
            .await
            .unwrap();
    }
}
