//! What is held of one durable consumer's messages, and what is to be said about them.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::Subject;
use bytes::Bytes;
use time::OffsetDateTime;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::broker::Settlement;

pub(super) const ACKNOWLEDGED: &[u8] = b"+ACK";
pub(super) const RELEASED: &[u8] = b"-NAK";
pub(super) const IN_PROGRESS: &[u8] = b"+WPI";

/// Longest delay that a release asks the server for.
const DELAY_MAX: Duration = Duration::from_secs(365 * 86_400);
/// Most delays remembered, in case the server brings a message before its time because our word was lost.
const DELAYS_MAX: usize = 10_000;

/// The right to settle one message, as long as the server leaves it to us.
pub(super) struct Lease {
    pub(super) sequence: u64,
    /// A stream that was deleted and made anew counts from one again; this tells its messages from the old ones.
    stored_at: OffsetDateTime,
    state: Mutex<LeaseState>,
}

struct LeaseState {
    /// Where settlements go; a later delivery of the same message has another one.
    reply: Subject,
    /// Until when the server surely gives it to nobody else.
    until: Instant,
}

impl Lease {
    fn state(&self) -> MutexGuard<'_, LeaseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn reply(&self) -> Subject {
        self.state().reply.clone()
    }

    pub(super) fn until(&self) -> Instant {
        self.state().until
    }

    pub(super) fn extend(&self, until: Instant) {
        let mut state = self.state();
        state.until = state.until.max(until);
    }
}

/// A message to be given back.
pub(super) struct Held {
    pub(super) reply: Subject,
    pub(super) until: Instant,
}

impl Held {
    fn of(lease: &Lease) -> Self {
        let state = lease.state();
        Self {
            reply: state.reply.clone(),
            until: state.until,
        }
    }
}

/// What a puller and the receipts of its messages share.
pub(super) struct Shelf {
    /// The name by which the request asked for it.
    pub(super) source: String,
    /// Most messages pulled and not settled.
    pub(super) quota: usize,
    /// Something for the puller to do.
    pub(super) changed: Notify,
    state: Mutex<ShelfState>,
}

#[derive(Default)]
struct ShelfState {
    leases: HashMap<u64, Arc<Lease>>,
    /// Settlements to be sent, in their order.
    settled: Vec<(Subject, Bytes)>,
    delays: HashMap<(u64, OffsetDateTime), Instant>,
    closed: bool,
}

impl Shelf {
    pub(super) fn new(source: String, quota: usize) -> Arc<Self> {
        Arc::new(Self {
            source,
            quota,
            changed: Notify::new(),
            state: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, ShelfState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many more messages may be pulled.
    pub(super) fn room(&self) -> usize {
        self.quota.saturating_sub(self.state().leases.len())
    }

    /// Takes a message in. One that we still hold is not taken twice: the server gave it again because a sign of life was
    /// late, and what we have of it goes on under the new delivery. Also says until when it must wait, if it was released
    /// and comes too early.
    pub(super) fn take_in(
        &self,
        sequence: u64,
        stored_at: OffsetDateTime,
        reply: Subject,
        until: Instant,
    ) -> Option<(Arc<Lease>, Option<Instant>)> {
        let mut state = self.state();
        let held = state.leases.get(&sequence);
        if let Some(held) = held.filter(|held| held.stored_at == stored_at) {
            *held.state() = LeaseState { reply, until };
            return None;
        }
        let lease = Arc::new(Lease {
            sequence,
            stored_at,
            state: Mutex::new(LeaseState { reply, until }),
        });
        state.leases.insert(sequence, Arc::clone(&lease));
        let now = Instant::now();
        let wait = state.delays.remove(&(sequence, stored_at));
        Some((lease, wait.filter(|due| *due > now)))
    }

    pub(super) fn holds_sequence(&self, sequence: u64) -> bool {
        self.state().leases.contains_key(&sequence)
    }

    pub(super) fn holds(&self, lease: &Arc<Lease>) -> bool {
        let state = self.state();
        let held = state.leases.get(&lease.sequence);
        !state.closed && held.is_some_and(|held| Arc::ptr_eq(held, lease))
    }

    pub(super) fn is_current(&self, lease: &Arc<Lease>) -> bool {
        self.holds(lease) && Instant::now() < lease.until()
    }

    /// What must be kept alive, because its time is over at `before`. What is over already is somebody else's: the server
    /// would take a sign of life for theirs.
    pub(super) fn ending(&self, before: Instant) -> Vec<Arc<Lease>> {
        let now = Instant::now();
        let ending = |lease: &&Arc<Lease>| {
            let until = lease.until();
            now < until && until < before
        };
        let state = self.state();
        let leases = state.leases.values().filter(ending);
        leases.cloned().collect()
    }

    /// Forgets a message and notes what is said of it.
    pub(super) fn settle(&self, lease: &Arc<Lease>, settlement: Settlement) {
        let mut state = self.state();
        let ours = state
            .leases
            .get(&lease.sequence)
            .is_some_and(|held| Arc::ptr_eq(held, lease));
        if !ours || state.closed {
            return;
        }
        state.leases.remove(&lease.sequence);
        let now = Instant::now();
        // Somebody else may have it by now; nothing is said about that delivery.
        if now < lease.until() {
            let word = match settlement {
                Settlement::Acknowledge => Bytes::from_static(ACKNOWLEDGED),
                Settlement::Release { delay } => {
                    if !delay.is_zero() {
                        state.delays.retain(|_, due| *due > now);
                        if state.delays.len() < DELAYS_MAX
                            && let Some(due) = now.checked_add(delay)
                        {
                            state.delays.insert((lease.sequence, lease.stored_at), due);
                        }
                    }
                    release(delay)
                }
            };
            state.settled.push((lease.reply(), word));
        }
        drop(state);
        self.changed.notify_one();
    }

    pub(super) fn take_settled(&self) -> Vec<(Subject, Bytes)> {
        std::mem::take(&mut self.state().settled)
    }

    /// From now on settlements change nothing. What is still held is to be given back, in the order of the stream: the
    /// server delivers it again in the order in which it is told.
    pub(super) fn close(&self) -> BTreeMap<u64, Held> {
        let mut state = self.state();
        state.closed = true;
        let now = Instant::now();
        std::mem::take(&mut state.leases)
            .into_iter()
            .map(|(sequence, lease)| (sequence, Held::of(&lease)))
            .filter(|(_, held)| now < held.until)
            .collect()
    }
}

/// The word for a release.
pub(super) fn release(delay: Duration) -> Bytes {
    if delay.is_zero() {
        return Bytes::from_static(RELEASED);
    }
    format!("-NAK {{\"delay\": {}}}", delay.min(DELAY_MAX).as_nanos()).into()
}
