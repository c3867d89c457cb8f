//! One member of a consumer as a process of its own, whose messages may end it.
//!
//! `fragile_process BROKER TOPIC CONSUMER DATABASE MEMBER [--crash POINT:N]`. The broker is `kafka`, `rabbitmq` or `nats`, its
//! address in the environment; the database a PostgreSQL URL or the path of an SQLite file. With `--crash` the process ends
//! at the N-th passage of a point of `crash.rs`.
//!
//! What a message does is the first word of its payload (see [`Deed`]); it ends with a row in the table `effect`. Copies that
//! are sent stand on stdout, a line each: `copy ID ATTEMPTS CLASS`. SIGTERM stops it in order.

// The example uses all of it.
#[allow(dead_code)]
#[path = "../../examples/webhooks/broker.rs"]
mod broker;
mod crash;
mod fragile_broker;
mod place;

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use relaybox::consumer::{Consumer, ConsumerConfig, Failure, Handler, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::store::InboxStore;
use relaybox::store::postgres::PostgresStore;
use relaybox::store::sqlite::SqliteStore;
use sqlx::postgres::{PgConnection, PgPoolOptions};
use sqlx::sqlite::SqliteConnection;
use tokio::signal::unix::{Signal, SignalKind, signal};

use broker::{Place, Product};
use crash::{FragileInbox, Plan};
use fragile_broker::FragileBroker;

/// Few, because many of these processes share one server.
const HANDLERS: usize = 4;
/// The test is over by then.
const RETENTION: Duration = Duration::from_secs(86_400);
/// Of every message: long enough for its neighbours to be under way when it ends the process.
const EFFORT: Duration = Duration::from_millis(5);

/// What handling a message leads to.
enum Deed {
    /// An effect.
    Work,
    /// The end of the process, every time.
    Abort,
    /// A failure, every time.
    Fail,
    /// A failure at the first attempt, an effect at the second.
    Once,
}

struct Member {
    topic: String,
    consumer: String,
    broker: FragileBroker,
    plan: Arc<Plan>,
    term: Signal,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    end_with_parent();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(io::stderr)
        .init();
    let term = signal(SignalKind::terminate())?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [product, topic, consumer, database, member, rest @ ..] = arguments.as_slice() else {
        return Err(
            "usage: fragile_process BROKER TOPIC CONSUMER DATABASE MEMBER [--crash POINT:N]".into(),
        );
    };
    let plan = match rest {
        [] => Plan::default(),
        [option, point] if option == "--crash" => Plan::parse(point)?,
        other => return Err(format!("not understood: {other:?}").into()),
    };
    let plan = Arc::new(plan);
    let product = Product::named(product).ok_or("no such broker")?;
    let address = std::env::var(product.variable())?;
    let place = Place { product, address };
    let broker = place::connect(&place, topic, member).await?;
    let member = Member {
        topic: topic.clone(),
        consumer: consumer.clone(),
        broker: FragileBroker::new(broker, plan.clone()),
        plan,
        term,
    };
    if database.starts_with("postgres") {
        let connections = u32::try_from(HANDLERS)? + 1;
        let pool = PgPoolOptions::new().max_connections(connections);
        let store = PostgresStore::new(pool.connect(database).await?);
        let handler = handler_fn(consumer.clone(), work_in_postgres);
        member.run(store, handler).await
    } else {
        let store = SqliteStore::connect(database).await?;
        let handler = handler_fn(consumer.clone(), work_in_sqlite);
        member.run(store, handler).await
    }
}

impl Member {
    async fn run<S, H>(self, store: S, handler: H) -> Result<(), Box<dyn Error + Send + Sync>>
    where
        S: InboxStore,
        H: Handler<S::Connection>,
    {
        let Self { plan, mut term, .. } = self;
        let store = FragileInbox::new(store, plan);
        let stop = async move {
            term.recv().await;
        };
        let config = ConsumerConfig::default()
            .with_concurrency(HANDLERS)
            .with_source_retention(RETENTION);
        Consumer::new(self.consumer, self.topic, self.broker, store)
            .with_ladder(place::ladder())
            .with_config(config)
            .run_until(handler, stop)
            .await?;
        Ok(())
    }
}

async fn work_in_postgres(
    consumer: &String,
    db: &mut PgConnection,
    incoming: &Incoming,
) -> Result<Outcome, sqlx::Error> {
    sqlx::query("INSERT INTO effect (consumer, message_id, attempt) VALUES ($1, $2, $3)")
        .bind(consumer)
        .bind(incoming.message.id.as_str())
        .bind(attempt(incoming))
        .execute(db)
        .await?;
    Ok(act(incoming).await)
}

async fn work_in_sqlite(
    consumer: &String,
    db: &mut SqliteConnection,
    incoming: &Incoming,
) -> Result<Outcome, sqlx::Error> {
    sqlx::query("INSERT INTO effect (consumer, message_id, attempt) VALUES (?, ?, ?)")
        .bind(consumer)
        .bind(incoming.message.id.as_str())
        .bind(attempt(incoming))
        .execute(db)
        .await?;
    Ok(act(incoming).await)
}

/// Failed attempts so far.
fn attempt(incoming: &Incoming) -> i32 {
    i32::try_from(incoming.story.retry_count).unwrap_or(i32::MAX)
}

async fn act(incoming: &Incoming) -> Outcome {
    tokio::time::sleep(EFFORT).await;
    match Deed::of(incoming) {
        Deed::Abort => std::process::abort(),
        Deed::Fail => Outcome::Retry(Failure::new("as every time")),
        Deed::Once if attempt(incoming) == 0 => Outcome::Retry(Failure::new("for now")),
        Deed::Once | Deed::Work => Outcome::Done,
    }
}

impl Deed {
    fn of(incoming: &Incoming) -> Self {
        let payload = incoming.message.payload.as_deref().unwrap_or_default();
        match payload.split(|byte| *byte == b' ').next() {
            Some(b"abort") => Self::Abort,
            Some(b"fail") => Self::Fail,
            Some(b"once") => Self::Once,
            _ => Self::Work,
        }
    }
}

/// Ends this process when the one that started it is gone.
fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(3);
    });
}
