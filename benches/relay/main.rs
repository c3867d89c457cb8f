//! The relay beside its twins, in one run: figures are ratios, since machines differ and are shared.
//!
//! ```sh
//! cargo bench -p relaybox-testcontainers --bench relay                # the whole report, some minutes
//! cargo bench -p relaybox-testcontainers --bench relay -- drain      # one row only: drain, kafka or enqueue
//! cargo bench -p relaybox-testcontainers --bench relay -- --smoke    # a few seconds: does it still run?
//! ```
//!
//! | row | twin |
//! |---|---|
//! | drain | a bare sqlx loop with the same two statements, batch and connections, and one with the simplest statements |
//! | Kafka | the client alone (in order, pipelined, idempotent, acks=all), and the relay everybody writes first |
//! | enqueue | the same transaction with a hand-written INSERT |
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
mod checked;
mod cpu;
mod drain;
mod enqueue;
mod kafka;
mod report;
mod twin;

use relaybox_testcontainers::{Kafka, Postgres, PostgresOptions};

use backlog::Backlog;
use report::Report;

/// How much is measured.
#[derive(Clone, Copy)]
pub struct Size {
    pub pairs: usize,
    pub drain_rows: u32,
    pub kafka_rows: u32,
    pub naive_rows: u32,
    pub enqueue_pairs: usize,
    pub enqueue_transactions: u32,
}

#[tokio::main]
async fn main() {
    // `RUST_LOG=sqlx::query=debug,relaybox=debug` shows where the time goes.
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .init();
    let smoke = std::env::args().any(|word| word == "--smoke");
    let size = if smoke {
        Size {
            pairs: 1,
            drain_rows: 5_000,
            kafka_rows: 2_000,
            naive_rows: 200,
            enqueue_pairs: 2,
            enqueue_transactions: 50,
        }
    } else {
        Size {
            pairs: 5,
            drain_rows: 200_000,
            kafka_rows: 100_000,
            naive_rows: 2_000,
            enqueue_pairs: 20,
            enqueue_transactions: 500,
        }
    };
    let options = PostgresOptions::default().with_durable();
    let postgres = Postgres::start_with(options).await.unwrap();
    let mut report = Report::new(&postgres, smoke).await;
    let backlog = Backlog::new(&postgres).await;
    let named: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| !word.starts_with('-'))
        .collect();
    let wanted = |row: &str| named.is_empty() || named.iter().any(|name| name == row);
    if wanted("drain") {
        drain::measure(&mut report, &backlog, size).await;
    }
    if wanted("kafka") {
        let kafka = Kafka::start().await.unwrap();
        kafka::measure(&mut report, &backlog, &kafka, size).await;
    }
    if wanted("enqueue") {
        enqueue::measure(&mut report, &backlog, size).await;
    }
    report.print();
}
