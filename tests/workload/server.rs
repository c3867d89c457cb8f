//! The broker's server of a run: its own, to be killed and frozen.

use relaybox_testcontainers::{Kafka, KafkaOptions, ServiceError};

use super::broker::Product;

pub enum Server {
    Kafka(Kafka),
}

impl Server {
    pub async fn start(product: Product) -> Result<Self, ServiceError> {
        Ok(match product {
            Product::Kafka => {
                let options = KafkaOptions::default().with_local_process();
                Self::Kafka(Kafka::start_with(options).await?)
            }
        })
    }

    pub fn address(&self) -> String {
        match self {
            Self::Kafka(kafka) => kafka.brokers(),
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
                    }
                }
            )+
        }
    };
}
blows!(kill start_again restart stop cont);
