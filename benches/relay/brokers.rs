//! Each adapter beside the bare client of its broker: publishing, consuming, and a relay over it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use relaybox::Message;
use relaybox::broker::kafka::{Kafka as KafkaAdapter, KafkaConfig};
use relaybox::broker::nats::{Nats as NatsAdapter, NatsConfig};
use relaybox::broker::rabbitmq::{QueueKind, RabbitMq as RabbitMqAdapter, RabbitMqConfig};
use relaybox::broker::{Broker, Settlement, SubscriptionRequest};
use relaybox::envelope::Outgoing;
use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::OutboxStore;
use relaybox::store::postgres::PostgresStore;
use relaybox_testcontainers::{Kafka, Nats, RabbitMq, unique_name};

use super::Size;
use super::backlog::{Backlog, KEYS, PAYLOAD_BYTES};
use super::clients::{self, IN_FLIGHT};
use super::drain::BATCH;
use super::report::Report;

/// A server, the adapter on it, and its bare client.
pub enum Product {
    Kafka(Kafka),
    RabbitMq(RabbitMq),
    Nats(Nats),
}

impl Product {
    /// Started when it is measured first.
    pub async fn named(name: &str) -> Self {
        match name {
            "kafka" => Self::Kafka(Kafka::start().await.unwrap()),
            "rabbitmq" => Self::RabbitMq(RabbitMq::start().await.unwrap()),
            "nats" => Self::Nats(Nats::start().await.unwrap()),
            other => panic!("no broker is named {other}"),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Kafka(_) => "Kafka",
            Self::RabbitMq(_) => "RabbitMQ",
            Self::Nats(_) => "JetStream",
        }
    }

    /// The adapter, and an empty place to publish to and to subscribe on.
    async fn adapter(&self) -> (Arc<dyn Broker>, String) {
        let place = unique_name("bench");
        let broker: Arc<dyn Broker> = match self {
            Self::Kafka(kafka) => {
                let config = KafkaConfig::new(kafka.brokers());
                let adapter = KafkaAdapter::connect(config).await.unwrap();
                adapter.create_topic(&place, 3).await.unwrap();
                Arc::new(adapter)
            }
            Self::RabbitMq(rabbitmq) => {
                let config = RabbitMqConfig::new(rabbitmq.url());
                let adapter = RabbitMqAdapter::connect(config).await.unwrap();
                let kind = QueueKind::Quorum;
                adapter.declare_queue(&place, kind).await.unwrap();
                Arc::new(adapter)
            }
            Self::Nats(nats) => {
                let config = NatsConfig::new(nats.url()).with_stream(&place, [&place]);
                let adapter = NatsAdapter::connect(config).await.unwrap();
                adapter.create_stream(&place, [&place]).await.unwrap();
                Arc::new(adapter)
            }
        };
        (broker, place)
    }

    async fn publish_alone(&self, place: &str, rows: u32) -> Duration {
        match self {
            Self::Kafka(kafka) => clients::publish_to_kafka(&kafka.brokers(), place, rows).await,
            Self::RabbitMq(server) => {
                clients::publish_to_rabbitmq(&server.url(), place, rows).await
            }
            Self::Nats(nats) => clients::publish_to_nats(&nats.url(), place, rows).await,
        }
    }

    async fn consume_alone(&self, place: &str, rows: u32) -> Duration {
        match self {
            Self::Kafka(kafka) => clients::consume_from_kafka(&kafka.brokers(), place, rows).await,
            Self::RabbitMq(server) => {
                clients::consume_from_rabbitmq(&server.url(), place, rows).await
            }
            Self::Nats(nats) => clients::consume_from_nats(&nats.url(), place, rows).await,
        }
    }
}

pub async fn measure(report: &mut Report, backlog: &Backlog, product: &Product, size: Size) {
    let rows = size.kafka_rows;
    let (mut published, mut published_alone) = (vec![], vec![]);
    let (mut consumed, mut consumed_alone) = (vec![], vec![]);
    let (mut relayed, mut goal) = (vec![], vec![]);
    for _ in 0..size.pairs {
        let (broker, place) = product.adapter().await;
        published.push(publish(&*broker, &place, rows).await);
        consumed.push(consume(&*broker, &place, rows).await);
        let (_, place) = product.adapter().await;
        let alone = product.publish_alone(&place, rows).await;
        published_alone.push(alone);
        consumed_alone.push(product.consume_alone(&place, rows).await);
        relayed.push(relay(backlog, product, rows).await);
        let drain = super::drain::ours_once(report, backlog, rows, 1).await.took;
        goal.push(drain + alone);
    }
    let name = product.name();
    let alone = "client alone";
    report.rate(
        &format!("publish to {name}"),
        rows,
        &published,
        alone,
        &published_alone,
    );
    report.rate(
        &format!("consume from {name}"),
        rows,
        &consumed,
        alone,
        &consumed_alone,
    );
    report.rate(
        &format!("PostgreSQL to {name}, 1 relay"),
        rows,
        &relayed,
        "drain and client one after the other",
        &goal,
    );
}

async fn publish(broker: &dyn Broker, place: &str, rows: u32) -> Duration {
    let payload = vec![0xab; PAYLOAD_BYTES];
    let message = |number: u32| -> Outgoing {
        Message::new(place, "Measured")
            .with_key(format!("key-{}", number % KEYS))
            .with_payload(payload.clone())
            .into()
    };
    let all: Vec<Outgoing> = (0..rows).map(message).collect();
    let started = Instant::now();
    for batch in all.chunks(BATCH) {
        for outcome in broker.publish(batch).await {
            assert!(outcome.is_confirmed(), "{outcome:?}");
        }
    }
    started.elapsed()
}

async fn consume(broker: &dyn Broker, place: &str, rows: u32) -> Duration {
    let mut request = SubscriptionRequest::new(unique_name("consumer"), vec![place.to_owned()]);
    request.in_flight_max = IN_FLIGHT.into();
    let mut subscription = broker.subscribe(request).await.unwrap();
    let mut left = rows;
    let mut started = None;
    while left > 0 {
        for delivery in subscription.receive(IN_FLIGHT.into()).await.unwrap() {
            // Joining a group takes its time, and is no matter of throughput.
            started.get_or_insert_with(Instant::now);
            delivery
                .receipt
                .settle(Settlement::Acknowledge)
                .await
                .unwrap();
            left -= 1;
        }
    }
    let took = started.map_or(Duration::ZERO, |started| started.elapsed());
    subscription.close(Duration::from_secs(30)).await.unwrap();
    took
}

async fn relay(backlog: &Backlog, product: &Product, rows: u32) -> Duration {
    let (broker, place) = product.adapter().await;
    let url = backlog.database(rows, &place).await;
    let store = PostgresStore::connect(&url).await.unwrap();
    let config = RelayConfig::default().with_batch_rows_max(BATCH);
    let started = Instant::now();
    let drained = async {
        while store.pending(1).await.unwrap() + store.aside(1).await.unwrap() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let relay = Relay::new(store.clone(), broker.clone()).with_config(config);
    relay.run_until(drained).await.unwrap();
    let took = started.elapsed();
    let stored = broker.depth(&place).await.unwrap().messages;
    assert_eq!(stored, u64::from(rows), "nothing lost, nothing twice");
    took
}
