//! Publishing: a batch pipelined over one connection, each confirmation awaited.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::context::{
    GetStreamByNameErrorKind, PublishAckFuture, PublishError, PublishErrorKind,
};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::publish::PublishAck;
use futures_util::FutureExt as _;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::config::NatsConfig;
use super::error::{Verdict, failed, mapped, rejected, verdict};
use super::link::{Changes, Link, context};
use super::names::{SUBJECT_RULE, is_subject};
use super::record;
use crate::broker::{FailureScope, PublishOutcome, RejectionScope, Stored};
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind, Result};

/// How long confirmations are waited for after a connection was lost and made again: what the old one had written is
/// gone, what waited in the client goes out at once.
const STRAGGLERS: Duration = Duration::from_secs(1);
/// Most publish calls at a time; [`Sender::close`] waits for all of them.
const CALLS_MAX: u32 = 1 << 16;

/// The sending half of the adapter.
pub(super) struct Sender {
    link: Arc<Link>,
    context: Context,
    config: NatsConfig,
    calls: Semaphore,
    closed: AtomicBool,
}

/// What became of one message.
enum Answer {
    Confirmed,
    Refused(PublishError),
    Denied,
    /// Nothing by the deadline.
    None,
}

/// What is known of a batch so far.
struct Batch<'a> {
    messages: &'a [Outgoing],
    outcomes: Vec<Option<PublishOutcome>>,
    waiting: VecDeque<(usize, PublishAckFuture)>,
    /// Messages that nobody took.
    unheard: Vec<usize>,
    unanswered: Vec<usize>,
    core: Vec<usize>,
    /// Whether the server said anything at all.
    answered: bool,
    started: Instant,
    deadline: Instant,
    changes: watch::Receiver<Changes>,
    before: Changes,
}

impl Sender {
    pub(super) fn new(config: &NatsConfig, link: Arc<Link>) -> Self {
        let context = context(config, link.client.clone(), config.publish_deadline);
        Self {
            link,
            context,
            config: config.clone(),
            calls: Semaphore::new(CALLS_MAX as usize),
            closed: AtomicBool::new(false),
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(super) async fn publish(&self, messages: &[Outgoing]) -> Vec<PublishOutcome> {
        let started = Instant::now();
        let changes = self.link.changes();
        let before = *changes.borrow();
        let mut batch = Batch {
            messages,
            outcomes: messages.iter().map(|_| None).collect(),
            waiting: VecDeque::new(),
            unheard: Vec::new(),
            unanswered: Vec::new(),
            core: Vec::new(),
            answered: false,
            started,
            // What is left of the deadline is for asking which stream was not there.
            deadline: started + self.config.publish_deadline
                - (self.config.publish_deadline / 10).min(Duration::from_secs(1)),
            changes,
            before,
        };
        // Closing waits for all calls that are under way, and one that waits behind it would not be one of them.
        let call = match self.is_closed() {
            true => None,
            false => timeout_at(batch.deadline, self.calls.acquire()).await.ok(),
        };
        let Some(Ok(_call)) = call else {
            for at in 0..messages.len() {
                let error = self.usable().err().unwrap_or_else(late);
                batch.settle(at, failed(FailureScope::Broker, Stored::No, error));
            }
            return batch.into_outcomes(FailureScope::Broker);
        };
        for at in 0..messages.len() {
            self.send(&mut batch, at).await;
        }
        while let Some(next) = batch.waiting.pop_front() {
            self.take(&mut batch, next).await;
        }
        self.flush_core(&mut batch).await;
        self.look_up(&mut batch, started + self.config.publish_deadline)
            .await;
        let scope = self.reach(&batch);
        batch.into_outcomes(scope)
    }

    /// Hands a message to the connection. The client would keep it while there is none, and send it at some time after
    /// its outcome was told: so a message is refused here as long as there is no connection.
    async fn send(&self, batch: &mut Batch<'_>, at: usize) {
        let Some(outgoing) = batch.messages.get(at) else {
            return;
        };
        let subject = outgoing.message.destination.as_str();
        if !is_subject(subject) {
            let error = Error::invalid("destination", SUBJECT_RULE, subject);
            return batch.settle(at, rejected(RejectionScope::Destination, error));
        }
        let core = self.config.is_core(subject);
        while !core && batch.waiting.len() >= self.config.in_flight_max {
            let Some(next) = batch.waiting.pop_front() else {
                break;
            };
            self.take(batch, next).await;
        }
        if let Err(error) = self.usable() {
            return batch.settle(at, failed(FailureScope::Broker, Stored::No, error));
        }
        // What is sent now would not be answered in time; while the client has room for it, sending does not fail.
        if Instant::now() >= batch.deadline {
            let scope = self.reach(batch);
            return batch.settle(at, failed(scope, Stored::No, late()));
        }
        let stream = self.config.stream_for(subject).filter(|_| !core);
        let (headers, payload) = match record::encode(outgoing, stream) {
            Ok(encoded) => encoded,
            Err(error) => return batch.settle(at, rejected(RejectionScope::Message, error)),
        };
        if core {
            let client = &self.link.client;
            let sending = client.publish_with_headers(subject.to_owned(), headers, payload);
            return match timeout_at(batch.deadline, sending).await {
                Ok(Ok(())) => batch.core.push(at),
                Ok(Err(error)) => {
                    let too_large =
                        error.kind() == async_nats::PublishErrorKind::MaxPayloadExceeded;
                    let error = refused(error);
                    batch.settle(
                        at,
                        if too_large {
                            rejected(RejectionScope::Message, error)
                        } else {
                            failed(FailureScope::Broker, Stored::No, error)
                        },
                    );
                }
                Err(_elapsed) => batch.settle(at, failed(FailureScope::Broker, Stored::No, late())),
            };
        }
        let message = PublishMessage::build().headers(headers).payload(payload);
        let sending = self.context.send_publish(subject.to_owned(), message);
        match timeout_at(batch.deadline, sending).await {
            Ok(Ok(confirmation)) => batch.waiting.push_back((at, confirmation)),
            Ok(Err(error)) => match error.kind() {
                PublishErrorKind::MaxPayloadExceeded => {
                    batch.settle(at, rejected(RejectionScope::Message, refused(error)));
                }
                // It never entered the client's queue.
                _ => batch.settle(at, failed(FailureScope::Broker, Stored::No, refused(error))),
            },
            Err(_elapsed) => batch.settle(at, failed(FailureScope::Broker, Stored::No, late())),
        }
    }

    fn usable(&self) -> Result<()> {
        if self.is_closed() {
            let detail = "the publisher is closed";
            return Err(Error::new(ErrorKind::Closed, "publish", detail));
        }
        self.link.require("publish")
    }

    /// Waits for one confirmation and notes what it says.
    async fn take(&self, batch: &mut Batch<'_>, (at, confirmation): (usize, PublishAckFuture)) {
        let Some(outgoing) = batch.messages.get(at) else {
            return;
        };
        let subject = outgoing.message.destination.as_str();
        let answer = self.answer(batch, subject, confirmation).await;
        batch.answered |= !matches!(answer, Answer::None);
        match answer {
            Answer::Confirmed => batch.settle(at, PublishOutcome::Confirmed),
            Answer::Denied => {
                let detail = format!("the server does not let us publish to {subject}");
                let error = Error::new(ErrorKind::Rejected, "publish", detail);
                batch.settle(at, rejected(RejectionScope::Destination, error));
            }
            Answer::None => batch.unanswered.push(at),
            Answer::Refused(error) => match verdict(&error) {
                Verdict::Message => {
                    tracing::warn!(subject, %error, "message refused");
                    batch.settle(at, rejected(RejectionScope::Message, refused(error)));
                }
                Verdict::Destination => {
                    batch.settle(at, rejected(RejectionScope::Destination, refused(error)));
                }
                Verdict::NoResponders => batch.unheard.push(at),
                Verdict::NotStored => {
                    batch.settle(
                        at,
                        failed(FailureScope::Destination, Stored::No, refused(error)),
                    );
                }
                Verdict::Unknown => batch.settle(
                    at,
                    failed(FailureScope::Destination, Stored::Unknown, refused(error)),
                ),
            },
        }
    }

    async fn answer(
        &self,
        batch: &mut Batch<'_>,
        subject: &str,
        confirmation: PublishAckFuture,
    ) -> Answer {
        let mut confirmation = confirmation.into_future();
        loop {
            // What is answered is stored, whatever was denied since.
            if let Some(answer) = (&mut confirmation).now_or_never() {
                return judged(answer);
            }
            let now = *batch.changes.borrow_and_update();
            if now.denials > batch.before.denials && self.link.denied(subject, batch.started) {
                return Answer::Denied;
            }
            if now.losses > batch.before.losses && self.link.is_connected() {
                batch.deadline = batch.deadline.min(Instant::now() + STRAGGLERS);
            }
            tokio::select! {
                biased;
                answer = &mut confirmation => return judged(answer),
                changed = batch.changes.changed() => {
                    if changed.is_err() {
                        return Answer::None;
                    }
                }
                () = sleep_until(batch.deadline) => return Answer::None,
            }
        }
    }

    /// Core messages are as good as sent once the connection has taken them; nobody confirms them.
    async fn flush_core(&self, batch: &mut Batch<'_>) {
        let core = std::mem::take(&mut batch.core);
        if core.is_empty() {
            return;
        }
        let flushed = matches!(
            timeout_at(batch.deadline, self.link.client.flush()).await,
            Ok(Ok(()))
        );
        for at in core {
            let outcome = if flushed {
                PublishOutcome::Confirmed
            } else {
                failed(FailureScope::Broker, Stored::Unknown, late())
            };
            batch.settle(at, outcome);
        }
    }

    /// Nobody listened on some subjects. That is a missing stream, or one whose server is just starting: only the list
    /// of streams tells.
    async fn look_up(&self, batch: &mut Batch<'_>, deadline: Instant) {
        let mut asked: BTreeMap<&str, Option<bool>> = BTreeMap::new();
        for at in std::mem::take(&mut batch.unheard) {
            let Some(outgoing) = batch.messages.get(at) else {
                continue;
            };
            let subject = outgoing.message.destination.as_str();
            let exists = match asked.get(subject) {
                Some(exists) => *exists,
                None => {
                    let exists = self.has_stream(subject, deadline).await;
                    asked.insert(subject, exists);
                    exists
                }
            };
            batch.settle(at, unheard(subject, exists));
        }
    }

    /// Whether a stream holds this subject; nothing if nobody tells.
    async fn has_stream(&self, subject: &str, deadline: Instant) -> Option<bool> {
        let asked = self.link.context.stream_by_subject(subject);
        match timeout_at(deadline, asked).await {
            Ok(Ok(_)) => Some(true),
            Ok(Err(error)) if error.kind() == GetStreamByNameErrorKind::NotFound => Some(false),
            Ok(Err(_)) | Err(_) => None,
        }
    }

    /// How far a failure without an answer reaches: the connection was lost, or nobody answered over several subjects.
    fn reach(&self, batch: &Batch<'_>) -> FailureScope {
        let now = *batch.changes.borrow();
        let lost = now.losses > batch.before.losses || !self.link.is_connected();
        let subjects: BTreeSet<&str> = batch
            .unanswered
            .iter()
            .filter_map(|at| batch.messages.get(*at))
            .map(|outgoing| outgoing.message.destination.as_str())
            .collect();
        if lost || (!batch.answered && subjects.len() > 1) {
            FailureScope::Broker
        } else {
            FailureScope::Destination
        }
    }

    pub(super) async fn close(&self, deadline: Duration) -> Result<()> {
        self.closed.store(true, Ordering::Release);
        let idle = async {
            // All calls that were under way are over once all permits are free.
            let _all = self.calls.acquire_many(CALLS_MAX).await;
            match self.link.is_connected() {
                true => self.link.client.flush().await,
                // Nothing is left to be flushed: what waits for a connection was never handed over.
                false => Ok(()),
            }
        };
        match timeout(deadline, idle).await {
            Ok(Ok(())) => Ok(()),
            // The connection is gone, and with it what could have been flushed: every outcome was told.
            Ok(Err(_gone)) => Ok(()),
            Err(_elapsed) => Err(Error::new(
                ErrorKind::Timeout,
                "close",
                format!("something was still unconfirmed after {deadline:?}"),
            )),
        }
    }
}

impl Batch<'_> {
    fn settle(&mut self, at: usize, outcome: PublishOutcome) {
        if let Some(slot) = self.outcomes.get_mut(at) {
            *slot = Some(outcome);
        }
    }

    /// What has no outcome was sent and not answered.
    fn into_outcomes(self, scope: FailureScope) -> Vec<PublishOutcome> {
        self.outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_or_else(|| failed(scope, Stored::Unknown, late())))
            .collect()
    }
}

fn judged(answer: std::result::Result<PublishAck, PublishError>) -> Answer {
    match answer {
        // A repetition that the server recognised is stored as well.
        Ok(_) => Answer::Confirmed,
        Err(error) if error.kind() == PublishErrorKind::TimedOut => Answer::None,
        Err(error) => Answer::Refused(error),
    }
}

/// The outcome of a message on whose subject nobody listened.
fn unheard(subject: &str, stream_exists: Option<bool>) -> PublishOutcome {
    let detail = match stream_exists {
        Some(false) => {
            let error = format!("no stream holds {subject}");
            let error = Error::new(ErrorKind::NotFound, "publish", error);
            return rejected(RejectionScope::Destination, error);
        }
        Some(true) => format!("the stream of {subject} does not answer"),
        None => format!("nobody listens on {subject}, and JetStream does not answer"),
    };
    let error = Error::new(ErrorKind::Unavailable, "publish", detail);
    failed(FailureScope::Destination, Stored::No, error)
}

fn refused(source: impl std::error::Error + Send + Sync + 'static) -> Error {
    mapped(
        ErrorKind::Rejected,
        "publish",
        "the server did not store it",
        source,
    )
}

fn late() -> Error {
    Error::new(
        ErrorKind::Timeout,
        "publish",
        "no confirmation by the publish deadline",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_list_of_streams_makes_a_destination_wrong() {
        assert!(matches!(
            unheard("x", Some(false)),
            PublishOutcome::Rejected {
                scope: RejectionScope::Destination,
                ..
            }
        ));
        for exists in [Some(true), None] {
            assert!(matches!(
                unheard("x", exists),
                PublishOutcome::Failed {
                    scope: FailureScope::Destination,
                    stored: Stored::No,
                    ..
                }
            ));
        }
    }
}
