//! What enqueueing adds to a business transaction, beside a hand-written INSERT.

use std::time::{Duration, Instant};

use relaybox::Message;
use relaybox::lane::lane_of;
use relaybox::outbox::Outbox;
use relaybox::store::postgres::PostgresStore;
use sqlx::Acquire;
use sqlx::postgres::PgConnection;

use super::Size;
use super::backlog::Backlog;
use super::report::Report;

pub async fn measure(report: &mut Report, backlog: &Backlog, size: Size) {
    let pool = backlog.empty().await;
    let store = PostgresStore::new(pool.clone());
    store.migrate().await.unwrap();
    sqlx::raw_sql("CREATE TABLE business (id bigserial PRIMARY KEY, note text NOT NULL)")
        .execute(&pool)
        .await
        .unwrap();
    let outbox = Outbox::new(store);
    let mut connection = pool.acquire().await.unwrap();
    let (mut ours, mut twin) = (Vec::new(), Vec::new());
    // The first of each warms the statement cache up.
    for pair in 0..=size.enqueue_pairs {
        let with_outbox = ours_once(&outbox, &mut connection, size.enqueue_transactions).await;
        let by_hand = twin_once(&mut connection, size.enqueue_transactions).await;
        if pair > 0 {
            ours.push(with_outbox);
            twin.push(by_hand);
        }
    }
    let what = format!(
        "{} transactions with one enqueue each",
        size.enqueue_transactions
    );
    report.cost(&what, &ours, "hand-written INSERT", &twin);
}

fn message(n: u32) -> Message {
    Message::new("orders", "OrderPlaced")
        .with_key(format!("order-{n}"))
        .with_payload(vec![0xab; 300])
}

async fn business(connection: &mut PgConnection) {
    sqlx::query("INSERT INTO business (note) VALUES ('x')")
        .execute(connection)
        .await
        .unwrap();
}

async fn ours_once(
    outbox: &Outbox<PostgresStore>,
    connection: &mut PgConnection,
    count: u32,
) -> Duration {
    let started = Instant::now();
    for n in 0..count {
        let mut tx = connection.begin().await.unwrap();
        business(&mut tx).await;
        outbox.enqueue(&mut tx, message(n)).await.unwrap();
        tx.commit().await.unwrap();
    }
    started.elapsed()
}

async fn twin_once(connection: &mut PgConnection, count: u32) -> Duration {
    let started = Instant::now();
    for n in 0..count {
        let mut tx = connection.begin().await.unwrap();
        business(&mut tx).await;
        let message = message(n);
        let key = message.key.as_deref().unwrap();
        sqlx::query(
            "INSERT INTO relaybox_outbox (lane, message_id, destination, key, event_type, payload, size, occurred_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        )
        .bind(lane_of(key))
        .bind(message.id.as_str())
        .bind(&message.destination)
        .bind(key)
        .bind(&message.event_type)
        .bind(message.payload.as_deref())
        .bind(i32::try_from(message.bytes()).unwrap())
        .bind(message.occurred_at)
        .execute(&mut *tx)
        .await
        .unwrap();
        tx.commit().await.unwrap();
    }
    started.elapsed()
}
