//! The way back from the dead letters over each broker, with PostgreSQL as the desk.

mod foreign;
mod journey;
mod kills;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use relaybox::broker::Broker;
use relaybox::consumer::{Consumer, ConsumerConfig, Failure, Outcome, handler_fn};
use relaybox::dlq::redrive::{CollectLimits, Redrive, RedriveConfig};
use relaybox::envelope::{Incoming, Outgoing};
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{DeadLetterStore, LetterFilter};
use relaybox::story::{Origin, Reason, Story};
use relaybox::testing::eventually;
use relaybox::{Ladder, Message};
use relaybox_testcontainers::{
    shared_kafka, shared_nats, shared_postgres, shared_rabbitmq, unique_name,
};
use sqlx::{Executor, PgConnection};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::end_to_end::broker::{Place, Product};
use crate::fragile::place;

/// Longest wait for anything that must happen; only a failing test waits that long.
const DEADLINE: Duration = Duration::from_secs(180);
/// More than any source here keeps messages for as far as a test goes.
const RETENTION: Duration = Duration::from_secs(7 * 86_400);

/// One consumer with a source of its own.
struct Scene {
    place: Place,
    broker: Arc<dyn Broker>,
    url: String,
    store: PostgresStore,
    topic: String,
    consumer: String,
    app: App,
}

/// What the handler goes by, and what it saw.
#[derive(Clone, Default)]
struct App {
    consumer: String,
    repaired: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<Incoming>>>,
}

async fn work(
    app: &App,
    db: &mut PgConnection,
    incoming: &Incoming,
) -> Result<Outcome, sqlx::Error> {
    app.seen.lock().unwrap().push(incoming.clone());
    sqlx::query("INSERT INTO effect (consumer, message_id) VALUES ($1, $2)")
        .bind(&app.consumer)
        .bind(incoming.message.id.as_str())
        .execute(db)
        .await?;
    Ok(if app.repaired.load(Ordering::SeqCst) {
        Outcome::Done
    } else {
        Outcome::Permanent(Failure::new("not repaired"))
    })
}

impl Scene {
    async fn new(product: Product) -> Self {
        let address = match product {
            Product::Kafka => shared_kafka().await.brokers(),
            Product::RabbitMq => shared_rabbitmq().await.url(),
            Product::Nats => shared_nats().await.url(),
        };
        let place = Place { product, address };
        let topic = unique_name("redriven");
        place::prepare(&place, &topic).await.unwrap();
        let url = shared_postgres()
            .await
            .create_database("redrive")
            .await
            .unwrap();
        let store = PostgresStore::connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        let create = "CREATE TABLE effect (consumer text NOT NULL, message_id text NOT NULL)";
        store.pool().execute(create).await.unwrap();
        let consumer = unique_name("c");
        Self {
            broker: place::connect(&place, &topic, "test").await.unwrap(),
            app: App {
                consumer: consumer.clone(),
                ..App::default()
            },
            place,
            url,
            store,
            topic,
            consumer,
        }
    }

    fn repair(&self) {
        self.app.repaired.store(true, Ordering::SeqCst);
    }

    fn start(&self) -> Running {
        self.start_as(self.app.clone())
    }

    fn start_as(&self, app: App) -> Running {
        let config = ConsumerConfig::default()
            .with_source_retention(RETENTION)
            .without_failure_guard();
        let consumer = Consumer::new(
            &app.consumer,
            &self.topic,
            self.broker.clone(),
            self.store.clone(),
        )
        .with_ladder(Ladder::none())
        .with_config(config);
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(consumer.run_until(handler_fn(app, work), async {
            let _ = stopped.await;
        }));
        Running { stop, task }
    }

    fn desk(&self) -> Redrive {
        let config = RedriveConfig::default()
            .with_rate_max(10_000)
            .with_batch_max(4);
        Redrive::new(
            &self.consumer,
            &self.topic,
            self.broker.clone(),
            self.store.clone(),
        )
        .with_config(config)
    }

    fn dead_letters(&self) -> String {
        format!("{}.{}.DLQ", self.topic, self.consumer)
    }

    async fn publish(&self, messages: Vec<Message>) {
        let batch: Vec<Outgoing> = messages.into_iter().map(Into::into).collect();
        for outcome in self.broker.publish(&batch).await {
            assert!(outcome.is_confirmed(), "{outcome:?}");
        }
    }

    /// Puts letters into the table without a consumer's help.
    async fn bury(&self, name: &str, count: usize) {
        for n in 0..count {
            let mut story = Story::default();
            story.origin = Some(Origin {
                topic: self.topic.clone(),
                partition: None,
                offset: None,
            });
            story.consumer = Some(self.consumer.clone());
            story.reason = Some(Reason::new(Reason::PERMANENT));
            let message = Message::new(&self.topic, "Order")
                .with_id(format!("{name}-{n}"))
                .with_key(format!("k-{}", n % 3))
                .with_payload(format!("{n}"));
            self.store.put(&Outgoing { message, story }).await.unwrap();
        }
    }

    async fn entries(&self) -> u64 {
        self.store.count(&self.consumer).await.unwrap()
    }

    /// Collects until so many entries are there.
    async fn collect(&self, count: u64) {
        let limits = CollectLimits {
            idle: Duration::from_secs(2),
            ..CollectLimits::default()
        };
        let until = std::time::Instant::now() + DEADLINE;
        while self.entries().await < count {
            assert!(std::time::Instant::now() < until, "letters are missing");
            // As the process that may have died over it, whose place in the group is taken at once.
            let broker = place::connect(&self.place, &self.topic, "desk")
                .await
                .unwrap();
            self.desk().collect(&*broker, limits).await.unwrap();
        }
        assert_eq!(self.entries().await, count);
    }

    /// Ids of effects of a consumer, sorted.
    async fn effects(&self, consumer: &str) -> Vec<String> {
        let query = "SELECT message_id FROM effect WHERE consumer = $1 ORDER BY message_id";
        let query = sqlx::query_scalar(query).bind(consumer);
        query.fetch_all(self.store.pool()).await.unwrap()
    }

    async fn until_effects(&self, count: usize) {
        eventually(DEADLINE, "the effects are there", || async {
            self.effects(&self.consumer).await.len() >= count
        })
        .await;
    }

    /// Nothing more is on its way to the consumer.
    async fn until_quiet(&self) {
        let way_back = format!("{}.{}.redrive", self.topic, self.consumer);
        eventually(DEADLINE, "the way back is empty", || async {
            for source in [&self.topic, &way_back] {
                match self.broker.lag(&self.consumer, source).await {
                    Ok(lag) if lag.messages == 0 => {}
                    _ => return false,
                }
            }
            true
        })
        .await;
    }

    async fn list(&self) -> Vec<relaybox::store::LetterEntry> {
        self.desk()
            .list(&LetterFilter::all(), 0, 1_000)
            .await
            .unwrap()
    }
}

struct Running {
    stop: oneshot::Sender<()>,
    task: JoinHandle<relaybox::Result<()>>,
}

impl Running {
    async fn stop(self) {
        let _ = self.stop.send(());
        self.task.await.unwrap().unwrap();
    }
}

fn ids(name: &str, count: usize) -> Vec<String> {
    let mut all: Vec<String> = (0..count).map(|n| format!("{name}-{n}")).collect();
    all.sort();
    all
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
