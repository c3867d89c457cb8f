//! The broker's server of a run: its own, to be killed and frozen.

use relaybox_testcontainers::{
    Kafka, KafkaOptions, Nats, NatsOptions, RabbitMq, RabbitMqOptions, ServiceError,
};

use super::broker::Product;

pub enum Server {
    Kafka(Kafka),
    RabbitMq(RabbitMq),
    Nats(Nats),
}

impl Server {
    pub async fn start(product: Product) -> Result<Self, ServiceError> {
        Ok(match product {
            Product::Kafka => {
                let options = KafkaOptions::default().with_local_process();
                Self::Kafka(Kafka::start_with(options).await?)
            }
            Product::RabbitMq => {
                let options = RabbitMqOptions::default().with_local_process();
                Self::RabbitMq(RabbitMq::start_with(options).await?)
            }
            Product::Nats => {
                let options = NatsOptions::default().with_local_process();
                Self::Nats(Nats::start_with(options).await?)
            }
        })
    }

    pub fn address(&self) -> String {
        match self {
            Self::Kafka(kafka) => kafka.brokers(),
            Self::RabbitMq(rabbitmq) => rabbitmq.url(),
            Self::Nats(nats) => nats.url(),
        }
    }
}

/// What the nemesis does, the same to each.
macro_rules! blows {
    ($($blow:ident)+) => {
        impl Server {
            $(
                pub async fn $blow(&self) -> Result<(), ServiceError> {
                    match self {
                        Self::Kafka(server) => server.$blow().await,
                        Self::RabbitMq(server) => server.$blow().await,
                        Self::Nats(server) => server.$blow().await,
                    }
                }
            )+
        }
    };
}
blows!(kill start_again restart stop cont);
