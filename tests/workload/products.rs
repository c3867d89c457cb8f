//! The brokers that a run can go over: how each is reached, what stands on it before the first message, and how an auditor
//! reads it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use relaybox::ErrorKind;
use relaybox::broker::kafka::{Kafka, KafkaConfig};
use relaybox::broker::{Broker, Settlement, SubscriptionRequest};
use relaybox::envelope::Incoming;
use relaybox_testcontainers as services;

use super::bank::{PARTITIONS, TOPIC};
use super::world::{Anyhow, PUBLISH_DEADLINE, SESSION};

/// A product that the transfers go over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Product {
    Kafka,
}

impl Product {
    pub const ALL: [Self; 1] = [Self::Kafka];

    pub fn name(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|product| product.name() == name)
    }

    /// A client of the server at this address.
    pub async fn connect(self, address: &str) -> relaybox::Result<Arc<dyn Broker>> {
        Ok(match self {
            Self::Kafka => Arc::new(kafka(address).await?),
        })
    }

    /// Makes what must be there before the first role starts.
    pub async fn prepare(self, address: &str) -> Anyhow<()> {
        match self {
            Self::Kafka => {
                kafka(address)
                    .await?
                    .create_topic(TOPIC, PARTITIONS)
                    .await?
            }
        }
        Ok(())
    }

    /// Where the bank's messages are sent to.
    pub fn destination(self) -> &'static str {
        match self {
            Self::Kafka => TOPIC,
        }
    }

    /// Where a copy of everything sent can be read when all is over.
    pub fn wire(self) -> &'static str {
        match self {
            Self::Kafka => TOPIC,
        }
    }

    /// What the story of a failed message says of its origin.
    pub fn origin(self) -> &'static str {
        self.destination()
    }
}

async fn kafka(brokers: &str) -> relaybox::Result<Kafka> {
    let config = KafkaConfig::new(brokers)
        .with_publish_deadline(PUBLISH_DEADLINE)
        .with_session_timeout(SESSION);
    Kafka::connect(config).await
}

/// Everything at a place, read as an auditor that belongs to nobody's group, by partition and offset; by the order of
/// arrival where the broker has no numbers.
pub async fn read(broker: &dyn Broker, name: &str) -> Anyhow<BTreeMap<(i32, i64), Incoming>> {
    let mut records = BTreeMap::new();
    let depth = match broker.depth(name).await {
        Ok(depth) => usize::try_from(depth.messages)?,
        Err(error) if error.kind() == ErrorKind::NotFound => 0,
        Err(error) => return Err(error.into()),
    };
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

/// A server of a run's own, to be killed and frozen.
pub enum Server {
    Kafka(services::Kafka),
}

impl Server {
    pub async fn start(product: Product) -> Anyhow<Self> {
        Ok(match product {
            Product::Kafka => {
                let options = services::KafkaOptions::default().with_local_process();
                Self::Kafka(services::Kafka::start_with(options).await?)
            }
        })
    }

    pub fn address(&self) -> String {
        match self {
            Self::Kafka(kafka) => kafka.brokers(),
        }
    }
}

/// What the nemesis does to a server, the same for each.
macro_rules! blows {
    ($($blow:ident)+) => {
        impl Server {
            $(
                pub async fn $blow(&self) -> Result<(), services::ServiceError> {
                    match self {
                        Self::Kafka(server) => server.$blow().await,
                    }
                }
            )+
        }
    };
}
blows!(kill start_again restart stop cont);
