//! What a consumer does on PostgreSQL, where transactions run side by side; the broker is the one in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use relaybox::Message;
use relaybox::broker::Publisher;
use relaybox::broker::memory::MemoryBroker;
use relaybox::consumer::{Consumer, ConsumerConfig, Handler, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::ladder::Ladder;
use relaybox::store::postgres::PostgresStore;
use relaybox::testing::{Signal, eventually};
use relaybox_testcontainers::{Postgres, PostgresOptions, shared_postgres};
use sqlx::PgConnection;
use sqlx::postgres::PgPoolOptions;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub const DEADLINE: Duration = Duration::from_secs(180);

pub struct House {
    pub store: PostgresStore,
    pub broker: MemoryBroker,
}

impl House {
    pub async fn new() -> Self {
        Self::on(shared_postgres().await, 10).await
    }

    pub async fn on(postgres: &Postgres, connections_max: u32) -> Self {
        let url = postgres.create_database("consuming").await.unwrap();
        let pool = PgPoolOptions::new()
            .max_connections(connections_max)
            .acquire_timeout(Duration::from_secs(5))
            .connect(&url)
            .await
            .unwrap();
        let store = PostgresStore::new(pool);
        store.migrate().await.unwrap();
        sqlx::raw_sql("CREATE TABLE effect (n bigserial, message_id text NOT NULL); CREATE TABLE one (id int PRIMARY KEY, n int NOT NULL); INSERT INTO one VALUES (1, 0), (2, 0)")
            .execute(store.pool())
            .await
            .unwrap();
        let broker = MemoryBroker::new();
        broker.create_topic("orders", 3).unwrap();
        Self { store, broker }
    }

    pub async fn publish(&self, key: &str, ids: &[&str]) {
        let batch: Vec<_> = ids
            .iter()
            .map(|id| {
                Message::new("orders", "T")
                    .with_key(key)
                    .with_id(*id)
                    .into()
            })
            .collect();
        for outcome in self.broker.publish(&batch).await {
            assert!(outcome.is_confirmed());
        }
    }

    pub fn consumer(&self) -> Consumer<PostgresStore> {
        let config = ConsumerConfig::default().with_shutdown_deadline(Duration::from_secs(5));
        Consumer::new("billing", "orders", self.broker.clone(), self.store.clone())
            .with_ladder(Ladder::rungs([50, 100].map(Duration::from_millis)))
            .with_config(config)
    }

    pub async fn effects(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT message_id FROM effect ORDER BY message_id")
            .fetch_all(self.store.pool())
            .await
            .unwrap()
    }

    pub fn dead(&self) -> Vec<Incoming> {
        self.broker.log("orders.billing.DLQ")
    }

    pub async fn consumed(&self) {
        eventually(DEADLINE, "everything is settled", || async {
            self.broker
                .topics()
                .iter()
                .filter(|topic| !topic.ends_with(".DLQ"))
                .all(|topic| {
                    let read: u64 = self.broker.committed("billing", topic).iter().sum();
                    read == self.broker.log(topic).len() as u64
                })
        })
        .await;
    }
}

pub struct Running(oneshot::Sender<()>, JoinHandle<relaybox::Result<()>>);

pub fn run(consumer: Consumer<PostgresStore>, handler: impl Handler<PgConnection>) -> Running {
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(consumer.run_until(handler, async {
        let _ = stopped.await;
    }));
    Running(stop, task)
}

impl Running {
    pub async fn stop(self) {
        let _ = self.0.send(());
        self.1.await.unwrap().unwrap();
    }
}

pub async fn write(db: &mut PgConnection, incoming: &Incoming) -> Result<(), sqlx::Error> {
    sqlx::query("INSERT INTO effect (message_id) VALUES ($1)")
        .bind(incoming.message.id.as_str())
        .execute(db)
        .await
        .map(drop)
}

pub async fn effect(_: &(), db: &mut PgConnection, incoming: &Incoming) -> Result<(), sqlx::Error> {
    write(db, incoming).await
}

#[derive(Clone, Default)]
struct Gate {
    entered: Signal,
    open: Signal,
    passed: Arc<AtomicU64>,
    at_once: Arc<AtomicU64>,
    most_at_once: Arc<AtomicU64>,
}

#[tokio::test]
async fn a_blocked_key_delays_only_itself() {
    let house = House::new().await;
    house.publish("slow", &["s-1", "s-2"]).await;
    house.publish("quick", &["q-1", "q-2", "q-3", "q-4"]).await;
    let gate = Gate::default();
    async fn gated(
        gate: &Gate,
        db: &mut PgConnection,
        incoming: &Incoming,
    ) -> Result<(), sqlx::Error> {
        if incoming.message.id.as_str() == "s-1" {
            gate.entered.set();
            gate.open.wait().await;
        }
        write(db, incoming).await
    }
    let consumer = run(house.consumer(), handler_fn(gate.clone(), gated));
    gate.entered.wait().await;
    eventually(DEADLINE, "the other key is done", || async {
        house.effects().await.len() == 4
    })
    .await;
    assert_eq!(
        house.effects().await,
        ["q-1", "q-2", "q-3", "q-4"],
        "s-2 waits behind s-1"
    );
    gate.open.set();
    house.consumed().await;
    consumer.stop().await;
    assert_eq!(house.effects().await.len(), 6);
}

#[tokio::test]
async fn handlers_use_one_connection_each_and_never_exceed_the_concurrency() {
    let house = House::on(shared_postgres().await, 4).await;
    let ids: Vec<String> = (0..24).map(|n| format!("m-{n}")).collect();
    for id in &ids {
        house.publish(id, &[id]).await;
    }
    let gate = Gate::default();
    async fn count(
        gate: &Gate,
        db: &mut PgConnection,
        incoming: &Incoming,
    ) -> Result<(), sqlx::Error> {
        let now = gate.at_once.fetch_add(1, Ordering::SeqCst) + 1;
        gate.most_at_once.fetch_max(now, Ordering::SeqCst);
        sqlx::query("SELECT pg_sleep(0.02)")
            .execute(&mut *db)
            .await?;
        let written = write(db, incoming).await;
        gate.at_once.fetch_sub(1, Ordering::SeqCst);
        written
    }
    // As many handlers as connections: one that took a second connection would never get it.
    let config = ConsumerConfig::default().with_concurrency(4);
    let consumer = run(
        house.consumer().with_config(config),
        handler_fn(gate.clone(), count),
    );
    house.consumed().await;
    consumer.stop().await;
    assert_eq!(house.effects().await.len(), 24);
    assert!((2..=4).contains(&gate.most_at_once.load(Ordering::SeqCst)));
}

#[tokio::test]
async fn two_copies_at_the_same_moment_in_two_members_have_one_effect() {
    let house = House::new().await;
    // Under different keys, so that two members have them side by side.
    house.publish("a", &["m-1"]).await;
    house.publish("b", &["m-1"]).await;
    house.publish("c", &["m-1"]).await;
    let gate = Gate::default();
    async fn slow(
        gate: &Gate,
        db: &mut PgConnection,
        incoming: &Incoming,
    ) -> Result<(), sqlx::Error> {
        gate.passed.fetch_add(1, Ordering::SeqCst);
        write(&mut *db, incoming).await?;
        sqlx::query("SELECT pg_sleep(0.3)")
            .execute(db)
            .await
            .map(drop)
    }
    let first = run(house.consumer(), handler_fn(gate.clone(), slow));
    let second = run(house.consumer(), handler_fn(gate.clone(), slow));
    house.consumed().await;
    first.stop().await;
    second.stop().await;
    assert_eq!(house.effects().await, ["m-1"]);
    assert_eq!(gate.passed.load(Ordering::SeqCst), 1);
    assert!(house.dead().is_empty());
}

#[tokio::test]
async fn a_duplicate_of_a_message_in_work_for_long_is_released_without_an_attempt() {
    let house = House::new().await;
    let impatient = house
        .store
        .clone()
        .with_lock_wait(Duration::from_millis(50));
    house.publish("a", &["m-1"]).await;
    house.publish("b", &["m-1"]).await;
    let gate = Gate::default();
    async fn gated(
        gate: &Gate,
        db: &mut PgConnection,
        incoming: &Incoming,
    ) -> Result<(), sqlx::Error> {
        write(db, incoming).await?;
        gate.entered.set();
        gate.open.wait().await;
        Ok(())
    }
    let consumer = Consumer::new("billing", "orders", house.broker.clone(), impatient);
    let consumer = run(consumer, handler_fn(gate.clone(), gated));
    gate.entered.wait().await;
    eventually(DEADLINE, "the copy came a second time", || async {
        house.broker.deliveries("billing") >= 3
    })
    .await;
    gate.open.set();
    house.consumed().await;
    consumer.stop().await;
    assert_eq!(house.effects().await, ["m-1"]);
    assert!(house.dead().is_empty());
}

#[tokio::test]
async fn a_deadlock_is_run_again_and_counts_as_no_attempt() {
    let house = House::new().await;
    house.publish("a", &["m-1"]).await;
    house.publish("b", &["m-2"]).await;
    // Each locks its row and then, once the other has its own, the other's.
    #[derive(Clone, Default)]
    struct Crossing(
        Arc<tokio::sync::Mutex<u32>>,
        Arc<tokio::sync::Notify>,
        Arc<AtomicU64>,
    );
    async fn cross(
        state: &Crossing,
        db: &mut PgConnection,
        incoming: &Incoming,
    ) -> Result<(), sqlx::Error> {
        state.2.fetch_add(1, Ordering::SeqCst);
        let (own, other) = if incoming.message.id.as_str() == "m-1" {
            (1, 2)
        } else {
            (2, 1)
        };
        let lock = "UPDATE one SET n = n + 1 WHERE id = $1";
        sqlx::query(lock).bind(own).execute(&mut *db).await?;
        let met = {
            let mut met = state.0.lock().await;
            *met += 1;
            *met
        };
        if met == 1 {
            state.1.notified().await;
        } else {
            state.1.notify_one();
        }
        sqlx::query(lock).bind(other).execute(&mut *db).await?;
        write(db, incoming).await
    }
    let state = Crossing::default();
    // No rung: a counted failure would be a dead letter.
    let consumer = house.consumer().with_ladder(Ladder::none());
    let consumer = run(consumer, handler_fn(state.clone(), cross));
    house.consumed().await;
    consumer.stop().await;
    assert_eq!(house.effects().await, ["m-1", "m-2"]);
    assert!(house.dead().is_empty());
    assert_eq!(
        state.2.load(Ordering::SeqCst),
        3,
        "one of the two was run twice"
    );
}

#[tokio::test]
async fn a_conflict_that_never_ends_is_finite() {
    let house = House::new().await;
    house.publish("a", &["m-1"]).await;
    async fn conflict(_: &(), db: &mut PgConnection, _: &Incoming) -> Result<(), sqlx::Error> {
        let raise = "DO $$ BEGIN RAISE serialization_failure; END $$";
        sqlx::raw_sql(raise).execute(db).await.map(drop)
    }
    let consumer = house.consumer().with_ladder(Ladder::none());
    let consumer = run(consumer, handler_fn((), conflict));
    house.consumed().await;
    consumer.stop().await;
    let letter = &house.dead()[0];
    assert_eq!(letter.story.retry_count, 1);
    assert!(
        letter
            .story
            .last_error
            .as_ref()
            .unwrap()
            .contains("serialization_failure")
    );
}

#[tokio::test]
async fn an_error_the_handler_swallowed_is_never_a_success() {
    let house = House::new().await;
    house.publish("a", &["m-1"]).await;
    async fn swallow(_: &(), db: &mut PgConnection, incoming: &Incoming) -> Outcome {
        write(db, incoming).await.unwrap();
        let _ = sqlx::query("INSERT INTO one VALUES (1, 0)")
            .execute(db)
            .await;
        Outcome::Done
    }
    let consumer = house.consumer().with_ladder(Ladder::none());
    let consumer = run(consumer, handler_fn((), swallow));
    house.consumed().await;
    consumer.stop().await;
    assert!(house.effects().await.is_empty());
    assert_eq!(house.dead().len(), 1);
}

#[tokio::test]
async fn the_first_error_is_told_not_the_one_that_follows_from_it() {
    let house = House::new().await;
    house.publish("a", &["m-1"]).await;
    async fn stumble(
        _: &(),
        db: &mut PgConnection,
        incoming: &Incoming,
    ) -> Result<(), sqlx::Error> {
        let first = sqlx::query("INSERT INTO one VALUES (1, 0)")
            .execute(&mut *db)
            .await;
        let _ = write(db, incoming).await;
        first.map(drop)
    }
    let consumer = house.consumer().with_ladder(Ladder::none());
    let consumer = run(consumer, handler_fn((), stumble));
    house.consumed().await;
    consumer.stop().await;
    let error = house.dead()[0].story.last_error.clone().unwrap();
    assert!(error.contains("one_pkey"), "{error}");
    assert!(!error.contains("aborted"), "{error}");
}

#[tokio::test]
async fn a_database_outage_burns_no_attempt_and_ends_nothing() {
    // Durable, or the kill takes committed transactions along.
    let options = PostgresOptions::default()
        .with_durable()
        .with_local_process();
    let postgres = Postgres::start_with(options).await.unwrap();
    let house = House::on(&postgres, 8).await;
    let gate = Gate::default();
    async fn gated(
        gate: &Gate,
        db: &mut PgConnection,
        incoming: &Incoming,
    ) -> Result<(), sqlx::Error> {
        gate.entered.set();
        gate.open.wait().await;
        write(db, incoming).await
    }
    // No rung: one burnt attempt would be a dead letter.
    let consumer = house.consumer().with_ladder(Ladder::none());
    let counts = consumer.counts();
    house.publish("a", &["m-1"]).await;
    let consumer = run(consumer, handler_fn(gate.clone(), gated));
    gate.entered.wait().await;
    postgres.kill().await.unwrap();
    gate.open.set();
    house.publish("b", &["m-2"]).await;
    postgres.start_again().await.unwrap();
    house.consumed().await;
    consumer.stop().await;
    assert_eq!(house.effects().await, ["m-1", "m-2"]);
    assert_eq!(counts.dead.load(Ordering::SeqCst), 0);
    assert!(house.dead().is_empty());
}

#[tokio::test]
async fn a_message_that_breaks_its_connection_every_time_is_found() {
    let house = House::new().await;
    house.publish("a", &["m-1"]).await;
    house.publish("b", &["m-2"]).await;
    async fn fatal(_: &(), db: &mut PgConnection, incoming: &Incoming) -> Result<(), sqlx::Error> {
        if incoming.message.id.as_str() == "m-1" {
            sqlx::query("SELECT pg_terminate_backend(pg_backend_pid())")
                .execute(&mut *db)
                .await?;
        }
        write(db, incoming).await
    }
    let consumer = house.consumer().with_ladder(Ladder::none());
    let consumer = run(consumer, handler_fn((), fatal));
    house.consumed().await;
    consumer.stop().await;
    assert_eq!(house.effects().await, ["m-2"]);
    assert_eq!(house.dead().len(), 1);
}

#[tokio::test]
async fn a_transaction_inside_the_handler_is_a_savepoint() {
    let house = House::new().await;
    house.publish("a", &["m-1"]).await;
    async fn nested(_: &(), db: &mut PgConnection, incoming: &Incoming) -> Result<(), sqlx::Error> {
        let mut inner = sqlx::Connection::begin(&mut *db).await?;
        write(&mut inner, incoming).await?;
        inner.commit().await?;
        let mut undone = sqlx::Connection::begin(&mut *db).await?;
        write(&mut undone, incoming).await?;
        undone.rollback().await
    }
    let consumer = run(house.consumer(), handler_fn((), nested));
    house.consumed().await;
    consumer.stop().await;
    assert_eq!(house.effects().await, ["m-1"]);
}

#[tokio::test]
async fn a_database_without_tables_is_an_error_at_start() {
    let url = shared_postgres()
        .await
        .create_database("empty")
        .await
        .unwrap();
    let store = PostgresStore::connect(&url).await.unwrap();
    let broker = MemoryBroker::new();
    broker.create_topic("orders", 1).unwrap();
    let consumer = Consumer::new("billing", "orders", broker, store);
    let error = consumer
        .run_until(handler_fn((), effect), std::future::pending())
        .await
        .unwrap_err();
    assert_eq!(error.kind(), relaybox::ErrorKind::NotFound, "{error}");
}
