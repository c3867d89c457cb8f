//! Where a fragile consumer lives: settings under which what a dead process had comes back soon.

use std::sync::Arc;
use std::time::Duration;

use relaybox::broker::Broker;
use relaybox::broker::kafka::{Assignor, Kafka, KafkaConfig};
use relaybox::broker::nats::{Nats, NatsConfig};
use relaybox::broker::rabbitmq::{QueueKind, RabbitMq, RabbitMqConfig};
use relaybox::ladder::Ladder;

use super::broker::{Place, Product};

/// Longer than a machine with a dozen of these processes is ever busy.
const PUBLISH_DEADLINE: Duration = Duration::from_secs(60);
/// How long the members of a group wait for one that died; one that is back under its name is not waited for.
/// As long, too: a member that is only slow must not lose what it has in hand.
const SESSION: Duration = Duration::from_secs(30);
const ACK_WAIT: Duration = Duration::from_secs(2);
/// As long as that a copy that was sent can be sent again: a death undoes what is not committed.
const COMMIT_INTERVAL: Duration = Duration::from_millis(50);
const PARTITIONS: u16 = 3;

/// The rungs of every consumer here.
pub fn ladder() -> Ladder {
    Ladder::rungs([100, 200].map(Duration::from_millis))
}

/// Where a second copy of a message is sent to. A stream stores an id once for each subject.
pub fn again(product: Product, topic: &str) -> String {
    match product {
        Product::Kafka | Product::RabbitMq => topic.to_owned(),
        Product::Nats => format!("{topic}.again"),
    }
}

/// A client of the member with this name.
pub async fn connect(
    place: &Place,
    topic: &str,
    member: &str,
) -> relaybox::Result<Arc<dyn Broker>> {
    Ok(match place.product {
        Product::Kafka => Arc::new(kafka(&place.address, member).await?),
        Product::RabbitMq => Arc::new(rabbitmq(&place.address).await?),
        Product::Nats => Arc::new(nats(&place.address, topic).await?),
    })
}

/// Makes the source.
#[allow(dead_code, reason = "the tests make it, the process finds it")]
pub async fn prepare(place: &Place, topic: &str) -> relaybox::Result<()> {
    match place.product {
        Product::Kafka => {
            let kafka = kafka(&place.address, "maker").await?;
            kafka.create_topic(topic, PARTITIONS).await
        }
        Product::RabbitMq => {
            let rabbitmq = rabbitmq(&place.address).await?;
            rabbitmq.declare_queue(topic, QueueKind::Quorum).await
        }
        Product::Nats => {
            let subjects = [topic, &again(place.product, topic)];
            nats(&place.address, topic)
                .await?
                .create_stream(topic, subjects)
                .await
        }
    }
}

async fn kafka(brokers: &str, member: &str) -> relaybox::Result<Kafka> {
    let config = KafkaConfig::new(brokers)
        .with_publish_deadline(PUBLISH_DEADLINE)
        .with_session_timeout(SESSION)
        .with_commit_interval(COMMIT_INTERVAL)
        .with_assignor(Assignor::Range)
        .with_instance_id(member);
    Kafka::connect(config).await
}

async fn rabbitmq(url: &str) -> relaybox::Result<RabbitMq> {
    let config = RabbitMqConfig::new(url).with_publish_deadline(PUBLISH_DEADLINE);
    RabbitMq::connect(config).await
}

async fn nats(server: &str, topic: &str) -> relaybox::Result<Nats> {
    let config = NatsConfig::new(server)
        .with_publish_deadline(PUBLISH_DEADLINE)
        .with_ack_wait(ACK_WAIT)
        .with_stream(topic, [topic, &again(Product::Nats, topic)]);
    Nats::connect(config).await
}
