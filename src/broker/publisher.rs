//! Publishing: batches in, one outcome per message out.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::Health;
use crate::envelope::Outgoing;
use crate::error::{Error, Result};
use crate::message::{Limits, Message};

/// Sends messages to a broker and says of each what became of it.
///
/// Rules an implementation keeps, each a case of the conformance suite:
///
/// 1. [`publish`](Self::publish) returns exactly one outcome per message, in the order of the batch.
/// 2. [`PublishOutcome::Confirmed`] is returned only after the broker said that the message is stored to the
///    strength the broker was configured for, and routed to at least one place.
/// 3. An error of one message never becomes the outcome of another: a batch refused as a whole is taken apart and
///    resent until the culprit stands alone. Later messages of the culprit's key may be [`PublishOutcome::Withheld`].
/// 4. Key, headers and payload arrive byte for byte; null, empty and repeated stay what they are.
/// 5. Messages of one destination and key are stored in the order of the batch; what a failure leaves behind is
///    declared by [`PublisherCapabilities::order`].
/// 6. The call returns within [`PublisherCapabilities::publish_deadline`]; what is unanswered by then is
///    `Failed` with [`Stored::Unknown`].
/// 7. It never panics on a message, whatever its names and bytes.
/// 8. Calls for different destinations may run at the same time, and none waits for another's broker answer.
///
/// Cancel safety: dropping the future of `publish` recalls nothing; messages in it may or may not be stored.
pub trait Publisher: Send + Sync + 'static {
    /// What this publisher can do. Constant for its lifetime.
    fn capabilities(&self) -> PublisherCapabilities;

    /// Sends a batch and waits for the broker's word on each message.
    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>>;

    /// What orders together with this destination: the topic, exchange or stream it belongs to.
    ///
    /// The relay publishes different scopes side by side. Defaults to the destination itself.
    fn scope<'a>(&'a self, destination: &'a str) -> &'a str {
        destination
    }

    /// How it stands with the broker. Asks nobody and never waits.
    fn health(&self) -> Health;

    /// Checks that each destination exists, so that a missing one is found at start and not at the first failure.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound) naming every missing destination;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) naming what was tried when the broker does not answer,
    /// within seconds.
    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>>;

    /// Sends what is buffered and closes, at most until `deadline` has passed. Idempotent.
    ///
    /// # Errors
    /// [`Timeout`](crate::ErrorKind::Timeout) when something was still unconfirmed at the deadline.
    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>>;
}

impl<P: Publisher + ?Sized> Publisher for Arc<P> {
    fn capabilities(&self) -> PublisherCapabilities {
        (**self).capabilities()
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        (**self).publish(batch)
    }

    fn scope<'a>(&'a self, destination: &'a str) -> &'a str {
        (**self).scope(destination)
    }

    fn health(&self) -> Health {
        (**self).health()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        (**self).check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        (**self).close(deadline)
    }
}

/// What a publisher can do, as data.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PublisherCapabilities {
    /// Name of the product, for logs and errors.
    pub name: &'static str,
    /// What a message may be at most. Enqueue checks against it, so that poison never enters the outbox.
    pub limits: Limits,
    /// Refuses what this broker cannot carry beyond the limits, for example a character in a name; called at enqueue.
    /// Accepts everything by default.
    pub refuse: fn(&Message) -> Result<()>,
    /// What a failure inside a run leaves behind.
    pub order: PublisherOrder,
    /// The longest that one publish call takes. The relay's lease is at least twice as long.
    pub publish_deadline: Duration,
}

impl PublisherCapabilities {
    /// Default limits, order [`PublisherOrder::Gap`] and a deadline of 10 s.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            limits: Limits::default(),
            refuse: |_| Ok(()),
            order: PublisherOrder::Gap,
            publish_deadline: Duration::from_secs(10),
        }
    }
}

/// What is stored of a run of messages of one scope and key after one of them was not confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublisherOrder {
    /// Nothing later of that scope and key was stored: the run may be pipelined.
    Prefix,
    /// Later ones may have been stored: order needs one unconfirmed message per scope and key.
    Gap,
}

/// What became of one message.
#[derive(Debug)]
pub enum PublishOutcome {
    /// Stored and routed.
    Confirmed,
    /// Refused; the same message to the same place will be refused again until something is changed by hand.
    Rejected {
        /// Whether the message or its destination is to blame.
        scope: RejectionScope,
        /// Why.
        error: Error,
    },
    /// Not confirmed; the same message may go through later.
    Failed {
        /// Whether the trouble is with one destination or with the broker as a whole.
        scope: FailureScope,
        /// Whether the broker may have it nevertheless.
        stored: Stored,
        /// Why.
        error: Error,
    },
    /// Not tried, because an earlier message of its scope and key in the batch was not confirmed. Says nothing about the
    /// message or its destination; it is certainly not stored.
    Withheld,
}

impl PublishOutcome {
    /// Whether the message is stored for certain.
    #[must_use]
    pub const fn is_confirmed(&self) -> bool {
        matches!(self, Self::Confirmed)
    }

    /// The outcome in a word, for a label.
    pub(crate) const fn word(&self) -> &'static str {
        match self {
            Self::Confirmed => "confirmed",
            Self::Rejected {
                scope: RejectionScope::Message,
                ..
            } => "rejected",
            Self::Rejected { .. } => "undeliverable",
            Self::Failed {
                stored: Stored::No, ..
            } => "failed",
            Self::Failed { .. } => "unknown",
            Self::Withheld => "withheld",
        }
    }

    /// The error of a rejection or failure.
    #[must_use]
    pub const fn error(&self) -> Option<&Error> {
        match self {
            Self::Confirmed | Self::Withheld => None,
            Self::Rejected { error, .. } | Self::Failed { error, .. } => Some(error),
        }
    }
}

/// Who is to blame for a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RejectionScope {
    /// The message: it is parked.
    Message,
    /// The destination (missing, forbidden, unroutable): its messages stay pending.
    Destination,
}

/// How far a failure reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureScope {
    /// This destination only.
    Destination,
    /// The broker: only on connection state, or failure across destinations.
    Broker,
}

/// Whether an unconfirmed message may be stored nevertheless.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// Certainly not.
    No,
    /// Perhaps: a resend may be a duplicate, and carries the same id.
    Unknown,
}
