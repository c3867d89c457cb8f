//! The same story as the quickstart over real services: webhook deliveries written to a PostgreSQL outbox, relayed to a
//! broker, consumed into PostgreSQL with an inbox, a ladder and dead letters.
//!
//! ```sh
//! export RELAYBOX_POSTGRES_URL=postgres://... RELAYBOX_KAFKA_BROKERS=localhost:9092
//! cargo run --example webhooks --features postgres,kafka,rabbitmq,nats -- FILE [--copies K] [--broker kafka]
//! ```
//!
//! FILE holds one JSON object a line: `{"event", "action", "key", "payload"}`. With `--role` the parts of the story run
//! as processes of their own over one `--run NAME`: `prepare`, `enqueue`, `relay`, `consume` (until SIGTERM), `report`.

#[path = "webhooks/arguments.rs"]
mod arguments;
#[path = "webhooks/broker.rs"]
mod broker;
#[path = "webhooks/report.rs"]
mod report;
mod story;
#[path = "webhooks/world.rs"]
mod world;

use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use relaybox::Message;
use relaybox::consumer::{Consumer, ConsumerConfig, Failure, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::outbox::Outbox;
use relaybox::relay::{Relay, RelayConfig};
use relaybox::story::Reason;
use serde::Deserialize;
use serde_json::value::RawValue;
use sqlx::postgres::PgConnection;

use arguments::{Arguments, Role};
use world::{Anyhow, World};

/// A delivery as the file has it. The payload stays the text it is: its bytes are what must arrive.
#[derive(Deserialize)]
struct Webhook<'a> {
    event: String,
    action: Option<String>,
    key: String,
    #[serde(borrow)]
    payload: &'a RawValue,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("webhooks failed: {error}");
            let mut cause = error.source();
            while let Some(error) = cause {
                eprintln!("  because: {error}");
                cause = error.source();
            }
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Anyhow<bool> {
    let arguments = Arguments::parse()?;
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    let world = World::connect(arguments.product, &arguments.run).await?;
    match arguments.role {
        Role::All => all(&world, &arguments).await,
        Role::Prepare => world.prepare().await.map(|()| true),
        Role::Enqueue => enqueue(&world, &arguments).await.map(|_| true),
        Role::Relay => relay(&world, terminated()).await.map(|()| true),
        Role::Consume => consume(&world, terminated()).await.map(|()| true),
        Role::Report => report::print(&world).await,
    }
}

async fn all(world: &World, arguments: &Arguments) -> Anyhow<bool> {
    world.prepare().await?;
    let committed = enqueue(world, arguments).await?;
    println!(
        "{committed} deliveries are committed, each with its message in the same transaction."
    );
    println!(
        "Relay and consumer start. Some handlers fail once, a few always, a few say that it is pointless."
    );
    let bar = ProgressBar::new(committed);
    bar.set_style(ProgressStyle::with_template(
        "{bar:40} {pos}/{len} handled or dead, {elapsed}",
    )?);
    let watch = async {
        loop {
            let settled = world.settled().await?;
            bar.set_position(settled);
            if settled >= committed && world.is_drained().await? {
                bar.finish();
                return Anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    };
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let wait = || {
        let mut stopped = stopped.clone();
        async move {
            // An error means that the sender is gone: stop as well.
            let _ = stopped.wait_for(|stop| *stop).await;
        }
    };
    let both = async { tokio::try_join!(relay(world, wait()), consume(world, wait())) };
    let watch_then_stop = async {
        let watched = watch.await;
        stop.send_replace(true);
        watched
    };
    tokio::try_join!(both, watch_then_stop)?;
    report::print(world).await
}

/// One transaction per delivery: the business fact, and the message about it.
async fn enqueue(world: &World, arguments: &Arguments) -> Anyhow<u64> {
    let text = std::fs::read_to_string(&arguments.file)
        .map_err(|error| format!("{}: {error}", arguments.file.display()))?;
    let outbox = Outbox::new(world.store.clone()).with_rules_of(&world.broker);
    let fact = "INSERT INTO {schema}.fact (number, key, digest) VALUES ($1, $2, md5($3::bytea))";
    let mut number = 0i64;
    for copy in 1..=arguments.copies {
        for line in text.lines() {
            let webhook: Webhook = serde_json::from_str(line)?;
            number += 1;
            let key = match arguments.copies {
                1 => webhook.key,
                _ => format!("{}/{copy}", webhook.key),
            };
            let payload = webhook.payload.get().as_bytes();
            let mut tx = world.store.pool().begin().await?;
            sqlx::query(world.sql(fact))
                .bind(number)
                .bind(&key)
                .bind(payload)
                .execute(&mut *tx)
                .await?;
            let message = Message::new(world.destination(), webhook.event)
                .with_key(key)
                .with_content_type("application/json")
                .with_header("action", webhook.action.unwrap_or_default())
                .with_header("number", number.to_string())
                .with_version(number)
                .with_trace(format!("00-{number:032x}-{number:016x}-01"), None)
                .with_payload(payload.to_vec());
            outbox.enqueue(&mut tx, message).await?;
            tx.commit().await?;
        }
    }
    Ok(number.try_into()?)
}

async fn relay(world: &World, stop: impl Future<Output = ()> + Send) -> Anyhow<()> {
    let config = RelayConfig::default()
        .with_batch_rows_max(200)
        .with_lease(2 * (broker::PUBLISH_DEADLINE + Duration::from_secs(1)));
    let relay = Relay::new(world.store.clone(), world.broker.clone()).with_config(config);
    Ok(relay.run_until(stop).await?)
}

async fn consume(world: &World, stop: impl Future<Output = ()> + Send) -> Anyhow<()> {
    let consumer = Consumer::new(
        world::CONSUMER,
        &world.topic,
        world.broker.clone(),
        world.store.clone(),
    )
    .with_ladder(world::ladder())
    .with_config(ConsumerConfig::default().with_concurrency(4));
    let handler = handler_fn(world.clone(), handle);
    Ok(consumer.run_until(handler, stop).await?)
}

/// Writes one effect per delivery. What fails depends on the delivery's number alone, so every run tells the same story.
async fn handle(
    world: &World,
    db: &mut PgConnection,
    incoming: &Incoming,
) -> Result<Outcome, sqlx::Error> {
    let message = &incoming.message;
    let number = message.version.unwrap_or_default();
    let key = message.key_str().unwrap_or_default();
    // The observer's notebook, through a pool of its own and outside the transaction: failed attempts are seen too.
    sqlx::query(
        world.sql("INSERT INTO {schema}.attempt (key, number, retries) VALUES ($1, $2, $3)"),
    )
    .bind(key)
    .bind(number)
    .bind(i64::from(incoming.story.retry_count))
    .execute(&world.notebook)
    .await?;
    sqlx::query(world.sql(
        "INSERT INTO {schema}.effect (message_id, number, key, digest) VALUES ($1, $2, $3, md5($4::bytea))",
    ))
    .bind(message.id.as_str())
    .bind(number)
    .bind(key)
    .bind(message.payload.as_deref().unwrap_or_default())
    .execute(db)
    .await?;
    Ok(match number {
        n if n % 97 == 13 => Outcome::Permanent(Failure::new("this repository is unknown here")),
        n if n % 50 == 7 => Outcome::Retry(Failure::new("the index refuses this document")),
        n if n % 10 == 3 && incoming.story.retry_count == 0 => {
            Outcome::Retry(Failure::new("the index did not answer"))
        }
        _ => Outcome::Done,
    })
}

/// Why the handler above makes a dead letter of this delivery, if it does.
fn expected_reason(number: i64) -> Option<&'static str> {
    match number {
        n if n % 97 == 13 => Some(Reason::PERMANENT),
        n if n % 50 == 7 => Some(Reason::RETRIES_EXHAUSTED),
        _ => None,
    }
}

async fn terminated() {
    let term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate());
    match term {
        Ok(mut term) => tokio::select! {
            _ = term.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        },
        Err(_) => {
            let _ = tokio::signal::ctrl_c().await;
        }
    }
}
