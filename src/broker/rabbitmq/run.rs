//! One run: messages published on one channel, and the broker's word on each.
//!
//! The channel belongs to the run alone, and one with anything left open is never used again. So whatever is returned
//! on it belongs to this run: the client hands a returned message to whichever confirm comes next, not to its own.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation, Connection, PublisherConfirm};
use tokio::time::{Instant, timeout_at};

use super::error::{Blame, blame};
use super::link::Link;
use crate::error::Result;

/// Messages handed to the client at once, and their bytes; a larger one goes alone.
const WINDOW_MAX: usize = 64;
const WINDOW_BYTES_MAX: usize = 1_024 * 1_024;
/// How often a wait looks whether the broker has blocked the connection.
const LOOK: Duration = Duration::from_millis(100);
/// What the broker may still confirm after it said that it reads no more.
const BLOCKED_GRACE: Duration = Duration::from_millis(500);

/// A message ready to be sent.
pub(super) struct Record<'a> {
    pub(super) exchange: ShortString,
    pub(super) routing_key: ShortString,
    pub(super) properties: BasicProperties,
    pub(super) body: &'a [u8],
}

impl Record<'_> {
    fn is(&self, returned: &lapin::message::Delivery) -> bool {
        self.exchange == returned.exchange
            && self.routing_key == returned.routing_key
            && self.properties.message_id() == returned.properties.message_id()
    }
}

/// A channel in confirm mode.
pub(super) struct Line {
    pub(super) connection: Arc<Connection>,
    channel: Channel,
}

/// The broker's word on one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Stored,
    /// Confirmed, but no queue has it.
    Unroutable,
    /// A queue would not take it.
    Refused,
    /// Never handed to the client.
    Unsent,
    /// Perhaps stored.
    None,
}

/// Why a run ended before all answers were there.
pub(super) enum Trouble {
    Deadline,
    Blocked,
    Client(lapin::Error),
}

impl Line {
    pub(super) async fn open(link: &Link, until: Instant) -> Result<Self> {
        let (connection, channel) = link.channel("publish", until).await?;
        let select = channel.confirm_select(ConfirmSelectOptions::default());
        match timeout_at(until, select).await {
            Ok(Ok(())) => Ok(Self {
                connection,
                channel,
            }),
            Ok(Err(error)) => Err(super::error::mapped("publish", "no channel", error)),
            Err(_) => {
                let detail = "a channel was not ready in time";
                Err(crate::Error::new(
                    crate::ErrorKind::Timeout,
                    "publish",
                    detail,
                ))
            }
        }
    }

    pub(super) fn is_usable(&self) -> bool {
        self.connection.status().connected() && self.channel.status().connected()
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.connection.status().blocked()
    }

    /// The most that properties and headers may be on this connection.
    pub(super) fn header_bytes_max(&self) -> usize {
        const FRAMING: usize = 64;
        let frame = usize::try_from(self.connection.configuration().frame_max());
        match frame {
            // 0 is no limit.
            Ok(0) | Err(_) => super::record::HEADER_BYTES_MAX,
            Ok(frame) => super::record::HEADER_BYTES_MAX.min(frame.saturating_sub(FRAMING)),
        }
    }

    /// Publishes in order and waits for every answer. Without a trouble the line may be used again.
    pub(super) async fn run(
        &self,
        records: &[Record<'_>],
        until: Instant,
    ) -> (Vec<Answer>, Option<Trouble>) {
        let mut answers = vec![Answer::Unsent; records.len()];
        let mut confirms: Vec<(usize, PublisherConfirm)> = Vec::with_capacity(records.len());
        let mut trouble = None;
        let mut next = 0;
        while next < records.len() && trouble.is_none() {
            let end = window(records, next);
            let mut writing = Vec::with_capacity(end - next);
            for (at, record) in records.iter().enumerate().take(end).skip(next) {
                let mut publish = Box::pin(self.publish(record));
                // The first poll gives the message its number and its place in the client's queue: one after another.
                let first = poll_fn(|cx| Poll::Ready(publish.as_mut().poll(cx))).await;
                if let Some(answer) = answers.get_mut(at) {
                    *answer = Answer::None;
                }
                writing.push((at, publish, first));
            }
            for (at, publish, first) in writing {
                let written = match first {
                    Poll::Ready(written) => Ok(written),
                    Poll::Pending => self.wait(publish, until).await,
                };
                match written {
                    Ok(Ok(confirm)) => confirms.push((at, confirm)),
                    Ok(Err(error)) => note(&mut trouble, Trouble::Client(error)),
                    Err(other) => note(&mut trouble, other),
                }
            }
            next = end;
        }
        let mut returned = Vec::new();
        for (at, confirm) in confirms {
            // After a trouble what is there already still counts.
            let until = if trouble.is_some() {
                Instant::now()
            } else {
                until
            };
            let answer = match self.wait(Box::pin(confirm), until).await {
                Ok(Ok(Confirmation::Ack(message))) => {
                    returned.extend(message);
                    Answer::Stored
                }
                Ok(Ok(Confirmation::Nack(message))) => {
                    returned.extend(message);
                    Answer::Refused
                }
                // Confirms were asked for; without one nothing is known.
                Ok(Ok(Confirmation::NotRequested)) => Answer::None,
                Ok(Err(error)) => {
                    note(&mut trouble, Trouble::Client(error));
                    Answer::None
                }
                Err(other) => {
                    note(&mut trouble, other);
                    Answer::None
                }
            };
            if let Some(slot) = answers.get_mut(at) {
                *slot = answer;
            }
        }
        for message in returned {
            for (record, answer) in records.iter().zip(&mut answers) {
                if record.is(&message.delivery) {
                    *answer = Answer::Unroutable;
                }
            }
        }
        (answers, trouble)
    }

    async fn publish(&self, record: &Record<'_>) -> lapin::Result<PublisherConfirm> {
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        self.channel
            .basic_publish(
                record.exchange.clone(),
                record.routing_key.clone(),
                options,
                record.body,
                record.properties.clone(),
            )
            .await
    }

    /// Waits, but not beyond the deadline and not for a broker that has stopped reading.
    async fn wait<F: Future>(
        &self,
        mut future: Pin<Box<F>>,
        until: Instant,
    ) -> Result<F::Output, Trouble> {
        let mut blocked_since = None;
        loop {
            let now = Instant::now();
            let look = until.min(now + LOOK);
            if let Ok(output) = timeout_at(look, &mut future).await {
                return Ok(output);
            }
            let now = Instant::now();
            if self.is_blocked() {
                let since = *blocked_since.get_or_insert(now);
                if now.duration_since(since) >= BLOCKED_GRACE {
                    return Err(Trouble::Blocked);
                }
            } else {
                blocked_since = None;
            }
            if now >= until {
                return Err(Trouble::Deadline);
            }
        }
    }
}

/// Keeps the first trouble, unless a later one says whom the broker blames: what comes after its word on a closed channel
/// only says that it is closed.
fn note(trouble: &mut Option<Trouble>, new: Trouble) {
    let tells = |trouble: &Trouble| matches!(trouble, Trouble::Client(error) if blame(error) != Blame::Nobody);
    if trouble.is_none() || (tells(&new) && !trouble.as_ref().is_some_and(tells)) {
        *trouble = Some(new);
    }
}

/// Where the window that begins at `start` ends; it holds at least one.
fn window(records: &[Record<'_>], start: usize) -> usize {
    let mut bytes: usize = 0;
    let mut end = start;
    for record in records.iter().skip(start).take(WINDOW_MAX) {
        bytes = bytes.saturating_add(record.body.len());
        if end > start && bytes > WINDOW_BYTES_MAX {
            break;
        }
        end += 1;
    }
    end.max(start + 1)
}
