//! Handlers: the user's code, inside the transaction of the inbox.

use std::future::Future;

use crate::envelope::Incoming;

use super::outcome::Outcome;

/// Does the work for a message on the connection of the open transaction.
///
/// Use only this connection: whatever is written elsewhere is neither rolled back nor protected from duplicates. Do not
/// commit or roll back on it; savepoints are fine.
pub trait Handler<C>: Send + Sync + 'static {
    /// Handles one message. Panics count as failures.
    fn handle(
        &self,
        connection: &mut C,
        incoming: &Incoming,
    ) -> impl Future<Output = Outcome> + Send;
}

/// A plain async function `f(&state, &mut connection, &incoming)` as a handler. It may return an [`Outcome`], a
/// `Result<(), E>` or a `Result<Outcome, E>` of any `std::error::Error`.
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

/// Async functions of the right shape. Implemented for them all; never by hand.
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
