//! A house to test in: outbox and inbox in one SQLite file, a broker in memory, and things that run until told.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::backoff::DelayPolicy;
use relaybox::broker::memory::MemoryBroker;
use relaybox::broker::{
    PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder, RejectionScope,
};
use relaybox::consumer::{Consumer, ConsumerConfig, Handler};
use relaybox::envelope::{Incoming, Outgoing};
use relaybox::ladder::Ladder;
use relaybox::outbox::Outbox;
use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::OutboxStore;
use relaybox::store::sqlite::SqliteStore;
use relaybox::testing::eventually;
use relaybox::{Error, ErrorKind, Message, Result};
use sqlx::sqlite::SqliteConnection;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Longest wait for anything that must happen; only a failing test waits that long.
pub const DEADLINE: Duration = Duration::from_secs(180);

pub struct House {
    _directory: TempDir,
    pub store: SqliteStore,
    pub broker: MemoryBroker,
}

impl House {
    /// A migrated store, an `effect` table, and a topic `orders` of three partitions.
    pub async fn new() -> Self {
        // `RUST_LOG=relaybox=debug` shows what happens inside.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        let directory = tempfile::tempdir().unwrap();
        let store = SqliteStore::connect(directory.path().join("house.db"))
            .await
            .unwrap();
        store.migrate().await.unwrap();
        sqlx::raw_sql(
            "CREATE TABLE effect (n INTEGER PRIMARY KEY, consumer TEXT, message_id TEXT, key TEXT)",
        )
        .execute(store.pool())
        .await
        .unwrap();
        let broker = MemoryBroker::new();
        broker.create_topic("orders", 3).unwrap();
        Self {
            _directory: directory,
            store,
            broker,
        }
    }

    pub async fn enqueue(&self, messages: &[Message]) {
        let outbox = Outbox::new(self.store.clone());
        let mut tx = self.store.pool().begin().await.unwrap();
        outbox.enqueue_all(&mut tx, messages).await.unwrap();
        tx.commit().await.unwrap();
    }

    /// Publishes past the outbox.
    pub async fn publish(&self, messages: &[Message]) {
        let batch: Vec<_> = messages.iter().cloned().map(Into::into).collect();
        for outcome in self.broker.publish(&batch).await {
            assert!(outcome.is_confirmed(), "{outcome:?}");
        }
    }

    pub fn relay(&self, publisher: impl Publisher, config: RelayConfig) -> Running {
        let relay = Relay::new(self.store.clone(), publisher).with_config(config);
        Running::start(|stop| relay.run_until(stop))
    }

    pub fn consumer(&self, name: &str) -> Consumer<SqliteStore> {
        Consumer::new(name, "orders", self.broker.clone(), self.store.clone())
            .with_ladder(Ladder::rungs([50, 100].map(Duration::from_millis)))
            .with_config(quick())
    }

    pub fn consume(&self, name: &str, handler: impl Handler<SqliteConnection>) -> Running {
        run(self.consumer(name), handler)
    }

    /// Ids stored on a topic, in order of partition and offset.
    pub fn ids(&self, topic: &str) -> Vec<String> {
        let log = self.broker.log(topic).into_iter();
        log.map(|record| record.message.id.to_string()).collect()
    }

    /// Ids of one key on `orders`, in order.
    pub fn ids_of(&self, key: &str) -> Vec<String> {
        let of_key = |record: &Incoming| record.message.key.as_deref() == Some(key.as_bytes());
        let log = self.broker.log("orders").into_iter();
        log.filter(of_key)
            .map(|record| record.message.id.to_string())
            .collect()
    }

    pub fn dead(&self, consumer: &str) -> Vec<Incoming> {
        self.broker.log(&format!("orders.{consumer}.DLQ"))
    }

    pub async fn pending(&self) -> u64 {
        self.store.pending(100_000).await.unwrap()
    }

    /// Rows set aside in this state.
    pub async fn aside(&self, state: &str) -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM relaybox_outbox_aside WHERE state = ?")
            .bind(state)
            .fetch_one(self.store.pool())
            .await
            .unwrap()
    }

    /// Waits until nothing is left that would be sent without an operator.
    pub async fn drained(&self) {
        eventually(DEADLINE, "all is sent", || async {
            let left: i64 = sqlx::query_scalar(
                "SELECT (SELECT count(*) FROM relaybox_outbox) + (SELECT count(*) FROM relaybox_outbox_aside \
                    WHERE state IN ('waiting', 'delayed'))",
            )
            .fetch_one(self.store.pool())
            .await
            .unwrap();
            left == 0
        })
        .await;
    }

    /// Effects of a consumer, as message ids in the order they were written.
    pub async fn effects(&self, consumer: &str) -> Vec<String> {
        sqlx::query_scalar("SELECT message_id FROM effect WHERE consumer = ? ORDER BY n")
            .bind(consumer)
            .fetch_all(self.store.pool())
            .await
            .unwrap()
    }

    /// Waits until the consumer has committed every record of the topic.
    pub async fn consumed(&self, consumer: &str, topic: &str) {
        let awaited = format!("{consumer} has read {topic} to its end");
        eventually(DEADLINE, &awaited, || async {
            let read: u64 = self.broker.committed(consumer, topic).iter().sum();
            read == self.broker.log(topic).len() as u64
        })
        .await;
    }
}

/// A relay with settings that do not wait long.
pub fn brisk() -> RelayConfig {
    RelayConfig::default().with_lease(Duration::from_secs(4))
}

pub fn quick() -> ConsumerConfig {
    ConsumerConfig::default().with_shutdown_deadline(Duration::from_secs(5))
}

pub fn run(consumer: Consumer<SqliteStore>, handler: impl Handler<SqliteConnection>) -> Running {
    Running::start(|stop| consumer.run_until(handler, stop))
}

/// Messages `{prefix}-0..count` of one key.
pub fn numbered(key: &str, prefix: &str, count: usize) -> Vec<Message> {
    (0..count)
        .map(|n| {
            Message::new("orders", "Numbered")
                .with_id(format!("{prefix}-{n}"))
                .with_key(key)
                .with_payload(format!("{prefix}-{n}"))
        })
        .collect()
}

/// The same messages to another destination.
pub fn to(destination: &str, mut messages: Vec<Message>) -> Vec<Message> {
    for message in &mut messages {
        message.destination = destination.into();
    }
    messages
}

/// Names as [`numbered`] gives them.
pub fn names(prefix: &str, numbers: impl IntoIterator<Item = usize>) -> Vec<String> {
    let name = |n| format!("{prefix}-{n}");
    numbers.into_iter().map(name).collect()
}

pub fn refused(scope: RejectionScope) -> PublishOutcome {
    let error = Error::new(ErrorKind::Rejected, "publish", "not this one");
    PublishOutcome::Rejected { scope, error }
}

/// A relay that gives up on nobody for long.
pub fn impatient() -> RelayConfig {
    brisk()
        .with_patience(Duration::from_millis(20))
        .with_backoff(DelayPolicy::fixed(Duration::from_millis(5)))
}

pub async fn write_effect(db: &mut SqliteConnection, consumer: &str, incoming: &Incoming) {
    let key = incoming.message.key.as_deref().unwrap_or_default();
    sqlx::query("INSERT INTO effect (consumer, message_id, key) VALUES (?, ?, ?)")
        .bind(consumer)
        .bind(incoming.message.id.as_str())
        .bind(String::from_utf8_lossy(key).as_ref())
        .execute(db)
        .await
        .unwrap();
}

pub fn loaded(count: &AtomicU64) -> u64 {
    count.load(Ordering::SeqCst)
}

/// A relay or consumer running in a task.
pub struct Running {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<()>>,
}

impl Running {
    pub fn start<F>(
        run: impl FnOnce(std::pin::Pin<Box<dyn Future<Output = ()> + Send>>) -> F,
    ) -> Self
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let (stop, stopped) = oneshot::channel();
        let stopped = Box::pin(async {
            let _ = stopped.await;
        });
        Self {
            stop,
            task: tokio::spawn(run(stopped)),
        }
    }

    /// Stops it as a service does and returns how it ended.
    pub async fn stop(self) -> Result<()> {
        let _ = self.stop.send(());
        tokio::time::timeout(DEADLINE, self.task)
            .await
            .expect("it stops")
            .expect("it does not panic")
    }

    /// Ends it on the spot, as a killed process would.
    pub async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }

    /// Waits until it ends by itself.
    pub async fn ended(self) -> Result<()> {
        tokio::time::timeout(DEADLINE, self.task)
            .await
            .expect("it ends")
            .expect("it does not panic")
    }
}

type Answer = Box<dyn Fn(&Outgoing) -> Option<PublishOutcome> + Send + Sync>;

/// A publisher that answers some messages itself and passes the others on.
pub struct Altered<P> {
    inner: P,
    order: PublisherOrder,
    answer: Answer,
}

impl<P: Publisher> Altered<P> {
    /// Declared as one whose failures leave gaps.
    pub fn gap(inner: P) -> Self {
        Self {
            inner,
            order: PublisherOrder::Gap,
            answer: Box::new(|_| None),
        }
    }

    pub fn answering(
        inner: P,
        answer: impl Fn(&Outgoing) -> Option<PublishOutcome> + Send + Sync + 'static,
    ) -> Self {
        Self {
            order: inner.capabilities().order,
            inner,
            answer: Box::new(answer),
        }
    }
}

impl<P: Publisher> Publisher for Altered<P> {
    fn capabilities(&self) -> PublisherCapabilities {
        let mut capabilities = self.inner.capabilities();
        capabilities.order = self.order;
        capabilities
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            let answers: Vec<_> = batch.iter().map(|sent| (self.answer)(sent)).collect();
            let passed: Vec<_> = (batch.iter().zip(&answers))
                .filter(|(_, answer)| answer.is_none())
                .map(|(sent, _)| sent.clone())
                .collect();
            let mut outcomes = self.inner.publish(&passed).await.into_iter();
            let next = |answer: Option<_>| answer.or_else(|| outcomes.next());
            answers.into_iter().filter_map(next).collect()
        })
    }

    fn health(&self) -> relaybox::broker::Health {
        self.inner.health()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        self.inner.close(deadline)
    }
}

pub type Shared<T> = Arc<Mutex<Vec<T>>>;
