//! What a broker refuses, or keeps waiting, and what then goes on beside it.

use rdkafka::mocking::MockCluster;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use relaybox::broker::{FailureScope, PublishOutcome, Publisher, RejectionScope, Stored};
use relaybox::testing::eventually;

use super::*;

fn is_rejected(outcome: &PublishOutcome, by: RejectionScope) -> bool {
    matches!(outcome, PublishOutcome::Rejected { scope, .. } if *scope == by)
}

/// A compacted topic takes no record without a key, and refuses the whole batch for its sake.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_without_a_key_is_refused_alone_where_keys_are_needed() {
    let kafka = connect().await;
    let settings = [("cleanup.policy", "compact")];
    let server = shared_kafka().await;
    let topic = server
        .create_topic_with("compacted", 1, &settings)
        .await
        .unwrap();
    let batch = [
        message(&topic, "a", "0"),
        Message::new(&topic, "T").with_payload("no key").into(),
        message(&topic, "b", "0"),
    ];
    let outcomes = kafka.publish(&batch).await;
    assert!(outcomes[0].is_confirmed(), "{outcomes:?}");
    assert!(
        is_rejected(&outcomes[1], RejectionScope::Message),
        "{outcomes:?}"
    );
    assert!(outcomes[2].is_confirmed(), "{outcomes:?}");
    assert_eq!(log(server.brokers(), topic).await[&0].len(), 2);
}

/// The broker that leads one of the topics has fallen silent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_whose_broker_is_silent_fails_alone() {
    let cluster = MockCluster::new(2).unwrap();
    for (topic, leader) in [("beside", 1), ("stuck", 2)] {
        cluster.create_topic(topic, 1, 2).unwrap();
        cluster.partition_leader(topic, 0, Some(leader)).unwrap();
    }
    let config = config(&cluster.bootstrap_servers()).with_publish_deadline(3 * SECOND);
    let kafka = Kafka::connect(config).await.unwrap();
    let batch = [message("stuck", "a", "0"), message("beside", "a", "0")];
    publish_all(&kafka, &batch).await;
    cluster.broker_round_trip_time(2, 60 * SECOND).unwrap();
    let outcomes = kafka.publish(&batch).await;
    let (destination, unknown) = (FailureScope::Destination, Stored::Unknown);
    assert!(
        matches!(
            &outcomes[0],
            PublishOutcome::Failed { scope, stored, .. }
                if *scope == destination && *stored == unknown
        ),
        "{outcomes:?}"
    );
    assert!(outcomes[1].is_confirmed(), "{outcomes:?}");
    assert!(Publisher::health(&kafka).is_up());
    cluster.broker_round_trip_time(2, Duration::ZERO).unwrap();
    eventually(60 * SECOND, "it answers again", || async {
        kafka
            .publish(&batch)
            .await
            .iter()
            .all(PublishOutcome::is_confirmed)
    })
    .await;
}

/// The client refuses all work after such an answer; a new one takes its place in the same call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_gave_up_for_good_is_replaced() {
    let cluster = MockCluster::new(1).unwrap();
    cluster.create_topic("orders", 1, 1).unwrap();
    let kafka = Kafka::connect(config(&cluster.bootstrap_servers()))
        .await
        .unwrap();
    publish_all(&kafka, &numbered("orders", "k", 0..3)).await;
    for fatal in [
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_PRODUCER_ID,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_PRODUCER_EPOCH,
    ] {
        cluster.request_errors(RDKafkaApiKey::Produce, &[fatal]);
        publish_all(&kafka, &numbered("orders", "k", 3..6)).await;
        assert!(Publisher::health(&kafka).is_up(), "{fatal:?}");
    }
}

/// What the client knows of a topic by itself is as old as its last look; what we know by asking is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_is_there_again_needs_no_patience() {
    let cluster = MockCluster::new(1).unwrap();
    for name in ["open", "closed"] {
        cluster.create_topic(name, 1, 1).unwrap();
    }
    // Often and at once, so that the client itself learns what became of the topic.
    let config = config(&cluster.bootstrap_servers())
        .with_property("topic.metadata.refresh.interval.ms", "4000")
        .with_property("topic.metadata.propagation.max.ms", "0");
    let kafka = Kafka::connect(config).await.unwrap();
    let batch = [message("closed", "k", "0"), message("open", "k", "0")];
    publish_all(&kafka, &batch).await;
    for error in [
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART,
    ] {
        cluster.topic_error("closed", error).unwrap();
        eventually(60 * SECOND, "refused", || async {
            let outcomes = kafka.publish(&batch).await;
            assert!(outcomes[1].is_confirmed(), "{outcomes:?}");
            is_rejected(&outcomes[0], RejectionScope::Destination)
        })
        .await;
        let nothing = RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR;
        cluster.topic_error("closed", nothing).unwrap();
        publish_all(&kafka, &batch).await;
    }
}
