//! Apache Kafka, through librdkafka.
//!
//! - **Topics.** Sources have to be there. Rungs and dead letters are made with the source's number of partitions and
//!   replicas, kept for ever (or as [configured](KafkaConfig::with_dead_letter_retention)), with room for the story on top
//!   of the source's `max.message.bytes`. One that is there already is refused if it compacts, takes less than the source,
//!   or, as a rung, keeps messages less than a day beyond its delay or by size.
//! - **Order.** Messages of one topic and key are stored in the order of the batch, as long as every producer of the topic
//!   has the same [`Partitioner`] and the number of partitions stays.
//! - **Commits.** What is settled is committed in the order of receipt, up to the first message that is not. A partition
//!   that is taken away waits for what is in work, [so long](KafkaConfig::with_drain_deadline).
//! - **Security.** By [properties](KafkaConfig::with_property) of librdkafka. A build needs the feature `kafka-ssl` (the
//!   headers of OpenSSL) for TLS and SCRAM, and `kafka-gssapi` (those of Cyrus SASL too) for Kerberos; SASL/PLAIN without
//!   TLS needs neither. OAUTHBEARER is not offered. `kafka-zstd` is for `compression.type=zstd`; gzip, snappy and lz4 are
//!   always there.
//!
//! ```no_run
//! # async fn example() -> relaybox::Result<()> {
//! use relaybox::broker::kafka::{Kafka, KafkaConfig};
//!
//! let config = KafkaConfig::new("broker-1:9093,broker-2:9093")
//!     .with_property("security.protocol", "sasl_ssl")
//!     .with_property("sasl.mechanisms", "SCRAM-SHA-512")
//!     .with_property("sasl.username", "billing")
//!     .with_property("sasl.password", "read from a secret store")
//!     .with_instance_id("billing-0");
//! let kafka = Kafka::connect(config).await?;
//! # let _ = kafka;
//! # Ok(())
//! # }
//! ```

mod batch;
mod commits;
mod committer;
mod config;
mod context;
mod control;
mod depth;
mod desk;
mod error;
mod generation;
mod member;
mod progress;
mod properties;
mod publisher;
mod record;
mod retention;
mod settings;
mod subscriber;
mod topology;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

pub use config::{Assignor, KafkaConfig, Partitioner};

use self::control::Control;
use self::publisher::Sender;
use super::{
    Backlog, Health, PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder, Retention,
    Subscriber, SubscriberCapabilities, Subscription, SubscriptionRequest,
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

    /// Makes a topic with the cluster's defaults otherwise. One that is there already is left as it is.
    ///
    /// # Errors
    /// Why it could not be made, or [`Timeout`](crate::ErrorKind::Timeout) when it is not seen within seconds.
    pub async fn create_topic(&self, name: &str, partitions: u16) -> Result<()> {
        topology::make_source(&self.0.control, name, partitions).await
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
        capabilities.refuse = record::refuse;
        capabilities.order = PublisherOrder::Prefix;
        capabilities.publish_deadline = self.0.config.publish_deadline;
        capabilities
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(self.0.sender.publish(batch))
    }

    fn health(&self) -> Health {
        self.0.sender.health()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let Inner {
                config, control, ..
            } = &*self.0;
            control.all_exist("check", destinations).await?;
            let bytes_max = config.limits.message_bytes_max;
            settings::compare(control, destinations, bytes_max).await;
            Ok(())
        })
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.0.sender.close(deadline))
    }
}

impl Subscriber for Kafka {
    fn capabilities(&self) -> SubscriberCapabilities {
        let mut capabilities = SubscriberCapabilities::new("kafka");
        capabilities.marks_redelivery = true;
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

    fn key_affinity(&self, _source: &str) -> bool {
        true
    }

    /// Counted in offsets: an upper bound where the topic is compacted or written by transactions. The age goes by the
    /// records' timestamps; where reading them takes too long it is that of the oldest read.
    fn depth<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        let Inner {
            config, control, ..
        } = &*self.0;
        Box::pin(depth::backlog(config, control, None, destination))
    }

    /// As far as its commits tell; counted as [`depth`](Self::depth).
    fn lag<'a>(&'a self, consumer: &'a str, source: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        let Inner {
            config, control, ..
        } = &*self.0;
        Box::pin(depth::backlog(config, control, Some(consumer), source))
    }

    fn destinations<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        Box::pin(self.0.control.named("destinations", prefix.to_owned()))
    }

    /// `retention.ms` and `segment.ms` together, because a segment goes as a whole, once its newest record is old enough.
    /// Without a limit of age, or compacted only, a topic keeps messages for ever. Unknown without the right to describe the
    /// topic's configuration.
    fn retention<'a>(&'a self, source: &'a str) -> BoxFuture<'a, Result<Retention>> {
        Box::pin(retention::of_topic(&self.0.control, source))
    }
}
