//! Committing, on a thread of its own: it waits for the broker's answers, for which the polling thread has no time.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode as Code};
use rdkafka::topic_partition_list::TopicPartitionListElem;
use rdkafka::{Offset, TopicPartitionList};
use time::OffsetDateTime;

use super::commits::{Commit, Mark};
use super::desk::Holding;
use super::member::{Member, Slot, Slots};
use crate::error::{Error, ErrorKind};

/// Before something that failed is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// How long deliveries wait in vain before the receiver hears of it, each time.
const PATIENCE: Duration = Duration::from_secs(10);

/// A commit to be made for an assignment.
pub(super) struct Entry {
    topic: String,
    partition: i32,
    holding: Arc<Holding>,
    commit: Commit,
}

/// Reads what last owners left and commits, until the member says that it is over.
pub(super) fn run(consumer: &BaseConsumer<Member>) {
    let member = consumer.client().context();
    let mut timer = Instant::now() + member.commit_interval;
    let mut failing: Option<Instant> = None;
    while member.wait_to_commit(timer) {
        let is_time = Instant::now() >= timer;
        // What cannot be read of one partition keeps no other from being committed.
        let found = find(consumer, &member.unknown());
        let result = commit(consumer, &member.under_way(is_time)).and(found);
        member.answered();
        if is_time {
            timer = Instant::now() + member.commit_interval;
        }
        match result {
            Ok(()) => failing = None,
            Err(error) => {
                tracing::debug!(%error, "no commit; it is tried again");
                let since = *failing.get_or_insert_with(Instant::now);
                if since.elapsed() >= PATIENCE && member.is_waiting() {
                    failing = None;
                    let detail = "deliveries wait for a commit";
                    let error =
                        Error::new(ErrorKind::Unavailable, "receive", detail).with_source(error);
                    tracing::warn!(%error, "receiving is in trouble and goes on trying");
                    member.desk.report(error);
                }
                member.pause_commits(RETRY_PAUSE);
            }
        }
    }
}

/// Reads what the last owners of these partitions left.
fn find(
    consumer: &BaseConsumer<Member>,
    unknown: &[(String, i32, Arc<Holding>)],
) -> KafkaResult<()> {
    if unknown.is_empty() {
        return Ok(());
    }
    let member = consumer.client().context();
    let mut list = TopicPartitionList::with_capacity(unknown.len());
    for (topic, partition, _) in unknown {
        list.add_partition(topic, *partition);
    }
    let found = consumer.committed_offsets(list, member.answer_deadline)?;
    let mut failed = None;
    for (topic, partition, holding) in unknown {
        let element = found.find_partition(topic, *partition);
        match element.as_ref().map(|element| (element, element.error())) {
            Some((element, Ok(()))) => {
                member.found(topic, *partition, holding, committed(element));
            }
            Some((_, Err(error))) => failed = Some(error),
            None => failed = Some(KafkaError::OffsetFetch(Code::UnknownPartition)),
        }
    }
    member.desk.committed();
    failed.map_or(Ok(()), Err)
}

fn committed(element: &TopicPartitionListElem<'_>) -> Option<Commit> {
    let Offset::Offset(point) = element.offset() else {
        return None;
    };
    // The client panics over bytes that are not UTF-8; whoever wrote them, they are not ours.
    let text = catch_unwind(AssertUnwindSafe(|| element.metadata())).unwrap_or_default();
    let mark = Mark::read(text);
    Some(Commit { point, mark })
}

fn list(entries: &[Entry]) -> TopicPartitionList {
    let mut list = TopicPartitionList::with_capacity(entries.len());
    for entry in entries {
        let mut element = list.add_partition(&entry.topic, entry.partition);
        // Fails only for offsets below zero, which no commit point is.
        let _ = element.set_offset(Offset::Offset(entry.commit.point));
        element.set_metadata(entry.commit.mark.write());
    }
    list
}

/// Commits and waits for the answer, at worst until the client gives up on it.
pub(super) fn commit(consumer: &BaseConsumer<Member>, entries: &[Entry]) -> KafkaResult<()> {
    if entries.is_empty() {
        return Ok(());
    }
    // With a generation that goes on, the broker asks nobody whose partition it is.
    if consumer.assignment_lost() {
        return Err(KafkaError::ConsumerCommit(Code::AssignmentLost));
    }
    match consumer.commit(&list(entries), CommitMode::Sync) {
        Ok(()) => {
            let member = consumer.client().context();
            member.confirmed(entries);
            member.desk.committed();
            Ok(())
        }
        // One that is refused must not keep the others from being confirmed.
        Err(error) if entries.len() > 1 && is_partitions_own(&error) => {
            let mut failed = None;
            for entry in entries {
                let alone = commit(consumer, std::slice::from_ref(entry));
                failed = alone.err().or(failed);
            }
            failed.map_or(Ok(()), Err)
        }
        Err(error) => Err(error),
    }
}

/// Commits without waiting, from a rebalance: the client gives a partition back only when its commits are answered.
pub(super) fn send(consumer: &BaseConsumer<Member>, entries: &[Entry]) {
    if !entries.is_empty()
        && let Err(error) = consumer.commit(&list(entries), CommitMode::Async)
    {
        tracing::debug!(%error, "the last commit was not sent; what it covered comes again");
    }
}

fn is_partitions_own(error: &KafkaError) -> bool {
    matches!(
        error.rdkafka_error_code(),
        Some(
            Code::UnknownTopicOrPartition
                | Code::TopicAuthorizationFailed
                | Code::OffsetMetadataTooLarge
                | Code::InvalidCommitOffsetSize
        )
    )
}

/// What of a member its committer needs.
impl Member {
    /// Waits until it is time, or something is short. False when it is over.
    fn wait_to_commit(&self, until: Instant) -> bool {
        let mut slots = self.slots();
        loop {
            if slots.is_over {
                return false;
            }
            let left = until.saturating_duration_since(Instant::now());
            if std::mem::take(&mut slots.is_short) || left.is_zero() {
                return true;
            }
            let waited = self.short.wait_timeout(slots, left);
            slots = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn pause_commits(&self, pause: Duration) {
        let until = Instant::now() + pause;
        let mut slots = self.slots();
        while !slots.is_over {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                // Whoever was short is so still.
                slots.is_short = true;
                return;
            }
            let waited = self.short.wait_timeout(slots, left);
            slots = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the committer, after what it waits for.
    pub(super) fn no_more_commits(&self) {
        self.slots().is_over = true;
        self.short.notify_all();
    }

    fn unknown(&self) -> Vec<(String, i32, Arc<Holding>)> {
        let mut slots = self.slots();
        let unknown = slots.all().filter(|(_, _, slot)| !slot.commits.is_known());
        unknown
            .map(|(topic, partition, slot)| (topic.to_owned(), partition, slot.holding.clone()))
            .collect()
    }

    fn found(
        &self,
        topic: &str,
        partition: i32,
        holding: &Arc<Holding>,
        committed: Option<Commit>,
    ) {
        let mut slots = self.slots();
        if let Some(slot) = slots.same(topic, partition, holding) {
            slot.commits.found(committed);
            if let Some(first) = slot.holding.next() {
                slot.commits.received(first);
            }
        }
    }

    /// What to commit if it is time, or if something is short; then all that is new goes with it.
    fn under_way(&self, is_time: bool) -> Vec<Entry> {
        let now = (Instant::now(), OffsetDateTime::now_utc());
        let mut slots = self.slots();
        if !is_time && !slots.all().any(|(_, _, slot)| slot.is_short(now.1)) {
            return Vec::new();
        }
        let with_news = slots.all().filter(|(_, _, slot)| {
            slot.commits.is_known() && (slot.is_short(now.1) || slot.has_progress())
        });
        let entries: Vec<Entry> = with_news
            .filter_map(|(topic, partition, slot)| {
                let point = slot.holding.commit_point().or(slot.commits.told_point());
                let point = point.or_else(|| slot.holding.next())?;
                let reach = slot.reach(now.1).unwrap_or(point);
                let commit = slot.commits.under_way(point, reach, now.0);
                Some(entry(topic, partition, slot, commit))
            })
            .collect();
        slots.is_committing = !entries.is_empty();
        entries
    }

    fn answered(&self) {
        self.slots().is_committing = false;
        self.short.notify_all();
    }

    /// What to commit of assignments that go, which nobody else commits any more. Nothing if the commit under way is not
    /// answered in time: it could overtake this one and take it back.
    pub(super) fn last_commits(&self, holdings: &[Arc<Holding>]) -> Vec<Entry> {
        let until = Instant::now() + self.answer_deadline;
        let mut slots = self.slots();
        while slots.is_committing {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::info!("partitions go without a last commit; what it covered comes again");
                return Vec::new();
            }
            let waited = self.short.wait_timeout(slots, left);
            slots = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let entries = slots.at_end(|holding| holdings.iter().any(|h| Arc::ptr_eq(h, holding)));
        slots.remove(holdings);
        entries
    }

    /// What to commit of all assignments at their end.
    pub(super) fn at_end(&self) -> Vec<Entry> {
        self.slots().at_end(|_| true)
    }

    fn confirmed(&self, entries: &[Entry]) {
        let mut slots = self.slots();
        for entry in entries {
            if let Some(slot) = slots.same(&entry.topic, entry.partition, &entry.holding) {
                slot.commits.confirmed(entry.commit);
            }
        }
    }
}

impl Slots {
    fn at_end(&mut self, is_among: impl Fn(&Arc<Holding>) -> bool) -> Vec<Entry> {
        self.all()
            .filter(|(_, _, slot)| is_among(&slot.holding))
            .filter_map(|(topic, partition, slot)| {
                let standing = slot.holding.standing();
                let commit = slot.commits.at_end(standing.point, standing.in_work)?;
                Some(entry(topic, partition, slot, commit))
            })
            .collect()
    }
}

fn entry(topic: &str, partition: i32, slot: &Slot, commit: Commit) -> Entry {
    Entry {
        topic: topic.to_owned(),
        partition,
        holding: Arc::clone(&slot.holding),
        commit,
    }
}
