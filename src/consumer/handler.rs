//! Handlers: the user's code, in three forms.

use std::future::Future;

use crate::envelope::Incoming;

use super::outcome::Outcome;

/// Does the work for a message on the connection of the open transaction.
///
/// Use only this connection: whatever is written elsewhere is neither rolled back nor protected from duplicates, and a
/// second one from the same pool may wait for ever for what the other handlers hold. Do not commit or roll back on it;
/// savepoints are fine. Return the first error: PostgreSQL refuses every statement after it, and only says so.
pub trait Handler<C>: Send + Sync + 'static {
    /// Handles one message. Panics count as failures.
    fn handle(
        &self,
        connection: &mut C,
        incoming: &Incoming,
    ) -> impl Future<Output = Outcome> + Send;
}

/// Does the work for several messages in one transaction, all or nothing. Run by [`run_batches_until`](super::Consumer::run_batches_until).
///
/// Messages of one key come in their order. Any outcome but [`Done`](Outcome::Done) and [`Skip`](Outcome::Skip) rolls the
/// batch back, and each message is handled again in a batch of its own: so what an outcome says counts only there. The rules
/// of [`Handler`] hold.
pub trait BatchHandler<C>: Send + Sync + 'static {
    /// Handles 1 or more messages, none of which was handled before. Panics count as failures.
    fn handle(
        &self,
        connection: &mut C,
        batch: &[&Incoming],
    ) -> impl Future<Output = Outcome> + Send;
}

/// Does work that no transaction protects: a call to another service. Run by
/// [`run_outside_until`](super::Consumer::run_outside_until).
///
/// The inbox remembers the message once the work is done. A process that dies in between does it again, and so may two
/// members with a copy each: the work itself must bear repetition, for example by a key that the other side knows.
pub trait OutsideHandler: Send + Sync + 'static {
    /// Handles one message. Panics count as failures.
    fn handle(&self, incoming: &Incoming) -> impl Future<Output = Outcome> + Send;
}

/// A plain async function as a handler: `f(&state, &mut connection, &incoming)` as a [`Handler`], `f(&state, &mut
/// connection, &[&incoming])` as a [`BatchHandler`], `f(&state, &incoming)` as an [`OutsideHandler`]. It may return an
/// [`Outcome`], a `Result<(), E>` or a `Result<Outcome, E>` of any `std::error::Error`.
///
/// ```
/// use relaybox::consumer::{Outcome, handler_fn};
/// use relaybox::envelope::Incoming;
///
/// struct App;
/// struct Connection;
///
/// async fn charge(_app: &App, _db: &mut Connection, incoming: &Incoming) -> Result<(), std::str::Utf8Error> {
///     let payload = incoming.message.payload.as_deref().unwrap_or_default();
///     println!("{}", std::str::from_utf8(payload)?);
///     Ok(())
/// }
///
/// let handler = handler_fn(App, charge);
/// # fn is_handler<C>(_: &impl relaybox::consumer::Handler<C>) {}
/// # is_handler::<Connection>(&handler);
/// ```
pub fn handler_fn<S, F>(state: S, function: F) -> HandlerFn<S, F> {
    HandlerFn { state, function }
}

/// Made by [`handler_fn`].
#[derive(Debug, Clone)]
pub struct HandlerFn<S, F> {
    state: S,
    function: F,
}

impl<S, C, F> Handler<C> for HandlerFn<S, F>
where
    S: Send + Sync + 'static,
    C: Send,
    F: for<'a> HandlerFunction<'a, S, C> + Send + Sync + 'static,
{
    async fn handle(&self, connection: &mut C, incoming: &Incoming) -> Outcome {
        self.function
            .call(&self.state, connection, incoming)
            .await
            .into()
    }
}

impl<S, C, F> BatchHandler<C> for HandlerFn<S, F>
where
    S: Send + Sync + 'static,
    C: Send,
    F: for<'a> BatchFunction<'a, S, C> + Send + Sync + 'static,
{
    async fn handle(&self, connection: &mut C, batch: &[&Incoming]) -> Outcome {
        self.function
            .call(&self.state, connection, batch)
            .await
            .into()
    }
}

impl<S, F> OutsideHandler for HandlerFn<S, F>
where
    S: Send + Sync + 'static,
    F: for<'a> OutsideFunction<'a, S> + Send + Sync + 'static,
{
    async fn handle(&self, incoming: &Incoming) -> Outcome {
        self.function.call(&self.state, incoming).await.into()
    }
}

/// Async functions of the shape of a [`Handler`]. Implemented for them all; never by hand.
///
/// A bound on `AsyncFn` would not do: its future cannot be required to be `Send`.
pub trait HandlerFunction<'a, S, C> {
    /// What the function returns.
    type Output: Into<Outcome>;
    /// Its future.
    type Future: Future<Output = Self::Output> + Send + 'a;

    /// Calls it.
    fn call(&self, state: &'a S, connection: &'a mut C, incoming: &'a Incoming) -> Self::Future;
}

impl<'a, S, C, F, Fut> HandlerFunction<'a, S, C> for F
where
    S: 'a,
    C: 'a,
    F: Fn(&'a S, &'a mut C, &'a Incoming) -> Fut,
    Fut: Future + Send + 'a,
    Fut::Output: Into<Outcome>,
{
    type Output = Fut::Output;
    type Future = Fut;

    fn call(&self, state: &'a S, connection: &'a mut C, incoming: &'a Incoming) -> Fut {
        self(state, connection, incoming)
    }
}

/// Async functions of the shape of a [`BatchHandler`]. Implemented for them all; never by hand.
pub trait BatchFunction<'a, S, C> {
    /// What the function returns.
    type Output: Into<Outcome>;
    /// Its future.
    type Future: Future<Output = Self::Output> + Send + 'a;

    /// Calls it.
    fn call(&self, state: &'a S, connection: &'a mut C, batch: &'a [&'a Incoming]) -> Self::Future;
}

impl<'a, S, C, F, Fut> BatchFunction<'a, S, C> for F
where
    S: 'a,
    C: 'a,
    F: Fn(&'a S, &'a mut C, &'a [&'a Incoming]) -> Fut,
    Fut: Future + Send + 'a,
    Fut::Output: Into<Outcome>,
{
    type Output = Fut::Output;
    type Future = Fut;

    fn call(&self, state: &'a S, connection: &'a mut C, batch: &'a [&'a Incoming]) -> Fut {
        self(state, connection, batch)
    }
}

/// Async functions of the shape of an [`OutsideHandler`]. Implemented for them all; never by hand.
pub trait OutsideFunction<'a, S> {
    /// What the function returns.
    type Output: Into<Outcome>;
    /// Its future.
    type Future: Future<Output = Self::Output> + Send + 'a;

    /// Calls it.
    fn call(&self, state: &'a S, incoming: &'a Incoming) -> Self::Future;
}

impl<'a, S, F, Fut> OutsideFunction<'a, S> for F
where
    S: 'a,
    F: Fn(&'a S, &'a Incoming) -> Fut,
    Fut: Future + Send + 'a,
    Fut::Output: Into<Outcome>,
{
    type Output = Fut::Output;
    type Future = Fut;

    fn call(&self, state: &'a S, incoming: &'a Incoming) -> Fut {
        self(state, incoming)
    }
}
