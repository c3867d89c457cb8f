//! Sharing the shards of one source: a single active consumer keeps its shard as long as it lives, so who has too many
//! steps back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use lapin::options::{BasicConsumeOptions, QueueDeclareOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Connection, Consumer};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::arguments::{self, short, table, text};
use super::link::Link;
use crate::error::cut;

const LOOK: Duration = Duration::from_secs(2);

/// What a member knows of its consumer on one shard.
#[derive(Default)]
pub(super) struct Shift {
    /// Whether it has received: the broker tells nobody who is active.
    pub(super) busy: AtomicBool,
    /// Wakes the consumer that is to step back behind the others.
    pub(super) asked: Notify,
}

impl Shift {
    /// What was received and asked for so far was for a channel that is given up.
    pub(super) fn forget(&self) {
        self.busy.store(false, Ordering::Release);
        let _taken = self.asked.notified().now_or_never();
    }
}

/// The shards of one source, seen from one member.
pub(super) struct Balance {
    pub(super) link: Arc<Link>,
    pub(super) answer_deadline: Duration,
    pub(super) source: Arc<str>,
    pub(super) shifts: Vec<Arc<Shift>>,
}

/// A member's place on the roll.
struct Enrolled {
    // Held: it lives as long as its channel is used.
    _connection: Arc<Connection>,
    channel: Channel,
    _consumer: Consumer,
}

impl Balance {
    /// Looks now and then how many members there are, and steps back where it has more than its share.
    pub(super) async fn keep(self, mut stopping: watch::Receiver<Option<Instant>>) -> bool {
        tokio::select! {
            () = self.look() => {}
            _ = stopping.wait_for(Option::is_some) => {}
        }
        true
    }

    async fn look(&self) {
        let mut enrolled = None;
        loop {
            // Not in step with the others.
            sleep(LOOK / 2 + LOOK.mul_f64(fastrand::f64()) / 2).await;
            if enrolled.is_none() {
                enrolled = self.enrol().await;
            }
            let Some(place) = &enrolled else {
                continue;
            };
            let Some(members) = self.count(&place.channel).await else {
                enrolled = None;
                continue;
            };
            let busy: Vec<_> = self
                .shifts
                .iter()
                .filter(|shift| shift.busy.load(Ordering::Acquire))
                .collect();
            let surplus = surplus(self.shifts.len(), members, busy.len());
            for shift in busy.iter().take(surplus) {
                shift.asked.notify_one();
            }
        }
    }

    /// The roll: a queue that is always empty and goes with the last member. A quorum queue with a single active consumer
    /// does not count those that wait.
    fn roll(&self) -> Option<ShortString> {
        short(cut(&format!("{}.members", self.source), 255))
    }

    /// Without the right to make the roll nobody steps back: members take over from each other only when one leaves.
    async fn enrol(&self) -> Option<Enrolled> {
        let until = Instant::now() + self.answer_deadline;
        let (connection, channel) = self.link.channel("balance", until).await.ok()?;
        self.count(&channel).await?;
        let enrolling = channel.basic_consume(
            self.roll()?,
            ShortString::default(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        );
        let consumer = timeout_at(until, enrolling).await.ok()?.ok()?;
        Some(Enrolled {
            _connection: connection,
            channel,
            _consumer: consumer,
        })
    }

    async fn count(&self, channel: &Channel) -> Option<usize> {
        let options = QueueDeclareOptions {
            durable: true,
            auto_delete: true,
            ..QueueDeclareOptions::default()
        };
        let arguments = table([(arguments::QUEUE_TYPE, text("classic"))]);
        let asked = channel.queue_declare(self.roll()?, options, arguments);
        let found = timeout(self.answer_deadline, asked).await.ok()?.ok()?;
        usize::try_from(found.consumer_count()).ok()
    }
}

/// How many shards to give up of those that are busy here.
fn surplus(shards: usize, members: usize, busy: usize) -> usize {
    busy.saturating_sub(shards.div_ceil(members.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shift_that_is_taken_is_not_asked_for_again() {
        let shift = Shift::default();
        shift.busy.store(true, Ordering::Release);
        shift.asked.notify_one();
        shift.forget();
        assert!(!shift.busy.load(Ordering::Acquire));
        assert!(shift.asked.notified().now_or_never().is_none());
    }

    #[test]
    fn a_member_keeps_its_share_and_no_more() {
        assert_eq!(surplus(4, 0, 4), 0);
        assert_eq!(surplus(4, 1, 4), 0);
        assert_eq!(surplus(4, 2, 4), 2);
        assert_eq!(surplus(4, 2, 2), 0);
        assert_eq!(surplus(5, 2, 3), 0);
        assert_eq!(surplus(4, 9, 4), 3);
    }
}
