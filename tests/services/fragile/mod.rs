//! Consumers as processes of their own that die of a message, at named points and at random moments, over each broker.
//!
//! A test starts members of `tests/fragile_process`, lets them die and starts them again until every message came to its
//! end. Then `judge.rs` holds what the database, the dead letters and the members' journals say against what was sent.

mod judge;
mod kills;
mod members;
mod points;
mod poison;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use relaybox::Message;
use relaybox::broker::Broker;
use relaybox::envelope::Incoming;
use relaybox::store::postgres::PostgresStore;
use relaybox::store::sqlite::SqliteStore;
use relaybox_testcontainers::{
    shared_kafka, shared_nats, shared_postgres, shared_rabbitmq, unique_name,
};
use sqlx::Executor;
use tempfile::TempDir;

use crate::end_to_end::broker::{self, Place, Product};

#[path = "../../fragile_process/place.rs"]
pub mod place;

/// Longest wait for anything that must happen; only a failing test waits that long.
const DEADLINE: Duration = Duration::from_secs(180);
/// Attempts until a message is dead: the first and one for each rung.
const ATTEMPTS: u32 = 3;
const KEYS: usize = 8;

const CREATE_EFFECT: &str = "CREATE TABLE effect (consumer text NOT NULL, message_id text NOT NULL, attempt integer NOT NULL)";
const EFFECTS: &str = "SELECT message_id, attempt FROM effect WHERE consumer = $1";

/// What handling a message does; see `tests/fragile_process`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Work,
    Abort,
    Fail,
    Once,
}

/// What was sent.
#[derive(Debug, Clone)]
struct Sent {
    kind: Kind,
    message: Message,
}

/// Where the effects are.
#[derive(Clone)]
enum Database {
    Postgres { url: String, store: PostgresStore },
    Sqlite { path: String, store: SqliteStore },
}

impl Database {
    async fn postgres() -> Self {
        let postgres = shared_postgres().await;
        let url = postgres.create_database("fragile").await.unwrap();
        let store = PostgresStore::connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        store.pool().execute(CREATE_EFFECT).await.unwrap();
        Self::Postgres { url, store }
    }

    async fn sqlite(directory: &TempDir) -> Self {
        let path = directory.path().join("inbox.db");
        let path = path.to_str().unwrap().to_owned();
        let store = SqliteStore::connect(&path).await.unwrap();
        store.migrate().await.unwrap();
        store.pool().execute(CREATE_EFFECT).await.unwrap();
        Self::Sqlite { path, store }
    }

    /// As the process is told it.
    fn address(&self) -> &str {
        match self {
            Self::Postgres { url, .. } => url,
            Self::Sqlite { path, .. } => path,
        }
    }

    /// Ids, and the failed attempts that each effect had behind it.
    async fn effects(&self, consumer: &str) -> Vec<(String, i32)> {
        match self {
            Self::Postgres { store, .. } => {
                let query = sqlx::query_as(EFFECTS).bind(consumer);
                query.fetch_all(store.pool()).await.unwrap()
            }
            Self::Sqlite { store, .. } => {
                let query = sqlx::query_as(EFFECTS).bind(consumer);
                query.fetch_all(store.pool()).await.unwrap()
            }
        }
    }
}

/// One consumer with a source of its own.
struct Scene {
    name: String,
    place: Place,
    database: Database,
    broker: Arc<dyn Broker>,
    topic: String,
    consumer: String,
    sent: Vec<Sent>,
    /// Journals of the members, a file each.
    journals: TempDir,
    started: AtomicUsize,
}

impl Scene {
    /// Makes the source and sends messages of these kinds, keys in turn; `doubled` of them twice.
    async fn new(
        name: impl Into<String>,
        product: Product,
        database: Database,
        kinds: &[Kind],
        doubled: &[usize],
    ) -> Self {
        let address = match product {
            Product::Kafka => shared_kafka().await.brokers(),
            Product::RabbitMq => shared_rabbitmq().await.url(),
            Product::Nats => shared_nats().await.url(),
        };
        let place = Place { product, address };
        let topic = unique_name("fragile");
        place::prepare(&place, &topic).await.unwrap();
        let sent = kinds.iter().enumerate().map(|(n, &kind)| Sent {
            kind,
            message: message(&topic, n, kind),
        });
        let scene = Self {
            name: format!("{} over {}", name.into(), product.name()),
            broker: place::connect(&place, &topic, "test").await.unwrap(),
            sent: sent.collect(),
            consumer: unique_name("c"),
            journals: tempfile::tempdir().unwrap(),
            started: AtomicUsize::new(0),
            place,
            database,
            topic,
        };
        scene.send(doubled).await;
        scene
    }

    async fn send(&self, doubled: &[usize]) {
        let mut batch = Vec::new();
        for (n, sent) in self.sent.iter().enumerate() {
            batch.push(sent.message.clone().into());
            if doubled.contains(&n) {
                let mut second = sent.message.clone();
                second.destination = place::again(self.place.product, &self.topic);
                batch.push(second.into());
            }
        }
        let outcomes = self.broker.publish(&batch).await;
        for (n, outcome) in outcomes.iter().enumerate() {
            assert!(outcome.is_confirmed(), "{}: {n}: {outcome:?}", self.name);
        }
    }

    fn count(&self, kind: Kind) -> usize {
        self.sent.iter().filter(|sent| sent.kind == kind).count()
    }

    /// Of the next member that is started.
    fn next_journal(&self) -> PathBuf {
        let n = self.started.fetch_add(1, Ordering::Relaxed);
        self.journals.path().join(n.to_string())
    }

    fn dead_letters(&self) -> String {
        format!("{}.{}.DLQ", self.topic, self.consumer)
    }

    async fn effects(&self) -> Vec<(String, i32)> {
        self.database.effects(&self.consumer).await
    }

    /// Whether nothing waits at the source and on the rungs. Not every broker tells what a member holds.
    async fn nothing_waits(&self) -> bool {
        let rungs = place::ladder().rungs_of(&self.topic, &self.consumer);
        let rungs = rungs.into_iter().map(|rung| rung.destination);
        for source in rungs.chain([self.topic.clone()]) {
            // The first member may not have made its rungs yet.
            match self.broker.lag(&self.consumer, &source).await {
                Ok(lag) if lag.messages == 0 => {}
                _ => return false,
            }
        }
        true
    }

    /// Messages that end with an effect.
    fn effects_due(&self) -> usize {
        self.count(Kind::Work) + self.count(Kind::Once)
    }

    /// Whether every message has its effect or its dead letter, and nothing waits.
    async fn is_over(&self) -> bool {
        // The other questions are asked once this one is answered well.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let effects = self.effects().await.len();
        // One that was blamed for three deaths ends as a dead letter.
        if effects + 1 < self.effects_due() {
            return false;
        }
        let letters = broker::depth(&*self.broker, &self.dead_letters()).await;
        let ends = effects as u64 + letters.unwrap_or(0);
        ends >= self.sent.len() as u64 && self.nothing_waits().await
    }

    async fn letters(&self) -> Vec<Incoming> {
        let read = broker::read(&*self.broker, &self.dead_letters()).await;
        read.unwrap().into_values().collect()
    }
}

/// With everything in it that a broker might spoil.
fn message(topic: &str, n: usize, kind: Kind) -> Message {
    let word = match kind {
        Kind::Work => "work",
        Kind::Abort => "abort",
        Kind::Fail => "fail",
        Kind::Once => "once",
    };
    let mut payload = format!("{word} {n} ").into_bytes();
    payload.extend(0..=u8::MAX);
    let mut message = Message::new(topic, "Fragile")
        .with_id(format!("m{n}"))
        .with_key([b'k', 0xff, u8::try_from(n % KEYS).unwrap()])
        .with_payload(payload)
        .with_header("number", n.to_string())
        .with_header("repeated", "1")
        .with_header("bytes", &b"\0\xc3\x28"[..])
        .with_header("repeated", "2")
        .with_header("empty", "");
    message.headers.push_optional("null", None);
    message
}

/// So many messages, of these kinds at these places and else ordinary ones.
fn kinds(count: usize, others: &[(usize, Kind)]) -> Vec<Kind> {
    let mut kinds = vec![Kind::Work; count];
    for &(n, kind) in others {
        kinds[n] = kind;
    }
    kinds
}

/// Tests as modules of each broker.
macro_rules! over_each_broker {
    ($($test:ident)+) => {
        over_each_broker!(@ kafka Kafka $($test)+);
        over_each_broker!(@ rabbitmq RabbitMq $($test)+);
        over_each_broker!(@ nats Nats $($test)+);
    };
    (@ $module:ident $product:ident $($test:ident)+) => {
        mod $module {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $test() {
                    super::$test(crate::end_to_end::broker::Product::$product).await;
                }
            )+
        }
    };
}
use over_each_broker;
