//! The main job on real input, in processes of their own: PostgreSQL to a broker to PostgreSQL, over each broker.
//!
//! Input is the JSONL file named by `RELAYBOX_WEBHOOKS_FILE`; without it the test writes one of its own. The verdict is
//! the example's own report, whose counts come from the database and the broker.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Headers, Message};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use relaybox::broker::Broker;
use relaybox::testing::eventually;
use relaybox_testcontainers::{
    Postgres, shared_kafka, shared_nats, shared_postgres, shared_rabbitmq, unique_name,
};
use sqlx::AssertSqlSafe;
use sqlx::postgres::PgPool;
use tempfile::TempDir;

const COPIES: u64 = 5;
const DEADLINE: Duration = Duration::from_secs(180);

// The example uses all of it.
#[allow(dead_code)]
#[path = "../../examples/webhooks/broker.rs"]
pub mod broker;

use broker::{Place, Product};

macro_rules! over_each_broker {
    ($($module:ident: $product:expr;)+) => {
        $(
            mod $module {
                use super::*;

                #[tokio::test(flavor = "multi_thread")]
                async fn every_delivery_has_its_effect_once_and_in_order() {
                    super::every_delivery_has_its_effect_once_and_in_order($product).await;
                }

                #[tokio::test(flavor = "multi_thread")]
                async fn a_relay_killed_mid_run_loses_nothing() {
                    super::a_relay_killed_mid_run_loses_nothing($product).await;
                }

                #[tokio::test(flavor = "multi_thread")]
                async fn a_consumer_killed_mid_run_loses_and_doubles_nothing() {
                    super::a_consumer_killed_mid_run_loses_and_doubles_nothing($product).await;
                }
            }
        )+
    };
}

over_each_broker! {
    kafka: Product::Kafka;
    rabbitmq: Product::RabbitMq;
    nats: Product::Nats;
}

async fn every_delivery_has_its_effect_once_and_in_order(product: Product) {
    let story = Story::new(product).await;
    let output = story.role("all").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}");
    story.check_last_line(&printed);
    if product == Product::Kafka {
        story.check_dead_letter_headers().await;
    }
}

async fn a_relay_killed_mid_run_loses_nothing(product: Product) {
    let story = Story::new(product).await;
    story.run("prepare");
    let broker = story.broker().await;
    let mut relay = story.start("relay");
    let consumer = story.start("consume");
    let mut enqueue = story.start("enqueue");
    eventually(DEADLINE, "a part is committed", || async {
        story.count("fact").await >= story.messages() / 4
    })
    .await;
    // Held up while it writes, so that the kill surely comes before the end. By a lock: for a process that stands still
    // the time of its own deadlines goes on.
    let mut lock = story.pool.begin().await.unwrap();
    let sql = format!("LOCK TABLE webhooks_{}.fact IN EXCLUSIVE MODE", story.run);
    sqlx::query(AssertSqlSafe(sql))
        .execute(&mut *lock)
        .await
        .unwrap();
    story.until_published(&*broker, 1).await;
    relay.kill();
    lock.rollback().await.unwrap();
    assert!(enqueue.wait().success());
    assert!(story.unsent().await > 0, "the relay was killed mid-run");
    let relay = story.start("relay");
    story.until_settled().await;
    relay.stop();
    consumer.stop();
    story.check_last_line(&story.run("report"));
}

async fn a_consumer_killed_mid_run_loses_and_doubles_nothing(product: Product) {
    let story = Story::new(product).await;
    story.run("prepare");
    story.run("enqueue");
    let relay = story.start("relay");
    let mut consumer = story.start("consume");
    eventually(DEADLINE, "a part has its effect", || async {
        story.count("effect").await >= 100
    })
    .await;
    consumer.kill();
    assert!(
        story.count("effect").await < story.messages(),
        "the consumer was killed mid-run"
    );
    let consumer = story.start("consume");
    story.until_settled().await;
    relay.stop();
    consumer.stop();
    story.check_last_line(&story.run("report"));
}

/// One run of the example: a database and a name of its own.
struct Story {
    _directory: TempDir,
    file: PathBuf,
    lines: u64,
    run: String,
    url: String,
    pool: PgPool,
    place: Place,
}

impl Story {
    async fn new(product: Product) -> Self {
        let postgres: &Postgres = shared_postgres().await;
        let url = postgres.create_database("webhooks").await.unwrap();
        let directory = tempfile::tempdir().unwrap();
        let file = match std::env::var_os("RELAYBOX_WEBHOOKS_FILE") {
            Some(file) => PathBuf::from(file),
            None => own_input(directory.path()),
        };
        let text = std::fs::read_to_string(&file).unwrap();
        Self {
            _directory: directory,
            file,
            lines: text.lines().count() as u64,
            run: unique_name("r")[..12].trim_end_matches('_').to_owned(),
            pool: PgPool::connect(&url).await.unwrap(),
            url,
            place: Place {
                product,
                address: match product {
                    Product::Kafka => shared_kafka().await.brokers(),
                    Product::RabbitMq => shared_rabbitmq().await.url(),
                    Product::Nats => shared_nats().await.url(),
                },
            },
        }
    }

    fn messages(&self) -> u64 {
        self.lines * COPIES
    }

    fn topic(&self) -> String {
        format!("webhooks-{}", self.run)
    }

    fn role(&self, role: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_webhooks"));
        command
            .arg(&self.file)
            .args([
                "--copies",
                &COPIES.to_string(),
                "--run",
                &self.run,
                "--broker",
                self.place.product.name(),
                "--role",
                role,
            ])
            .env("RELAYBOX_POSTGRES_URL", &self.url)
            .env(self.place.product.variable(), &self.place.address)
            .env("RUST_LOG", "warn")
            .stdin(Stdio::null())
            .stderr(Stdio::inherit());
        command
    }

    /// Runs a role to its good end and returns what it printed.
    fn run(&self, role: &str) -> String {
        let output = self.role(role).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{role}: {printed}");
        printed
    }

    fn start(&self, role: &str) -> Process {
        Process(self.role(role).stdout(Stdio::null()).spawn().unwrap())
    }

    async fn count(&self, table: &str) -> u64 {
        let sql = format!("SELECT count(*) FROM webhooks_{}.{table}", self.run);
        let count: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
            .fetch_one(&self.pool)
            .await
            .unwrap();
        count.try_into().unwrap()
    }

    /// A slow broker's messages are set aside.
    async fn unsent(&self) -> u64 {
        self.count("relaybox_outbox").await + self.count("relaybox_outbox_aside").await
    }

    async fn broker(&self) -> Arc<dyn Broker> {
        self.place.connect(&self.topic()).await.unwrap()
    }

    async fn until_published(&self, broker: &dyn Broker, records: u64) {
        let wire = self.place.product.wire(&self.topic());
        eventually(DEADLINE, "a part is published", || async {
            broker::depth(broker, &wire).await.unwrap() >= records
        })
        .await;
    }

    /// Waits until the outbox is empty, every message has its effect or its letter, and nothing waits for the consumer.
    /// Counting ends alone would not do, as a kill may leave a dead letter twice; nor would what waits, as not every broker
    /// tells what a member holds.
    async fn until_settled(&self) {
        let (broker, topic) = (self.broker().await, self.topic());
        let rungs = ["1s", "3s"].map(|delay| format!("{topic}.index.retry.{delay}"));
        let dead_letters = format!("{topic}.index.DLQ");
        eventually(DEADLINE, "every message came to its end", || async {
            let mut left = self.unsent().await;
            for source in std::iter::once(&topic).chain(&rungs) {
                // The consumer may not have made its rungs yet.
                let Ok(lag) = broker.lag("index", source).await else {
                    return false;
                };
                left += lag.messages;
            }
            let dead = broker::depth(&*broker, &dead_letters).await.unwrap();
            left == 0 && self.count("effect").await + dead >= self.messages()
        })
        .await;
    }

    /// Holds the report against what the handler's rules say must happen, counted here anew.
    fn check_last_line(&self, printed: &str) {
        let last = printed.lines().last().unwrap();
        println!("{last}");
        let counts: HashMap<&str, i64> = last
            .split(' ')
            .map(|pair| pair.split_once('=').unwrap())
            .map(|(name, count)| (name, count.parse().unwrap()))
            .collect();
        let total = i64::try_from(self.messages()).unwrap();
        let is_dead = |n: &i64| n % 97 == 13 || n % 50 == 7;
        let climbs = |n: &i64| n % 97 != 13 && (n % 50 == 7 || n % 10 == 3);
        let dead = (1..=total).filter(is_dead).count() as i64;
        let retried = (1..=total).filter(climbs).count() as i64;
        assert_eq!(counts["committed"], total);
        assert_eq!(counts["published"], total);
        assert_eq!(counts["effects"], total - dead);
        assert_eq!(counts["dead"], dead);
        assert_eq!(counts["retried"], retried);
        assert_eq!(counts["lost"], 0);
        assert!(counts["delivered"] >= total + retried);
    }

    /// Every header of the table that belongs on a dead letter is there, as another language would read it.
    async fn check_dead_letter_headers(&self) {
        let topic = format!("{}.index.DLQ", self.topic());
        let ends = shared_kafka()
            .await
            .topic_end_offsets(&topic)
            .await
            .unwrap();
        let brokers = self.place.address.clone();
        let seen = tokio::task::spawn_blocking(move || read_headers(&brokers, &topic, &ends));
        let letters = seen.await.unwrap();
        assert!(!letters.is_empty());
        let wanted: BTreeSet<&str> = [
            "x-message-id",
            "x-event-type",
            "x-occurred-at",
            "x-version",
            "content-type",
            "x-original-topic",
            "x-original-partition",
            "x-original-offset",
            "x-consumer",
            "x-retry-count",
            "x-first-failed-at",
            "x-last-failed-at",
            "x-last-error",
            "x-dead-letter-reason",
            "traceparent",
            "action",
            "number",
        ]
        .into();
        for letter in &letters {
            let names: BTreeSet<&str> = letter.keys().map(String::as_str).collect();
            assert_eq!(names, wanted);
            assert_eq!(letter["x-original-topic"], self.topic());
            assert_eq!(letter["x-consumer"], "index");
            assert_eq!(letter["x-version"], letter["number"]);
            let number: i64 = letter["number"].parse().unwrap();
            assert_eq!(
                letter["traceparent"],
                format!("00-{number:032x}-{number:016x}-01")
            );
            assert!(letter["x-first-failed-at"].ends_with('Z'));
            let (reason, attempts) = match number % 97 {
                13 => ("permanent", "1"),
                _ => ("retries-exhausted", "3"),
            };
            assert_eq!(letter["x-dead-letter-reason"], reason);
            assert_eq!(letter["x-retry-count"], attempts);
        }
    }
}

fn read_headers(brokers: &str, topic: &str, ends: &[i64]) -> Vec<HashMap<String, String>> {
    let consumer: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", unique_name("headers"))
        .create()
        .unwrap();
    let mut assignment = TopicPartitionList::new();
    for partition in 0..ends.len() {
        assignment
            .add_partition_offset(topic, partition.try_into().unwrap(), Offset::Beginning)
            .unwrap();
    }
    consumer.assign(&assignment).unwrap();
    let total: i64 = ends.iter().sum();
    let mut letters = Vec::new();
    while (letters.len() as i64) < total {
        let record = consumer.poll(DEADLINE).expect("a record").unwrap();
        let headers = record.headers().unwrap();
        letters.push(
            headers
                .iter()
                .map(|header| {
                    let value = String::from_utf8_lossy(header.value.unwrap()).into_owned();
                    (header.key.to_owned(), value)
                })
                .collect(),
        );
    }
    letters
}

/// Input in the shape of the real one: a hot key, Unicode, large integers, nulls.
fn own_input(directory: &Path) -> PathBuf {
    let mut text = String::new();
    for n in 0..200u64 {
        let key = if n % 4 == 0 { n % 7 } else { 0 };
        let action = if n % 5 == 0 { "null" } else { "\"opened\"" };
        writeln!(
            text,
            r#"{{"event":"issues","action":{action},"key":"owner/repository-{key}","payload":{{"id":{},"title":"№ {n} 🚀","body":null,"text":"{}"}}}}"#,
            u64::MAX - n,
            "x".repeat(usize::try_from(n * 40).unwrap()),
        )
        .unwrap();
    }
    let file = directory.join("webhooks.jsonl");
    std::fs::write(&file, text).unwrap();
    file
}

pub fn signal(name: &str, process: &Process) {
    let status = Command::new("kill")
        .args([&format!("-{name}"), &process.0.id().to_string()])
        .status()
        .unwrap();
    assert!(status.success());
}

/// A role running by itself; killed when a test ends early.
pub struct Process(pub Child);

impl Process {
    /// SIGKILL.
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// SIGTERM, and a good end.
    pub fn stop(mut self) {
        signal("TERM", &self);
        assert!(self.wait().success());
    }

    fn wait(&mut self) -> std::process::ExitStatus {
        self.0.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
