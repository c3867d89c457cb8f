//! RabbitMQ over AMQP 0-9-1, through lapin.
//!
//! A destination is a queue, or `exchange/routing key` split at the first `/`. A source is a queue, made by the user; what
//! it is bound to is made by the user too, or with the helpers of [`RabbitMq`].
//!
//! A queue belongs to one consumer. Where several are to get every message each has its own, bound to the same exchange.
//!
//! The client logs a message that the broker returned as unroutable, with its payload, at level `WARN` of the target
//! `lapin::returned_messages`: switch that target off where payloads must not reach logs.

mod arguments;
mod balance;
mod config;
mod desk;
mod error;
mod link;
mod place;
mod publisher;
mod record;
mod run;
mod subscriber;
mod topology;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::Instant;

pub use config::RabbitMqConfig;

use self::link::Link;
use self::place::Shards;
use self::publisher::Sender;
use self::topology::Surveyor;
use super::{
    Backlog, Health, PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder, Retention,
    Subscriber, SubscriberCapabilities, Subscription, SubscriptionRequest,
};
use crate::envelope::Outgoing;
use crate::error::Result;

const NAME: &str = "rabbitmq";

/// How a queue keeps its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum QueueKind {
    /// Replicated, and durable to the last confirm (the default).
    #[default]
    Quorum,
    /// On one node.
    Classic,
}

impl QueueKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Quorum => "quorum",
            Self::Classic => "classic",
        }
    }
}

/// How an exchange routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExchangeKind {
    /// To queues bound with exactly the routing key.
    Direct,
    /// To queues whose binding matches the routing key word by word: `*` is one word, `#` any number.
    Topic,
    /// To all bound queues.
    Fanout,
    /// To queues whose binding's arguments match the message's headers.
    Headers,
}

/// A RabbitMQ, to publish to and to subscribe on. Cloning shares the connections: one to publish, one for everything else.
#[derive(Clone)]
pub struct RabbitMq(Arc<Inner>);

struct Inner {
    config: Arc<RabbitMqConfig>,
    shards: Arc<Shards>,
    sender: Sender,
    link: Arc<Link>,
}

impl RabbitMq {
    /// Checks the settings and waits until a broker answers. Needs a tokio runtime, to which it belongs from then on.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) for a setting that is refused;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) naming the addresses tried, within the answer deadline.
    pub async fn connect(config: RabbitMqConfig) -> Result<Self> {
        config.check()?;
        let config = Arc::new(config);
        let shards = Arc::new(Shards::new(&config.shards));
        let sender = Sender::new(&config, &shards);
        sender
            .connect(Instant::now() + config.answer_deadline)
            .await?;
        let link = Link::new(&config, "consuming");
        Ok(Self(Arc::new(Inner {
            config,
            shards,
            sender,
            link,
        })))
    }

    /// Makes a durable queue, or the queues of a name with [shards](RabbitMqConfig::with_shards). One that is there with
    /// the same settings is left as it is.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) when it exists with other settings, naming both values;
    /// otherwise why it could not be made.
    pub async fn declare_queue(&self, name: &str, kind: QueueKind) -> Result<()> {
        self.surveyor("declare queue")
            .declare_source(name, kind)
            .await
    }

    /// Makes a durable exchange. One that is there with the same settings is left as it is.
    ///
    /// # Errors
    /// As [`declare_queue`](Self::declare_queue).
    pub async fn declare_exchange(&self, name: &str, kind: ExchangeKind) -> Result<()> {
        let surveyor = self.surveyor("declare exchange");
        surveyor.declare_exchange(name, kind).await
    }

    /// Binds a queue to an exchange. A binding that is there already is left as it is.
    ///
    /// `arguments` are for [`ExchangeKind::Headers`]: the headers that must match, and `x-match` for how many of them.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) for a name with [shards](RabbitMqConfig::with_shards), whose
    /// queues are bound one by one; [`NotFound`](crate::ErrorKind::NotFound) when either is missing; otherwise why it could
    /// not be bound.
    pub async fn bind(
        &self,
        queue: &str,
        exchange: &str,
        routing_key: &str,
        arguments: &[(&str, &str)],
    ) -> Result<()> {
        let surveyor = self.surveyor("bind");
        surveyor.bind(queue, exchange, routing_key, arguments).await
    }

    fn surveyor(&self, operation: &'static str) -> Surveyor<'_> {
        let Inner {
            config,
            shards,
            link,
            ..
        } = &*self.0;
        Surveyor {
            config,
            link,
            shards,
            operation,
        }
    }
}

impl fmt::Debug for RabbitMq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RabbitMq").field(&self.0.config).finish()
    }
}

impl Publisher for RabbitMq {
    fn capabilities(&self) -> PublisherCapabilities {
        let mut capabilities = PublisherCapabilities::new(NAME);
        capabilities.limits = self.0.config.limits;
        capabilities.refuse = record::refuse;
        capabilities.order = PublisherOrder::Gap;
        capabilities.publish_deadline = self.0.config.publish_deadline;
        capabilities
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(self.0.sender.publish(batch))
    }

    fn scope<'a>(&'a self, destination: &'a str) -> &'a str {
        place::scope(destination)
    }

    fn health(&self) -> Health {
        self.0.sender.health()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let names = destinations.iter().map(String::as_str);
            self.surveyor("check").all_exist(names).await
        })
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.0.sender.close(deadline))
    }
}

impl Subscriber for RabbitMq {
    fn capabilities(&self) -> SubscriberCapabilities {
        let mut capabilities = SubscriberCapabilities::new(NAME);
        capabilities.marks_redelivery = true;
        capabilities.fan_out = false;
        capabilities.positions = false;
        capabilities
    }

    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        let Inner {
            config,
            shards,
            link,
            ..
        } = &*self.0;
        Box::pin(subscriber::subscribe(config, link, shards, request))
    }

    /// Only a queue with [shards](RabbitMqConfig::with_shards).
    fn key_affinity(&self, source: &str) -> bool {
        self.0.shards.of(source).is_some()
    }

    /// Counts what is ready; the broker tells no age, and what consumers hold only to its management.
    fn depth<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        Box::pin(async move {
            let messages = self.surveyor("depth").depth(destination).await?;
            Ok(Backlog::new(messages, None))
        })
    }

    /// As [`depth`](Subscriber::depth): a queue belongs to one consumer. What its members hold is not counted, so it is
    /// below the truth by up to what each may have in flight, and 0 does not mean that all is settled.
    fn lag<'a>(&'a self, _consumer: &'a str, source: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        Box::pin(async move {
            let messages = self.surveyor("lag").depth(source).await?;
            Ok(Backlog::new(messages, None))
        })
    }

    /// Until settled, as classic and quorum queues do; a limit of age or length only shortens that. Not for streams, which
    /// are no sources.
    fn retention<'a>(&'a self, source: &'a str) -> BoxFuture<'a, Result<Retention>> {
        Box::pin(async move {
            self.surveyor("retention").depth(source).await?;
            Ok(Retention::UntilSettled)
        })
    }
}
