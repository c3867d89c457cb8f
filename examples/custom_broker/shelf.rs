//! What the small broker stores: a list a topic, and for each consumer what it has not dealt with.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use relaybox::broker::{Backlog, Settlement};
use relaybox::envelope::{Outgoing, Received};
use relaybox::story::Origin;
use time::OffsetDateTime;
use tokio::sync::Notify;

#[derive(Default)]
pub struct Shelf {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    topics: BTreeMap<String, Vec<Stored>>,
    consumers: BTreeMap<String, Consumer>,
    members: BTreeMap<u64, Member>,
    last_member: u64,
}

struct Stored {
    message: Outgoing,
    since: Instant,
}

#[derive(Default)]
struct Consumer {
    /// The first message of each topic that nobody has seen.
    next: BTreeMap<String, usize>,
    dealt_with: BTreeSet<(String, usize)>,
    /// Not before then: what is not due, or was given back. The flag says whether somebody has seen it.
    waiting: BTreeMap<(Instant, String, usize), bool>,
}

struct Member {
    consumer: String,
    /// True for a rung.
    topics: BTreeMap<String, bool>,
    in_flight_max: usize,
    holds: BTreeSet<(String, usize)>,
}

/// One message handed to one member.
pub struct Ticket {
    member: u64,
    place: (String, usize),
    pub redelivered: bool,
}

impl Shelf {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn make(&self, topic: &str) {
        self.lock().topics.entry(topic.to_owned()).or_default();
    }

    pub fn has(&self, topic: &str) -> bool {
        self.lock().topics.contains_key(topic)
    }

    /// Topics that begin with this, sorted.
    pub fn named(&self, prefix: &str) -> Vec<String> {
        let state = self.lock();
        let names = state.topics.keys();
        names
            .filter(|name| name.starts_with(prefix))
            .cloned()
            .collect()
    }

    /// Whether the topic was there.
    pub fn put(&self, message: &Outgoing) -> bool {
        let mut state = self.lock();
        let Some(topic) = state.topics.get_mut(&message.message.destination) else {
            return false;
        };
        topic.push(Stored {
            message: message.clone(),
            since: Instant::now(),
        });
        drop(state);
        self.changed.notify_waiters();
        true
    }

    pub fn join(
        &self,
        consumer: &str,
        topics: BTreeMap<String, bool>,
        in_flight_max: usize,
    ) -> u64 {
        let mut state = self.lock();
        state.consumers.entry(consumer.to_owned()).or_default();
        state.last_member += 1;
        let number = state.last_member;
        let member = Member {
            consumer: consumer.to_owned(),
            topics,
            in_flight_max,
            holds: BTreeSet::new(),
        };
        state.members.insert(number, member);
        number
    }

    /// What the member holds comes again, and its tickets are void.
    pub fn leave(&self, number: u64) {
        let mut state = self.lock();
        if let Some(member) = state.members.remove(&number) {
            for place in member.holds {
                state.give_back(&member.consumer, place, Duration::ZERO);
            }
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// Waits until there is something for the member.
    pub async fn take(&self, member: u64, count_max: usize) -> Vec<(Ticket, Received)> {
        loop {
            // Listening begins before looking, so that a change in between is not missed.
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let (taken, due) = self.lock().take(member, count_max);
            if !taken.is_empty() {
                return taken;
            }
            match due {
                None => changed.await,
                Some(due) => drop(tokio::time::timeout_at(due.into(), changed).await),
            }
        }
    }

    pub fn is_current(&self, ticket: &Ticket) -> bool {
        let state = self.lock();
        let member = state.members.get(&ticket.member);
        member.is_some_and(|member| member.holds.contains(&ticket.place))
    }

    pub fn settle(&self, ticket: Ticket, settlement: Settlement) {
        let mut state = self.lock();
        let Some(member) = state.members.get_mut(&ticket.member) else {
            return;
        };
        if !member.holds.remove(&ticket.place) {
            return;
        }
        let consumer = member.consumer.clone();
        match settlement {
            Settlement::Acknowledge => {
                let consumer = state.consumers.entry(consumer).or_default();
                consumer.dealt_with.insert(ticket.place);
            }
            Settlement::Release { delay } => state.give_back(&consumer, ticket.place, delay),
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// Nothing if there is no such topic.
    pub fn backlog(&self, consumer: Option<&str>, topic: &str) -> Option<Backlog> {
        let state = self.lock();
        let stored = state.topics.get(topic)?;
        let consumer = consumer.and_then(|name| state.consumers.get(name));
        let is_open = |at: usize| {
            let place = (topic.to_owned(), at);
            consumer.is_none_or(|consumer| !consumer.dealt_with.contains(&place))
        };
        let open = stored.iter().enumerate().filter(|(at, _)| is_open(*at));
        let ages: Vec<Duration> = open.map(|(_, stored)| stored.since.elapsed()).collect();
        Some(Backlog::new(ages.len() as u64, ages.into_iter().max()))
    }
}

impl State {
    fn give_back(&mut self, consumer: &str, (topic, at): (String, usize), delay: Duration) {
        let consumer = self.consumers.entry(consumer.to_owned()).or_default();
        consumer
            .waiting
            .insert((Instant::now() + delay, topic, at), true);
    }

    /// What the member may have now; if nothing, when something that waits is due.
    fn take(
        &mut self,
        number: u64,
        count_max: usize,
    ) -> (Vec<(Ticket, Received)>, Option<Instant>) {
        let Self {
            topics,
            consumers,
            members,
            ..
        } = self;
        let Some(member) = members.get_mut(&number) else {
            return (Vec::new(), None);
        };
        let consumer = consumers.entry(member.consumer.clone()).or_default();
        // Read together once, so that due times keep their order when one clock is told by the other.
        let (now, wall_clock) = (Instant::now(), OffsetDateTime::now_utc());
        let mut taken = Vec::new();
        for (topic, rung) in &member.topics {
            let stored = topics.get(topic).map_or(&[][..], Vec::as_slice);
            let next = consumer.next.entry(topic.clone()).or_default();
            // Everything new is put where what waits is taken from: due at once, but for a rung.
            while let Some(new) = stored.get(*next) {
                let due = new.message.story.due_at.filter(|_| *rung);
                let left = due.map_or(Duration::ZERO, |due| {
                    Duration::try_from(due - wall_clock).unwrap_or_default()
                });
                let since = if left.is_zero() {
                    new.since
                } else {
                    now + left
                };
                consumer
                    .waiting
                    .insert((since, topic.clone(), *next), false);
                *next += 1;
            }
        }
        let mut due = None;
        let mut later = BTreeMap::new();
        while let Some(((instant, topic, at), redelivered)) = consumer.waiting.pop_first() {
            let full = taken.len() >= count_max || member.holds.len() >= member.in_flight_max;
            if full || instant > now {
                due = Some(instant).filter(|_| !full);
                later.insert((instant, topic, at), redelivered);
                break;
            }
            let ours = member.topics.contains_key(&topic);
            let Some(stored) = topics.get(&topic).and_then(|t| t.get(at)).filter(|_| ours) else {
                later.insert((instant, topic, at), redelivered);
                continue;
            };
            let place = (topic, at);
            member.holds.insert(place.clone());
            let received = stored.received(&place);
            let ticket = Ticket {
                member: number,
                place,
                redelivered,
            };
            taken.push((ticket, received));
        }
        consumer.waiting.append(&mut later);
        (taken, due)
    }
}

impl Stored {
    /// As it would come over a wire: bytes and headers, to be read anew.
    fn received(&self, (topic, at): &(String, usize)) -> Received {
        let message = &self.message.message;
        Received {
            coordinates: Origin {
                topic: topic.clone(),
                partition: None,
                offset: Some(at.to_string()),
            },
            key: message.key.clone(),
            headers: self.message.to_headers(),
            payload: message.payload.clone(),
            timestamp: message.occurred_at,
        }
    }
}
