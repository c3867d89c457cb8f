//! An operator's redrive as a process of its own, which dies at a named point.
//!
//! `redrive_process BROKER TOPIC CONSUMER POSTGRES-URL collect|run|resume [RUN] [--crash POINT:N]`. The broker's address is in
//! the environment. With `--crash` the process ends at the N-th passage of a point of `crash.rs`.

// The example and the other process use all of it.
#[allow(dead_code)]
#[path = "../../examples/webhooks/broker.rs"]
mod broker;
mod crash;
#[allow(dead_code)]
#[path = "../fragile_process/place.rs"]
mod place;

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use relaybox::dlq::redrive::{CollectLimits, Redrive, RedriveConfig};
use relaybox::store::postgres::PostgresStore;

use broker::{Place, Product};
use crash::{FragileBroker, FragileStore, Plan};

/// Entries settled together.
const BATCH: usize = 4;
/// Longer than any test waits: the process is to die before.
const IDLE: Duration = Duration::from_secs(600);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    end_with_parent();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(io::stderr)
        .init();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [product, topic, consumer, url, verb, rest @ ..] = arguments.as_slice() else {
        return Err("usage: see the head of this program".into());
    };
    let (rest, plan) = match rest {
        [rest @ .., option, point] if option == "--crash" => (rest, Plan::parse(point)?),
        rest => (rest, Plan::default()),
    };
    let plan = Arc::new(plan);
    let product = Product::named(product).ok_or("no such broker")?;
    let address = std::env::var(product.variable())?;
    let place = Place { product, address };
    let broker = FragileBroker::new(place::connect(&place, topic, "desk").await?, plan.clone());
    let broker = Arc::new(broker);
    let store = FragileStore::new(PostgresStore::connect(url).await?, plan);
    let config = RedriveConfig::default()
        .with_batch_max(BATCH)
        .with_rate_max(10_000);
    let desk = Redrive::new(consumer, topic, broker.clone(), store).with_config(config);
    match (verb.as_str(), rest) {
        ("collect", []) => {
            let limits = CollectLimits {
                idle: IDLE,
                ..CollectLimits::default()
            };
            desk.collect(&*broker, limits).await?;
        }
        ("run", [run]) => drop(desk.run("process", run.parse()?, |_| {}).await?),
        ("resume", [run]) => drop(desk.resume("process", run.parse()?, |_| {}).await?),
        other => return Err(format!("not understood: {other:?}").into()),
    }
    Ok(())
}

/// Ends this process when the one that started it is gone.
fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(3);
    });
}
