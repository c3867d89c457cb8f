//! A member of a consumer group as the client's callbacks see it: partitions come, are paused, and go.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, Rebalance};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode as Code};
use rdkafka::{ClientContext, Offset, Statistics, TopicPartitionList};
use time::OffsetDateTime;

use super::config::KafkaConfig;
use super::context::Context;
use super::desk::{Desk, Holding, Item};
use crate::envelope::Received;
use crate::error::Error;

/// Most offsets kept per partition behind one that is not finished; then the partition pauses until it is.
const TRACKED_MAX: usize = 100_000;

/// The context of a subscription's client. All of it runs on the polling thread.
pub(super) struct Member {
    pub(super) context: Context,
    pub(super) desk: Arc<Desk>,
    rungs: HashSet<String>,
    drain_deadline: Duration,
    instance_id: Option<String>,
    session_timeout: Duration,
    slots: Mutex<Slots>,
}

#[derive(Default)]
struct Slots {
    partitions: HashMap<String, HashMap<i32, Slot>>,
    /// Whether everything is paused, because too much is unsettled.
    halted: bool,
}

/// A partition that is assigned to us.
struct Slot {
    holding: Arc<Holding>,
    /// On a rung: messages that are not due, the first of which decides when the partition goes on.
    held: VecDeque<Item>,
    paused: bool,
    stored: i64,
}

impl Slot {
    fn new() -> Self {
        Self {
            holding: Holding::new(),
            held: VecDeque::new(),
            paused: false,
            stored: -1,
        }
    }

    fn should_pause(&self, halted: bool) -> bool {
        // Resumed at half, because every pause costs what was fetched ahead.
        let crowded = if self.paused {
            TRACKED_MAX / 2
        } else {
            TRACKED_MAX
        };
        halted || !self.held.is_empty() || self.holding.tracked() >= crowded
    }
}

impl Slots {
    fn all(&mut self) -> impl Iterator<Item = (&str, i32, &mut Slot)> {
        self.partitions.iter_mut().flat_map(|(topic, partitions)| {
            partitions
                .iter_mut()
                .map(move |(partition, slot)| (topic.as_str(), *partition, slot))
        })
    }

    fn slot(&mut self, topic: &str, partition: i32) -> &mut Slot {
        if !self.partitions.contains_key(topic) {
            self.partitions.insert(topic.to_owned(), HashMap::new());
        }
        self.partitions
            .entry(topic.to_owned())
            .or_default()
            .entry(partition)
            .or_insert_with(Slot::new)
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
            slots: Mutex::default(),
        }
    }

    /// With a name of its own the group keeps this member's partitions for it while it is away.
    pub(super) fn instance_id(&self) -> Option<&str> {
        self.instance_id.as_deref()
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
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

    /// Delivers a message, or holds it until it is due. Whether it is held, and so its partition is to be paused.
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
        if !slot.holding.received(offset) {
            // The log was cut or made anew: what is in work belongs to messages that are gone.
            tracing::warn!(topic, partition, offset, "partition went backwards");
            let old = std::mem::replace(slot, Slot::new());
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
        let waits = self.rungs.contains(topic) && !is_due(&item, OffsetDateTime::now_utc());
        if waits || !slot.held.is_empty() {
            slot.held.push_back(item);
            return true;
        }
        self.desk.offer(item);
        false
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
            for (topic, partition, slot) in slots.all() {
                while slot.held.front().is_some_and(|item| is_due(item, now))
                    && self.desk.has_room()
                    && let Some(item) = slot.held.pop_front()
                {
                    self.desk.offer(item);
                }
                let should = slot.should_pause(halted);
                if should != slot.paused {
                    slot.paused = should;
                    let list = if should { &mut pause } else { &mut resume };
                    list.add_partition(topic, partition);
                }
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

    pub(super) fn is_halted(&self) -> bool {
        self.slots().halted
    }

    /// Takes effect with the next [`tend`](Self::tend).
    pub(super) fn halt(&self, halted: bool) {
        self.slots().halted = halted;
    }

    /// Hands the finished prefixes to the client, whose timer commits them.
    pub(super) fn store(&self, consumer: &BaseConsumer<Self>) {
        let mut list = TopicPartitionList::new();
        let mut slots = self.slots();
        for (topic, partition, slot) in slots.all() {
            if let Some(point) = slot.holding.commit_point().filter(|p| *p > slot.stored) {
                // Fails only for offsets below zero, which no commit point is.
                let _ = list.add_partition_offset(topic, partition, Offset::Offset(point));
            }
        }
        if list.count() == 0 {
            return;
        }
        if let Err(error) = consumer.store_offsets(&list) {
            tracing::debug!(%error, "no offset was stored");
            return;
        }
        // The call succeeds if any element did.
        for element in list.elements() {
            match (element.error(), element.offset()) {
                (Ok(()), Offset::Offset(point)) => {
                    slots.slot(element.topic(), element.partition()).stored = point;
                }
                (failed, _) => tracing::debug!(
                    topic = element.topic(),
                    partition = element.partition(),
                    ?failed,
                    "offset not stored"
                ),
            }
        }
    }

    /// Whether no partition is assigned.
    pub(super) fn is_empty(&self) -> bool {
        self.slots().all().next().is_none()
    }

    fn assigned(&self, list: &TopicPartitionList) {
        let mut slots = self.slots();
        for element in list.elements() {
            *slots.slot(element.topic(), element.partition()) = Slot::new();
        }
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
        if !consumer.assignment_lost() {
            if !self.desk.drain(&holdings, self.drain_deadline) {
                tracing::info!("partitions go while deliveries are in work; these come again");
            }
            // It may have been lost while we waited. The client checks it again before it commits.
            if !consumer.assignment_lost() {
                self.store(consumer);
            }
        }
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
            tracing::debug!(%error, "commit failed; the next one carries the same offsets");
        }
    }
}
