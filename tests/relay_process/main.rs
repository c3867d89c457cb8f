//! One relay as a process of its own, which a test starts, kills, or lets die at a named point.
//!
//! `relay_process [POINT]`; the points stand in `crash.rs`. It publishes to Kafka where brokers are named in the
//! environment, else into the table of `ledger.rs`. SIGTERM stops it in order.

mod crash;
mod ledger;

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use relaybox::broker::Publisher;
use relaybox::broker::kafka::{Kafka, KafkaConfig};
use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::postgres::PostgresStore;
use tokio::signal::unix::{SignalKind, signal};

use crash::{CrashingPublisher, CrashingStore, Plan};
use ledger::Ledger;

/// Enough for a Kafka on a busy machine: what is not confirmed in time is sent twice.
const KAFKA_DEADLINE: Duration = Duration::from_secs(4);
/// Rows in a batch: what a relay that dies may leave to be sent twice.
const BATCH: usize = 20;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    end_with_parent();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(io::stderr)
        .init();
    let mut term = signal(SignalKind::terminate())?;
    let plan = Arc::new(Plan::parse(std::env::args().nth(1).as_deref())?);
    let store = PostgresStore::connect(&std::env::var("RELAYBOX_POSTGRES_URL")?).await?;
    let publisher: Arc<dyn Publisher> = match std::env::var("RELAYBOX_KAFKA_BROKERS") {
        Ok(brokers) => {
            let config = KafkaConfig::new(brokers).with_publish_deadline(KAFKA_DEADLINE);
            Arc::new(Kafka::connect(config).await?)
        }
        Err(_) => Arc::new(Ledger::new(store.pool().clone())),
    };
    // As short as allowed: how long a killed relay's lanes wait.
    let deadline = publisher.capabilities().publish_deadline;
    let lease = 2 * (deadline + Duration::from_secs(1));
    let config = RelayConfig::default()
        .with_name(format!("process-{}", std::process::id()))
        .with_batch_rows_max(BATCH)
        // The points of a circle are those of a batch that is waited for.
        .with_patience(deadline)
        .with_lease(lease);
    let relay = Relay::new(
        CrashingStore::new(store, plan.clone()),
        CrashingPublisher::new(publisher, plan),
    );
    let stop = async move {
        term.recv().await;
    };
    Ok(relay.with_config(config).run_until(stop).await?)
}

/// Ends this process when the one that started it is gone.
fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(3);
    });
}
