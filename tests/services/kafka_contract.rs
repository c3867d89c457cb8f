//! Kafka under the broker contract.

use std::sync::Arc;

use relaybox::broker::kafka::{Kafka, KafkaConfig};
use relaybox::broker::{Publisher, Subscriber};
use relaybox_testcontainers::shared_kafka;

use futures_util::future::BoxFuture;
use relaybox::conformance::Fixture;

struct Broker(Kafka);

impl Broker {
    async fn new() -> Self {
        let brokers = shared_kafka().await.brokers();
        Self(Kafka::connect(KafkaConfig::new(brokers)).await.unwrap())
    }
}

impl Fixture for Broker {
    fn topic(&self, partitions: usize) -> BoxFuture<'_, String> {
        Box::pin(async move {
            let partitions = partitions.try_into().unwrap();
            let kafka = shared_kafka().await;
            kafka.create_topic("contract", partitions).await.unwrap()
        })
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(self.0.clone())
    }

    fn subscriber(&self) -> Arc<dyn Subscriber> {
        Arc::new(self.0.clone())
    }
}

relaybox::broker_tests!(Broker::new().await);
