//! Handlers that take their payload as a type.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;

use crate::codec::Decode;
use crate::envelope::Incoming;

use super::handler::{BatchHandler, Handler, OutsideHandler};
use super::outcome::{Failure, Outcome};

/// A plain async function over its payload as a handler. The payload is of any type with [`Decode`]; what the function may
/// return: see [`handler_fn`](super::handler_fn).
///
/// | form | function, with or without the last argument |
/// |---|---|
/// | [`Handler`] | `f(&state, &mut connection, payload, &incoming)` |
/// | [`BatchHandler`] | `f(&state, &mut connection, vec_of_payloads, &[&incoming])` |
/// | [`OutsideHandler`] | `f(&state, payload, &incoming)` |
///
/// A payload that cannot be decoded never reaches the function and is never tried again: the message becomes a dead letter
/// with reason [`undecodable`](crate::story::Reason::UNDECODABLE) and its bytes as they came. That includes a message
/// without a payload, unless the type is an `Option`: then it is `None`. One in a batch leaves the others to be handled each
/// alone.
///
/// ```
/// use relaybox::Failure;
/// use relaybox::codec::Json;
/// use relaybox::consumer::{Outcome, typed_fn};
///
/// #[derive(serde::Deserialize)]
/// struct OrderPlaced {
///     cents: u32,
/// }
/// # struct App;
/// # struct Connection;
///
/// async fn charge(_app: &App, _db: &mut Connection, Json(order): Json<OrderPlaced>) -> Outcome {
///     if order.cents == 0 {
///         return Outcome::Skip;
///     }
///     Outcome::Retry(Failure::new("the till is closed"))
/// }
///
/// let handler = typed_fn(App, charge);
/// # fn is_handler<C>(_: impl relaybox::consumer::Handler<C>) {}
/// # is_handler::<Connection>(handler);
/// ```
pub fn typed_fn<S, A, F>(state: S, function: F) -> TypedFn<S, A, F> {
    TypedFn {
        state,
        function,
        arguments: PhantomData,
    }
}

/// Made by [`typed_fn`]. `A` is found by the compiler.
pub struct TypedFn<S, A, F> {
    state: S,
    function: F,
    arguments: PhantomData<fn() -> A>,
}

impl<S: fmt::Debug, A, F> fmt::Debug for TypedFn<S, A, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TypedFn")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl<S: Clone, A, F: Clone> Clone for TypedFn<S, A, F> {
    fn clone(&self) -> Self {
        typed_fn(self.state.clone(), self.function.clone())
    }
}

impl<S, A, C, F> Handler<C> for TypedFn<S, A, F>
where
    S: Send + Sync + 'static,
    A: 'static,
    C: Send,
    F: for<'a> TypedFunction<'a, S, C, A> + Send + Sync + 'static,
{
    async fn handle(&self, connection: &mut C, incoming: &Incoming) -> Outcome {
        match self.function.call(&self.state, connection, incoming) {
            Ok(called) => called.await.into(),
            Err(failure) => Outcome::Permanent(failure),
        }
    }
}

impl<S, A, C, F> BatchHandler<C> for TypedFn<S, A, F>
where
    S: Send + Sync + 'static,
    A: 'static,
    C: Send,
    F: for<'a> TypedBatchFunction<'a, S, C, A> + Send + Sync + 'static,
{
    async fn handle(&self, connection: &mut C, batch: &[&Incoming]) -> Outcome {
        match self.function.call(&self.state, connection, batch) {
            Ok(called) => called.await.into(),
            Err(failure) => Outcome::Permanent(failure),
        }
    }
}

impl<S, A, F> OutsideHandler for TypedFn<S, A, F>
where
    S: Send + Sync + 'static,
    A: 'static,
    F: for<'a> TypedOutsideFunction<'a, S, A> + Send + Sync + 'static,
{
    async fn handle(&self, incoming: &Incoming) -> Outcome {
        match self.function.call(&self.state, incoming) {
            Ok(called) => called.await.into(),
            Err(failure) => Outcome::Permanent(failure),
        }
    }
}

/// Async functions of the shapes of a typed [`Handler`]. Implemented for them all; never by hand.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a typed handler",
    label = "not an `async fn(&State, &mut Connection, Payload)`, with or without a fourth `&Incoming`",
    note = "the payload must implement `Decode` (such as `Json<T>`), the state and connection must be those of the consumer, \
            the future must be `Send`, and what it returns must be an `Outcome` or a `Result`"
)]
pub trait TypedFunction<'a, S, C, A> {
    /// What the function returns.
    type Output: Into<Outcome>;
    /// Its future.
    type Future: Future<Output = Self::Output> + Send + 'a;

    /// Decodes the payload and calls the function.
    ///
    /// # Errors
    /// When the payload cannot be decoded.
    fn call(
        &self,
        state: &'a S,
        connection: &'a mut C,
        incoming: &'a Incoming,
    ) -> Result<Self::Future, Failure>;
}

impl<'a, S, C, P, F, Fut> TypedFunction<'a, S, C, (P,)> for F
where
    S: 'a,
    C: 'a,
    P: Decode,
    F: Fn(&'a S, &'a mut C, P) -> Fut,
    Fut: Future + Send + 'a,
    Fut::Output: Into<Outcome>,
{
    type Output = Fut::Output;
    type Future = Fut;

    fn call(&self, state: &'a S, db: &'a mut C, incoming: &'a Incoming) -> Result<Fut, Failure> {
        Ok(self(state, db, decoded(incoming)?))
    }
}

impl<'a, S, C, P, F, Fut> TypedFunction<'a, S, C, (P, Incoming)> for F
where
    S: 'a,
    C: 'a,
    P: Decode,
    F: Fn(&'a S, &'a mut C, P, &'a Incoming) -> Fut,
    Fut: Future + Send + 'a,
    Fut::Output: Into<Outcome>,
{
    type Output = Fut::Output;
    type Future = Fut;

    fn call(&self, state: &'a S, db: &'a mut C, incoming: &'a Incoming) -> Result<Fut, Failure> {
        Ok(self(state, db, decoded(incoming)?, incoming))
    }
}

/// Async functions of the shapes of a typed [`BatchHandler`]. Implemented for them all; never by hand.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a typed handler of batches",
    label = "not an `async fn(&State, &mut Connection, Vec<Payload>)`, with or without a fourth `&[&Incoming]`",
    note = "the payload must implement `Decode` (such as `Json<T>`), the state and connection must be those of the consumer, \
            the future must be `Send`, and what it returns must be an `Outcome` or a `Result`"
)]
pub trait TypedBatchFunction<'a, S, C, A> {
    /// What the function returns.
    type Output: Into<Outcome>;
    /// Its future.
    type Future: Future<Output = Self::Output> + Send + 'a;

    /// Decodes the payloads and calls the function.
    ///
    /// # Errors
    /// When one of them cannot be decoded.
    fn call(
        &self,
        state: &'a S,
        connection: &'a mut C,
        batch: &'a [&'a Incoming],
    ) -> Result<Self::Future, Failure>;
}

impl<'a, S, C, P, F, Fut> TypedBatchFunction<'a, S, C, (P,)> for F
where
    S: 'a,
    C: 'a,
    P: Decode,
    F: Fn(&'a S, &'a mut C, Vec<P>) -> Fut,
    Fut: Future + Send + 'a,
    Fut::Output: Into<Outcome>,
{
    type Output = Fut::Output;
    type Future = Fut;

    fn call(&self, state: &'a S, db: &'a mut C, batch: &'a [&'a Incoming]) -> Result<Fut, Failure> {
        Ok(self(state, db, all_decoded(batch)?))
    }
}

impl<'a, S, C, P, F, Fut> TypedBatchFunction<'a, S, C, (P, Incoming)> for F
where
    S: 'a,
    C: 'a,
    P: Decode,
    F: Fn(&'a S, &'a mut C, Vec<P>, &'a [&'a Incoming]) -> Fut,
    Fut: Future + Send + 'a,
    Fut::Output: Into<Outcome>,
{
    type Output = Fut::Output;
    type Future = Fut;

    fn call(&self, state: &'a S, db: &'a mut C, batch: &'a [&'a Incoming]) -> Result<Fut, Failure> {
        Ok(self(state, db, all_decoded(batch)?, batch))
    }
}

/// Async functions of the shapes of a typed [`OutsideHandler`]. Implemented for them all; never by hand.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a typed handler outside of a transaction",
    label = "not an `async fn(&State, Payload)`, with or without a third `&Incoming`",
    note = "the payload must implement `Decode` (such as `Json<T>`), the future must be `Send`, and what it returns must be \
            an `Outcome` or a `Result`"
)]
pub trait TypedOutsideFunction<'a, S, A> {
    /// What the function returns.
    type Output: Into<Outcome>;
    /// Its future.
    type Future: Future<Output = Self::Output> + Send + 'a;

    /// Decodes the payload and calls the function.
    ///
    /// # Errors
    /// When the payload cannot be decoded.
    fn call(&self, state: &'a S, incoming: &'a Incoming) -> Result<Self::Future, Failure>;
}

impl<'a, S, P, F, Fut> TypedOutsideFunction<'a, S, (P,)> for F
where
    S: 'a,
    P: Decode,
    F: Fn(&'a S, P) -> Fut,
    Fut: Future + Send + 'a,
    Fut::Output: Into<Outcome>,
{
    type Output = Fut::Output;
    type Future = Fut;

    fn call(&self, state: &'a S, incoming: &'a Incoming) -> Result<Fut, Failure> {
        Ok(self(state, decoded(incoming)?))
    }
}

impl<'a, S, P, F, Fut> TypedOutsideFunction<'a, S, (P, Incoming)> for F
where
    S: 'a,
    P: Decode,
    F: Fn(&'a S, P, &'a Incoming) -> Fut,
    Fut: Future + Send + 'a,
    Fut::Output: Into<Outcome>,
{
    type Output = Fut::Output;
    type Future = Fut;

    fn call(&self, state: &'a S, incoming: &'a Incoming) -> Result<Fut, Failure> {
        Ok(self(state, decoded(incoming)?, incoming))
    }
}

fn all_decoded<P: Decode>(batch: &[&Incoming]) -> Result<Vec<P>, Failure> {
    batch.iter().map(|incoming| decoded(incoming)).collect()
}

fn decoded<P: Decode>(incoming: &Incoming) -> Result<P, Failure> {
    incoming.message.decode().map_err(Failure::undecodable)
}
