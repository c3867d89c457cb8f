//! The relay beside its twins, in one run: figures are ratios, since machines differ and are shared.
//!
//! ```sh
//! cargo bench -p relaybox-testcontainers --bench relay                # drain, kafka, enqueue: some minutes
//! cargo bench -p relaybox-testcontainers --bench relay -- drain      # one row only
//! cargo bench -p relaybox-testcontainers --bench relay -- held --held-seconds=180
//! cargo bench -p relaybox-testcontainers --bench relay -- depth --depth-rows=10000000
//! cargo bench -p relaybox-testcontainers --bench relay -- --smoke    # all rows, a minute: do they still run?
//! ```
//!
//! | row | what | twin |
//! |---|---|---|
//! | `drain` | a backlog to a publisher that costs nothing | a bare sqlx loop with the relay's own statements, and one with the simplest |
//! | `kafka` | a backlog to Kafka | the client alone (in order, pipelined, idempotent, acks=all), and the relay everybody writes first |
//! | `brokers` | publish to, consume from and relay to each of Kafka, RabbitMQ and JetStream | the client alone |
//! | `consumer` | messages with an inbox and one UPDATE each, single and in batches, 1 and 8 at a time | the same by hand |
//! | `enqueue` | a business transaction with an enqueue | the same transaction with a hand-written INSERT |
//! | `steady` | commit to confirm at 1,000/s for `--steady-seconds` | the client alone |
//! | `held` | 5,000/s for `--held-seconds` beside an old snapshot, then an open writer | its own first sixth |
//! | `depth` | a backlog of `--depth-rows` | its own first tenth |
//! | `memory` | the peak of a relay's process at full speed | what it had before |
//!
//! Every run is checked: nothing lost, nothing sent twice, first appearances per key in order.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a bench fails by panicking"
)]

mod backlog;
mod brokers;
mod checked;
mod clients;
mod consumer;
mod cpu;
mod depth;
mod drain;
mod enqueue;
mod held;
mod kafka;
mod memory;
mod report;
mod steady;
mod twin;
mod writers;

use std::time::Duration;

use relaybox_testcontainers::{Kafka, Postgres, PostgresOptions};

use backlog::Backlog;
use brokers::Product;
use report::Report;

/// How much is measured.
#[derive(Clone, Copy)]
pub struct Size {
    pub pairs: usize,
    pub drain_rows: u32,
    /// To and from a broker.
    pub kafka_rows: u32,
    pub naive_rows: u32,
    pub consumer_rows: u32,
    pub enqueue_pairs: usize,
    pub enqueue_transactions: u32,
    pub steady: Duration,
    pub held: Duration,
    pub depth_rows: u32,
    pub memory_rows: u32,
}

/// Rows that are measured if none is named; the others take long, and are for a machine of their own.
const USUAL: [&str; 3] = ["drain", "kafka", "enqueue"];

#[tokio::main]
async fn main() {
    // `RUST_LOG=sqlx::query=debug,relaybox=debug` shows where the time goes.
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [first, url, rows] = &words[..]
        && first == memory::CHILD
    {
        return memory::child(url, rows.parse().unwrap()).await;
    }
    let smoke = words.iter().any(|word| word == "--smoke");
    let size = if smoke {
        Size {
            pairs: 1,
            drain_rows: 5_000,
            kafka_rows: 2_000,
            naive_rows: 200,
            consumer_rows: 500,
            enqueue_pairs: 2,
            enqueue_transactions: 50,
            steady: seconds("--steady-seconds", 3),
            held: seconds("--held-seconds", 3),
            depth_rows: option("--depth-rows", 20_000),
            memory_rows: 10_000,
        }
    } else {
        Size {
            pairs: 5,
            drain_rows: 200_000,
            kafka_rows: 100_000,
            naive_rows: 2_000,
            consumer_rows: 20_000,
            enqueue_pairs: 20,
            enqueue_transactions: 500,
            steady: seconds("--steady-seconds", 60),
            held: seconds("--held-seconds", 180),
            depth_rows: option("--depth-rows", 10_000_000),
            memory_rows: 500_000,
        }
    };
    let options = PostgresOptions::default().with_durable();
    let postgres = Postgres::start_with(options).await.unwrap();
    let mut report = Report::new(&postgres, smoke).await;
    let backlog = Backlog::new(&postgres).await;
    let named = || words.iter().filter(|word| !word.starts_with('-'));
    let wanted = |row: &str| match named().next() {
        Some(_) => named().any(|name| name == row),
        None => smoke || USUAL.contains(&row),
    };
    let kafka = if wanted("kafka") || wanted("steady") {
        Some(Kafka::start().await.unwrap())
    } else {
        None
    };
    if wanted("drain") {
        drain::measure(&mut report, &backlog, size).await;
    }
    if let Some(kafka) = kafka.as_ref().filter(|_| wanted("kafka")) {
        kafka::measure(&mut report, &backlog, kafka, size).await;
    }
    if wanted("brokers") {
        for name in ["kafka", "rabbitmq", "nats"] {
            let product = Product::named(name).await;
            brokers::measure(&mut report, &backlog, &product, size).await;
        }
    }
    if wanted("consumer") {
        consumer::measure(&mut report, &backlog, size).await;
    }
    if wanted("enqueue") {
        enqueue::measure(&mut report, &backlog, size).await;
    }
    if let Some(kafka) = kafka.as_ref().filter(|_| wanted("steady")) {
        steady::measure(&mut report, &backlog, kafka, size).await;
    }
    if wanted("held") {
        held::measure(&mut report, &backlog, size).await;
    }
    if wanted("depth") {
        depth::measure(&mut report, &backlog, size).await;
    }
    if wanted("memory") {
        memory::measure(&mut report, &backlog, size).await;
    }
    report.print();
}

/// The value of an option written as `--name=value`.
fn option(name: &str, default: u32) -> u32 {
    let mut words = std::env::args();
    let value = words.find_map(|word| {
        let value = word.strip_prefix(name)?.strip_prefix('=')?;
        Some(value.parse().unwrap())
    });
    value.unwrap_or(default)
}

fn seconds(name: &str, default: u32) -> Duration {
    Duration::from_secs(option(name, default).into())
}
