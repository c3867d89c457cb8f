//! Kafka under the broker contract, over a line that some of the cases break.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use relaybox::broker::kafka::{Kafka, KafkaConfig};
use relaybox::broker::{Publisher, Subscriber};
use relaybox::conformance::{Fixture, Line};
use relaybox_testcontainers::{KafkaLine, shared_kafka};

struct Broker {
    kafka: Kafka,
    line: Option<Arc<KafkaLine>>,
}

impl Broker {
    async fn new() -> Self {
        let server = shared_kafka().await;
        let line = server.line().await.unwrap().map(Arc::new);
        let brokers = match &line {
            Some(line) => line.brokers(),
            None => server.brokers(),
        };
        let kafka = Kafka::connect(KafkaConfig::new(brokers)).await.unwrap();
        Self { kafka, line }
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
        Arc::new(self.kafka.clone())
    }

    fn subscriber(&self) -> Arc<dyn Subscriber> {
        Arc::new(self.kafka.clone())
    }

    fn line(&self) -> Option<Arc<dyn Line>> {
        let line = Arc::clone(self.line.as_ref()?);
        Some(Arc::new(ToBreak(line)))
    }
}

struct ToBreak(Arc<KafkaLine>);

impl Line for ToBreak {
    fn pass(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.0.proxy().pass() })
    }

    fn cut(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.0.proxy().cut() })
    }

    fn silence(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.0.proxy().blackhole() })
    }
}

relaybox::broker_tests!(Broker::new().await);
