//! The accounts of one consumer: its members, who owns which partition, and what is finished. Decides, never waits.

use std::collections::{BTreeMap, BTreeSet};

use time::OffsetDateTime;

use super::log::{Record, Topic};
use crate::envelope::Received;

/// Position of a record in its partition, from 0.
pub(super) type Offset = u64;

/// Everyone who consumes under one name. Outlives its members, as its positions do.
#[derive(Default)]
pub(super) struct Group {
    members: BTreeMap<u64, Member>,
    /// Per topic, its partitions.
    progress: BTreeMap<String, Vec<Progress>>,
    deliveries: u64,
}

struct Member {
    /// Its sources and rungs; true for a rung.
    topics: BTreeMap<String, bool>,
    in_flight: usize,
    in_flight_max: usize,
    /// Which of its partitions is asked first next time, so that a busy one cannot starve the others.
    turn: usize,
}

/// What a receipt needs to be recognised.
pub(super) struct Ticket {
    pub(super) member: u64,
    pub(super) assignment: u64,
    pub(super) topic: String,
    pub(super) partition: usize,
    pub(super) offset: Offset,
}

pub(super) struct Taken {
    pub(super) ticket: Ticket,
    pub(super) received: Received,
    pub(super) redelivered: bool,
}

/// A count of records, and when the oldest of them was stored.
#[derive(Default)]
pub(super) struct Unsettled {
    pub(super) messages: u64,
    pub(super) since: Option<OffsetDateTime>,
}

impl Unsettled {
    pub(super) fn count(&mut self, record: &Record) {
        self.messages += 1;
        self.since = Some(
            self.since
                .map_or(record.timestamp, |since| since.min(record.timestamp)),
        );
    }
}

impl Group {
    pub(super) fn deliveries(&self) -> u64 {
        self.deliveries
    }

    pub(super) fn committed(&self, topic: &str) -> Vec<Offset> {
        self.progress
            .get(topic)
            .map(|partitions| partitions.iter().map(|p| p.committed).collect())
            .unwrap_or_default()
    }

    /// How many of the records are not acknowledged, and the first of them. The topic's own count where the consumer never
    /// subscribed.
    pub(super) fn unsettled(&self, name: &str, topic: &Topic) -> Unsettled {
        let mut all = Unsettled::default();
        for number in 0..topic.partitions() {
            let progress = self.progress.get(name).and_then(|p| p.get(number));
            let finished = |offset: &Offset| progress.is_some_and(|p| p.is_finished(*offset));
            for (offset, record) in (0..).zip(topic.partition(number)) {
                if !finished(&offset) {
                    all.count(record);
                }
            }
        }
        all
    }

    /// Adds a member; `topics` are its sources and rungs with their number of partitions and whether they are rungs.
    pub(super) fn join(
        &mut self,
        member: u64,
        topics: impl IntoIterator<Item = (String, usize, bool)>,
        in_flight_max: usize,
        last_number: &mut u64,
    ) {
        let mut asked = BTreeMap::new();
        for (topic, partitions, rung) in topics {
            self.progress
                .entry(topic.clone())
                .or_insert_with(|| (0..partitions).map(|_| Progress::default()).collect());
            *asked.entry(topic).or_default() |= rung;
        }
        let joined = Member {
            topics: asked,
            in_flight: 0,
            in_flight_max,
            turn: 0,
        };
        self.members.insert(member, joined);
        self.rebalance(last_number);
    }

    pub(super) fn leave(&mut self, member: u64, last_number: &mut u64) {
        if self.members.remove(&member).is_some() {
            self.rebalance(last_number);
        }
    }

    /// Deals the partitions out in turn among the members that want their topic.
    fn rebalance(&mut self, last_number: &mut u64) {
        let mut turn = 0;
        for (topic, partitions) in &mut self.progress {
            let wanting: Vec<u64> = self
                .members
                .iter()
                .filter(|(_, member)| member.topics.contains_key(topic))
                .map(|(number, _)| *number)
                .collect();
            for partition in partitions {
                let owner = wanting.get(turn % wanting.len().max(1)).copied();
                turn += 1;
                if partition.owner != owner {
                    *last_number += 1;
                    partition.assign(owner, *last_number);
                }
            }
        }
    }

    /// Up to `count_max` records that the member may have now.
    pub(super) fn take(
        &mut self,
        member: u64,
        count_max: usize,
        topics: &BTreeMap<String, Topic>,
        now: OffsetDateTime,
    ) -> Vec<Taken> {
        let Some(state) = self.members.get_mut(&member) else {
            return Vec::new();
        };
        let room = state.in_flight_max.saturating_sub(state.in_flight);
        let count_max = count_max.max(1).min(room);
        let mut owned = Vec::new();
        for (topic, partitions) in &mut self.progress {
            let Some(rung) = state.topics.get(topic).copied() else {
                continue;
            };
            for (number, partition) in partitions.iter_mut().enumerate() {
                if partition.owner == Some(member) {
                    owned.push((topic, number, rung, partition));
                }
            }
        }
        if !owned.is_empty() {
            let first = state.turn % owned.len();
            owned.rotate_left(first);
        }
        state.turn = state.turn.wrapping_add(1);
        let mut taken = Vec::new();
        for (topic, number, rung, partition) in owned {
            let records = topics.get(topic).map_or(&[][..], |t| t.partition(number));
            while taken.len() < count_max {
                let Some((offset, record, redelivered)) = partition.take(records, rung, now) else {
                    break;
                };
                taken.push(Taken {
                    received: record.received(topic, number, offset),
                    ticket: Ticket {
                        member,
                        assignment: partition.assignment,
                        topic: topic.clone(),
                        partition: number,
                        offset,
                    },
                    redelivered,
                });
            }
        }
        state.in_flight += taken.len();
        self.deliveries += taken.len() as u64;
        taken
    }

    /// When the first record that waits for its time in one of the member's partitions may be had.
    pub(super) fn next_due(&self, member: u64) -> Option<OffsetDateTime> {
        self.progress
            .values()
            .flatten()
            .filter(|partition| partition.owner == Some(member))
            .filter_map(|partition| partition.waiting.first())
            .map(|(due, _)| *due)
            .min()
    }

    pub(super) fn is_current(&self, ticket: &Ticket) -> bool {
        self.partition(ticket)
            .is_some_and(|partition| partition.assignment == ticket.assignment)
    }

    fn partition(&self, ticket: &Ticket) -> Option<&Progress> {
        self.progress.get(&ticket.topic)?.get(ticket.partition)
    }

    /// Ends a delivery: finished, or to come again from `again` on. Of a partition that has moved only the member's
    /// room is given back.
    pub(super) fn settle(&mut self, ticket: &Ticket, again: Option<OffsetDateTime>) {
        if let Some(member) = self.members.get_mut(&ticket.member) {
            member.in_flight = member.in_flight.saturating_sub(1);
        }
        let partition = self
            .progress
            .get_mut(&ticket.topic)
            .and_then(|partitions| partitions.get_mut(ticket.partition))
            .filter(|partition| partition.assignment == ticket.assignment);
        match (partition, again) {
            (Some(partition), None) => partition.finish(ticket.offset),
            (Some(partition), Some(at)) => partition.release(ticket.offset, at),
            (None, _) => {}
        }
    }
}

/// One partition, as one consumer sees it.
#[derive(Default)]
struct Progress {
    owner: Option<u64>,
    /// Number of the owner's turn; receipts of an earlier one are not current.
    assignment: u64,
    /// Everything before it is finished.
    committed: Offset,
    /// The next record that this owner has not seen.
    cursor: Offset,
    /// Finished by this owner, with something before it unfinished. Forgotten with the owner, as a committed position
    /// cannot tell of it.
    finished: BTreeSet<Offset>,
    /// Seen by this owner, but too early.
    waiting: BTreeSet<(OffsetDateTime, Offset)>,
    /// Released until then; survives the owner so that the delay holds.
    released: BTreeMap<Offset, OffsetDateTime>,
    /// Handed out before to anybody, and not committed.
    handed: BTreeSet<Offset>,
}

impl Progress {
    fn assign(&mut self, owner: Option<u64>, assignment: u64) {
        self.owner = owner;
        self.assignment = assignment;
        self.cursor = self.committed;
        self.finished.clear();
        self.waiting.clear();
    }

    fn take<'a>(
        &mut self,
        records: &'a [Record],
        rung: bool,
        now: OffsetDateTime,
    ) -> Option<(Offset, &'a Record, bool)> {
        if let Some((due, offset)) = self.waiting.first().copied()
            && due <= now
        {
            self.waiting.pop_first();
            return self.hand_out(offset, record_at(records, offset)?);
        }
        loop {
            let offset = self.cursor;
            let record = record_at(records, offset)?;
            self.cursor += 1;
            let due = record.due_at.filter(|_| rung);
            match due.max(self.released.get(&offset).copied()) {
                Some(later) if later > now => self.waiting.insert((later, offset)),
                _ => return self.hand_out(offset, record),
            };
        }
    }

    fn hand_out<'a>(
        &mut self,
        offset: Offset,
        record: &'a Record,
    ) -> Option<(Offset, &'a Record, bool)> {
        self.released.remove(&offset);
        Some((offset, record, !self.handed.insert(offset)))
    }

    fn is_finished(&self, offset: Offset) -> bool {
        offset < self.committed || self.finished.contains(&offset)
    }

    fn finish(&mut self, offset: Offset) {
        self.finished.insert(offset);
        while self.finished.remove(&self.committed) {
            self.handed.remove(&self.committed);
            self.committed += 1;
        }
    }

    fn release(&mut self, offset: Offset, at: OffsetDateTime) {
        self.released.insert(offset, at);
        self.waiting.insert((at, offset));
    }
}

fn record_at(records: &[Record], offset: Offset) -> Option<&Record> {
    records.get(usize::try_from(offset).ok()?)
}
