//! The services themselves: started for real, broken on purpose, and gone afterwards.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::producer::{FutureProducer, FutureRecord};
use relaybox_testcontainers::{
    Kafka, KafkaOptions, Nats, NatsOptions, Postgres, PostgresOptions, RabbitMq, RabbitMqOptions,
    ServiceError, Way, shared_kafka, shared_nats, shared_postgres, shared_rabbitmq, unique_name,
};
use sqlx::{Connection, PgConnection};

mod owners;

use owners::holder;

const SOON: Duration = Duration::from_secs(15);

fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {SOON:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn local_postgres() -> PostgresOptions {
    PostgresOptions::default().with_local_process()
}

fn local_kafka() -> KafkaOptions {
    KafkaOptions::default().with_local_process()
}

async fn scalar<T>(url: &str, query: &'static str) -> T
where
    T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
{
    let mut connection = PgConnection::connect(url).await.unwrap();
    sqlx::query_scalar(query)
        .fetch_one(&mut connection)
        .await
        .unwrap()
}

async fn produce(brokers: &str, topic: &str, partition: i32) {
    let producer: FutureProducer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("message.timeout.ms", "20000")
        .set("reconnect.backoff.max.ms", "100")
        .create()
        .unwrap();
    let record = FutureRecord::<(), str>::to(topic)
        .payload("hello")
        .partition(partition);
    producer.send(record, SOON).await.expect("produced");
}

#[tokio::test]
async fn postgres_answers_with_the_settings_for_tests() {
    let started = Instant::now();
    let postgres = shared_postgres().await;
    println!(
        "PostgreSQL by {} after {:?}",
        postgres.way(),
        started.elapsed()
    );
    assert!(postgres.is_ready().await);
    if postgres.way() != Way::Url {
        let url = postgres.url();
        assert_eq!(scalar::<String>(&url, "SHOW max_connections").await, "200");
        assert_eq!(
            scalar::<String>(&url, "SHOW max_prepared_transactions").await,
            "20"
        );
        assert_eq!(scalar::<String>(&url, "SHOW fsync").await, "off");
    }
}

#[tokio::test]
async fn every_database_is_fresh() {
    let postgres = shared_postgres().await;
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..4 {
        calls.spawn(async {
            let url = postgres.create_database("Fresh.one").await.unwrap();
            let mut connection = PgConnection::connect(&url).await.unwrap();
            // Fails where the table is there already.
            sqlx::query("CREATE TABLE marks (id int)")
                .execute(&mut connection)
                .await
                .unwrap();
            url
        });
    }
    let mut urls = calls.join_all().await;
    urls.sort();
    urls.dedup();
    assert_eq!(urls.len(), 4);
}

#[test]
fn shared_handles_outlive_the_runtime_that_made_them() {
    let threads: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .unwrap();
                runtime.block_on(async {
                    let topic = shared_kafka().await.create_topic("runtimes", 1).await;
                    let database = shared_postgres().await.create_database("runtimes").await;
                    (topic.unwrap(), database.unwrap())
                })
            })
        })
        .collect();
    let mut all: Vec<_> = threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 4);
}

#[tokio::test]
async fn a_durable_postgres_syncs() {
    let postgres = Postgres::start_with(local_postgres().with_durable())
        .await
        .unwrap();
    let url = postgres.url();
    assert_eq!(scalar::<String>(&url, "SHOW fsync").await, "on");
    assert_eq!(
        scalar::<String>(&url, "SHOW synchronous_commit").await,
        "on"
    );
    assert_eq!(scalar::<String>(&url, "SHOW full_page_writes").await, "on");
}

#[tokio::test]
async fn postgres_keeps_its_data_through_kill_and_restart() {
    let postgres = Postgres::start_with(local_postgres()).await.unwrap();
    let url = postgres.create_database("kept").await.unwrap();
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql("SET synchronous_commit = on; CREATE TABLE kept AS SELECT 7::int8 AS id")
        .execute(&mut connection)
        .await
        .unwrap();

    let first = postgres.pid().unwrap();
    postgres.kill().await.unwrap();
    assert_eq!(postgres.pid(), None);
    assert!(!postgres.is_ready().await);
    assert!(matches!(
        postgres.kill().await,
        Err(ServiceError::Failed { .. })
    ));
    sqlx::query("SELECT 1")
        .execute(&mut connection)
        .await
        .expect_err("the connection died with the server");

    let started = Instant::now();
    postgres.start_again().await.unwrap();
    println!("PostgreSQL again after {:?}", started.elapsed());
    assert_ne!(postgres.pid().unwrap(), first);
    assert_eq!(scalar::<i64>(&url, "SELECT id FROM kept").await, 7);

    let started = Instant::now();
    postgres.restart().await.unwrap();
    println!("PostgreSQL restarted after {:?}", started.elapsed());
    assert_eq!(scalar::<i64>(&url, "SELECT id FROM kept").await, 7);
    assert!(matches!(
        postgres.start_again().await,
        Err(ServiceError::Failed { .. })
    ));
}

#[tokio::test]
async fn a_stopped_postgres_stalls_and_goes_on() {
    let postgres = Postgres::start_with(local_postgres()).await.unwrap();
    let mut connection = PgConnection::connect(&postgres.url()).await.unwrap();
    postgres.stop().await.unwrap();
    // An open connection stalls too, because its backend is stopped with the postmaster.
    let stalled = tokio::time::timeout(
        Duration::from_millis(300),
        sqlx::query("SELECT 1").execute(&mut connection),
    );
    assert!(stalled.await.is_err());
    assert!(!postgres.is_ready().await);
    postgres.cont().await.unwrap();
    until_ready_again(|| postgres.is_ready()).await;
}

#[tokio::test]
async fn kafka_answers_and_counts() {
    let started = Instant::now();
    let kafka = shared_kafka().await;
    println!("Kafka by {} after {:?}", kafka.way(), started.elapsed());
    assert!(kafka.is_ready().await);

    let topic = kafka
        .create_topic_with("counted", 3, &[("retention.ms", "600000")])
        .await
        .unwrap();
    assert_eq!(kafka.topic_end_offsets(&topic).await.unwrap(), [0, 0, 0]);
    produce(&kafka.brokers(), &topic, 1).await;
    assert_eq!(kafka.topic_end_offsets(&topic).await.unwrap(), [0, 1, 0]);

    let named = format!("{topic}.billing.retry.5s");
    kafka.create_topic_named(&named, 1, &[]).await.unwrap();
    let taken = kafka.create_topic_named(&named, 1, &[]).await;
    assert!(taken.unwrap_err().to_string().contains(&named));
    let missing = kafka.topic_end_offsets("nobody-made-this").await;
    assert!(matches!(missing, Err(ServiceError::Failed { .. })));
    let refused = kafka.create_topic_with("odd", 1, &[("no.such", "1")]).await;
    assert!(matches!(refused, Err(ServiceError::Failed { .. })));
}

#[tokio::test]
async fn kafka_keeps_its_data_through_kill_and_restart() {
    let kafka = Kafka::start_with(local_kafka()).await.unwrap();
    let topic = kafka.create_topic("kept", 1).await.unwrap();
    produce(&kafka.brokers(), &topic, 0).await;

    kafka.kill().await.unwrap();
    assert!(!kafka.is_ready().await);
    let started = Instant::now();
    kafka.start_again().await.unwrap();
    println!("Kafka again after {:?}", started.elapsed());
    assert_eq!(kafka.topic_end_offsets(&topic).await.unwrap(), [1]);
    produce(&kafka.brokers(), &topic, 0).await;
    println!("Kafka takes records again after {:?}", started.elapsed());

    let started = Instant::now();
    kafka.restart().await.unwrap();
    println!("Kafka restarted after {:?}", started.elapsed());
    assert_eq!(kafka.topic_end_offsets(&topic).await.unwrap(), [2]);

    kafka.stop().await.unwrap();
    assert!(!kafka.is_ready().await);
    kafka.cont().await.unwrap();
    until_ready_again(|| kafka.is_ready()).await;
    produce(&kafka.brokers(), &topic, 0).await;
}

#[tokio::test]
async fn rabbitmq_answers_and_takes_commands() {
    let started = Instant::now();
    let rabbitmq = shared_rabbitmq().await;
    println!(
        "RabbitMQ by {} after {:?}",
        rabbitmq.way(),
        started.elapsed()
    );
    assert!(rabbitmq.is_ready().await);
    if rabbitmq.way() == Way::LocalProcess {
        let flags = rabbitmq.ctl(&["list_feature_flags"]).await.unwrap();
        assert!(flags.contains("stream_queue\tenabled"), "{flags}");
        let refused = rabbitmq.ctl(&["no_such_command"]).await;
        assert!(matches!(refused, Err(ServiceError::Failed { .. })));
    }
    let address = rabbitmq.address();
    assert!(rabbitmq.url_by("elsewhere:1").contains("@elsewhere:1/"));
    assert!(format!("{rabbitmq:?}").contains(&address));
    assert!(!format!("{rabbitmq:?}").contains("guest"));
}

#[tokio::test]
async fn rabbitmq_keeps_its_data_through_kill_and_restart() {
    let options = RabbitMqOptions::default().with_local_process();
    let rabbitmq = RabbitMq::start_with(options).await.unwrap();
    let add = ["add_vhost", "kept"];
    rabbitmq.ctl(&add).await.unwrap();
    let kept = || async {
        rabbitmq
            .ctl(&["list_vhosts"])
            .await
            .unwrap()
            .contains("kept")
    };

    rabbitmq.kill().await.unwrap();
    assert!(!rabbitmq.is_ready().await);
    let started = Instant::now();
    rabbitmq.start_again().await.unwrap();
    println!("RabbitMQ again after {:?}", started.elapsed());
    assert!(kept().await);
    let started = Instant::now();
    rabbitmq.restart().await.unwrap();
    println!("RabbitMQ restarted after {:?}", started.elapsed());
    assert!(kept().await);

    rabbitmq.stop().await.unwrap();
    assert!(!rabbitmq.is_ready().await);
    rabbitmq.cont().await.unwrap();
    until_ready_again(|| rabbitmq.is_ready()).await;
}

#[tokio::test]
async fn nats_answers_with_jetstream() {
    let started = Instant::now();
    let nats = shared_nats().await;
    println!("NATS by {} after {:?}", nats.way(), started.elapsed());
    assert!(nats.is_ready().await);
    let stream = unique_name("answers");
    assert_eq!(stored(&nats.url(), &stream).await, 1);
}

#[tokio::test]
async fn nats_keeps_its_data_through_kill_and_restart() {
    let options = NatsOptions::default().with_local_process();
    let nats = Nats::start_with(options.with_durable()).await.unwrap();
    let stream = unique_name("kept");
    assert_eq!(stored(&nats.url(), &stream).await, 1);

    nats.kill().await.unwrap();
    assert!(!nats.is_ready().await);
    let started = Instant::now();
    nats.start_again().await.unwrap();
    println!("NATS again after {:?}", started.elapsed());
    assert_eq!(stored(&nats.url(), &stream).await, 2);
    nats.restart().await.unwrap();
    assert_eq!(stored(&nats.url(), &stream).await, 3);

    nats.stop().await.unwrap();
    assert!(!nats.is_ready().await);
    nats.cont().await.unwrap();
    until_ready_again(|| nats.is_ready()).await;
    assert_eq!(stored(&nats.url(), &stream).await, 4);
}

/// How many messages the stream holds after one more was stored; it is made if it is missing.
async fn stored(url: &str, stream: &str) -> u64 {
    let client = async_nats::connect(url).await.unwrap();
    let context = async_nats::jetstream::new(client);
    context.get_or_create_stream(stream).await.unwrap();
    let subject = stream.to_owned();
    let sent = context.publish(subject, "hello".into()).await.unwrap();
    sent.await.unwrap().sequence
}

async fn until_ready_again<F, A>(is_ready: F)
where
    F: Fn() -> A,
    A: Future<Output = bool>,
{
    let deadline = Instant::now() + SOON;
    while !is_ready().await {
        assert!(Instant::now() < deadline, "not ready within {SOON:?}");
    }
}

#[test]
fn a_service_that_cannot_be_had_fails_and_says_what_was_tried() {
    let empty = tempfile::tempdir().unwrap();
    for (service, variable) in [
        ("postgres", "RELAYBOX_PG_BIN"),
        ("kafka", "RELAYBOX_KAFKA_HOME"),
        ("rabbitmq", "RELAYBOX_RABBITMQ_HOME"),
        ("nats", "RELAYBOX_NATS_HOME"),
    ] {
        let started = Instant::now();
        let output = holder(service)
            .env(variable, empty.path())
            .output()
            .unwrap();
        assert!(!output.status.success());
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
        let error = String::from_utf8_lossy(&output.stderr);
        for expected in [
            "cannot be had",
            "is not set",
            "no Docker engine at unix:///nonexistent/docker.sock",
            &empty.path().to_string_lossy(),
            "run testcontainers/install",
        ] {
            assert!(error.contains(expected), "{expected:?} is not in:\n{error}");
        }
    }
}

#[test]
fn an_address_that_does_not_answer_fails_and_nothing_else_is_tried() {
    for (service, variable, address) in [
        (
            "postgres",
            "RELAYBOX_POSTGRES_URL",
            "postgres://u:secret@127.0.0.1:9/x",
        ),
        ("kafka", "RELAYBOX_KAFKA_BROKERS", "127.0.0.1:9"),
        (
            "rabbitmq",
            "RELAYBOX_RABBITMQ_URL",
            "amqp://u:secret@127.0.0.1:9/%2f",
        ),
        ("nats", "RELAYBOX_NATS_URL", "nats://u:secret@127.0.0.1:9"),
    ] {
        let output = holder(service).env(variable, address).output().unwrap();
        assert!(!output.status.success());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(error.contains(variable), "{error}");
        assert!(!error.contains("local process"), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

#[tokio::test]
async fn an_address_that_answers_is_used_and_left_alone() {
    let postgres = Postgres::start_with(local_postgres()).await.unwrap();
    let output = holder("postgres")
        .env("RELAYBOX_POSTGRES_URL", postgres.url())
        .output()
        .unwrap();
    assert!(output.status.success());
    let line = String::from_utf8(output.stdout).unwrap();
    assert_eq!(line.trim_end(), format!("{} - -", postgres.url()));
    assert!(postgres.is_ready().await);
}

#[tokio::test]
async fn a_server_that_dies_at_start_is_reported_with_its_log() {
    let postgres = Postgres::start_with(local_postgres()).await.unwrap();
    postgres.kill().await.unwrap();
    let settings = postgres.directory().unwrap().join("data/postgresql.conf");
    std::fs::write(settings, "no_such_setting = 1\n").unwrap();
    let error = postgres.start_again().await.unwrap_err().to_string();
    assert!(error.contains("no_such_setting"), "{error}");
}
