//! Ladders that keep an order, in PostgreSQL, over real brokers: members that come and die in the middle.

use std::collections::{BTreeMap, HashSet};
use std::process::{ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use relaybox::Message;
use relaybox::backoff::{DelayPolicy, Jitter};
use relaybox::broker::kafka::Kafka;
use relaybox::broker::rabbitmq::{QueueKind, RabbitMq};
use relaybox::broker::{Publisher, Subscriber};
use relaybox::consumer::{Consumer, ConsumerConfig, Failure, Outcome, handler_fn};
use relaybox::dlq::DeadLetters;
use relaybox::envelope::Incoming;
use relaybox::ladder::{DeadHead, Ladder};
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{DeadLetterStore, WaitingState, WaitingStore};
use relaybox::testing::eventually;
use relaybox_testcontainers::{shared_kafka, shared_postgres, shared_rabbitmq, unique_name};
use sqlx::PgConnection;
use sqlx::postgres::PgPoolOptions;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::end_to_end::Process;
use super::{kafka, rabbitmq};

const DEADLINE: Duration = Duration::from_secs(180);
const MS: Duration = Duration::from_millis(1);

struct House<B> {
    store: PostgresStore,
    broker: B,
    topic: String,
    name: String,
}

struct Member(oneshot::Sender<()>, JoinHandle<relaybox::Result<()>>);

impl Member {
    async fn stop(self) {
        let _ = self.0.send(());
        self.1.await.unwrap().unwrap();
    }

    async fn kill(self) {
        self.1.abort();
        let _ = self.1.await;
    }
}

async fn obey(_: &(), db: &mut PgConnection, incoming: &Incoming) -> Outcome {
    let count = incoming.story.retry_count;
    let payload = incoming.message.payload.as_deref().unwrap_or_default();
    let word = std::str::from_utf8(payload).unwrap();
    let id = incoming.message.id.as_str();
    // Outside of the transaction's fate: what was tried, in order.
    let written = sqlx::query("INSERT INTO effect (message_id, attempt) VALUES ($1, $2)")
        .bind(id)
        .bind(i64::from(count))
        .execute(db)
        .await;
    let times = word.strip_prefix("fail ").and_then(|n| n.parse().ok());
    match (word, written) {
        (_, Err(error)) => Outcome::Retry(error.into()),
        ("never", _) => Outcome::Permanent(Failure::new("pointless")),
        _ if times.is_some_and(|times: u32| count < times) => {
            Outcome::Retry(Failure::new("not yet"))
        }
        _ => Outcome::Done,
    }
}

impl<B: Publisher + Subscriber + Clone> House<B> {
    async fn new(broker: B, topic: String) -> Self {
        let url = shared_postgres().await.create_database("waiting").await;
        let pool = PgPoolOptions::new()
            .max_connections(20)
            .acquire_timeout(Duration::from_secs(10))
            .connect(&url.unwrap())
            .await
            .unwrap();
        let store = PostgresStore::new(pool);
        store.migrate().await.unwrap();
        let create =
            "CREATE TABLE effect (n bigserial, message_id text NOT NULL, attempt bigint NOT NULL)";
        sqlx::raw_sql(create).execute(store.pool()).await.unwrap();
        Self {
            store,
            broker,
            topic,
            name: unique_name("billing"),
        }
    }

    fn member(&self, ladder: Ladder) -> Member {
        let config = ConsumerConfig::default()
            .with_shutdown_deadline(Duration::from_secs(5))
            .with_waiting_lease(Duration::from_secs(2));
        let (name, topic) = (self.name.clone(), self.topic.clone());
        let consumer = Consumer::new(name, topic, self.broker.clone(), self.store.clone())
            .with_ladder(ladder)
            .with_waiting_room(self.store.clone())
            .with_dead_letters(DeadLetters::table(self.store.clone()))
            .with_config(config);
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(consumer.run_until(handler_fn((), obey), async {
            let _ = stopped.await;
        }));
        Member(stop, task)
    }

    async fn publish(&self, messages: Vec<Message>) {
        for batch in messages.chunks(100) {
            let batch: Vec<_> = batch.iter().cloned().map(Into::into).collect();
            for outcome in self.broker.publish(&batch).await {
                assert!(outcome.is_confirmed(), "{outcome:?}");
            }
        }
    }

    fn message(&self, key: &str, n: usize, payload: &str) -> Message {
        Message::new(self.topic.clone(), "T")
            .with_id(format!("{key}-{n}"))
            .with_key(key)
            .with_payload(payload.to_owned())
    }

    async fn effects(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT message_id FROM effect ORDER BY n")
            .fetch_all(self.store.pool())
            .await
            .unwrap()
    }

    async fn dead(&self) -> Vec<(String, String, u32)> {
        let letters = DeadLetterStore::list(&self.store, &self.name, 0, 10_000).await;
        let told = letters.unwrap().into_iter().map(|entry| {
            let story = entry.letter.story;
            let reason = story.reason.unwrap().as_str().to_owned();
            (
                entry.letter.message.id.to_string(),
                reason,
                story.retry_count,
            )
        });
        told.collect()
    }

    async fn ended(&self, count: usize) {
        eventually(DEADLINE, "each is handled or dead", || async {
            self.effects().await.len() + self.dead().await.len() >= count
        })
        .await;
    }

    async fn counted(&self, state: WaitingState) -> u64 {
        let counts = WaitingStore::count(&self.store, &self.name).await.unwrap();
        counts
            .iter()
            .find(|(of, _)| *of == state)
            .map_or(0, |(_, count)| *count)
    }
}

async fn on_kafka(partitions: i32) -> House<Kafka> {
    let topic = kafka::topic("waiting", partitions).await;
    House::new(kafka::connect().await, topic).await
}

async fn on_rabbitmq() -> House<RabbitMq> {
    let name = unique_name("waiting");
    let config = rabbitmq::config(shared_rabbitmq().await.url()).with_shards(&name, 4);
    let rabbitmq = RabbitMq::connect(config).await.unwrap();
    let declared = rabbitmq.declare_queue(&name, QueueKind::Quorum).await;
    declared.unwrap();
    House::new(rabbitmq, name).await
}

fn by_key(dead_head: DeadHead) -> Ladder {
    let policy = DelayPolicy::exponential(50 * MS).with_jitter(Jitter::Equal);
    Ladder::backoff(policy, 4).by_key(dead_head)
}

async fn one_key_waits<B: Publisher + Subscriber + Clone>(house: House<B>) {
    let messages = vec![
        house.message("k", 1, "fail 2"),
        house.message("k", 2, "ok"),
        house.message("k", 3, "ok"),
        house.message("j", 1, "ok"),
    ];
    house.publish(messages).await;
    let member = house.member(by_key(DeadHead::Skip));
    house.ended(4).await;
    let effects = house.effects().await;
    let of_k: Vec<_> = effects.iter().filter(|id| id.starts_with("k-")).collect();
    assert_eq!(of_k, ["k-1", "k-2", "k-3"]);
    assert!(house.dead().await.is_empty());
    member.stop().await;
    assert_eq!(house.store.count_all(&house.name).await, 0);
}

trait CountAll {
    async fn count_all(&self, consumer: &str) -> u64;
}

impl CountAll for PostgresStore {
    async fn count_all(&self, consumer: &str) -> u64 {
        let counts = WaitingStore::count(self, consumer).await.unwrap();
        counts.iter().map(|(_, count)| count).sum()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_key_waits_and_another_goes_on_over_kafka() {
    one_key_waits(on_kafka(3).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_key_waits_and_another_goes_on_over_rabbitmq() {
    one_key_waits(on_rabbitmq().await).await;
}

/// A thousand messages of twenty keys, a third of which fail now and then, while members come, stop and die.
async fn keys_keep_their_order<B: Publisher + Subscriber + Clone>(house: House<B>) {
    const KEYS: usize = 20;
    const COUNT: usize = 1_000;
    let seed = std::env::var("SEED").map_or_else(|_| fastrand::u64(..), |s| s.parse().unwrap());
    println!("SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut of_key: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut messages = Vec::with_capacity(COUNT);
    for _ in 0..COUNT {
        let key = format!("key{}", random.usize(0..KEYS));
        let of_key = of_key.entry(key.clone()).or_default();
        let payload = match random.u8(0..20) {
            0 => "fail 2",
            1..=3 => "fail 1",
            4 => "never",
            _ => "ok",
        };
        let message = house.message(&key, of_key.len(), payload);
        of_key.push(message.id.to_string());
        messages.push(message);
    }
    house.publish(messages).await;
    let began = Instant::now();
    let first = house.member(by_key(DeadHead::Skip));
    house.ended(COUNT / 5).await;
    let second = house.member(by_key(DeadHead::Skip));
    house.ended(COUNT * 2 / 5).await;
    first.kill().await;
    house.ended(COUNT * 3 / 5).await;
    let third = house.member(by_key(DeadHead::Skip));
    house.ended(COUNT * 4 / 5).await;
    second.stop().await;
    house.ended(COUNT).await;
    third.stop().await;
    println!("{COUNT} messages in {:?}", began.elapsed());
    let (effects, dead) = (house.effects().await, house.dead().await);
    let dead: HashSet<String> = dead.into_iter().map(|(id, ..)| id).collect();
    assert_eq!(effects.len() + dead.len(), COUNT, "SEED={seed}");
    for (key, ids) in of_key {
        let prefix = format!("{key}-");
        let done: Vec<_> = effects
            .iter()
            .filter(|id| id.starts_with(&prefix))
            .collect();
        let wanted: Vec<_> = ids.iter().filter(|id| !dead.contains(*id)).collect();
        assert_eq!(done, wanted, "{key} SEED={seed}");
    }
    assert_eq!(house.store.count_all(&house.name).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_keep_their_order_while_members_come_and_die_over_kafka() {
    keys_keep_their_order(on_kafka(4).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_keep_their_order_while_members_come_and_die_over_rabbitmq() {
    keys_keep_their_order(on_rabbitmq().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_waits_in_its_place_and_its_count_survives_a_kill_over_kafka() {
    let house = on_kafka(1).await;
    let messages = vec![house.message("k", 0, "fail 9"), house.message("j", 0, "ok")];
    house.publish(messages).await;
    let ladder = || Ladder::backoff(DelayPolicy::fixed(Duration::from_secs(1)), 3).in_place();
    let first = house.member(ladder());
    eventually(DEADLINE, "it has failed and waits", || async {
        house.counted(WaitingState::Noted).await == 1
    })
    .await;
    assert!(house.effects().await.is_empty(), "the partition waits");
    first.kill().await;
    let second = house.member(ladder());
    house.ended(2).await;
    second.stop().await;
    assert_eq!(house.effects().await, ["j-0"]);
    let dead = house.dead().await;
    assert_eq!(dead, [("k-0".into(), "retries-exhausted".into(), 3)]);
    assert_eq!(house.counted(WaitingState::Noted).await, 0);
}

/// A database for members as processes of their own.
async fn of_process() -> (String, PostgresStore) {
    let url = shared_postgres().await.create_database("in_place").await;
    let url = url.unwrap();
    let store = PostgresStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    let create = "CREATE TABLE effect (message_id text NOT NULL, member text NOT NULL)";
    sqlx::raw_sql(create).execute(store.pool()).await.unwrap();
    (url, store)
}

async fn effects(store: &PostgresStore) -> i64 {
    let count = sqlx::query_scalar("SELECT count(*) FROM effect");
    count.fetch_one(store.pool()).await.unwrap()
}

impl<B> House<B> {
    /// A member as a process of its own, in place. It ends with its pipe.
    fn process(&self, url: &str, brokers: &str) -> (Process, Option<ChildStdin>) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_consumer_process"));
        command
            .args([
                &self.topic,
                &self.name,
                "range",
                "member",
                "static",
                "in-place",
            ])
            .env("RELAYBOX_POSTGRES_URL", url)
            .env("RELAYBOX_KAFKA_BROKERS", brokers)
            .env("RUST_LOG", "error")
            .stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let pipe = child.stdin.take();
        (Process(child), pipe)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_in_place_and_ends_its_process_is_found() {
    let house = on_kafka(1).await;
    let (url, store) = of_process().await;
    let messages = vec![house.message("k", 0, "poison"), house.message("j", 0, "ok")];
    house.publish(messages).await;
    let brokers = shared_kafka().await.brokers();
    let (mut process, mut pipe) = house.process(&url, &brokers);
    let mut deaths = 0;
    eventually(DEADLINE, "the next one is handled", || {
        if process.0.try_wait().unwrap().is_some() {
            deaths += 1;
            assert!(deaths < 10, "it ends one after the other");
            (process, pipe) = house.process(&url, &brokers);
        }
        async { effects(&store).await == 1 }
    })
    .await;
    // Told from its neighbours at the second death of its second attempt, and suspected at once in the two that are left.
    assert_eq!(deaths, 4);
    let letters = DeadLetterStore::list(&store, &house.name, 0, 9);
    let story = &letters.await.unwrap()[0].letter.story;
    assert_eq!(story.retry_count, 4);
    assert!(story.last_error.as_deref().unwrap().starts_with("crash: "));
    let stop = move || {
        process.stop();
        drop(pipe);
    };
    tokio::task::spawn_blocking(stop).await.unwrap();
}

/// Killed twice while a message waits in its place, and once more if an attempt is under way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_in_place_keeps_its_count_through_kills_of_the_process() {
    let house = on_kafka(1).await;
    let (url, store) = of_process().await;
    let create = "CREATE SEQUENCE attempt";
    sqlx::raw_sql(create).execute(store.pool()).await.unwrap();
    let messages = vec![house.message("k", 0, "fail"), house.message("j", 0, "ok")];
    house.publish(messages).await;
    let brokers = shared_kafka().await.brokers();
    let start = || house.process(&url, &brokers);
    for failures in 1..=2 {
        let (mut process, _pipe) = start();
        eventually(DEADLINE, "it waits", || async {
            let noted = Some(WaitingState::Noted);
            let noted = WaitingStore::list(&store, &house.name, noted, 0, 9).await;
            noted
                .unwrap()
                .iter()
                .any(|note| note.retry_count >= failures)
        })
        .await;
        process.kill();
    }
    let (process, pipe) = start();
    eventually(DEADLINE, "the next one is handled", || async {
        effects(&store).await == 1
    })
    .await;
    let letters = DeadLetterStore::list(&store, &house.name, 0, 9)
        .await
        .unwrap();
    assert_eq!(
        letters.len(),
        1,
        "it is dead before the next one is handled"
    );
    assert_eq!(letters[0].letter.story.retry_count, 4);
    let attempts: i64 = sqlx::query_scalar("SELECT last_value FROM attempt")
        .fetch_one(store.pool())
        .await
        .unwrap();
    // A kill in the middle of an attempt, on a slow machine, makes that one again.
    assert!((4..=6).contains(&attempts), "{attempts} attempts");
    let stop = move || {
        process.stop();
        drop(pipe);
    };
    tokio::task::spawn_blocking(stop).await.unwrap();
}

#[tokio::test]
async fn an_order_that_the_broker_undoes_is_refused_at_start() {
    let url = shared_rabbitmq().await.url();
    let rabbitmq = RabbitMq::connect(rabbitmq::config(url)).await.unwrap();
    let name = rabbitmq::queue(&rabbitmq, "waiting").await;
    let house = House::new(rabbitmq, name).await;
    for ladder in [by_key(DeadHead::Skip), by_key(DeadHead::Skip).in_place()] {
        let member = house.member(ladder);
        let error = member.1.await.unwrap().unwrap_err();
        let violation = error.violation().unwrap();
        assert_eq!(violation.field, "ladder mode");
        assert!(violation.value.contains(&house.topic), "{error}");
    }
}
