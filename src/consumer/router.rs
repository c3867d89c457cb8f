//! Event types and their handlers.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::BoxFuture;

use crate::envelope::Incoming;
use crate::error::{Error, Result};
use crate::story::Reason;

use super::handler::Handler;
use super::outcome::{Failure, Outcome};

/// Hands each message to the handler of its event type.
///
/// ```
/// use relaybox::Incoming;
/// use relaybox::codec::Json;
/// use relaybox::consumer::{Outcome, Router, UnknownType, handler_fn, typed_fn};
///
/// # struct Connection;
/// async fn placed(_: &(), _: &mut Connection, Json(_cents): Json<u32>) -> Outcome { Outcome::Done }
/// async fn cancelled(_: &(), _: &mut Connection, _: &Incoming) -> Outcome { Outcome::Done }
///
/// # fn main() -> relaybox::Result<()> {
/// let router = Router::new(UnknownType::Skip)
///     .with_route("OrderPlaced", typed_fn((), placed))?
///     .with_route("OrderCancelled", handler_fn((), cancelled))?;
/// # fn is_handler<C>(_: impl relaybox::consumer::Handler<C>) {}
/// # is_handler::<Connection>(router);
/// # Ok(())
/// # }
/// ```
pub struct Router<C> {
    routes: HashMap<String, Box<dyn BoxedHandler<C>>>,
    rule: UnknownType<C>,
    unknown: Arc<AtomicU64>,
}

/// What becomes of a message whose event type has no handler. There is no default: a type that somebody added later is
/// either none of this consumer's business or work that must not be lost, and only its author knows.
#[non_exhaustive]
pub enum UnknownType<C> {
    /// Acknowledge it as handled: for a consumer that wants some of what its source holds.
    Skip,
    /// Make it a dead letter with reason [`unknown-type`](Reason::UNKNOWN_TYPE): for a consumer that must miss nothing.
    DeadLetter,
    /// Hand it to a handler; made by [`UnknownType::handler`].
    Handler(UnknownHandler<C>),
}

/// Made by [`UnknownType::handler`].
pub struct UnknownHandler<C>(Box<dyn BoxedHandler<C>>);

impl<C: Send + 'static> UnknownType<C> {
    /// Hands messages of unknown types to this handler.
    pub fn handler(handler: impl Handler<C>) -> Self {
        Self::Handler(UnknownHandler(Box::new(handler)))
    }
}

impl<C: Send + 'static> Router<C> {
    /// Without a route, and with a rule for what has none.
    #[must_use]
    pub fn new(rule: UnknownType<C>) -> Self {
        Self {
            routes: HashMap::new(),
            rule,
            unknown: Arc::default(),
        }
    }

    /// Hands messages of this type to this handler. The text is compared byte for byte; an empty one stands for messages
    /// without a type.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) when the type has a handler already.
    pub fn with_route(
        mut self,
        event_type: impl Into<String>,
        handler: impl Handler<C>,
    ) -> Result<Self> {
        let event_type = event_type.into();
        if self.routes.contains_key(&event_type) {
            let limit = "a type without a handler";
            return Err(Error::configuration("event type", limit, event_type));
        }
        self.routes.insert(event_type, Box::new(handler));
        Ok(self)
    }

    /// How many messages of unknown types there were, deliveries that were repeated included; shared, for after the router
    /// was handed over.
    #[must_use]
    pub fn unknown(&self) -> Arc<AtomicU64> {
        self.unknown.clone()
    }
}

impl<C: Send + 'static> Handler<C> for Router<C> {
    async fn handle(&self, connection: &mut C, incoming: &Incoming) -> Outcome {
        let event_type = &incoming.message.event_type;
        if let Some(handler) = self.routes.get(event_type) {
            return handler.handle_boxed(connection, incoming).await;
        }
        self.unknown.fetch_add(1, Ordering::Relaxed);
        match &self.rule {
            UnknownType::Skip => Outcome::Skip,
            UnknownType::DeadLetter => {
                let failure = Failure::new(format!("no handler for event type {event_type:?}"));
                let reason = Reason::new(Reason::UNKNOWN_TYPE);
                Outcome::Permanent(failure.with_reason(reason))
            }
            UnknownType::Handler(UnknownHandler(handler)) => {
                handler.handle_boxed(connection, incoming).await
            }
        }
    }
}

impl<C> fmt::Debug for Router<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Router")
            .field("routes", &self.routes.keys())
            .field("rule", &self.rule)
            .finish_non_exhaustive()
    }
}

impl<C> fmt::Debug for UnknownType<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Skip => "Skip",
            Self::DeadLetter => "DeadLetter",
            Self::Handler(_) => "Handler",
        })
    }
}

impl<C> fmt::Debug for UnknownHandler<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UnknownHandler")
    }
}

/// A handler that handlers of other types can stand beside.
trait BoxedHandler<C>: Send + Sync {
    fn handle_boxed<'a>(
        &'a self,
        connection: &'a mut C,
        incoming: &'a Incoming,
    ) -> BoxFuture<'a, Outcome>;
}

impl<C: Send, H: Handler<C>> BoxedHandler<C> for H {
    fn handle_boxed<'a>(
        &'a self,
        connection: &'a mut C,
        incoming: &'a Incoming,
    ) -> BoxFuture<'a, Outcome> {
        Box::pin(self.handle(connection, incoming))
    }
}
