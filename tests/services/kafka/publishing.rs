//! To a real broker: refusals, kills, partitions.

use std::collections::HashSet;
use std::time::Instant;

use relaybox::broker::kafka::Kafka;
use relaybox::broker::{
    FailureScope, PublishOutcome, Publisher, RejectionScope, Stored, Subscriber,
};
use relaybox::envelope::Outgoing;
use relaybox::{ErrorKind, Message};
use relaybox_testcontainers::{KafkaOptions, shared_kafka, unique_name};

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_sent_arrives_byte_for_byte() {
    let kafka = connect().await;
    let topic = topic("fidelity", 1).await;
    let long = "n".repeat(255);
    let mut full = Message::new(&topic, "OrderPlaced")
        .with_key("")
        .with_payload("")
        .with_content_type("application/json")
        .with_version(-3)
        .with_trace("00-aa-bb-01", Some("v=1".into()))
        .with_header("a", "1")
        .with_header("a", vec![0xff, 0, b'\r', b'\n'])
        .with_header("empty", Vec::new())
        .with_header(long.as_str(), " leading space");
    full.headers.push_optional("null", None);
    let tombstone = Message::new(&topic, "OrderDeleted").with_key([0, 0xff]);
    let bare = Message::new(&topic, "T").with_payload(vec![0, 1, 2, 0xff]);
    let sent = [full, tombstone, bare];
    let batch: Vec<Outgoing> = sent.iter().cloned().map(Outgoing::from).collect();
    publish_all(&kafka, &batch).await;
    let mut subscription = kafka.subscribe(request("fidelity", &topic)).await.unwrap();
    let received = receive(&mut subscription, 3).await;
    for (received, sent) in received.iter().zip(&sent) {
        assert_eq!(&received.incoming.message, sent);
        assert_eq!(received.incoming.message.payload, sent.payload);
        assert!(!received.incoming.id_missing && !received.redelivered);
    }
    assert_eq!(received[2].coordinates.to_string(), format!("{topic}/0/2"));
    drop(received);
    subscription.close(10 * SECOND).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_topic_is_refused_within_seconds_and_harms_no_other() {
    let kafka = connect().await;
    let topic = topic("known", 3).await;
    let nowhere = unique_name("nowhere");
    let batch = [
        message(&topic, "k", "0"),
        message(&nowhere, "k", "1"),
        message(&topic, "k", "2"),
        message("not a topic", "k", "3"),
        Message::new(&topic, "T").with_header("a\0b", "v").into(),
    ];
    let outcomes = within(5 * SECOND, "publish", kafka.publish(&batch)).await;
    assert!(outcomes[0].is_confirmed() && outcomes[2].is_confirmed());
    for at in [1, 3] {
        assert!(
            matches!(
                outcomes[at],
                PublishOutcome::Rejected {
                    scope: RejectionScope::Destination,
                    ..
                }
            ),
            "{:?}",
            outcomes[at]
        );
    }
    assert!(matches!(
        outcomes[4],
        PublishOutcome::Rejected {
            scope: RejectionScope::Message,
            ..
        }
    ));
    let names = [topic.clone(), nowhere.clone(), "other-missing".to_owned()];
    let error = kafka.check(&names).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let shown = error.to_string();
    assert!(shown.contains(&nowhere) && shown.contains("other-missing"));
    assert!(!shown.contains(&topic));
    kafka.check(&[topic]).await.unwrap();
}

/// Publishes until everything is confirmed or rejected as a message; returns the rejected payload numbers.
async fn publish_until_done(kafka: &Kafka, mut batch: Vec<Outgoing>) -> Vec<Outgoing> {
    let mut rejected = Vec::new();
    let until = Instant::now() + 120 * SECOND;
    while !batch.is_empty() {
        assert!(Instant::now() < until, "{} left", batch.len());
        let outcomes = kafka.publish(&batch).await;
        let mut again = Vec::new();
        for (outgoing, outcome) in batch.into_iter().zip(outcomes) {
            match outcome {
                PublishOutcome::Confirmed => {}
                PublishOutcome::Failed { .. } => again.push(outgoing),
                PublishOutcome::Rejected {
                    scope: RejectionScope::Message,
                    ..
                } => rejected.push(outgoing),
                other => panic!("{other:?}"),
            }
        }
        batch = again;
    }
    rejected
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_oversized_message_is_refused_and_its_neighbours_keep_their_order() {
    let kafka = connect().await;
    let brokers = shared_kafka().await.brokers();
    let topic = shared_kafka()
        .await
        .create_topic_with("small", 1, &[("max.message.bytes", "20000")])
        .await
        .unwrap();
    let mut batch = Vec::new();
    for n in 0..30 {
        batch.extend(numbered(&topic, &format!("k{}", n % 3), n / 3..n / 3 + 1));
    }
    // Larger than the topic takes, smaller than the client's own bound.
    let big = message(&topic, "big", "x".repeat(30_000));
    batch.insert(15, big.clone());
    // Larger than the client's own bound.
    let huge = message(&topic, "huge", "x".repeat(990_000));
    batch.insert(3, huge.clone());
    let rejected = publish_until_done(&kafka, batch).await;
    assert_eq!(rejected, [huge, big]);
    let log = log(brokers, topic).await;
    assert_prefix_order(&log, 10);
    assert_eq!(log[&0].len(), 30);
}

/// The very first batch of a producer id is refused while the second one is under way. A broker that knows nothing of
/// the producer would store the second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_a_key_is_stored_behind_a_refused_first_batch() {
    let brokers = shared_kafka().await.brokers();
    // Batches of single messages, as large messages make them: the client has up to five of them under way.
    let config = config(&brokers).with_property("batch.num.messages", "1");
    let kafka = Kafka::connect(config).await.unwrap();
    let topic = shared_kafka()
        .await
        .create_topic_with("first", 1, &[("max.message.bytes", "20000")])
        .await
        .unwrap();
    let mut batch = vec![message(&topic, "k", "x".repeat(30_000))];
    batch.extend(numbered(&topic, "k", 0..100));
    let outcomes = kafka.publish(&batch).await;
    assert!(matches!(
        outcomes[0],
        PublishOutcome::Rejected {
            scope: RejectionScope::Message,
            ..
        }
    ));
    for outcome in &outcomes[1..] {
        assert!(matches!(outcome, PublishOutcome::Withheld), "{outcome:?}");
    }
    assert!(log(brokers.clone(), topic.clone()).await[&0].is_empty());
    assert!(
        publish_until_done(&kafka, batch.split_off(1))
            .await
            .is_empty()
    );
    assert_prefix_order(&log(brokers, topic).await, 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_killed_under_way_costs_no_message_and_no_order() {
    let options = KafkaOptions::default().with_local_process();
    let server = relaybox_testcontainers::Kafka::start_with(options)
        .await
        .unwrap();
    let topic = server.create_topic("killed", 3).await.unwrap();
    let config = config(&server.brokers()).with_publish_deadline(3 * SECOND);
    let kafka = Kafka::connect(config).await.unwrap();
    const KEYS: usize = 7;
    const EACH: usize = 300;
    let mut batch = Vec::new();
    for n in 0..EACH {
        for key in 0..KEYS {
            batch.push(message(&topic, &format!("k{key}"), n.to_string()));
        }
    }
    let mut pending: Vec<Outgoing> = batch;
    let mut unknown = 0;
    let mut round = 0;
    let until = Instant::now() + 120 * SECOND;
    while !pending.is_empty() {
        assert!(Instant::now() < until, "{} left", pending.len());
        round += 1;
        // A slice, as the relay would take it; the whole key order is kept by taking a prefix.
        let slice: Vec<Outgoing> = pending.iter().take(300).cloned().collect();
        let outcomes = match round {
            // Takes the requests and answers none of them in time; going on, it stores what it has of the old
            // producer, while the new one sends the same again.
            2 => {
                server.stop().await.unwrap();
                let outcomes = kafka.publish(&slice).await;
                assert!(!outcomes.iter().any(PublishOutcome::is_confirmed));
                server.cont().await.unwrap();
                outcomes
            }
            // Dies with requests in its hands, and is away when the deadline comes.
            4 => {
                server.stop().await.unwrap();
                let (outcomes, ()) = tokio::join!(kafka.publish(&slice), async {
                    tokio::time::sleep(SECOND).await;
                    server.kill().await.unwrap();
                });
                assert!(outcomes.iter().all(|outcome| matches!(
                    outcome,
                    PublishOutcome::Failed {
                        scope: FailureScope::Broker,
                        ..
                    }
                )));
                server.start_again().await.unwrap();
                outcomes
            }
            _ => kafka.publish(&slice).await,
        };
        let mut kept = Vec::new();
        for (outgoing, outcome) in slice.into_iter().zip(outcomes) {
            match outcome {
                PublishOutcome::Confirmed => {}
                PublishOutcome::Failed { stored, .. } => {
                    unknown += usize::from(stored == Stored::Unknown);
                    kept.push(outgoing);
                }
                other => panic!("{other:?}"),
            }
        }
        kept.extend(pending.into_iter().skip(300));
        pending = kept;
    }
    assert!(unknown > 0);
    let log = log(server.brokers(), topic).await;
    let stored: usize = log.values().map(Vec::len).sum();
    println!("{round} rounds, {unknown} unknown, {stored} stored");
    assert_prefix_order(&log, EACH);
    let ids: HashSet<_> = log.values().flatten().map(|(_, _, id)| id).collect();
    assert_eq!(ids.len(), KEYS * EACH);
}

/// Java's `Utils.murmur2`.
fn murmur2(data: &[u8]) -> i32 {
    const M: u32 = 0x5bd1_e995;
    let mut h: u32 = 0x9747_b28c ^ data.len() as u32;
    let chunks = data.chunks_exact(4);
    let rest = chunks.remainder();
    for chunk in chunks {
        let mut k = u32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]);
        k = k.wrapping_mul(M);
        k ^= k >> 24;
        k = k.wrapping_mul(M);
        h = h.wrapping_mul(M);
        h ^= k;
    }
    for (at, byte) in rest.iter().enumerate().rev() {
        h ^= u32::from(*byte) << (8 * at);
    }
    if !rest.is_empty() {
        h = h.wrapping_mul(M);
    }
    h ^= h >> 13;
    h = h.wrapping_mul(M);
    h ^= h >> 15;
    h as i32
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_meets_the_partition_java_would_choose() {
    // Vectors of Kafka's own UtilsTest.
    for (text, hash) in [
        ("21", -973_932_308),
        ("foobar", -790_332_482),
        ("a-little-bit-long-string", -985_981_536),
        ("a-little-bit-longer-string", -1_486_304_829),
        (
            "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8",
            -58_897_971,
        ),
        ("abc", 479_470_107),
    ] {
        assert_eq!(murmur2(text.as_bytes()), hash, "{text}");
    }
    let kafka = connect().await;
    let topic = topic("murmur", 15).await;
    let keys: Vec<String> = (0..40)
        .map(|n| format!("cart-{n}"))
        .chain(["é".to_owned(), String::new()])
        .collect();
    let batch: Vec<Outgoing> = keys.iter().map(|key| message(&topic, key, "x")).collect();
    publish_all(&kafka, &batch).await;
    for (partition, records) in log(shared_kafka().await.brokers(), topic).await {
        for (key, ..) in records {
            let expected = (murmur2(key.as_bytes()) & 0x7fff_ffff) % 15;
            assert_eq!(partition, expected, "{key:?}");
        }
    }
}

/// A record of another producer, as large as the topic allows, has to get onto a rung and among the dead letters.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_fits_the_topic_is_sent_however_small_the_limit_of_new_messages_is() {
    let limits = relaybox::Limits {
        message_bytes_max: 10_000,
        ..relaybox::Limits::default()
    };
    let brokers = shared_kafka().await.brokers();
    let kafka = Kafka::connect(config(&brokers).with_limits(limits))
        .await
        .unwrap();
    let topic = topic("large", 1).await;
    let large = message(&topic, "k", "x".repeat(1_020_000));
    let larger = message(&topic, "j", "x".repeat(2_000_000));
    let small = message(&topic, "i", "x");
    publish_all(&kafka, &[large, small.clone()]).await;
    let outcomes = kafka.publish(&[larger, small]).await;
    assert!(
        matches!(
            &outcomes[..],
            [
                PublishOutcome::Rejected {
                    scope: RejectionScope::Message,
                    ..
                },
                PublishOutcome::Confirmed
            ]
        ),
        "{outcomes:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_may_not_be_seen_is_no_trouble_of_the_broker() {
    let cluster = rdkafka::mocking::MockCluster::new(1).unwrap();
    cluster.create_topic("open", 1, 1).unwrap();
    cluster.create_topic("forbidden", 1, 1).unwrap();
    let refused = rdkafka::types::RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED;
    cluster.topic_error("forbidden", refused).unwrap();
    let kafka = Kafka::connect(config(&cluster.bootstrap_servers()))
        .await
        .unwrap();
    let forbidden = message("forbidden", "k", "1");
    let outcomes = kafka.publish(&[forbidden, message("open", "k", "2")]).await;
    assert!(
        matches!(
            &outcomes[..],
            [
                PublishOutcome::Rejected {
                    scope: RejectionScope::Destination,
                    ..
                },
                PublishOutcome::Confirmed
            ]
        ),
        "{outcomes:?}"
    );
}
