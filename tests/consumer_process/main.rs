//! One member of a consumer as a process of its own, which a test kills, stops, or tells to end.
//!
//! `consumer_process TOPIC CONSUMER ASSIGNOR MEMBER [static | in-place]`. Its handler is slow, and slower than a rebalance waits for
//! some messages; it writes what it did into the table `effect`. A payload `fail` fails every time, `poison` once and then ends the
//! process. SIGTERM stops it in order.

use std::error::Error;
use std::io;
use std::time::Duration;

use relaybox::backoff::DelayPolicy;
use relaybox::broker::kafka::{Assignor, Kafka, KafkaConfig};
use relaybox::consumer::{Consumer, ConsumerConfig, handler_fn};
use relaybox::dlq::DeadLetters;
use relaybox::envelope::Incoming;
use relaybox::ladder::Ladder;
use relaybox::store::postgres::PostgresStore;
use sqlx::postgres::PgConnection;
use tokio::signal::unix::{SignalKind, signal};

const SESSION: Duration = Duration::from_secs(4);
/// Shorter than the slowest messages take.
const DRAIN: Duration = Duration::from_millis(500);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    end_with_parent();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(io::stderr)
        .init();
    let mut term = signal(SignalKind::terminate())?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [topic, consumer, assignor, member, rest @ ..] = arguments.as_slice() else {
        return Err(
            "usage: consumer_process TOPIC CONSUMER ASSIGNOR MEMBER [static | in-place]".into(),
        );
    };
    let assignor = match assignor.as_str() {
        "cooperative-sticky" => Assignor::CooperativeSticky,
        "range" => Assignor::Range,
        "broker" => Assignor::Broker,
        other => return Err(format!("no such assignor: {other}").into()),
    };
    let mut config = KafkaConfig::new(std::env::var("RELAYBOX_KAFKA_BROKERS")?)
        .with_client_id(member)
        .with_assignor(assignor)
        .with_session_timeout(SESSION)
        .with_commit_interval(Duration::from_millis(200))
        .with_drain_deadline(DRAIN);
    if rest.iter().any(|argument| argument == "static") {
        config = config.with_instance_id(member);
    }
    let store = PostgresStore::connect(&std::env::var("RELAYBOX_POSTGRES_URL")?).await?;
    let stop = async move {
        term.recv().await;
    };
    let mut member_of = Consumer::new(
        consumer,
        topic,
        Kafka::connect(config).await?,
        store.clone(),
    )
    .with_config(ConsumerConfig::default().with_concurrency(4))
    // A member killed twice over one message has failed it once.
    .with_ladder(Ladder::rungs(
        [50, 100, 150, 200].map(Duration::from_millis),
    ));
    if rest.iter().any(|argument| argument == "in-place") {
        let delay = DelayPolicy::fixed(Duration::from_secs(2));
        member_of = member_of
            .with_ladder(Ladder::backoff(delay, 4).in_place())
            .with_waiting_room(store.clone())
            .with_dead_letters(DeadLetters::table(store));
    }
    member_of
        .run_until(handler_fn(member.clone(), work), stop)
        .await?;
    Ok(())
}

async fn work(
    member: &String,
    db: &mut PgConnection,
    incoming: &Incoming,
) -> Result<(), sqlx::Error> {
    let id = incoming.message.id.as_str();
    if incoming.message.payload.as_deref() == Some(b"poison") {
        if incoming.story.retry_count > 0 {
            std::process::abort();
        }
        return Err(sqlx::Error::RowNotFound);
    }
    if incoming.message.payload.as_deref() == Some(b"fail") {
        // What a sequence gave is counted, although the attempt is rolled back.
        let count = "SELECT nextval('attempt')";
        sqlx::query(count).execute(db).await?;
        return Err(sqlx::Error::RowNotFound);
    }
    // The id alone decides, so that a message is as slow wherever it comes again.
    let digest = id
        .bytes()
        .fold(0_u64, |sum, byte| sum * 31 % 997 + u64::from(byte));
    let effort = if digest % 50 == 0 {
        1_500
    } else {
        10 + digest % 60
    };
    tokio::time::sleep(Duration::from_millis(effort)).await;
    sqlx::query("INSERT INTO effect (message_id, member) VALUES ($1, $2)")
        .bind(id)
        .bind(member)
        .execute(db)
        .await
        .map(drop)
}

/// Ends this process when the one that started it is gone.
fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(3);
    });
}
