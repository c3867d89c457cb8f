//! The brokers that the story can be told over: how each is reached, what stands on it before the first message, and how
//! an auditor reads it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use relaybox::ErrorKind;
use relaybox::broker::kafka::{Kafka, KafkaConfig};
use relaybox::broker::{Broker, Settlement, SubscriptionRequest};
use relaybox::envelope::Incoming;

/// Short, so that a killed relay's lanes are free after a few seconds.
pub const PUBLISH_DEADLINE: Duration = Duration::from_secs(3);
/// After how long a killed or frozen member's messages go to others.
pub const SESSION: Duration = Duration::from_secs(6);

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
}

impl Product {
    const ALL: [Self; 1] = [Self::Kafka];

    pub fn name(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|product| product.name() == name)
    }

    /// The variable of the environment that holds the address.
    pub fn variable(self) -> &'static str {
        match self {
            Self::Kafka => "RELAYBOX_KAFKA_BROKERS",
        }
    }

    /// Where messages about `topic` are sent to. The consumer's source is `topic` itself.
    pub fn destination(self, topic: &str) -> String {
        match self {
            Self::Kafka => topic.to_owned(),
        }
    }

    /// Where a copy of everything sent can be read when all is over.
    pub fn wire(self, topic: &str) -> String {
        match self {
            Self::Kafka => topic.to_owned(),
        }
    }
}

impl Place {
    /// A client. `topic` is what the story is about.
    pub async fn connect(&self, _topic: &str) -> relaybox::Result<Arc<dyn Broker>> {
        Ok(match self.product {
            Product::Kafka => Arc::new(self.kafka().await?),
        })
    }

    /// Makes what must be there before the first message, for as many members as there are `partitions`.
    pub async fn prepare(&self, topic: &str, partitions: u16) -> relaybox::Result<()> {
        match self.product {
            Product::Kafka => self.kafka().await?.create_topic(topic, partitions).await,
        }
    }

    async fn kafka(&self) -> relaybox::Result<Kafka> {
        let config = KafkaConfig::new(&self.address)
            .with_publish_deadline(PUBLISH_DEADLINE)
            .with_session_timeout(SESSION);
        Kafka::connect(config).await
    }
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
