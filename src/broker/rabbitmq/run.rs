//! One run: messages published on one channel, and the broker's word on each.
//!
//! The channel belongs to the run alone, and one with anything left open is never used again. So whatever is returned
//! on it belongs to this run: the client hands a returned message to whichever confirm comes next, not to its own.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use lapin::message::BasicReturnMessage;
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
pub(super) struct Record {
    pub(super) exchange: ShortString,
    pub(super) routing_key: ShortString,
    pub(super) properties: BasicProperties,
    pub(super) body: Bytes,
}

impl Record {
    fn is(&self, returned: &lapin::message::Delivery) -> bool {
        self.exchange == returned.exchange
            && self.routing_key == returned.routing_key
            && self.properties.message_id() == returned.properties.message_id()
    }
}

/// A channel in confirm mode.
pub(super) struct Line {
    connection: Arc<Connection>,
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
        self.is_connected() && self.channel.status().connected()
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connection.status().connected()
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
        records: &[Record],
        until: Instant,
    ) -> (Vec<Answer>, Option<Trouble>) {
        let mut told = Told::new(records.len());
        let mut flight = Flight {
            channel: self.channel.clone(),
            writes: VecDeque::new(),
            confirms: VecDeque::with_capacity(records.len()),
        };
        let mut next = 0;
        while next < records.len() && told.trouble.is_none() {
            let end = window(records, next);
            for (at, record) in records.iter().enumerate().take(end).skip(next) {
                let mut write = self.publish(record);
                told.began(at);
                // The first poll gives the message its number and its place in the client's queue: one after another.
                match (&mut write).now_or_never() {
                    Some(written) => flight.written(at, written, &mut told),
                    None => flight.writes.push_back((at, write)),
                }
            }
            while let Some((at, write)) = flight.writes.front_mut()
                && told.trouble.is_none()
            {
                let at = *at;
                match self.wait(write, until).await {
                    Ok(written) => {
                        flight.writes.pop_front();
                        flight.written(at, written, &mut told);
                    }
                    Err(other) => note(&mut told.trouble, other),
                }
            }
            next = end;
        }
        while let Some((at, confirm)) = flight.confirms.front_mut()
            && told.trouble.is_none()
        {
            let at = *at;
            match self.wait(confirm, until).await {
                Ok(said) => {
                    flight.confirms.pop_front();
                    told.hear(at, said);
                }
                Err(other) => note(&mut told.trouble, other),
            }
        }
        if told.trouble.is_some() {
            // Takes the lock under which the client gives out a returned message with somebody's confirm and then its own:
            // behind it every message heard of so far has its return in a confirm that is here.
            let given_out = || drop(self.channel.wait_for_confirms().now_or_never());
            catch_up(&mut told, |told| flight.look(told), given_out);
        }
        told.end(records)
    }

    fn publish(&self, record: &Record) -> Write {
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let (channel, body) = (self.channel.clone(), record.body.clone());
        let (exchange, routing_key) = (record.exchange.clone(), record.routing_key.clone());
        let properties = record.properties.clone();
        Box::pin(async move {
            channel
                .basic_publish(exchange, routing_key, options, &body, properties)
                .await
        })
    }

    /// Waits, but not beyond the deadline and not for a broker that has stopped reading.
    async fn wait<F: Future + Unpin>(
        &self,
        future: &mut F,
        until: Instant,
    ) -> Result<F::Output, Trouble> {
        let mut blocked_since = None;
        loop {
            let now = Instant::now();
            let look = until.min(now + LOOK);
            if let Ok(output) = timeout_at(look, &mut *future).await {
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

type Write = BoxFuture<'static, lapin::Result<PublisherConfirm>>;

/// The messages of a run that are on their way. None is let go before the end: any of them may be given what was returned of
/// another.
struct Flight {
    channel: Channel,
    /// Handed to the client, and perhaps not yet written.
    writes: VecDeque<(usize, Write)>,
    /// Written, and not yet answered.
    confirms: VecDeque<(usize, PublisherConfirm)>,
}

impl Flight {
    fn written(&mut self, at: usize, written: lapin::Result<PublisherConfirm>, told: &mut Told) {
        match written {
            Ok(confirm) => self.confirms.push_back((at, confirm)),
            Err(error) => note(&mut told.trouble, Trouble::Client(error)),
        }
    }

    /// Hears what is there already, without waiting.
    fn look(&mut self, told: &mut Told) {
        for (at, mut write) in std::mem::take(&mut self.writes) {
            match (&mut write).now_or_never() {
                Some(written) => self.written(at, written, told),
                None => self.writes.push_back((at, write)),
            }
        }
        hear_all(&mut self.confirms, told);
    }
}

impl Drop for Flight {
    /// A channel is closed when it is dropped, and the client sends that in front of messages that wait to be written. On a
    /// channel that is closed already the broker takes them for a violation, and ends the whole connection.
    fn drop(&mut self) {
        let writes = std::mem::take(&mut self.writes);
        if writes.is_empty() {
            return;
        }
        let channel = self.channel.clone();
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            // Ends with the connection at the latest.
            runtime.spawn(async move {
                for (_, write) in writes {
                    drop(write.await);
                }
                drop(channel);
            });
        }
    }
}

/// After a trouble: what is there already still counts, and whatever was returned of it is with one of the others.
fn catch_up(told: &mut Told, mut look: impl FnMut(&mut Told), given_out: impl FnOnce()) {
    look(told);
    given_out();
    told.returns_only = true;
    look(told);
}

/// Asks each once. What has nothing to say yet stays.
fn hear_all<C>(confirms: &mut VecDeque<(usize, C)>, told: &mut Told)
where
    C: Future<Output = lapin::Result<Confirmation>> + Unpin,
{
    confirms.retain_mut(|(at, confirm)| match confirm.now_or_never() {
        Some(said) => {
            told.hear(*at, said);
            false
        }
        None => true,
    });
}

/// What was heard of a run.
struct Told {
    answers: Vec<Answer>,
    returned: Vec<BasicReturnMessage>,
    trouble: Option<Trouble>,
    /// Whether an answer still counts, or only what was returned with it.
    returns_only: bool,
}

impl Told {
    fn new(count: usize) -> Self {
        Self {
            answers: vec![Answer::Unsent; count],
            returned: Vec::new(),
            trouble: None,
            returns_only: false,
        }
    }

    fn began(&mut self, at: usize) {
        self.answer(at, Answer::None);
    }

    fn answer(&mut self, at: usize, answer: Answer) {
        if let Some(slot) = self.answers.get_mut(at) {
            *slot = answer;
        }
    }

    fn hear(&mut self, at: usize, said: lapin::Result<Confirmation>) {
        let (answer, message) = match said {
            Ok(Confirmation::Ack(message)) => (Answer::Stored, message),
            Ok(Confirmation::Nack(message)) => (Answer::Refused, message),
            // Confirms were asked for; without one nothing is known.
            Ok(Confirmation::NotRequested) => (Answer::None, None),
            Err(error) => {
                note(&mut self.trouble, Trouble::Client(error));
                (Answer::None, None)
            }
        };
        self.returned.extend(message);
        if !self.returns_only {
            self.answer(at, answer);
        }
    }

    fn end(mut self, records: &[Record]) -> (Vec<Answer>, Option<Trouble>) {
        for message in &self.returned {
            for (record, answer) in records.iter().zip(&mut self.answers) {
                if record.is(&message.delivery) {
                    *answer = Answer::Unroutable;
                }
            }
        }
        (self.answers, self.trouble)
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
fn window(records: &[Record], start: usize) -> usize {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::future::ready;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use super::*;

    fn record(id: &'static str) -> Record {
        Record {
            exchange: "events".into(),
            routing_key: "k".into(),
            properties: BasicProperties::default().with_message_id(id.into()),
            body: Bytes::new(),
        }
    }

    fn returned(id: &'static str) -> BasicReturnMessage {
        let mut delivery =
            lapin::message::Delivery::mock(0, "events".into(), "k".into(), false, Vec::new());
        delivery.properties = record(id).properties;
        BasicReturnMessage {
            delivery,
            reply_code: 312,
            reply_text: "NO_ROUTE".into(),
        }
    }

    /// A confirm that has nothing to say when it is asked first.
    struct Late(Option<Confirmation>, bool);

    impl Future for Late {
        type Output = lapin::Result<Confirmation>;

        fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
            if std::mem::take(&mut self.1) {
                return Poll::Pending;
            }
            Poll::Ready(Ok(self.0.take().unwrap()))
        }
    }

    /// The client gave what was returned of the second to the first, whose wait had ended.
    #[test]
    fn what_comes_after_a_trouble_is_never_taken_for_stored_when_it_was_returned() {
        let records = [record("0"), record("1"), record("2")];
        let mut told = Told::new(3);
        (0..3).for_each(|at| told.began(at));
        note(&mut told.trouble, Trouble::Deadline);
        let mut confirms = VecDeque::from([
            (0, Late(Some(Confirmation::Ack(Some(returned("1")))), true)),
            (1, Late(Some(Confirmation::Ack(None)), false)),
            (2, Late(Some(Confirmation::Ack(None)), false)),
        ]);
        catch_up(&mut told, |told| hear_all(&mut confirms, told), || ());
        assert!(confirms.is_empty());
        let (answers, _) = told.end(&records);
        assert_eq!(answers, [Answer::None, Answer::Unroutable, Answer::Stored]);
    }

    #[test]
    fn a_refusal_and_no_confirm_are_told_apart() {
        let records = [record("0"), record("1"), record("2")];
        let mut told = Told::new(3);
        told.began(0);
        told.began(1);
        let mut confirms = VecDeque::from([
            (0, ready(Ok(Confirmation::Nack(None)))),
            (1, ready(Ok(Confirmation::NotRequested))),
        ]);
        hear_all(&mut confirms, &mut told);
        let (answers, trouble) = told.end(&records);
        assert_eq!(answers, [Answer::Refused, Answer::None, Answer::Unsent]);
        assert!(trouble.is_none());
    }
}
