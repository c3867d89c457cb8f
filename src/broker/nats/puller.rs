//! One durable consumer's messages: asked for as there is room, kept alive while they are held, given back at the end.
//!
//! The client's own streams of messages keep a buffer that its user cannot see, in which the time of a delivery runs out.
//! So the questions are asked here: never for more than there is room, and whatever arrives is kept alive at once.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Message, StatusCode, Subject};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::config::NatsConfig;
use super::desk::{Desk, Item};
use super::durable::{Feed, restore_consumer};
use super::link::Link;
use super::record::{self, Place};
use super::rescue::{Raw, unreadable};
use super::shelf::{Lease, Shelf};
use crate::backoff::{DelayPolicy, Delays, Jitter};
use crate::error::{Error, ErrorKind, Result};

/// Between two warnings about the same source.
const WARN_INTERVAL: Duration = Duration::from_secs(10);
/// How late a due message is noticed when the system's clock jumps.
const DUE_TURN: Duration = Duration::from_secs(1);

/// When a message that is held may be delivered.
#[derive(Clone, Copy)]
pub(super) enum When {
    /// On a rung: by the system's clock, which its `x-due-at` goes by.
    Due(OffsetDateTime),
    /// Released with a delay, and here too early.
    After(Instant),
}

impl When {
    fn left(self) -> Duration {
        match self {
            Self::Due(at) => {
                Duration::try_from(at - OffsetDateTime::now_utc()).unwrap_or(Duration::ZERO)
            }
            Self::After(at) => at.saturating_duration_since(Instant::now()),
        }
    }
}

/// A question that stands at the server.
pub(super) struct Pull {
    pub(super) number: u64,
    /// Messages still to come.
    pub(super) left: usize,
    pub(super) heard: Instant,
}

/// Signs of life that were sent, and what the answer to the last of them makes certain.
pub(super) struct Signs {
    pub(super) number: u64,
    pub(super) leases: Vec<Arc<Lease>>,
    pub(super) until: Instant,
    pub(super) sent: Instant,
}

pub(super) struct Puller {
    pub(super) config: NatsConfig,
    pub(super) link: Arc<Link>,
    pub(super) feed: Feed,
    pub(super) shelf: Arc<Shelf>,
    pub(super) desk: Arc<Desk>,
    pub(super) inbox: String,
    pub(super) subscriber: async_nats::Subscriber,
    pub(super) pull: Option<Pull>,
    pub(super) signs: Option<Signs>,
    pub(super) numbers: u64,
    pub(super) held: Vec<(When, Item)>,
    pub(super) delays: Delays,
    /// After trouble: not before this.
    pub(super) pause: Option<Instant>,
    /// After trouble: a question to be answered before the next pull.
    pub(super) errand: Option<Errand>,
    /// When the connection was last lost under a pull, and whether that may be by what was pulled.
    pub(super) lost: Option<Instant>,
    pub(super) suspicious: bool,
    pub(super) warned: Option<Instant>,
    /// What was acknowledged last, if the server has not said since that it knows.
    pub(super) unconfirmed: Option<Subject>,
}

impl Puller {
    pub(super) async fn new(
        config: &NatsConfig,
        link: Arc<Link>,
        feed: Feed,
        shelf: Arc<Shelf>,
        desk: Arc<Desk>,
    ) -> Result<Self> {
        let inbox = link.client.new_inbox();
        let subscribing = link.client.subscribe(format!("{inbox}.*"));
        let subscriber = link.ask("subscribe", "no inbox", subscribing).await?;
        let seed = fastrand::u64(..);
        let delays = DelayPolicy::exponential(Duration::from_millis(50))
            .with_cap(Duration::from_secs(5))
            .with_jitter(Jitter::Equal)
            .delays(seed);
        Ok(Self {
            config: config.clone(),
            link,
            feed,
            shelf,
            desk,
            inbox,
            subscriber,
            pull: None,
            signs: None,
            numbers: 0,
            held: Vec::new(),
            delays,
            pause: None,
            errand: None,
            lost: None,
            suspicious: false,
            warned: None,
            unconfirmed: None,
        })
    }

    /// Goes on until it is told by when to be done.
    pub(super) async fn run(mut self, mut close: watch::Receiver<Option<Instant>>) -> Result<()> {
        let mut changes = self.link.changes();
        let mut losses = changes.borrow().losses;
        let turn = (self.config.ack_wait / 12).max(Duration::from_millis(20));
        let mut tend_at = Instant::now();
        let until = loop {
            self.send_settled().await;
            if let Some(until) = *close.borrow_and_update() {
                break until;
            }
            self.deliver_due();
            let now = Instant::now();
            if now >= tend_at {
                self.keep_alive().await;
                self.listen_for_silence();
                tend_at = now + turn;
            }
            self.look_for_unreadable();
            self.ask_for_more().await;
            let wake = self.wake().map_or(tend_at, |wake| wake.min(tend_at));
            tokio::select! {
                message = self.subscriber.next() => match message {
                    Some(message) => self.take(message),
                    // The connection is closed for good, which only its last owner does.
                    None => {
                        let detail = "the connection is closed";
                        self.desk.fail(Error::new(ErrorKind::Closed, "receive", detail));
                        return Ok(());
                    }
                },
                () = self.shelf.changed.notified() => {}
                changed = close.changed() => if changed.is_err() {
                    break close.borrow().unwrap_or_else(Instant::now);
                },
                _ = changes.changed() => {
                    let now = changes.borrow_and_update().losses;
                    if std::mem::replace(&mut losses, now) != now {
                        self.lost_connection();
                    }
                }
                checked = run_errand(&mut self.errand) => self.checked(checked),
                () = sleep_until(wake) => {}
            }
        };
        self.farewell(until).await
    }

    fn wake(&self) -> Option<Instant> {
        let now = Instant::now();
        let due = self
            .held
            .iter()
            .map(|(when, _)| when.left().min(DUE_TURN))
            .min();
        let due = due.map(|left| now + left.max(Duration::from_millis(1)));
        let pause = self.pause.filter(|_| self.pull.is_none());
        [due, pause].into_iter().flatten().min()
    }

    /// What stood at the server went with the connection. Lost again soon under a pull, it may have been lost by a message
    /// that the client cannot read.
    fn lost_connection(&mut self) {
        self.signs = None;
        if self.pull.take().is_some() {
            let now = Instant::now();
            let soon = 3 * self.config.ack_wait;
            let before = self.lost.replace(now);
            self.suspicious |= before.is_some_and(|before| now < before + soon);
        }
    }

    fn look_for_unreadable(&mut self) {
        if self.suspicious && self.feed.checked && self.errand.is_none() && self.link.is_connected()
        {
            self.suspicious = false;
            let (link, feed) = (Arc::clone(&self.link), self.feed.clone());
            let shelf = Arc::clone(&self.shelf);
            self.errand = Some(Box::pin(
                async move { unreadable(&link, &feed, &shelf).await },
            ));
        }
    }

    fn listen_for_silence(&mut self) {
        let silent = self
            .pull
            .as_ref()
            .is_some_and(|pull| pull.heard.elapsed() > 2 * self.config.heartbeat);
        if silent {
            self.trouble("two heartbeats are missing", true);
        }
    }

    fn take(&mut self, message: Message) {
        if let Some(rest) = message.subject.strip_prefix(self.inbox.as_str()) {
            let token = rest.trim_start_matches('.').to_owned();
            return self.take_word(&token, &message);
        }
        if let Some(pull) = &mut self.pull {
            pull.heard = Instant::now();
            pull.left = pull.left.saturating_sub(1);
            if pull.left == 0 {
                self.pull = None;
            }
        }
        self.delays.reset();
        self.take_message(message);
    }

    fn take_message(&mut self, message: Message) {
        let until = Instant::now() + self.config.ack_wait;
        let message = async_nats::jetstream::Message {
            message,
            context: self.link.context.clone(),
        };
        let (sequence, delivered, stored_at) = match message.info() {
            Ok(info) => (info.stream_sequence, info.delivered, info.published),
            // Not from a consumer: somebody wrote into our inbox.
            Err(_) => return,
        };
        let message = message.message;
        let Some(reply) = message.reply else {
            return;
        };
        let place = Place {
            subject: message.subject.as_str(),
            stream: &self.feed.stream.clone(),
            sequence,
            stored_at,
        };
        let lines = record::lines(message.headers.as_ref());
        self.lay_out(&place, reply, until, delivered > 1, lines, message.payload);
    }

    /// One that was fetched as data. The server counts its time since it gave it to a connection that is gone, so a sign of
    /// life is due at once.
    fn take_raw(&mut self, raw: Raw) {
        let until = Instant::now() + self.config.ack_wait / 3;
        let place = Place {
            subject: &raw.subject,
            stream: &self.feed.stream.clone(),
            sequence: raw.sequence,
            stored_at: raw.stored_at,
        };
        self.lay_out(&place, raw.reply, until, true, raw.headers, raw.payload);
    }

    fn lay_out(
        &mut self,
        place: &Place<'_>,
        reply: Subject,
        until: Instant,
        redelivered: bool,
        lines: Vec<(String, Bytes)>,
        payload: Bytes,
    ) {
        let Some((lease, wait)) = self.shelf.take_in(place.sequence, reply, until) else {
            return;
        };
        let received = record::received(place, lines, payload);
        let coordinates = received.coordinates.clone();
        let incoming = received.read();
        let due = incoming.story.due_at.filter(|_| self.feed.is_rung);
        let item = Item {
            shelf: Arc::clone(&self.shelf),
            lease,
            incoming,
            coordinates,
            redelivered,
        };
        match due.map(When::Due).or(wait.map(When::After)) {
            Some(when) if !when.left().is_zero() => self.held.push((when, item)),
            _ => self.desk.offer(item),
        }
    }

    fn deliver_due(&mut self) {
        // The earliest first; the sort keeps the order of those that are due at the same time.
        if self.held.iter().any(|(when, _)| when.left().is_zero()) {
            self.held.sort_by_key(|(when, _)| when.left());
            let due = self.held.partition_point(|(when, _)| when.left().is_zero());
            for (_, item) in self.held.drain(..due) {
                self.desk.offer(item);
            }
        }
    }

    /// An answer of the server's about a question or a sign of life.
    fn take_word(&mut self, token: &str, message: &Message) {
        let status = message.status.unwrap_or(StatusCode::OK);
        let Some(number) = token.get(1..).and_then(|number| number.parse::<u64>().ok()) else {
            return;
        };
        if token.starts_with('w') {
            if let Some(signs) = self.signs.take_if(|signs| signs.number == number)
                && status != StatusCode::NO_RESPONDERS
            {
                for lease in &signs.leases {
                    lease.extend(signs.until);
                }
            }
            return;
        }
        // The answer to an earlier question says nothing about this one.
        let Some(pull) = self.pull.as_mut().filter(|pull| pull.number == number) else {
            return;
        };
        pull.heard = Instant::now();
        match status {
            StatusCode::IDLE_HEARTBEAT => {}
            // It stood its time, or there was nothing.
            StatusCode::TIMEOUT | StatusCode::NOT_FOUND => {
                self.pull = None;
                self.delays.reset();
            }
            _ => {
                let what = message.description.as_deref().unwrap_or("no consumer");
                let gone = status == StatusCode::NO_RESPONDERS || what.contains("Deleted");
                self.trouble(&format!("{status}: {what}"), gone);
            }
        }
    }

    /// Asks again after a while, and first whether the consumer is still there, if that is in doubt.
    pub(super) fn trouble(&mut self, what: &str, in_doubt: bool) {
        self.pull = None;
        self.pause = Some(Instant::now() + self.delays.next_delay());
        let Feed {
            stream, durable, ..
        } = &self.feed;
        let detail = format!(
            "consumer {durable} of stream {stream} is in trouble and goes on trying: {what}"
        );
        if self.warned.is_none_or(|at| at.elapsed() >= WARN_INTERVAL) {
            self.warned = Some(Instant::now());
            tracing::warn!(
                stream,
                durable,
                what,
                "receiving is in trouble and goes on trying"
            );
            self.desk
                .report(Error::new(ErrorKind::Unavailable, "receive", detail));
        }
        if in_doubt && self.errand.is_none() {
            let (config, link, feed) = (
                self.config.clone(),
                Arc::clone(&self.link),
                self.feed.clone(),
            );
            self.errand = Some(Box::pin(async move {
                restore_consumer(&config, link, &feed).await?;
                Ok(Vec::new())
            }));
        }
    }

    fn checked(&mut self, checked: Result<Vec<Raw>>) {
        self.errand = None;
        match checked {
            Ok(found) => {
                // Of a consumer that was made anew the server would not know it.
                self.unconfirmed = None;
                for raw in found {
                    self.take_raw(raw);
                }
            }
            Err(error) if error.is_transient() => {
                self.pause = Some(Instant::now() + self.delays.next_delay());
                tracing::warn!(%error, "a question about the consumer was not answered");
            }
            Err(error) => self.desk.fail(error),
        }
    }
}

/// A question, and the messages that came with its answer.
type Errand = BoxFuture<'static, Result<Vec<Raw>>>;

async fn run_errand(errand: &mut Option<Errand>) -> Result<Vec<Raw>> {
    match errand {
        Some(errand) => errand.await,
        None => std::future::pending().await,
    }
}
