//! A member of a consumer group as the client's callbacks see it: partitions come, are paused, and go.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, Rebalance};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode as Code};
use rdkafka::{ClientContext, Statistics, TopicPartitionList};
use time::OffsetDateTime;

use super::commits::Commits;
use super::committer;
use super::config::KafkaConfig;
use super::context::Context;
use super::desk::{Desk, Holding, Item};
use crate::envelope::Received;
use crate::error::Error;

/// Most offsets kept per partition behind one that is not finished; then the partition pauses until it is.
const TRACKED_MAX: usize = 100_000;

/// The context of a subscription's client. It runs on the polling thread, but for what the committer calls.
pub(super) struct Member {
    pub(super) context: Context,
    pub(super) desk: Arc<Desk>,
    rungs: HashSet<String>,
    drain_deadline: Duration,
    instance_id: Option<String>,
    session_timeout: Duration,
    pub(super) commit_interval: Duration,
    pub(super) answer_deadline: Duration,
    slots: Mutex<Slots>,
    /// For the committer: something is short, or it is over.
    pub(super) short: Condvar,
}

#[derive(Default)]
pub(super) struct Slots {
    partitions: HashMap<String, HashMap<i32, Slot>>,
    /// Whether everything is paused, because too much is unsettled.
    halted: bool,
    /// Whether something that is due waits for a commit.
    waiting: bool,
    /// Whether the committer should look before its time.
    pub(super) is_short: bool,
    /// Whether the committer waits for an answer.
    pub(super) is_committing: bool,
    /// Whether the committer is to end.
    pub(super) is_over: bool,
}

/// A partition that is assigned to us.
pub(super) struct Slot {
    pub(super) holding: Arc<Holding>,
    pub(super) commits: Commits,
    /// Messages that are not due, on a rung, or not covered by a commit. The first decides when the partition goes on.
    held: VecDeque<Item>,
    /// One past the last offset that was handed on.
    handed_on: Option<i64>,
    paused: bool,
}

impl Slot {
    fn new(commits: Commits) -> Self {
        Self {
            holding: Holding::new(),
            commits,
            held: VecDeque::new(),
            handed_on: None,
            paused: false,
        }
    }

    /// The next offset to hand on, as far as that is known.
    pub(super) fn reach(&self, now: OffsetDateTime) -> Option<i64> {
        let due = self.held.front().filter(|item| is_due(item, now));
        due.map(|item| item.offset).or(self.handed_on)
    }

    /// Whether a commit is wanted, so that deliveries can go on.
    pub(super) fn is_short(&self, now: OffsetDateTime) -> bool {
        let reach = self.reach(now);
        reach.is_some_and(|reach| self.commits.is_short(reach))
    }

    /// Whether more is finished than committed.
    pub(super) fn has_progress(&self) -> bool {
        let point = self.holding.commit_point();
        point.is_some_and(|point| Some(point) > self.commits.told_point())
    }

    fn hand_on(&mut self, mut item: Item, desk: &Desk) {
        item.redelivered = self.commits.is_suspect(item.offset);
        self.handed_on = Some(item.offset + 1);
        desk.offer(item);
    }

    /// Hands on what is due and covered, as far as there is room. Whether what comes next waits for a commit.
    fn hand_on_held(&mut self, desk: &Desk, now: OffsetDateTime) -> bool {
        while let Some(item) = self.held.front().filter(|item| is_due(item, now)) {
            if !self.commits.covers(item.offset) {
                return true;
            }
            if !desk.has_room() {
                break;
            }
            if let Some(item) = self.held.pop_front() {
                self.hand_on(item, desk);
            }
        }
        false
    }

    /// `waits` for a commit, which is soon confirmed: pausing would cost more.
    fn should_pause(&self, halted: bool, waits: bool) -> bool {
        // Resumed at half, because every pause costs what was fetched ahead.
        let crowded = if self.paused {
            TRACKED_MAX / 2
        } else {
            TRACKED_MAX
        };
        halted || (!self.held.is_empty() && !waits) || self.holding.tracked() >= crowded
    }
}

impl Slots {
    pub(super) fn all(&mut self) -> impl Iterator<Item = (&str, i32, &mut Slot)> {
        self.partitions.iter_mut().flat_map(|(topic, partitions)| {
            partitions
                .iter_mut()
                .map(move |(partition, slot)| (topic.as_str(), *partition, slot))
        })
    }

    fn slot(&mut self, topic: &str, partition: i32) -> &mut Slot {
        self.partitions
            .entry(topic.to_owned())
            .or_default()
            .entry(partition)
            .or_insert_with(|| Slot::new(Commits::new()))
    }

    /// Forgets these assignments.
    pub(super) fn remove(&mut self, holdings: &[Arc<Holding>]) {
        let is_gone = |slot: &Slot| holdings.iter().any(|h| Arc::ptr_eq(h, &slot.holding));
        for partitions in self.partitions.values_mut() {
            partitions.retain(|_, slot| !is_gone(slot));
        }
    }

    /// The partition, if it is still the same assignment.
    pub(super) fn same(
        &mut self,
        topic: &str,
        partition: i32,
        holding: &Arc<Holding>,
    ) -> Option<&mut Slot> {
        let slot = self.partitions.get_mut(topic)?.get_mut(&partition)?;
        Arc::ptr_eq(&slot.holding, holding).then_some(slot)
    }
}

impl Member {
    pub(super) fn new(desk: Arc<Desk>, rungs: HashSet<String>, config: &KafkaConfig) -> Self {
        Self {
            context: Context::default(),
            desk,
            rungs,
            drain_deadline: config.drain_deadline,
            instance_id: config.instance_id.clone(),
            session_timeout: config.session_timeout,
            commit_interval: config.commit_interval,
            answer_deadline: config.answer_deadline,
            slots: Mutex::default(),
            short: Condvar::new(),
        }
    }

    /// With a name of its own the group keeps this member's partitions for it while it is away.
    pub(super) fn instance_id(&self) -> Option<&str> {
        self.instance_id.as_deref()
    }

    pub(super) fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of a setting that the group refuses, if it is one: nothing is mended by trying again.
    pub(super) fn refused(&self, code: Code) -> Option<Error> {
        let (field, limit, value) = match code {
            Code::FencedInstanceId | Code::UnreleasedInstanceId => (
                "instance_id",
                "a name that no other member of the consumer has",
                self.instance_id.clone().unwrap_or_default(),
            ),
            Code::InvalidSessionTimeout => (
                "session_timeout",
                "within the broker's group.min.session.timeout.ms and group.max.session.timeout.ms",
                format!("{:?}", self.session_timeout),
            ),
            _ => return None,
        };
        Some(Error::configuration(field, limit, value))
    }

    /// Delivers a message, or holds it until it is due and covered by a commit. Whether it is held, and so its partition
    /// is to be looked at.
    pub(super) fn arrived(
        &self,
        topic: &str,
        partition: i32,
        offset: i64,
        received: Received,
    ) -> bool {
        let coordinates = received.coordinates.clone();
        let mut slots = self.slots();
        let slot = slots.slot(topic, partition);
        slot.commits.received(offset);
        if !slot.holding.received(offset) {
            // The log was cut or made anew: what is in work belongs to messages that are gone.
            tracing::warn!(topic, partition, offset, "partition went backwards");
            let anew = Slot::new(Commits::anew());
            let old = std::mem::replace(slot, anew);
            self.desk.take_back(std::slice::from_ref(&old.holding));
            // The first offset of a new holding is always news.
            let _ = slot.holding.received(offset);
        }
        let item = Item {
            holding: Arc::clone(&slot.holding),
            offset,
            incoming: received.read(),
            coordinates,
            redelivered: false,
        };
        let is_early = self.rungs.contains(topic) && !is_due(&item, OffsetDateTime::now_utc());
        let is_held = is_early || !slot.held.is_empty() || !slot.commits.covers(offset);
        if is_held {
            slot.held.push_back(item);
        } else {
            slot.hand_on(item, &self.desk);
            if slot.commits.is_short(offset + 1) {
                self.urge(&mut slots);
            }
        }
        is_held
    }

    /// Has the committer look before its time.
    fn urge(&self, slots: &mut Slots) {
        if !std::mem::replace(&mut slots.is_short, true) {
            self.short.notify_one();
        }
    }

    /// Delivers what is due by now, as far as there is room, and pauses or resumes each partition as it should be.
    /// Pausing costs the client what it fetched ahead, so it happens only on a change.
    pub(super) fn tend(&self, consumer: &BaseConsumer<Self>) {
        let mut pause = TopicPartitionList::new();
        let mut resume = TopicPartitionList::new();
        {
            let mut slots = self.slots();
            let halted = slots.halted;
            let now = OffsetDateTime::now_utc();
            let (mut waiting, mut short) = (false, false);
            for (topic, partition, slot) in slots.all() {
                let waits = slot.hand_on_held(&self.desk, now);
                waiting |= waits;
                short |= waits || slot.is_short(now);
                let should = slot.should_pause(halted, waits);
                if should != slot.paused {
                    slot.paused = should;
                    let list = if should { &mut pause } else { &mut resume };
                    list.add_partition(topic, partition);
                }
            }
            slots.waiting = waiting;
            if short {
                self.urge(&mut slots);
            }
        }
        let results = [
            (pause.count() > 0).then(|| consumer.pause(&pause)),
            (resume.count() > 0).then(|| consumer.resume(&resume)),
        ];
        for error in results.into_iter().flatten().filter_map(Result::err) {
            tracing::warn!(%error, "pausing or resuming partitions failed");
        }
    }

    /// Whether something that is due waits for a commit, since everything was [tended](Self::tend) last.
    pub(super) fn is_waiting(&self) -> bool {
        self.slots().waiting
    }

    pub(super) fn is_halted(&self) -> bool {
        self.slots().halted
    }

    /// Takes effect with the next [`tend`](Self::tend).
    pub(super) fn halt(&self, halted: bool) {
        self.slots().halted = halted;
    }

    /// Whether no partition is assigned.
    pub(super) fn is_empty(&self) -> bool {
        self.slots().all().next().is_none()
    }

    fn assigned(&self, list: &TopicPartitionList) {
        let mut slots = self.slots();
        for element in list.elements() {
            *slots.slot(element.topic(), element.partition()) = Slot::new(Commits::new());
        }
        // What the last owners left is read at once.
        self.urge(&mut slots);
    }

    /// Takes back what is queued of all partitions, at the end.
    pub(super) fn take_all_back(&self) {
        let mut slots = self.slots();
        let holdings: Vec<_> = slots
            .all()
            .map(|(_, _, slot)| slot.holding.clone())
            .collect();
        drop(slots);
        self.desk.take_back(&holdings);
    }

    /// A partition goes: nothing new of it is started, and what is in work gets a bounded time to end, so that its
    /// result is committed before the next owner begins.
    fn revoked(&self, consumer: &BaseConsumer<Self>, list: &TopicPartitionList) {
        let holdings: Vec<Arc<Holding>> = {
            let mut slots = self.slots();
            list.elements()
                .iter()
                .filter_map(|element| {
                    let slot = slots
                        .partitions
                        .get_mut(element.topic())?
                        .get_mut(&element.partition())?;
                    slot.held.clear();
                    Some(Arc::clone(&slot.holding))
                })
                .collect()
        };
        self.desk.take_back(&holdings);
        let mut last = Vec::new();
        if !consumer.assignment_lost() {
            if !self.desk.drain(&holdings, self.drain_deadline) {
                tracing::info!("partitions go while deliveries are in work; these come again");
            }
            last = self.last_commits(&holdings);
            // It may have been lost while we waited.
            if consumer.assignment_lost() {
                last.clear();
            }
        }
        committer::send(consumer, &last);
        let mut slots = self.slots();
        for element in list.elements() {
            if let Some(partitions) = slots.partitions.get_mut(element.topic()) {
                partitions.remove(&element.partition());
            }
        }
    }
}

fn is_due(item: &Item, now: OffsetDateTime) -> bool {
    item.incoming.story.due_at.is_none_or(|due| due <= now)
}

impl ClientContext for Member {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        self.context.log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.context.error(error, reason);
    }

    fn stats(&self, statistics: Statistics) {
        self.context.stats(statistics);
    }
}

impl ConsumerContext for Member {
    fn pre_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        match rebalance {
            Rebalance::Assign(list) => self.assigned(list),
            Rebalance::Revoke(list) => self.revoked(consumer, list),
            Rebalance::Error(error) => tracing::warn!(%error, "rebalance failed"),
        }
    }

    fn post_rebalance(&self, consumer: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        // The client's pause flag outlives a revocation: a partition that comes back would stay silent.
        if let Rebalance::Assign(list) = rebalance
            && list.count() > 0
            && let Err(error) = consumer.resume(list)
        {
            tracing::warn!(%error, "resuming assigned partitions failed");
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, _offsets: &TopicPartitionList) {
        if let Err(error) = result {
            tracing::debug!(%error, "the last commit failed; what it covered comes again");
        }
    }
}
