//! A server that falls silent under a handler.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use relaybox::broker::Publisher;
use relaybox::broker::memory::MemoryBroker;
use relaybox::consumer::{Consumer, ConsumerConfig, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::readiness::NotReady;
use relaybox::{Ladder, Message};
use relaybox_testcontainers::PostgresOptions;
use tokio::sync::{Notify, oneshot};

use super::*;

/// How far the first attempt is.
#[derive(Default)]
struct Turns {
    attempts: AtomicUsize,
    begun: Notify,
    go_on: Notify,
}

async fn ask(
    turns: &Arc<Turns>,
    db: &mut PgConnection,
    incoming: &Incoming,
) -> Result<Outcome, sqlx::Error> {
    if turns.attempts.fetch_add(1, Ordering::SeqCst) == 0 {
        turns.begun.notify_one();
        turns.go_on.notified().await;
    }
    assert_eq!(incoming.story.retry_count, 0);
    sqlx::query("SELECT 1").execute(db).await?;
    Ok(Outcome::Done)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_falls_silent_under_a_handler_burns_no_attempt() {
    let options = PostgresOptions::default().with_local_process();
    let server = relaybox_testcontainers::Postgres::start_with(options)
        .await
        .unwrap();
    let url = server.create_database("store").await.unwrap();
    let pool = PgPoolOptions::new()
        .max_connections(4)
        .acquire_timeout(Duration::from_secs(2));
    let store = PostgresStore::new(pool.connect(&url).await.unwrap());
    store.migrate().await.unwrap();
    let broker = MemoryBroker::new();
    broker.create_topic("orders", 1).unwrap();
    let sent = broker.publish(&[Message::new("orders", "T").into()]).await;
    assert!(sent[0].is_confirmed());
    let config = ConsumerConfig::default().with_handler_timeout(Duration::from_secs(1));
    // A failed attempt would be a dead letter at once.
    let consumer = Consumer::new("billing", "orders", broker.clone(), store)
        .with_ladder(Ladder::none())
        .with_config(config);
    let probe = consumer.probe();
    let turns = Arc::new(Turns::default());
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(handler_fn(turns.clone(), ask), async {
        let _ = stopped.await;
    }));
    turns.begun.notified().await;
    server.stop().await.unwrap();
    turns.go_on.notify_one();
    // By the question that follows the timeout, and by nothing else that the consumer does.
    eventually(DEADLINE, "the database is missed", || async {
        let reasons = probe.readiness().reasons;
        matches!(&reasons[..], [NotReady::DatabaseDown(why)] if why.contains("ask the inbox"))
    })
    .await;
    server.cont().await.unwrap();
    eventually(DEADLINE, "it is handled", || async {
        let lag = relaybox::broker::Subscriber::lag(&broker, "billing", "orders").await;
        lag.unwrap().messages == 0
    })
    .await;
    drop(stop);
    running.await.unwrap().unwrap();
    assert!(turns.attempts.load(Ordering::SeqCst) >= 2);
    assert!(broker.log("orders.billing.DLQ").is_empty());
}
