//! Publishing: a batch taken apart by exchange or queue, each part in its order on a channel of its own.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use super::arguments::short;
use super::config::{ENVELOPE_BYTES_MAX, RabbitMqConfig};
use super::error::{Blame, blame, ends_connection, mapped};
use super::link::Link;
use super::place::{Place, Shards, scope};
use super::record;
use super::run::{Answer, Line, Record, Trouble};
use crate::broker::{FailureScope, Health, PublishOutcome, RejectionScope, Stored};
use crate::clock::at_most_a_day;
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind, Result};

/// Channels in use at a time.
const IN_USE_MAX: u32 = 64;
/// Channels that one part of a batch may cost. Each refused message costs one, and the search for it another.
const CHANNELS_MAX: usize = 64;
/// Messages of one run.
const RUN_MAX: usize = 1_000;

/// The sending half of the adapter.
pub(super) struct Sender {
    link: Arc<Link>,
    shards: Arc<Shards>,
    idle: Mutex<Vec<Line>>,
    idle_max: usize,
    in_use: Semaphore,
    deadline: Duration,
    message_bytes_max: usize,
    closed: AtomicBool,
}

/// What is left to do of one exchange's or queue's part, and what became of the rest.
struct Part {
    left: VecDeque<(usize, Record)>,
    /// Those that may have reached the broker in an earlier run.
    tried: bool,
    done: Vec<(usize, PublishOutcome)>,
}

impl Sender {
    pub(super) fn new(config: &Arc<RabbitMqConfig>, shards: &Arc<Shards>) -> Self {
        Self {
            link: Link::new(config, "publishing"),
            shards: Arc::clone(shards),
            idle: Mutex::default(),
            idle_max: config.channels,
            in_use: Semaphore::new(IN_USE_MAX as usize),
            deadline: config.publish_deadline,
            message_bytes_max: config.limits.message_bytes_max + ENVELOPE_BYTES_MAX,
            closed: AtomicBool::new(false),
        }
    }

    pub(super) async fn connect(&self, until: Instant) -> Result<()> {
        self.link.get("connect", until).await?;
        self.link.keep_up();
        Ok(())
    }

    pub(super) fn health(&self) -> Health {
        self.link.health()
    }

    pub(super) async fn publish(&self, batch: &[Outgoing]) -> Vec<PublishOutcome> {
        // What is left of the deadline is for telling.
        let until =
            Instant::now() + self.deadline - (self.deadline / 10).min(Duration::from_secs(1));
        let mut outcomes: Vec<Option<PublishOutcome>> = Vec::with_capacity(batch.len());
        let mut parts: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (at, outgoing) in batch.iter().enumerate() {
            let name = &outgoing.message.destination;
            outcomes.push(self.refused(outgoing));
            if outcomes.last().is_some_and(Option::is_none) {
                parts.entry(scope(name)).or_default().push(at);
            }
        }
        let parts = parts
            .into_values()
            .map(|part| self.send(batch, part, until));
        for (at, outcome) in join_all(parts).await.into_iter().flatten() {
            if let Some(slot) = outcomes.get_mut(at) {
                *slot = Some(outcome);
            }
        }
        let unsaid = || {
            let error = Error::new(ErrorKind::Other, "publish", "no outcome");
            failed(FailureScope::Destination, Stored::Unknown, error)
        };
        outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_or_else(unsaid))
            .collect()
    }

    /// What can be said before anything is sent.
    fn refused(&self, outgoing: &Outgoing) -> Option<PublishOutcome> {
        let message = &outgoing.message;
        if let Err(error) = Place::read(&message.destination) {
            return Some(rejected(RejectionScope::Destination, error));
        }
        let bytes = message.payload.as_ref().map_or(0, bytes::Bytes::len);
        if bytes > self.message_bytes_max {
            let limit = format!("at most {} bytes", self.message_bytes_max);
            let error = Error::invalid("message", limit, format!("{bytes} bytes"));
            return Some(rejected(RejectionScope::Message, error));
        }
        None
    }

    async fn send(
        &self,
        batch: &[Outgoing],
        indices: Vec<usize>,
        until: Instant,
    ) -> Vec<(usize, PublishOutcome)> {
        let mut part = Part {
            left: VecDeque::new(),
            tried: false,
            done: Vec::with_capacity(indices.len()),
        };
        let Ok(Ok(_permit)) = timeout_at(until, self.in_use.acquire()).await else {
            let detail = "no channel was free in time";
            for at in indices {
                let error = Error::new(ErrorKind::Timeout, "publish", detail);
                part.done
                    .push((at, failed(FailureScope::Destination, Stored::No, error)));
            }
            return part.done;
        };
        let mut line = match self.line(until).await {
            Ok(line) => line,
            Err(error) => {
                part.done
                    .extend(all_failed(indices, FailureScope::Broker, Stored::No, error));
                return part.done;
            }
        };
        for at in indices {
            let Some(outgoing) = batch.get(at) else {
                continue;
            };
            match self.record(outgoing, line.header_bytes_max()) {
                Ok(record) => part.left.push_back((at, record)),
                Err(error) => part
                    .done
                    .push((at, rejected(RejectionScope::Message, error))),
            }
        }
        let mut single = false;
        for _ in 0..CHANNELS_MAX {
            loop {
                if part.left.is_empty() {
                    self.put_back(line);
                    return part.done;
                }
                if line.is_blocked() {
                    self.put_back(line);
                    part.fail(FailureScope::Broker, blocked);
                    return part.done;
                }
                let count = if single {
                    1
                } else {
                    RUN_MAX.min(part.left.len())
                };
                if let Some(trouble) = part.run(&line, count, until).await {
                    match trouble {
                        // What ends the connection blames no message, whatever it says.
                        Trouble::Client(error)
                            if line.is_connected() && blame(&error) != Blame::Nobody =>
                        {
                            // Alone it is the culprit; otherwise each goes alone until one is.
                            if count == 1 {
                                part.reject_first(error);
                                single = false;
                            } else {
                                single = true;
                            }
                            break;
                        }
                        trouble => {
                            part.fail_after(trouble, &line);
                            return part.done;
                        }
                    }
                }
            }
            drop(line);
            line = match self.open(until).await {
                Ok(line) => line,
                Err(error) => {
                    part.fail_with(FailureScope::Broker, error);
                    return part.done;
                }
            };
        }
        part.fail(FailureScope::Destination, || {
            let detail = "too many messages of one call were refused";
            Error::new(ErrorKind::Unavailable, "publish", detail)
        });
        part.done
    }

    fn record(&self, outgoing: &Outgoing, header_bytes_max: usize) -> Result<Record> {
        let message = &outgoing.message;
        let place = Place::read(&message.destination)?;
        let shard = self.shards.queue_of(message);
        let routing_key = shard.as_deref().unwrap_or(place.routing_key);
        let (Some(exchange), Some(routing_key)) = (short(place.exchange), short(routing_key))
        else {
            let name = &message.destination;
            return Err(Error::invalid(
                "destination",
                "at most 255 bytes a name",
                name,
            ));
        };
        Ok(Record {
            exchange,
            routing_key,
            properties: record::properties(outgoing, header_bytes_max)?,
            body: message.payload.clone().unwrap_or_default(),
        })
    }

    /// An idle line, or a new one.
    async fn line(&self, until: Instant) -> Result<Line> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "publish", "it was closed"));
        }
        loop {
            let idle = self
                .idle
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop();
            match idle {
                Some(line) if line.is_usable() => return Ok(line),
                Some(_) => {}
                None => return self.open(until).await,
            }
        }
    }

    /// A new line. A broker that reads no more would not answer, and the alarm is the reason to tell.
    async fn open(&self, until: Instant) -> Result<Line> {
        if self.link.is_blocked() {
            return Err(blocked());
        }
        let opened = Line::open(&self.link, until).await;
        opened.map_err(|error| {
            if self.link.is_blocked() {
                return blocked();
            }
            error
        })
    }

    fn put_back(&self, line: Line) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < self.idle_max && line.is_usable() && !self.closed.load(Ordering::Acquire) {
            idle.push(line);
        }
    }

    pub(super) async fn close(&self, deadline: Duration) -> Result<()> {
        let until = Instant::now() + at_most_a_day(deadline);
        self.closed.store(true, Ordering::Release);
        let all = timeout_at(until, self.in_use.acquire_many(IN_USE_MAX)).await;
        self.idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
        self.link.close(until).await;
        match all {
            Ok(_) => Ok(()),
            Err(_) => {
                let detail = "messages were unconfirmed at the deadline";
                Err(Error::new(ErrorKind::Timeout, "close", detail))
            }
        }
    }
}

impl Part {
    /// Runs the first `count` and settles those that were answered; the others stay in front.
    async fn run(&mut self, line: &Line, count: usize, until: Instant) -> Option<Trouble> {
        let (places, records): (Vec<usize>, Vec<Record>) =
            self.left.drain(..count.min(self.left.len())).unzip();
        let (answers, trouble) = line.run(&records, until).await;
        let mut open = Vec::new();
        for ((at, record), answer) in places.into_iter().zip(records).zip(answers) {
            let name = || format!("{}/{}", record.exchange, record.routing_key);
            let outcome = match answer {
                Answer::Stored => PublishOutcome::Confirmed,
                Answer::Unroutable => {
                    let detail = format!("unroutable: no queue is bound for {}", name());
                    let error = Error::new(ErrorKind::NotFound, "publish", detail);
                    rejected(RejectionScope::Destination, error)
                }
                Answer::Refused => {
                    let detail = format!("a queue of {} takes no more", name());
                    let error = Error::new(ErrorKind::Busy, "publish", detail);
                    // Another queue may have taken it, and one that crashed may have stored it before.
                    failed(FailureScope::Destination, Stored::Unknown, error)
                }
                Answer::None | Answer::Unsent => {
                    self.tried |= answer == Answer::None;
                    open.push((at, record));
                    continue;
                }
            };
            self.done.push((at, outcome));
        }
        for entry in open.into_iter().rev() {
            self.left.push_front(entry);
        }
        trouble
    }

    /// The first alone was refused; with its exchange missing, all are.
    fn reject_first(&mut self, error: lapin::Error) {
        let blame = blame(&error);
        let scope = match blame {
            Blame::Message => RejectionScope::Message,
            _ => RejectionScope::Destination,
        };
        let all = blame == Blame::Exchange;
        let count = if all { self.left.len() } else { 1 };
        for (at, record) in self.left.drain(..count.min(self.left.len())) {
            let detail = format!("{}/{} was refused", record.exchange, record.routing_key);
            let error = mapped("publish", &detail, error.clone());
            self.done.push((at, rejected(scope, error)));
        }
    }

    fn fail_after(&mut self, trouble: Trouble, line: &Line) {
        match trouble {
            Trouble::Blocked => self.fail(FailureScope::Broker, blocked),
            // On a connection that is well another exchange or queue may answer.
            Trouble::Deadline => self.fail(FailureScope::Destination, || {
                Error::new(ErrorKind::Timeout, "publish", "no confirm in time")
            }),
            Trouble::Client(error) => {
                // The client gives out such errors before it says that it is not connected.
                let scope = if line.is_connected() && !ends_connection(&error) {
                    FailureScope::Destination
                } else {
                    FailureScope::Broker
                };
                self.fail(scope, || mapped("publish", "not confirmed", error.clone()));
            }
        }
    }

    fn fail_with(&mut self, scope: FailureScope, error: Error) {
        let (kind, text) = (error.kind(), error.to_string());
        self.fail(scope, || Error::new(kind, "publish", text.clone()));
    }

    fn fail(&mut self, scope: FailureScope, error: impl Fn() -> Error) {
        let stored = if self.tried {
            Stored::Unknown
        } else {
            Stored::No
        };
        for (at, _) in self.left.drain(..) {
            self.done.push((at, failed(scope, stored, error())));
        }
    }
}

fn blocked() -> Error {
    let detail = "the broker takes nothing because of an alarm";
    Error::new(ErrorKind::Unavailable, "publish", detail)
}

fn all_failed(
    indices: Vec<usize>,
    scope: FailureScope,
    stored: Stored,
    error: Error,
) -> impl Iterator<Item = (usize, PublishOutcome)> {
    let (kind, text) = (error.kind(), error.to_string());
    indices.into_iter().map(move |at| {
        let error = Error::new(kind, "publish", text.clone());
        (at, failed(scope, stored, error))
    })
}

fn rejected(scope: RejectionScope, error: Error) -> PublishOutcome {
    PublishOutcome::Rejected { scope, error }
}

fn failed(scope: FailureScope, stored: Stored, error: Error) -> PublishOutcome {
    PublishOutcome::Failed {
        scope,
        stored,
        error,
    }
}
