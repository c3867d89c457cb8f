//! Passwords, TLS, rules: what a client is let in by, and what it says where it is not.

use relaybox::ErrorKind;
use relaybox::broker::kafka::{Kafka, KafkaConfig};
use relaybox::broker::{
    ConnectionState, FailureScope, PublishOutcome, Publisher, RejectionScope, Subscriber,
};
use relaybox::testing::eventually;
use relaybox_testcontainers::{KafkaOptions, KafkaSecurity};

use super::*;

pub async fn server() -> relaybox_testcontainers::Kafka {
    let options = KafkaOptions::default().with_security();
    relaybox_testcontainers::Kafka::start_with(options)
        .await
        .unwrap()
}

pub fn by_password(security: &KafkaSecurity, mechanism: &str, password: &str) -> KafkaConfig {
    config(&security.sasl_brokers)
        .with_property("security.protocol", "sasl_plaintext")
        .with_property("sasl.mechanisms", mechanism)
        .with_property("sasl.username", security.user)
        .with_property("sasl.password", password)
}

fn by_tls(security: &KafkaSecurity) -> KafkaConfig {
    config(&security.tls_brokers).with_property("security.protocol", "ssl")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_pass_by_password_and_by_tls() {
    let server = server().await;
    let security = server.security().unwrap();
    let certificate = security.certificate.to_string_lossy().into_owned();
    for config in [
        by_password(security, "PLAIN", security.password),
        by_password(security, "SCRAM-SHA-256", security.password),
        by_tls(security).with_property("ssl.ca.location", certificate),
        // Nothing to do with security, but built like it: a codec that has to be asked for.
        by_password(security, "PLAIN", security.password).with_property("compression.type", "zstd"),
    ] {
        let topic = server.create_topic("secured", 1).await.unwrap();
        let kafka = Kafka::connect(config).await.unwrap();
        publish_all(&kafka, &numbered(&topic, "k", 0..3)).await;
        let mut subscription = kafka.subscribe(request("secured", &topic)).await.unwrap();
        let received = receive(&mut subscription, 3).await;
        assert_eq!(text(&received[2]), "2");
        drop(received);
        subscription.close(30 * SECOND).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_not_let_in_is_told_why_and_no_secret() {
    let server = server().await;
    let security = server.security().unwrap();
    for (config, cause) in [
        (by_password(security, "PLAIN", "hunter2"), "authentication"),
        (
            by_password(security, "SCRAM-SHA-256", "hunter2"),
            "authentication",
        ),
        // The broker's certificate is not one of those that the system trusts.
        (by_tls(security), "TLS"),
    ] {
        // On a busy machine the refusal may come later than the deadline of one try.
        eventually(60 * SECOND, cause, || async {
            let error = Kafka::connect(config.clone()).await.map(drop).unwrap_err();
            let shown = format!("{error} {error:?}");
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{shown}");
            assert!(!shown.contains("hunter2"), "{shown}");
            shown.contains(cause)
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_build_cannot_do_is_said_with_the_features_that_can() {
    // No feature of ours brings what this needs.
    let config = KafkaConfig::new("127.0.0.1:1")
        .with_property("sasl.mechanisms", "OAUTHBEARER")
        .with_property("sasl.oauthbearer.method", "oidc");
    let error = Kafka::connect(config).await.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
    assert!(error.to_string().contains("kafka-ssl"), "{error}");
}

/// Somebody changes the password under a running client, and puts it back: nothing is restarted, nothing is judged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_that_no_longer_holds_shows_in_health_and_judges_no_message() {
    let server = server().await;
    let security = server.security().unwrap();
    let config = by_password(security, "SCRAM-SHA-256", security.password);
    let kafka = Kafka::connect(config.with_publish_deadline(3 * SECOND))
        .await
        .unwrap();
    let topic = server.create_topic("password", 1).await.unwrap();
    let mut subscription = kafka.subscribe(request("password", &topic)).await.unwrap();
    publish_all(&kafka, &numbered(&topic, "k", 0..1)).await;
    acknowledge(receive(&mut subscription, 1).await.remove(0)).await;
    let set = async |password: &str| {
        let config = format!("SCRAM-SHA-256=[password={password}]");
        let of_user = ["--entity-type", "users", "--entity-name", security.user];
        let arguments = [&["--alter", "--add-config", &config][..], &of_user].concat();
        let class = "org.apache.kafka.tools.ConfigCommand";
        server.run_tool(class, &arguments, b"").await.unwrap();
        // Connections that are let in stay in.
        server.restart().await.unwrap();
    };
    set("looking-glass").await;
    eventually(60 * SECOND, "health tells why", || async {
        [Publisher::health(&kafka), subscription.health()]
            .iter()
            .all(|health| {
                let detail = health.detail.as_deref().unwrap_or_default();
                health.state == ConnectionState::Down && detail.contains("authentication")
            })
    })
    .await;
    let outcomes = kafka.publish(&numbered(&topic, "k", 1..2)).await;
    let broker = FailureScope::Broker;
    assert!(
        matches!(&outcomes[0], PublishOutcome::Failed { scope, .. } if *scope == broker),
        "{outcomes:?}"
    );
    set(security.password).await;
    eventually(60 * SECOND, "let in again", || async {
        kafka.publish(&numbered(&topic, "k", 1..2)).await[0].is_confirmed()
    })
    .await;
    assert_eq!(text(&receive(&mut subscription, 1).await[0]), "1");
    assert!(Publisher::health(&kafka).is_up() && subscription.health().is_up());
    subscription.close(30 * SECOND).await.unwrap();
}

/// The rule may be mended while the client is up: it needs no restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_is_forbidden_harms_no_other_and_flows_again_when_it_is_allowed() {
    let server = server().await;
    let security = server.security().unwrap();
    let config = by_password(security, "PLAIN", security.password);
    let kafka = Kafka::connect(config).await.unwrap();
    let free = server.create_topic("free", 2).await.unwrap();
    let closed = server.create_topic("closed", 2).await.unwrap();
    publish_all(&kafka, &numbered(&closed, "k", 0..1)).await;
    let deny = |verb: &'static str| {
        let (server, closed) = (&server, &closed);
        async move {
            let mut arguments = vec![verb, "--topic", closed, "--operation", "Write"];
            arguments.extend(["--deny-principal", "User:alice"]);
            if verb == "--remove" {
                arguments.push("--force");
            }
            let class = "org.apache.kafka.tools.AclCommand";
            server.run_tool(class, &arguments, b"").await.unwrap();
        }
    };
    // Without a rule that allows, the first rule that denies would shut everybody out.
    let class = "org.apache.kafka.tools.AclCommand";
    let allow = ["--add", "--topic", "*", "--allow-principal", "User:alice"];
    server.run_tool(class, &allow, b"").await.unwrap();
    deny("--add").await;
    let batch = [
        message(&closed, "k", "1"),
        message(&free, "k", "2"),
        message(&closed, "other", "3"),
    ];
    let refused = |outcome: &PublishOutcome| {
        let destination = RejectionScope::Destination;
        matches!(outcome, PublishOutcome::Rejected { scope, .. } if *scope == destination)
    };
    // Rules reach the broker a moment after the tool has ended.
    eventually(60 * SECOND, "forbidden", || async {
        let outcomes = kafka.publish(&batch).await;
        assert!(outcomes[1].is_confirmed(), "{outcomes:?}");
        refused(&outcomes[0]) && refused(&outcomes[2])
    })
    .await;
    deny("--remove").await;
    eventually(60 * SECOND, "allowed again", || async {
        kafka.publish(&numbered(&closed, "k", 4..5)).await[0].is_confirmed()
    })
    .await;
}
