//! NATS JetStream, through async-nats.
//!
//! A destination is a subject, a source is a stream (or an alias of a part of one). A message is stored once the stream
//! confirmed it. The stream recognises what is sent again under the same id within its `duplicate_window`, two minutes
//! by default and counted from the first time: that spares most duplicates after a lost confirmation, and no more. What
//! makes effects happen once is the inbox.
//!
//! Each consumer has a durable pull consumer of its own on each stream. Several members share it without regard to
//! keys, so there is no key affinity: two messages of one key may be in work at two members at a time. Order is kept
//! by one member as long as no delivery is lost with a connection; strict order needs one member and
//! [`NatsConfig::with_ack_pending_max`] of 1.

mod config;
mod depth;
mod desk;
mod durable;
mod ear;
mod error;
mod farewell;
mod fit;
mod link;
mod names;
mod publisher;
mod puller;
mod record;
mod rescue;
mod retention;
mod rules;
mod shelf;
mod streams;
mod subscriber;
mod tls;
mod topology;
mod warnings;
mod when;
mod words;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

pub use config::NatsConfig;

use self::link::Link;
use self::publisher::Sender;
use self::warnings::Warnings;
use super::{
    Backlog, Health, PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder, Retention,
    Subscriber, SubscriberCapabilities, Subscription, SubscriptionRequest,
};
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind, Result};

/// A NATS server or cluster with JetStream, to publish to and to subscribe on. Cloning shares the connection; each
/// subscription has one of its own.
#[derive(Clone)]
pub struct Nats(Arc<Inner>);

struct Inner {
    config: NatsConfig,
    link: Arc<Link>,
    sender: Sender,
    warnings: Warnings,
}

impl Nats {
    /// Checks the settings, connects, and waits until JetStream answers.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) for a setting that is refused;
    /// [`Rejected`](crate::ErrorKind::Rejected) for credentials that are;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) naming the servers tried, within the answer deadline.
    pub async fn connect(config: NatsConfig) -> Result<Self> {
        config.check()?;
        let link = Arc::new(Link::connect(&config).await?);
        let warnings = Warnings::default();
        let max_payload = link.client.server_info().max_payload;
        if max_payload
            < config
                .limits
                .message_bytes_max
                .saturating_add(record::HEADER_BYTES_MAX)
        {
            warnings.add(format!(
                "the server takes messages of {max_payload} bytes (max_payload), headers included, and limits let in {}",
                config.limits.message_bytes_max
            ));
        }
        let sender = Sender::new(&config, Arc::clone(&link));
        Ok(Self(Arc::new(Inner {
            config,
            link,
            sender,
            warnings,
        })))
    }

    /// Makes a stream of these subjects (patterns) in files, without limits but the
    /// [retention](NatsConfig::with_stream_retention). One of this name that is there already is left as it is.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) for a name that no stream can have, and for subjects that
    /// another stream holds; otherwise why it could not be made.
    pub async fn create_stream<S: Into<String>>(
        &self,
        name: &str,
        subjects: impl IntoIterator<Item = S>,
    ) -> Result<()> {
        let subjects = subjects.into_iter().map(Into::into).collect();
        let retention = self.0.config.stream_retention.unwrap_or_default();
        streams::make_source(&self.0.link, name, subjects, retention).await
    }

    /// What was found so far that is not wrong and still likely to lose or repeat messages: at connect, by
    /// [`check`](Publisher::check) and when subscriptions began. Each was logged once, too.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        self.0.warnings.all()
    }
}

impl fmt::Debug for Nats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Nats").field(&self.0.config).finish()
    }
}

impl Publisher for Nats {
    fn capabilities(&self) -> PublisherCapabilities {
        let mut capabilities = PublisherCapabilities::new("nats");
        capabilities.limits = self.0.config.limits;
        capabilities.refuse = record::refuse;
        capabilities.order = PublisherOrder::Gap;
        capabilities.publish_deadline = self.0.config.publish_deadline;
        capabilities
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(self.0.sender.publish(batch))
    }

    /// The configured stream of the subject, else the subject's first token.
    fn scope<'a>(&'a self, destination: &'a str) -> &'a str {
        let stream = self.0.config.stream_for(destination);
        stream.unwrap_or_else(|| names::first_token(destination))
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let Inner {
                config,
                link,
                warnings,
                ..
            } = &*self.0;
            let mut missing = Vec::new();
            for destination in destinations.iter().filter(|name| !config.is_core(name)) {
                match streams::stream_by_subject(link, "check", destination).await? {
                    Some(stream) => {
                        if let Some(info) = streams::stream_info(link, "check", &stream).await? {
                            warnings.about_stream(config, &info);
                        }
                    }
                    None => missing.push(destination.as_str()),
                }
            }
            if missing.is_empty() {
                return Ok(());
            }
            let detail = format!("no stream holds {}", missing.join(", "));
            Err(Error::new(ErrorKind::NotFound, "check", detail))
        })
    }

    fn health(&self) -> Health {
        if self.0.sender.is_closed() {
            return Health::closed();
        }
        self.0.link.health()
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.0.sender.close(deadline))
    }
}

impl Subscriber for Nats {
    fn capabilities(&self) -> SubscriberCapabilities {
        let mut capabilities = SubscriberCapabilities::new("nats");
        capabilities.marks_redelivery = true;
        capabilities.fan_out = true;
        capabilities
    }

    fn key_affinity(&self, _source: &str) -> bool {
        false
    }

    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        let Inner {
            config, warnings, ..
        } = &*self.0;
        Box::pin(subscriber::subscribe(config, warnings, request))
    }

    fn depth<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        Box::pin(depth::depth(&self.0.config, &self.0.link, destination))
    }

    fn lag<'a>(&'a self, consumer: &'a str, source: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        Box::pin(depth::lag(&self.0.config, &self.0.link, consumer, source))
    }

    /// Of streams that hold one subject and no pattern, as those that are made for rungs.
    fn destinations<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        Box::pin(streams::named(&self.0.link, "destinations", prefix))
    }

    /// The stream's `max_age`; without one it keeps messages for ever. A stream with work-queue or interest retention lets go
    /// of what was acknowledged, by all who asked for it.
    fn retention<'a>(&'a self, source: &'a str) -> BoxFuture<'a, Result<Retention>> {
        Box::pin(retention::of_source(&self.0.config, &self.0.link, source))
    }
}
