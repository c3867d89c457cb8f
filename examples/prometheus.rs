//! What a monitoring system would read: the metrics of a relay and a consumer in Prometheus' text format, and whether
//! the two are ready.
//!
//! ```sh
//! cargo run --example prometheus --features metrics
//! ```
//!
//! SQLite and the broker in memory, no service. A program of yours would answer `/metrics` with the text, and `/ready`
//! by the probes.

use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use relaybox::broker::memory::MemoryBroker;
use relaybox::consumer::ConsumerConfig;
use relaybox::relay::RelayConfig;
use relaybox::store::sqlite::SqliteStore;
use relaybox::{Consumer, Failure, Incoming, Message, Outbox, Outcome, Relay, handler_fn};
use sqlx::SqliteConnection;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Result<()> {
    // Without buckets the exporter makes summaries, which cannot be added up over processes.
    let seconds = [0.001, 0.01, 0.1, 1.0, 10.0, 100.0];
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &seconds)?
        .build_recorder();
    let metrics = recorder.handle();
    metrics::set_global_recorder(recorder)?;

    let directory = tempfile::tempdir()?;
    let store = SqliteStore::connect(directory.path().join("shop.db")).await?;
    store.migrate().await?;
    let broker = MemoryBroker::new();
    broker.create_topic("orders", 3)?;

    let outbox = Outbox::new(store.clone()).with_rules_of(&broker);
    let mut tx = store.pool().begin().await?;
    for number in 0..10 {
        let message = Message::new("orders", "OrderPlaced").with_json(&number)?;
        outbox.enqueue(&mut tx, message).await?;
    }
    // Nobody made this topic.
    outbox
        .enqueue(&mut tx, Message::new("order", "OrderPlaced"))
        .await?;
    tx.commit().await?;

    let config = RelayConfig::default().with_sample_interval(Duration::from_millis(100));
    let relay = Relay::new(store.clone(), broker.clone()).with_config(config);
    let config = ConsumerConfig::default().with_sample_interval(Duration::from_millis(100));
    let consumer =
        Consumer::new("billing", "orders", broker.clone(), store.clone()).with_config(config);
    let probes = [("relay", relay.probe()), ("consumer", consumer.probe())];
    let tell = |when: &str| {
        for (name, probe) in &probes {
            println!("{name} {when}: {}", probe.readiness());
        }
    };
    tell("before the start");
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let shutdown = || {
        let mut stopped = stopped.clone();
        async move {
            let _ = stopped.wait_for(|stopped| *stopped).await;
        }
    };
    // A service would stop on a signal; this one when its work is done and has been sampled.
    let done = async {
        while broker.committed("billing", "orders").iter().sum::<u64>() < 10 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        tell("while it runs");
        stop.send_replace(true);
    };
    let (relayed, consumed, ()) = tokio::join!(
        relay.run_until(shutdown()),
        consumer.run_until(handler_fn((), charge), shutdown()),
        done,
    );
    relayed.and(consumed)?;
    tell("after the stop");

    println!("\n{}", metrics.render());
    Ok(())
}

async fn charge(_: &(), _: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    match incoming.message.json::<u32>() {
        Ok(7) => Outcome::Permanent(Failure::new("nobody pays for the seventh")),
        _ => Outcome::Done,
    }
}
