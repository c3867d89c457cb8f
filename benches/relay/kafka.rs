//! To Kafka: the relay, the client alone, and the relay that everybody writes first.

use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{FutureProducer, FutureRecord};
use relaybox::broker::Publisher;
use relaybox::broker::kafka::{Kafka as Broker, KafkaConfig};
use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::OutboxStore;
use relaybox::store::postgres::PostgresStore;
use relaybox_testcontainers::Kafka;
use sqlx::{Connection, PgConnection};

use super::Size;
use super::backlog::{Backlog, PAYLOAD_BYTES};
use super::drain::BATCH;
use super::report::{Report, median};

pub async fn measure(report: &mut Report, backlog: &Backlog, kafka: &Kafka, size: Size) {
    let rows = size.kafka_rows;
    let (mut relay, mut client, mut naive, mut goal) = (vec![], vec![], vec![], vec![]);
    for _ in 0..size.pairs {
        let took = relay_once(backlog, kafka, rows).await;
        let alone = client_once(kafka, rows).await;
        let drain = super::drain::ours_once(report, backlog, rows, 1).await.took;
        relay.push(took);
        client.push(alone);
        goal.push(drain + alone);
        naive.push(naive_once(backlog, kafka, size.naive_rows).await);
    }
    report.rate(
        "PostgreSQL to Kafka, 1 relay",
        rows,
        &relay,
        "client alone",
        &client,
    );
    report.rate(
        "PostgreSQL to Kafka, 1 relay",
        rows,
        &relay,
        "drain and client one after the other",
        &goal,
    );
    let ours = f64::from(rows) / median(&relay).as_secs_f64();
    let first = f64::from(size.naive_rows) / median(&naive).as_secs_f64();
    report.line(format!(
        "PostgreSQL to Kafka, 1 relay: {ours:.0}/s, the naive relay {first:.0}/s, ratio {:.1}",
        ours / first
    ));
}

async fn relay_once(backlog: &Backlog, kafka: &Kafka, rows: u32) -> Duration {
    let topic = kafka.create_topic("bench", 3).await.unwrap();
    let url = backlog.database(rows, &topic).await;
    let store = PostgresStore::connect(&url).await.unwrap();
    let broker = Broker::connect(KafkaConfig::new(kafka.brokers()))
        .await
        .unwrap();
    let config = RelayConfig::default().with_batch_rows_max(BATCH);
    let started = Instant::now();
    let drained = async {
        while store.pending(1).await.unwrap() + store.aside(1).await.unwrap() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let relay = Relay::new(store.clone(), broker.clone()).with_config(config);
    relay.run_until(drained).await.unwrap();
    let took = started.elapsed();
    broker.close(Duration::from_secs(10)).await.unwrap();
    let stored: i64 = kafka.topic_end_offsets(&topic).await.unwrap().iter().sum();
    assert_eq!(stored, i64::from(rows), "nothing lost, nothing twice");
    took
}

/// The same records, in batches as the relay sends them: next batch when the last one is confirmed.
async fn client_once(kafka: &Kafka, rows: u32) -> Duration {
    let topic = kafka.create_topic("bench", 3).await.unwrap();
    let producer = producer(kafka);
    let payload = vec![0xab; PAYLOAD_BYTES];
    let started = Instant::now();
    let mut sent = 0;
    while sent < rows {
        let mut waiting = Vec::with_capacity(BATCH);
        while sent < rows && waiting.len() < BATCH {
            let key = format!("key-{}", sent % super::backlog::KEYS);
            let record = FutureRecord::to(&topic).key(&key).payload(&payload);
            match producer.send_result(record) {
                Ok(delivery) => waiting.push(delivery),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => break,
                Err((error, _)) => panic!("{error}"),
            }
            sent += 1;
        }
        for delivery in waiting {
            delivery.await.unwrap().unwrap();
        }
    }
    started.elapsed()
}

pub fn producer(kafka: &Kafka) -> FutureProducer {
    producer_of(&kafka.brokers())
}

pub fn producer_of(brokers: &str) -> FutureProducer {
    ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("enable.idempotence", "true")
        .set("acks", "all")
        .set("linger.ms", "5")
        .create()
        .unwrap()
}

/// One transaction: select 100 rows with SKIP LOCKED, publish one by one, mark.
async fn naive_once(backlog: &Backlog, kafka: &Kafka, rows: u32) -> Duration {
    let topic = kafka.create_topic("bench", 3).await.unwrap();
    let url = backlog.database(rows, &topic).await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    super::backlog::run(
        &mut connection,
        "ALTER TABLE relaybox_outbox ADD published_at timestamptz; CREATE INDEX ON relaybox_outbox (position) WHERE published_at IS NULL".into(),
    )
    .await;
    let producer = producer(kafka);
    let started = Instant::now();
    loop {
        let mut tx = connection.begin().await.unwrap();
        let page: Vec<(i64, Vec<u8>, Vec<u8>)> = sqlx::query_as(
            "SELECT position, key, payload FROM relaybox_outbox WHERE published_at IS NULL
             ORDER BY position LIMIT 100 FOR UPDATE SKIP LOCKED",
        )
        .fetch_all(&mut *tx)
        .await
        .unwrap();
        if page.is_empty() {
            break;
        }
        for (_, key, payload) in &page {
            let record = FutureRecord::to(&topic).key(key).payload(payload);
            producer
                .send(record, Duration::from_secs(10))
                .await
                .unwrap();
        }
        let positions: Vec<i64> = page.iter().map(|row| row.0).collect();
        sqlx::query("UPDATE relaybox_outbox SET published_at = now() WHERE position = ANY ($1)")
            .bind(positions)
            .execute(&mut *tx)
            .await
            .unwrap();
        tx.commit().await.unwrap();
    }
    started.elapsed()
}
