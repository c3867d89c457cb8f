//! The outbox: a message becomes a row in the caller's own transaction.

use std::borrow::Cow;
use std::slice;
use std::time::Duration;

use tracing::Instrument;

use crate::broker::Publisher;
use crate::error::Result;
use crate::event::{current_trace, enqueue_span};
use crate::message::{Limits, Message, TraceContext};
use crate::store::{Enqueue, EnqueueStatement};

/// Writes messages beside business data.
///
/// The row exists if and only if the caller's transaction commits, savepoints included. Nothing of it is kept in
/// memory, so one `Outbox` may be shared by all tasks and a rolled-back call leaves no trace.
///
/// With feature `opentelemetry` a message without a trace context gets that of the current span; consumers continue it.
#[derive(Debug, Clone)]
pub struct Outbox<S> {
    store: S,
    limits: Limits,
    refuse: fn(&Message) -> Result<()>,
}

impl<S: Enqueue> Outbox<S> {
    /// An outbox in `store`, with the default [`Limits`].
    pub fn new(store: S) -> Self {
        Self {
            store,
            limits: Limits::default(),
            refuse: |_| Ok(()),
        }
    }

    /// Takes the rules of the publisher that will send the messages, so that what it would refuse is refused here.
    #[must_use]
    pub fn with_rules_of(mut self, publisher: &(impl Publisher + ?Sized)) -> Self {
        let capabilities = publisher.capabilities();
        self.limits = capabilities.limits;
        self.refuse = capabilities.refuse;
        self
    }

    /// Enqueues one message on the caller's connection, transaction or savepoint.
    ///
    /// # Errors
    /// [`Invalid`](crate::ErrorKind::Invalid) naming field, limit and value, before anything is sent to the database:
    /// the caller's transaction stays usable. Otherwise the database's error.
    pub async fn enqueue(
        &self,
        connection: &mut S::Connection,
        mut message: Message,
    ) -> Result<()> {
        let messages = slice::from_mut(&mut message);
        self.validate(messages)?;
        if let Some(trace) = current_trace() {
            self.trace(messages, &trace);
        }
        self.insert(connection, messages).await
    }

    /// Enqueues many messages in this order, in one statement where the database allows it: prefer it to a loop.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue); one invalid message refuses all.
    pub async fn enqueue_all(
        &self,
        connection: &mut S::Connection,
        messages: &[Message],
    ) -> Result<()> {
        self.validate(messages)?;
        if messages.is_empty() {
            return Ok(());
        }
        self.insert(connection, &self.traced(messages)).await
    }

    /// Enqueues messages that are not to be sent before `delay` has passed, by the database's clock.
    ///
    /// They are set aside until then (state `delayed`) and take their place in the outbox when they are due, late by a
    /// second or so at most while a relay runs: in their keys' order they come behind what was enqueued meanwhile.
    ///
    /// # Errors
    /// As [`enqueue_all`](Self::enqueue_all).
    pub async fn enqueue_later(
        &self,
        connection: &mut S::Connection,
        messages: &[Message],
        delay: Duration,
    ) -> Result<()> {
        self.validate(messages)?;
        if messages.is_empty() {
            return Ok(());
        }
        let messages = self.traced(messages);
        self.store
            .insert_delayed(connection, &messages, delay)
            .instrument(enqueue_span(&messages))
            .await
    }

    /// The statement that [`enqueue_all`](Self::enqueue_all) would run, with its binds, for a service whose transactions
    /// belong to another client. The messages keep the trace context they have ([`current_trace`]).
    ///
    /// # Errors
    /// [`Invalid`](crate::ErrorKind::Invalid) as [`enqueue_all`](Self::enqueue_all).
    pub fn statement<'a>(&'a self, messages: &'a [Message]) -> Result<S::Statement<'a>>
    where
        S: EnqueueStatement,
    {
        self.validate(messages)?;
        self.store.statement(messages)
    }

    async fn insert(&self, connection: &mut S::Connection, messages: &[Message]) -> Result<()> {
        self.store
            .insert(connection, messages)
            .instrument(enqueue_span(messages))
            .await
    }

    /// The messages with the current trace context where they have none.
    fn traced<'a>(&self, messages: &'a [Message]) -> Cow<'a, [Message]> {
        match current_trace() {
            Some(trace) if messages.iter().any(|message| message.trace.is_none()) => {
                let mut traced = messages.to_vec();
                self.trace(&mut traced, &trace);
                Cow::Owned(traced)
            }
            _ => Cow::Borrowed(messages),
        }
    }

    /// Gives valid messages this trace context where they have none. One that would be refused with it goes without: what watches
    /// the work must not stop it.
    fn trace(&self, messages: &mut [Message], trace: &TraceContext) {
        for message in messages
            .iter_mut()
            .filter(|message| message.trace.is_none())
        {
            message.trace = Some(trace.clone());
            if self.validate(slice::from_ref(message)).is_err() {
                message.trace = None;
            }
        }
    }

    fn validate(&self, messages: &[Message]) -> Result<()> {
        for message in messages {
            message.validate(&self.limits)?;
            (self.refuse)(message)?;
        }
        Ok(())
    }
}
