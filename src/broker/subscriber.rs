//! Consuming: subscriptions, deliveries and their settlement.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::{Backlog, Health};
use crate::envelope::Incoming;
use crate::error::Result;
use crate::story::Origin;

/// Opens subscriptions on a broker.
pub trait Subscriber: Send + Sync + 'static {
    /// What this subscriber can do. Constant for its lifetime.
    fn capabilities(&self) -> SubscriberCapabilities;

    /// Creates or verifies the topology as the request says, then subscribes.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound) naming every source, rung or dead letter destination that is missing;
    /// [`Configuration`](crate::ErrorKind::Configuration) when one exists with other settings, naming both values;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) naming what was tried when the broker does not answer,
    /// within seconds.
    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>>;

    /// Whether all messages of one key of this source go to one member of a consumer at a time.
    fn key_affinity(&self, source: &str) -> bool;

    /// How much is stored at a destination and not yet gone: for a log what it holds, for a queue what it has to give.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound) when it does not exist;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the broker does not answer, within seconds.
    fn depth<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Result<Backlog>>;

    /// How much of a source or rung a consumer has not settled, as far as the broker knows; settlements on their way are
    /// counted in. An upper bound where the broker counts in positions.
    ///
    /// # Errors
    /// As [`depth`](Self::depth).
    fn lag<'a>(&'a self, consumer: &'a str, source: &'a str) -> BoxFuture<'a, Result<Backlog>>;

    /// For how long after a message was stored this source may deliver it again, as its settings are now: to a consumer that
    /// lost its place, or whose place was put back, too.
    ///
    /// # Errors
    /// As [`depth`](Self::depth). What only may not be read is [`Retention::Unknown`].
    fn retention<'a>(&'a self, source: &'a str) -> BoxFuture<'a, Result<Retention>>;

    /// Names that begin with `prefix` of destinations that a subscription could read as rungs, sorted, at most 10,000: so a consumer
    /// finds rungs of an earlier ladder, in which messages would wait for ever. Nothing, the default, where what waits on a rung
    /// comes back to its source by itself, whoever subscribes.
    ///
    /// # Errors
    /// As [`depth`](Self::depth).
    fn destinations<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        let _ = prefix;
        Box::pin(async { Ok(Vec::new()) })
    }
}

impl<S: Subscriber + ?Sized> Subscriber for Arc<S> {
    fn capabilities(&self) -> SubscriberCapabilities {
        (**self).capabilities()
    }

    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        (**self).subscribe(request)
    }

    fn key_affinity(&self, source: &str) -> bool {
        (**self).key_affinity(source)
    }

    fn depth<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        (**self).depth(destination)
    }

    fn lag<'a>(&'a self, consumer: &'a str, source: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        (**self).lag(consumer, source)
    }

    fn retention<'a>(&'a self, source: &'a str) -> BoxFuture<'a, Result<Retention>> {
        (**self).retention(source)
    }

    fn destinations<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        (**self).destinations(prefix)
    }
}

/// For how long a source may deliver a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retention {
    /// No message that is older than this comes any more.
    Bounded(Duration),
    /// Messages are kept whether they are settled or not, and no age ends that: any of them may come again at any time.
    Unbounded,
    /// A message is kept until it is acknowledged, however long that takes, and never comes again after it: what queues do.
    UntilSettled,
    /// The broker does not tell.
    Unknown,
}

/// What a subscriber can do, as data.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubscriberCapabilities {
    /// Name of the product, for logs and errors.
    pub name: &'static str,
    /// Whether the broker says that a delivery may have been seen before.
    pub marks_redelivery: bool,
    /// Whether several consumers of one source each get every message. Otherwise each message goes to one of them, and a
    /// consumer needs a source of its own.
    pub fan_out: bool,
    /// Whether the coordinates of a delivery name its message for ever, so that they may serve as an id. A queue, from which
    /// messages go, has no positions.
    pub positions: bool,
}

impl SubscriberCapabilities {
    /// A subscriber that does not mark redeliveries, gives every consumer everything and whose coordinates are positions.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self {
            name,
            marks_redelivery: false,
            fan_out: true,
            positions: true,
        }
    }
}

/// Most names that [`Subscriber::destinations`] tells.
pub const DESTINATIONS_MAX: usize = 10_000;

/// What a consumer asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubscriptionRequest {
    /// Name of the consumer: members of one name share the messages.
    pub consumer: String,
    /// Where messages come from.
    pub sources: Vec<String>,
    /// Where failed ones wait.
    pub rungs: Vec<Rung>,
    /// Rungs of an earlier ladder that may still hold messages: read as rungs as far as they are there, neither made nor checked.
    pub earlier_rungs: Vec<Rung>,
    /// Where dead letters go, as far as they go to the broker.
    pub dead_letters: Vec<String>,
    /// Whether rungs and dead letter destination are made.
    pub topology: TopologyMode,
    /// Most deliveries handed over and not yet settled (at least 1).
    pub in_flight_max: usize,
}

impl SubscriptionRequest {
    /// A request without rungs and dead letters, verifying, with 256 deliveries in flight.
    pub fn new(consumer: impl Into<String>, sources: Vec<String>) -> Self {
        Self {
            consumer: consumer.into(),
            sources,
            rungs: Vec::new(),
            earlier_rungs: Vec::new(),
            dead_letters: Vec::new(),
            topology: TopologyMode::default(),
            in_flight_max: 256,
        }
    }
}

/// One step of a ladder at the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rung {
    /// Destination that a failed message is published to.
    pub destination: String,
    /// How long it waits there; zero for a way back from the dead letters.
    pub delay: Duration,
    /// The source that it came from, and comes back to where the broker moves what is due by itself. Several sources may
    /// share a rung, each with an entry of its own.
    pub source: String,
}

/// What to do about rungs and the dead letter destination before subscribing. Sources are never made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TopologyMode {
    /// Create what is missing, then verify.
    #[default]
    Create,
    /// Fail when something is missing or different.
    Verify,
    /// Make nothing and ask nothing, not even for the sources: for a user who may neither. What is missing shows later, as
    /// errors of `receive` and refusals of copies.
    Unchecked,
}

/// A running subscription: a member of a consumer.
///
/// Rules an implementation keeps, each a case of the conformance suite:
///
/// 1. Every message of the sources stored before or after the subscription began is delivered at least once per
///    consumer, until one of its deliveries is acknowledged. A consumer's first subscription begins at the oldest.
/// 2. Messages of one source and key are first delivered in the order they are stored.
/// 3. A message on a rung is not delivered before its `x-due-at`, and while it waits nothing else waits for it.
///    What somebody else wrote into that header on a source holds nothing back.
/// 4. At most `in_flight_max` deliveries are unsettled at a time; the membership stays alive while
///    [`receive`](Self::receive) is not called.
/// 5. What is unsettled when the process dies is delivered again.
/// 6. After a restart of the broker deliveries go on by themselves.
pub trait Subscription: Send {
    /// Waits for deliveries and returns 1 to `count_max` of them.
    ///
    /// Cancel safe: dropping the future loses nothing.
    ///
    /// # Errors
    /// A transient error is a report: the caller goes on calling. Any other ends the subscription.
    fn receive(&mut self, count_max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>>;

    /// How it stands with the broker. Asks nobody and never waits.
    fn health(&self) -> Health;

    /// Makes settlements durable and leaves, at most until `deadline` has passed; what is unsettled then is
    /// delivered again to somebody.
    ///
    /// # Errors
    /// [`Timeout`](crate::ErrorKind::Timeout) when the broker did not answer in time.
    fn close(self: Box<Self>, deadline: Duration) -> BoxFuture<'static, Result<()>>;
}

/// One message handed over, to be settled exactly once. Dropping it without settling releases it.
pub struct Delivery {
    /// The message, its story, and whether its id is missing.
    pub incoming: Incoming,
    /// The source or rung that it came through, by the name in the request.
    pub source: String,
    /// The broker's own name of its place.
    pub coordinates: Origin,
    /// Whether the broker says that it may have been delivered before.
    pub redelivered: bool,
    /// The adapter's side of the settlement.
    pub receipt: Box<dyn Receipt>,
}

impl fmt::Debug for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("incoming", &self.incoming)
            .field("source", &self.source)
            .field("coordinates", &self.coordinates)
            .field("redelivered", &self.redelivered)
            .finish_non_exhaustive()
    }
}

/// An adapter's handle on one delivery.
pub trait Receipt: Send + Sync {
    /// Whether this member may still settle it: false after its partition was taken away or its channel closed.
    ///
    /// A delivery that is no longer current must not be started; it comes again elsewhere.
    fn is_current(&self) -> bool;

    /// Settles. On one that is no longer current this does nothing and succeeds: the message comes again.
    ///
    /// # Errors
    /// The settlement may not have reached the broker; the message may come again.
    fn settle(self: Box<Self>, settlement: Settlement) -> BoxFuture<'static, Result<()>>;
}

/// How a delivery ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settlement {
    /// It is dealt with: its effect, or its copy on a rung or as a dead letter, is durable.
    Acknowledge,
    /// It is not dealt with: deliver it again, not before the delay has passed. Counts as no attempt.
    Release {
        /// How long it stays away at least.
        delay: Duration,
    },
}
