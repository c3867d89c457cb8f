//! One durable consumer's messages: asked for as there is room, kept alive while they are held, given back at the end.
//!
//! The client's own streams of messages keep a buffer that its user cannot see, in which the time of a delivery runs out.
//! So the questions are asked here: never for more than there is room, and whatever arrives is kept alive at once.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Message, Request, StatusCode, Subject};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::config::NatsConfig;
use super::desk::{ACKNOWLEDGED, Desk, IN_PROGRESS, Item, Lease, RELEASED, Shelf};
use super::link::Link;
use super::record::{self, Place};
use super::topology::{Feed, ensure_consumer};
use crate::backoff::{DelayPolicy, Delays, Jitter};
use crate::error::{Error, ErrorKind, Result};

/// How long a question stands at the server, in heartbeats.
const EXPIRES_HEARTBEATS: u32 = 6;
/// Between two warnings about the same source.
const WARN_INTERVAL: Duration = Duration::from_secs(10);
/// How late a due message is noticed when the system's clock jumps.
const DUE_TURN: Duration = Duration::from_secs(1);

/// When a message that is held may be delivered.
#[derive(Clone, Copy)]
enum When {
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
struct Pull {
    number: u64,
    /// Messages still to come.
    left: usize,
    heard: Instant,
}

/// Signs of life that were sent, and what the answer to the last of them makes certain.
struct Signs {
    number: u64,
    leases: Vec<Arc<Lease>>,
    until: Instant,
    sent: Instant,
}

pub(super) struct Puller {
    config: NatsConfig,
    link: Arc<Link>,
    feed: Feed,
    shelf: Arc<Shelf>,
    desk: Arc<Desk>,
    inbox: String,
    subscriber: async_nats::Subscriber,
    pull: Option<Pull>,
    signs: Option<Signs>,
    numbers: u64,
    held: Vec<(When, Item)>,
    delays: Delays,
    /// After trouble: not before this.
    pause: Option<Instant>,
    /// After trouble: whether the consumer is still there.
    errand: Option<BoxFuture<'static, Result<()>>>,
    warned: Option<Instant>,
    /// What was acknowledged last, if the server has not said since that it knows.
    unconfirmed: Option<Subject>,
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
            self.ask_for_more().await;
            let wake = self.wake().map_or(tend_at, |wake| wake.min(tend_at));
            tokio::select! {
                message = self.subscriber.next() => match message {
                    Some(message) => self.take(message).await,
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
                        // What stood at the server went with the connection.
                        self.pull = None;
                        self.signs = None;
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

    // ---- What is asked and said

    /// Asks for as many messages as there is room for, one question at a time.
    async fn ask_for_more(&mut self) {
        let now = Instant::now();
        let waiting = self.pause.is_some_and(|pause| now < pause) || self.errand.is_some();
        let room = self.shelf.room();
        if self.pull.is_some() || waiting || room == 0 || !self.link.is_connected() {
            return;
        }
        self.pause = None;
        self.numbers += 1;
        let number = self.numbers;
        let expires = self.config.heartbeat * EXPIRES_HEARTBEATS;
        let question = format!(
            r#"{{"batch":{room},"expires":{},"idle_heartbeat":{}}}"#,
            expires.as_nanos(),
            self.config.heartbeat.as_nanos(),
        );
        let subject = format!(
            "CONSUMER.MSG.NEXT.{}.{}",
            self.feed.stream, self.feed.durable
        );
        let request = Request::new()
            .payload(question.into())
            .inbox(format!("{}.p{number}", self.inbox));
        let asked = self.link.context.send_request(subject, request);
        match timeout_at(now + self.config.answer_deadline, asked).await {
            Ok(Ok(())) => {
                self.pull = Some(Pull {
                    number,
                    left: room,
                    heard: Instant::now(),
                });
            }
            Ok(Err(error)) => self.trouble(&error.to_string(), false),
            Err(_elapsed) => self.trouble("the connection takes nothing", false),
        }
    }

    async fn send_settled(&mut self) {
        if !self.link.is_connected() {
            // Kept here: the client would keep it too, but not tell whether it was sent.
            return;
        }
        for (reply, word) in self.shelf.take_settled() {
            if word == ACKNOWLEDGED {
                self.unconfirmed = Some(reply.clone());
            }
            self.say(reply, word).await;
        }
    }

    async fn say(&mut self, reply: Subject, word: Bytes) {
        let saying = self.link.client.publish(reply, word);
        let until = Instant::now() + self.config.answer_deadline;
        // What is not said is asked again by the server, after the ack wait.
        if !matches!(timeout_at(until, saying).await, Ok(Ok(()))) {
            tracing::warn!(source = self.shelf.source, "a settlement could not be sent");
        }
    }

    /// Tells the server that what is held is still in work. The answer to the last sign stands for those before it.
    async fn keep_alive(&mut self) {
        let now = Instant::now();
        let third = self.config.ack_wait / 3;
        if let Some(signs) = &self.signs
            && now < signs.sent + third
        {
            return;
        }
        self.signs = None;
        let ending = self.shelf.ending(now + 2 * third);
        let Some(last) = ending.last().cloned() else {
            return;
        };
        if !self.link.is_connected() {
            return;
        }
        self.numbers += 1;
        let number = self.numbers;
        for lease in &ending {
            // Released meanwhile: a sign of life would cut its delay short.
            if !self.shelf.holds(lease) {
                continue;
            }
            if !Arc::ptr_eq(lease, &last) {
                self.say(lease.reply(), Bytes::from_static(IN_PROGRESS))
                    .await;
                continue;
            }
            let inbox = format!("{}.w{number}", self.inbox);
            let word = Bytes::from_static(IN_PROGRESS);
            let asking = self
                .link
                .client
                .publish_with_reply(lease.reply(), inbox, word);
            let _ = timeout_at(now + self.config.answer_deadline, asking).await;
        }
        self.signs = Some(Signs {
            number,
            leases: ending,
            until: now + self.config.ack_wait,
            sent: now,
        });
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

    // ---- What arrives

    async fn take(&mut self, message: Message) {
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
        self.take_message(message).await;
    }

    async fn take_message(&mut self, message: Message) {
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
        let Some((lease, wait)) = self.shelf.take_in(sequence, reply, until) else {
            return;
        };
        let place = Place {
            subject: message.subject.as_str(),
            stream: &self.feed.stream,
            sequence,
            stored_at,
        };
        let received = record::received(&place, message.headers.as_ref(), message.payload);
        let coordinates = received.coordinates.clone();
        let incoming = received.read();
        let due = incoming
            .story
            .due_at
            .filter(|_| self.feed.is_rung)
            .map(When::Due);
        let item = Item {
            shelf: Arc::clone(&self.shelf),
            lease,
            incoming,
            coordinates,
            redelivered: delivered > 1,
        };
        match due.or(wait.map(When::After)) {
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
    fn trouble(&mut self, what: &str, in_doubt: bool) {
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
                ensure_consumer(&config, &link, &feed).await
            }));
        }
    }

    fn checked(&mut self, checked: Result<()>) {
        self.errand = None;
        if let Err(error) = checked {
            if error.is_transient() {
                self.pause = Some(Instant::now() + self.delays.next_delay());
                // Asked anew with the next question, which nobody will answer.
                tracing::warn!(%error, "the consumer could not be checked");
            } else {
                self.desk.fail(error);
            }
        }
    }

    // ---- The end

    /// Gives back what is held and makes sure that the server knows what was acknowledged.
    async fn farewell(mut self, until: Instant) -> Result<()> {
        self.held.clear();
        self.shelf.close();
        let result = timeout_at(until, self.say_all()).await;
        if let Ok(()) = result {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Timeout,
            "close",
            format!(
                "{} did not confirm what was acknowledged in time",
                self.link.tried
            ),
        ))
    }

    async fn say_all(&mut self) {
        let mut changes = self.link.changes();
        while !self.link.is_connected() {
            if changes.changed().await.is_err() {
                return;
            }
        }
        self.send_settled().await;
        if let Some(reply) = self.unconfirmed.clone() {
            // The same acknowledgement once more, as a question: the server answers what is acknowledged already, and
            // its answer stands for all those before.
            let inbox = format!("{}.c0", self.inbox);
            let word = Bytes::from_static(ACKNOWLEDGED);
            let mut asked = false;
            loop {
                if !asked {
                    let client = &self.link.client;
                    let asking =
                        client.publish_with_reply(reply.clone(), inbox.clone(), word.clone());
                    asked = asking.await.is_ok();
                }
                tokio::select! {
                    message = self.subscriber.next() => match message {
                        Some(message) if message.subject.as_str() == inbox => break,
                        // It came too late to be delivered.
                        Some(message) => if let Some(reply) = message.reply {
                            self.say(reply, Bytes::from_static(RELEASED)).await;
                        },
                        None => return,
                    },
                    changed = changes.changed() => {
                        if changed.is_err() {
                            return;
                        }
                        asked = !self.link.is_connected();
                    }
                }
            }
        }
        let _ = self.link.client.flush().await;
    }
}

async fn run_errand(errand: &mut Option<BoxFuture<'static, Result<()>>>) -> Result<()> {
    match errand {
        Some(errand) => errand.await,
        None => std::future::pending().await,
    }
}
