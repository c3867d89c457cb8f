//! Older versions of an aggregate are skipped.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use tracing::debug;

use crate::envelope::Incoming;
use crate::error::{Error, ErrorKind};
use crate::store::{Advanced, VersionStore};
use crate::story::Reason;

use super::handler::Handler;
use super::outcome::{Failure, Outcome};

type AggregateOf = dyn Fn(&Incoming) -> Option<Bytes> + Send + Sync;

/// Lets a handler see a message only if no later version of its aggregate was handled before, in the transaction of the
/// handler's work: what comes back from a rung, or out of order, does not overwrite what is newer. Older messages end as
/// [`Outcome::Skip`].
///
/// For messages that tell a state ("the address is now ..."). One that tells a change ("5 less") is lost when it is
/// skipped: those need no guard, or an order that is kept.
///
/// The version is [`Message::version`](crate::Message::version), the aggregate is the message's key; equal versions are
/// handled. What is remembered goes with the consumer's inbox records, by age.
///
/// ```
/// use relaybox::codec::Json;
/// use relaybox::consumer::{Outcome, Unversioned, VersionGuard, typed_fn};
/// # use relaybox::store::VersionStore;
///
/// # struct Connection;
/// async fn moved(_: &(), _: &mut Connection, Json(_address): Json<String>) -> Outcome { Outcome::Done }
///
/// # fn guard<S: VersionStore<Connection = Connection>>(store: S) -> VersionGuard<S, impl relaybox::consumer::Handler<Connection>> {
/// // The consumer's own name, and its own store.
/// VersionGuard::new("billing", store, Unversioned::DeadLetter, typed_fn((), moved))
/// # }
/// ```
pub struct VersionGuard<V, H> {
    consumer: String,
    store: V,
    rule: Unversioned,
    handler: H,
    aggregate: Box<AggregateOf>,
    older: Arc<AtomicU64>,
}

/// What becomes of a message without a version, or without an aggregate. There is no default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unversioned {
    /// Hand it to the handler, in whatever order it comes.
    Handle,
    /// Make it a dead letter with reason [`unversioned`](Reason::UNVERSIONED).
    DeadLetter,
}

impl<V: VersionStore, H: Handler<V::Connection>> VersionGuard<V, H> {
    /// Guards a handler of this consumer, whose inbox is in this store.
    pub fn new(consumer: impl Into<String>, store: V, rule: Unversioned, handler: H) -> Self {
        Self {
            consumer: consumer.into(),
            store,
            rule,
            handler,
            aggregate: Box::new(|incoming| incoming.message.key.clone()),
            older: Arc::default(),
        }
    }

    /// Names the aggregate of a message otherwise (default: by its key), in at most
    /// [`AGGREGATE_BYTES_MAX`](crate::store::AGGREGATE_BYTES_MAX) bytes. Needed where one consumer meets equal keys of
    /// different things: order 17 and customer 17 would be one.
    #[must_use]
    pub fn with_aggregate(
        mut self,
        aggregate: impl Fn(&Incoming) -> Option<Bytes> + Send + Sync + 'static,
    ) -> Self {
        self.aggregate = Box::new(aggregate);
        self
    }

    /// How many older messages were skipped, deliveries that were repeated included; shared, for after the guard was
    /// handed over.
    #[must_use]
    pub fn older(&self) -> Arc<AtomicU64> {
        self.older.clone()
    }

    fn is_older(&self, incoming: &Incoming) {
        self.older.fetch_add(1, Ordering::Relaxed);
        debug!(
            consumer = self.consumer, id = %incoming.message.id, version = incoming.message.version,
            "a later version was handled before; the message is skipped"
        );
    }
}

impl<V: VersionStore, H: Handler<V::Connection>> Handler<V::Connection> for VersionGuard<V, H> {
    async fn handle(&self, connection: &mut V::Connection, incoming: &Incoming) -> Outcome {
        let aggregate = (self.aggregate)(incoming);
        let (Some(aggregate), Some(version)) = (aggregate, incoming.message.version) else {
            return match self.rule {
                Unversioned::Handle => self.handler.handle(connection, incoming).await,
                Unversioned::DeadLetter => Outcome::Permanent(unversioned()),
            };
        };
        let advanced = self
            .store
            .advance(connection, &self.consumer, &aggregate, version)
            .await;
        match advanced {
            Ok(Advanced::Newest) => self.handler.handle(connection, incoming).await,
            Ok(Advanced::Older) => {
                self.is_older(incoming);
                Outcome::Skip
            }
            Err(error) => failed(error),
        }
    }
}

fn unversioned() -> Failure {
    Failure::new("the message has no version, or no aggregate")
        .with_reason(Reason::new(Reason::UNVERSIONED))
}

/// A name that no store takes stays one; all else is the database's, which may want the transaction again.
fn failed(error: Error) -> Outcome {
    if error.kind() == ErrorKind::Invalid {
        return Outcome::Permanent(error.into());
    }
    Outcome::Retry(error.into())
}

impl<V, H> fmt::Debug for VersionGuard<V, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VersionGuard")
            .field("consumer", &self.consumer)
            .field("rule", &self.rule)
            .finish_non_exhaustive()
    }
}
