//! The brokers that the story can be told over: how each is reached, what stands on it before the first message, and how
//! an auditor reads it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use relaybox::ErrorKind;
use relaybox::broker::kafka::{Kafka, KafkaConfig};
use relaybox::broker::nats::{Nats, NatsConfig};
use relaybox::broker::rabbitmq::{ExchangeKind, QueueKind, RabbitMq, RabbitMqConfig};
use relaybox::broker::{Broker, Settlement, SubscriptionRequest};
use relaybox::envelope::Incoming;
use relaybox::lane::lane_of;

/// Short, so that a killed relay's lanes are free after a few seconds.
pub const PUBLISH_DEADLINE: Duration = Duration::from_secs(3);
/// After how long a killed or frozen member's messages go to others.
pub const SESSION: Duration = Duration::from_secs(6);

/// How long a stream keeps messages: less than an inbox remembers. Kafka's topics have the cluster's default, and a queue
/// keeps what nobody took.
const KEPT: Duration = Duration::from_secs(7 * 86_400);

type Anyhow<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// A broker by product and address.
#[derive(Debug, Clone)]
pub struct Place {
    pub product: Product,
    pub address: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Product {
    Kafka,
    RabbitMq,
    Nats,
}

/// Queues that a source on RabbitMQ is split into, so that a key goes to one member at a time.
const SHARDS: u16 = 4;

impl Product {
    const ALL: [Self; 3] = [Self::Kafka, Self::RabbitMq, Self::Nats];

    pub fn name(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
            Self::RabbitMq => "rabbitmq",
            Self::Nats => "nats",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|product| product.name() == name)
    }

    /// The variable of the environment that holds the address.
    pub fn variable(self) -> &'static str {
        match self {
            Self::Kafka => "RELAYBOX_KAFKA_BROKERS",
            Self::RabbitMq => "RELAYBOX_RABBITMQ_URL",
            Self::Nats => "RELAYBOX_NATS_URL",
        }
    }

    /// Where messages about `topic` with this key are sent to. The consumer's source is `topic` itself.
    pub fn destination(self, topic: &str, key: &[u8]) -> String {
        match self {
            Self::Kafka | Self::Nats => topic.to_owned(),
            // By an exchange, so that an auditor can have a queue beside the consumer's.
            Self::RabbitMq => format!("{topic}/{}", lane_of(key) % i32::from(SHARDS)),
        }
    }

    /// Where a copy of everything sent can be read when all is over.
    pub fn wire(self, topic: &str) -> String {
        match self {
            Self::Kafka | Self::Nats => topic.to_owned(),
            Self::RabbitMq => format!("{topic}.wire"),
        }
    }
}

impl Place {
    /// A client. `topic` is what the story is about.
    pub async fn connect(&self, topic: &str) -> relaybox::Result<Arc<dyn Broker>> {
        Ok(match self.product {
            Product::Kafka => Arc::new(self.kafka().await?),
            Product::RabbitMq => Arc::new(self.rabbitmq(topic).await?),
            Product::Nats => Arc::new(self.nats(topic).await?),
        })
    }

    /// Makes what must be there before the first message, for as many members as there are `partitions`.
    pub async fn prepare(&self, topic: &str, partitions: u16) -> relaybox::Result<()> {
        match self.product {
            Product::Kafka => self.kafka().await?.create_topic(topic, partitions).await,
            Product::RabbitMq => prepare_rabbitmq(&self.rabbitmq(topic).await?, topic).await,
            Product::Nats => self.nats(topic).await?.create_stream(topic, [topic]).await,
        }
    }

    async fn kafka(&self) -> relaybox::Result<Kafka> {
        let config = KafkaConfig::new(&self.address)
            .with_publish_deadline(PUBLISH_DEADLINE)
            .with_session_timeout(SESSION);
        Kafka::connect(config).await
    }

    async fn rabbitmq(&self, topic: &str) -> relaybox::Result<RabbitMq> {
        let config = RabbitMqConfig::new(&self.address)
            .with_publish_deadline(PUBLISH_DEADLINE)
            .with_heartbeat(SESSION / 2)
            .with_shards(topic, SHARDS);
        RabbitMq::connect(config).await
    }

    async fn nats(&self, topic: &str) -> relaybox::Result<Nats> {
        let config = NatsConfig::new(&self.address)
            .with_publish_deadline(PUBLISH_DEADLINE)
            .with_ack_wait(SESSION)
            .with_stream_retention(KEPT)
            .with_stream(topic, [topic]);
        Nats::connect(config).await
    }
}

/// An exchange, the consumer's queues and the auditor's: each message goes to one of the former and to the latter.
async fn prepare_rabbitmq(broker: &RabbitMq, topic: &str) -> relaybox::Result<()> {
    let wire = format!("{topic}.wire");
    broker.declare_exchange(topic, ExchangeKind::Direct).await?;
    broker.declare_queue(topic, QueueKind::Quorum).await?;
    broker.declare_queue(&wire, QueueKind::Quorum).await?;
    for shard in (0..SHARDS).map(|shard| shard.to_string()) {
        broker
            .bind(&format!("{topic}.{shard}"), topic, &shard, &[])
            .await?;
        broker.bind(&wire, topic, &shard, &[]).await?;
    }
    Ok(())
}

/// How many messages are at a place; none while nobody has made it.
pub async fn depth(broker: &dyn Broker, name: &str) -> Anyhow<u64> {
    match broker.depth(name).await {
        Ok(depth) => Ok(depth.messages),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// What was read, by partition and offset.
pub type Records = BTreeMap<(i32, i64), Incoming>;

/// Everything at a place, read as an auditor that belongs to nobody's group, by partition and offset; by the order of
/// arrival where the broker has no numbers.
pub async fn read(broker: &dyn Broker, name: &str) -> Anyhow<Records> {
    let mut records = Records::new();
    let depth = usize::try_from(depth(broker, name).await?)?;
    if depth == 0 {
        return Ok(records);
    }
    let auditor = format!("auditor-{:08x}", fastrand::u32(..));
    let request = SubscriptionRequest::new(auditor, vec![name.to_owned()]);
    let mut subscription = broker.subscribe(request).await?;
    while records.len() < depth {
        for delivery in subscription.receive(depth - records.len()).await? {
            delivery.receipt.settle(Settlement::Acknowledge).await?;
            let origin = &delivery.coordinates;
            let number = |text: &Option<String>| text.as_ref().and_then(|text| text.parse().ok());
            let arrived = i64::try_from(records.len())?;
            let partition = number(&origin.partition).unwrap_or(0);
            let offset = number(&origin.offset).unwrap_or(arrived);
            records.insert((i32::try_from(partition)?, offset), delivery.incoming);
        }
    }
    subscription.close(Duration::from_secs(10)).await?;
    Ok(records)
}
