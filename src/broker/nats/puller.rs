//! One durable consumer's messages: asked for as there is room, kept alive while they are held, given back at the end.
//!
//! The client's own streams of messages keep a buffer that its user cannot see, in which the time of a delivery runs out.
//! So the questions are asked here: never for more than there is room, and whatever arrives is kept alive at once.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Message, StatusCode, Subject};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::config::NatsConfig;
use super::desk::{Desk, Item, Vigil};
use super::durable::{Feed, restore_consumer};
use super::ear::Ear;
use super::link::{Changes, Link, Renewable};
use super::record::{self, Place};
use super::rescue::{Look, Raw, unreadable};
use super::shelf::{Lease, Shelf};
use super::when::{Now, When, still};
use crate::backoff::{DelayPolicy, Delays, Jitter};
use crate::error::{Error, ErrorKind, Result};

/// Between two warnings about the same source.
const WARN_INTERVAL: Duration = Duration::from_secs(10);
/// How late a due message is noticed when the system's clock jumps.
const DUE_TURN: Duration = Duration::from_secs(1);

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
    links: Arc<Renewable>,
    pub(super) link: Arc<Link>,
    pub(super) changes: watch::Receiver<Changes>,
    /// Losses of the connection that are dealt with.
    losses: u64,
    pub(super) feed: Feed,
    pub(super) shelf: Arc<Shelf>,
    pub(super) desk: Arc<Desk>,
    pub(super) ear: Ear,
    /// The ear is deaf: its connection is over.
    deaf: bool,
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
    /// From where on unreadable messages are looked for.
    cursor: u64,
    pub(super) warned: Option<Instant>,
    /// What was acknowledged last, if the server has not said since that it knows.
    pub(super) unconfirmed: Option<Subject>,
}

impl Puller {
    pub(super) async fn new(
        config: &NatsConfig,
        links: Arc<Renewable>,
        feed: Feed,
        shelf: Arc<Shelf>,
        desk: Arc<Desk>,
    ) -> Result<Self> {
        let link = links.current();
        let mut changes = link.changes();
        let losses = changes.borrow_and_update().losses;
        let ear = Ear::open(&link).await?;
        let seed = fastrand::u64(..);
        let delays = DelayPolicy::exponential(Duration::from_millis(50))
            .with_cap(Duration::from_secs(5))
            .with_jitter(Jitter::Equal)
            .delays(seed);
        Ok(Self {
            config: config.clone(),
            links,
            link,
            changes,
            losses,
            feed,
            shelf,
            desk,
            ear,
            deaf: false,
            pull: None,
            signs: None,
            numbers: 0,
            held: Vec::new(),
            delays,
            pause: None,
            errand: None,
            lost: None,
            suspicious: false,
            cursor: 0,
            warned: None,
            unconfirmed: None,
        })
    }

    /// Goes on until it is told by when to be done.
    pub(super) async fn run(mut self, mut close: watch::Receiver<Option<Instant>>) -> Result<()> {
        let _vigil = Vigil(Arc::clone(&self.desk));
        // Often enough for signs of life, and to notice that heartbeats are missing.
        let turn = (self.config.ack_wait / 12).min(self.config.heartbeat);
        let turn = turn.max(Duration::from_millis(20));
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
            self.pause = still(self.pause, now);
            self.renew();
            self.look_for_unreadable();
            self.ask_for_more().await;
            let wake = self.wake().map_or(tend_at, |wake| wake.min(tend_at));
            tokio::select! {
                message = self.ear.next(), if !self.deaf => match message {
                    Some(message) => self.take(message),
                    None => self.lost_for_good(),
                },
                () = self.shelf.changed.notified() => {}
                changed = close.changed() => if changed.is_err() {
                    break close.borrow().unwrap_or_else(Instant::now);
                },
                _ = self.changes.changed() => {
                    let now = self.changes.borrow_and_update().losses;
                    if std::mem::replace(&mut self.losses, now) != now {
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
        let now = Now::get();
        let due = self
            .held
            .iter()
            .map(|(when, _)| when.left(now).min(DUE_TURN))
            .min();
        let due = due.map(|left| now.steady + left.max(Duration::from_millis(1)));
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

    /// The client gave up altogether: it panics over some of what it cannot read.
    fn lost_for_good(&mut self) {
        self.deaf = true;
        self.lost_connection();
        self.suspicious = true;
        self.trouble("the client gave up its connection", false);
    }

    fn renew(&mut self) {
        if self.deaf && self.errand.is_none() && self.pause.is_none() {
            let (links, over) = (Arc::clone(&self.links), Arc::clone(&self.link));
            self.errand = Some(Box::pin(async move {
                let link = links.renew(&over).await?;
                let ear = Ear::open(&link).await?;
                Ok(Answer::Renewed(link, ear))
            }));
        }
    }

    fn look_for_unreadable(&mut self) {
        let asks = self.errand.is_none() && self.pause.is_none() && self.link.is_connected();
        if self.suspicious && self.feed.checked && asks {
            // Also where it fails, for example because it is not allowed: the next loss brings the next one.
            self.suspicious = false;
            let (link, feed) = (Arc::clone(&self.link), self.feed.clone());
            let (shelf, cursor) = (Arc::clone(&self.shelf), self.cursor);
            self.errand = Some(Box::pin(async move {
                let look = unreadable(&link, &feed, &shelf, cursor).await?;
                Ok(Answer::Looked(look))
            }));
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
        if let Some(token) = self.ear.token(&message) {
            let token = token.to_owned();
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
        let taken = self
            .shelf
            .take_in(place.sequence, place.stored_at, reply, until);
        let Some((lease, wait)) = taken else {
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
            Some(when) if !when.left(Now::get()).is_zero() => self.held.push((when, item)),
            _ => self.desk.offer(item),
        }
    }

    fn deliver_due(&mut self) {
        // The earliest first; the sort keeps the order of those that are due at the same time.
        let now = Now::get();
        let is_due = |(when, _): &(When, Item)| when.left(now).is_zero();
        if self.held.iter().any(is_due) {
            self.held.sort_by_key(|(when, _)| when.left(now));
            let due = self.held.partition_point(is_due);
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
                Ok(Answer::Restored)
            }));
        }
    }

    fn adopt(&mut self, link: Arc<Link>) {
        self.changes = link.changes();
        self.losses = self.changes.borrow_and_update().losses;
        self.link = link;
    }

    /// Waits until there is a connection, and makes one if the client does not.
    pub(super) async fn connected(&mut self) -> Result<()> {
        while !self.link.is_connected() {
            if self.link.is_over() {
                let link = self.links.renew(&self.link).await?;
                self.adopt(link);
            } else if self.changes.changed().await.is_err() {
                return self.link.require("close");
            }
        }
        Ok(())
    }

    fn checked(&mut self, checked: Result<Answer>) {
        self.errand = None;
        match checked {
            // Of a consumer that was made anew the server would not know it.
            Ok(Answer::Restored) => self.unconfirmed = None,
            Ok(Answer::Looked(look)) => {
                self.suspicious = look.next.is_some();
                self.cursor = look.next.unwrap_or(0);
                for raw in look.found {
                    self.take_raw(raw);
                }
            }
            Ok(Answer::Renewed(link, ear)) => {
                self.adopt(link);
                self.ear = ear;
                self.deaf = false;
            }
            Err(error) if error.is_transient() => {
                self.pause = Some(Instant::now() + self.delays.next_delay());
                tracing::warn!(%error, "a question about the consumer was not answered");
            }
            Err(error) => self.desk.fail(error),
        }
    }
}

/// What an errand brought.
pub(super) enum Answer {
    /// The consumer is as it must be.
    Restored,
    Looked(Look),
    Renewed(Arc<Link>, Ear),
}

type Errand = BoxFuture<'static, Result<Answer>>;

async fn run_errand(errand: &mut Option<Errand>) -> Result<Answer> {
    match errand {
        Some(errand) => errand.await,
        None => std::future::pending().await,
    }
}
