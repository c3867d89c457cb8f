//! Kafka as a container (not proven, see [`crate::docker`]).

use testcontainers::core::IntoContainerPort;
use testcontainers::{GenericImage, ImageExt};

use super::{SERVICE, version};
use crate::ServiceError;
use crate::docker::{self, Container};
use crate::names::free_port;

pub(super) fn start() -> Result<(Container, String), ServiceError> {
    let failed = |error: String| ServiceError::failed(SERVICE, "start", error);
    let host = docker::engine().map_err(failed)?;
    // Clients follow the advertised listener, so the published port must be known before the start.
    let port = free_port().map_err(|error| failed(error.to_string()))?;
    let mut request = GenericImage::new("apache/kafka", version())
        .with_mapped_port(port, 9092.tcp())
        .with_env_var(
            "KAFKA_ADVERTISED_LISTENERS",
            // The broker also talks to itself (transaction markers), and cannot reach the published port from inside.
            format!("PLAINTEXT://{host}:{port},BROKER://localhost:9094"),
        );
    for (name, value) in [
        ("KAFKA_NODE_ID", "1"),
        ("KAFKA_PROCESS_ROLES", "broker,controller"),
        ("KAFKA_CONTROLLER_QUORUM_VOTERS", "1@localhost:9093"),
        (
            "KAFKA_LISTENERS",
            "PLAINTEXT://:9092,CONTROLLER://:9093,BROKER://:9094",
        ),
        (
            "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP",
            "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,BROKER:PLAINTEXT",
        ),
        ("KAFKA_CONTROLLER_LISTENER_NAMES", "CONTROLLER"),
        ("KAFKA_INTER_BROKER_LISTENER_NAME", "BROKER"),
        ("KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR", "1"),
        ("KAFKA_OFFSETS_TOPIC_NUM_PARTITIONS", "1"),
        ("KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR", "1"),
        ("KAFKA_TRANSACTION_STATE_LOG_MIN_ISR", "1"),
        ("KAFKA_TRANSACTION_STATE_LOG_NUM_PARTITIONS", "1"),
        ("KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS", "0"),
        ("KAFKA_GROUP_MIN_SESSION_TIMEOUT_MS", "1000"),
        ("KAFKA_AUTO_CREATE_TOPICS_ENABLE", "false"),
        ("KAFKA_HEAP_OPTS", "-Xmx512m"),
    ] {
        request = request.with_env_var(name, value);
    }
    let container = Container::start("kafka", request).map_err(failed)?;
    Ok((container, format!("{host}:{port}")))
}
