//! Apache Kafka, through librdkafka.

mod batch;
mod config;
mod context;
mod control;
mod desk;
mod error;
mod generation;
mod member;
mod progress;
mod publisher;
mod record;
mod subscriber;
mod topology;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

pub use config::{KafkaConfig, Partitioner};

use self::control::Control;
use self::publisher::Sender;
use super::{
    PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder, Subscriber,
    SubscriberCapabilities, Subscription, SubscriptionRequest,
};
use crate::envelope::Outgoing;
use crate::error::Result;

/// A Kafka cluster, to publish to and to subscribe on. Cloning shares the clients.
#[derive(Clone)]
pub struct Kafka(Arc<Inner>);

struct Inner {
    config: KafkaConfig,
    control: Arc<Control>,
    sender: Sender,
}

impl Kafka {
    /// Checks the settings and waits until a broker answers.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) for a setting that is refused;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) naming the brokers tried, within the answer deadline.
    pub async fn connect(config: KafkaConfig) -> Result<Self> {
        config.check()?;
        let control = Control::new(&config)?;
        control.reach().await?;
        let sender = Sender::new(&config, Arc::clone(&control));
        Ok(Self(Arc::new(Inner {
            config,
            control,
            sender,
        })))
    }
}

impl fmt::Debug for Kafka {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kafka").field(&self.0.config).finish()
    }
}

impl Publisher for Kafka {
    fn capabilities(&self) -> PublisherCapabilities {
        let mut capabilities = PublisherCapabilities::new("kafka");
        capabilities.limits = self.0.config.limits;
        capabilities.order = PublisherOrder::Prefix;
        capabilities.publish_deadline = self.0.config.publish_deadline;
        capabilities
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(self.0.sender.publish(batch))
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let control = &self.0.control;
            control.all_exist("check", destinations).await.map(drop)
        })
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.0.sender.close(deadline))
    }
}

impl Subscriber for Kafka {
    fn capabilities(&self) -> SubscriberCapabilities {
        let mut capabilities = SubscriberCapabilities::new("kafka");
        capabilities.key_affinity = true;
        capabilities
    }

    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        let Inner {
            config, control, ..
        } = &*self.0;
        Box::pin(subscriber::subscribe(config, control, request))
    }
}
