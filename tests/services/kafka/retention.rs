//! For how long a topic says that it delivers a message, and who may be told.

use relaybox::ErrorKind;
use relaybox::broker::{Retention, Subscriber};
use relaybox::consumer::{Consumer, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::store::sqlite::SqliteStore;
use relaybox::testing::eventually;
use sqlx::sqlite::SqliteConnection;

use super::security::{by_password, server};
use super::*;

const DAY: Duration = Duration::from_secs(86_400);
const BROKERS_CHECK: Duration = Duration::from_secs(300);

async fn of_topic_with(kafka: &Kafka, settings: &[(&str, &str)]) -> Retention {
    let server = shared_kafka().await;
    let topic = server.create_topic_with("kept", 1, settings).await.unwrap();
    kafka.retention(&topic).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_tells_its_retention_by_its_settings_and_the_clusters_defaults() {
    let kafka = connect().await;
    let bounded = |kept| Retention::Bounded(kept + BROKERS_CHECK);
    for (settings, expected) in [
        (&[][..], bounded(7 * DAY + 7 * DAY)),
        (&[("retention.ms", "86400000")], bounded(8 * DAY)),
        (
            &[("retention.ms", "86400000"), ("segment.ms", "3600000")],
            bounded(DAY + DAY / 24),
        ),
        (
            &[("cleanup.policy", "compact,delete"), ("retention.ms", "0")],
            bounded(7 * DAY),
        ),
        (&[("retention.ms", "-1")], Retention::Unbounded),
        (&[("cleanup.policy", "compact")], Retention::Unbounded),
    ] {
        assert_eq!(
            of_topic_with(&kafka, settings).await,
            expected,
            "{settings:?}"
        );
    }
}

async fn nothing(_: &(), _: &mut SqliteConnection, _: &Incoming) -> Outcome {
    Outcome::Done
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_kept_for_ever_is_consumed_only_with_a_stated_retention() {
    let kafka = connect().await;
    let topic = shared_kafka()
        .await
        .create_topic_with("for-ever", 1, &[("retention.ms", "-1")])
        .await
        .unwrap();
    let directory = tempfile::tempdir().unwrap();
    let store = SqliteStore::connect(directory.path().join("inbox.db"))
        .await
        .unwrap();
    store.migrate().await.unwrap();
    let consumer =
        |config| Consumer::new("billing", &topic, kafka.clone(), store.clone()).with_config(config);
    let config = relaybox::consumer::ConsumerConfig::default;
    let running = consumer(config()).run_until(handler_fn((), nothing), std::future::pending());
    let error = within(60 * SECOND, "a refusal", running).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
    assert_eq!(error.violation().unwrap().field, "inbox_retention");

    publish_all(&kafka, &numbered(&topic, "k", 0..1)).await;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let stated = consumer(config().with_source_retention(7 * DAY));
    let running = tokio::spawn(stated.run_until(handler_fn((), nothing), async {
        let _ = stopped.await;
    }));
    eventually(60 * SECOND, "it is consumed", || async {
        let lag = kafka.lag("billing", &topic).await;
        lag.is_ok_and(|lag| lag.messages == 0)
    })
    .await;
    drop(stop);
    running.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_may_not_read_a_topics_settings_knows_no_retention() {
    let server = server().await;
    let security = server.security().unwrap();
    let config = by_password(security, "PLAIN", security.password);
    let kafka = Kafka::connect(config).await.unwrap();
    let topic = server.create_topic("private", 1).await.unwrap();
    assert!(matches!(
        kafka.retention(&topic).await.unwrap(),
        Retention::Bounded(_)
    ));
    let class = "org.apache.kafka.tools.AclCommand";
    let add = ["--add", "--topic", "*"];
    let rules: [&[&str]; 2] = [
        &["--allow-principal", "User:alice"],
        &[
            "--deny-principal",
            "User:alice",
            "--operation",
            "DescribeConfigs",
        ],
    ];
    for rule in rules {
        let arguments = [&add[..], rule].concat();
        server.run_tool(class, &arguments, b"").await.unwrap();
    }
    // Rules reach the broker a moment after the tool has ended.
    eventually(60 * SECOND, "forbidden", || async {
        kafka.retention(&topic).await.unwrap() == Retention::Unknown
    })
    .await;
}
