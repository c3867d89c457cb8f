//! The waiting room of a consumer: claims what is due, keeps the claims alive, and ends them. See decision 0016.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use time::OffsetDateTime;
use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedSender;
use tracing::{debug, warn};

use crate::backoff::{DelayPolicy, Jitter};
use crate::broker::{Delivery, Receipt, Settlement};
use crate::clock::{self, Clock};
use crate::envelope::Incoming;
use crate::error::{Error, Result};
use crate::event::{self, Value};
use crate::store::{Claim, Claimed, WaitingStore};
use crate::story::Origin;

use super::health::Condition;

/// How long nobody asks for what other members put there.
const IDLE_MAX: Duration = Duration::from_secs(1);
/// A pause that is shorter would be a busy loop, where two clocks disagree by less than that.
const PAUSE_MIN: Duration = Duration::from_millis(1);
/// Rows of one claim.
const CLAIM_MAX: usize = 100;
/// How often the end of a row is tried before it is left to the end of its lease.
const FINISH_TRIES: u32 = 5;

/// What came in: from the broker, or out of the waiting room.
pub(super) struct Arrival {
    pub(super) delivery: Delivery,
    pub(super) ticket: Option<Ticket>,
}

/// What only a delivery out of the waiting room has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket {
    pub(super) claim: Claim,
    /// To be a dead letter without an attempt.
    pub(super) parked: bool,
}

/// One consumer's side of the waiting room.
pub(super) struct Room {
    pub(super) store: Arc<dyn WaitingStore>,
    consumer: String,
    clock: Arc<dyn Clock>,
    condition: Arc<Condition>,
    lease: Duration,
    held: Mutex<Held>,
    /// When to ask next, by the consumer's clock.
    next: Mutex<OffsetDateTime>,
    /// How many deliveries somebody waits for.
    wanted: AtomicUsize,
    changed: Notify,
}

#[derive(Default)]
struct Held {
    /// By position: the token, and until when the claim is believed in.
    claims: HashMap<i64, (i64, Instant)>,
    /// Dropped without a settlement.
    dropped: Vec<Claim>,
}

impl Room {
    pub(super) fn new(
        store: Arc<dyn WaitingStore>,
        consumer: String,
        clock: Arc<dyn Clock>,
        condition: Arc<Condition>,
        lease: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            consumer,
            next: Mutex::new(clock.now()),
            clock,
            condition,
            lease,
            held: Mutex::default(),
            wanted: AtomicUsize::new(0),
            changed: Notify::new(),
        })
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> MutexGuard<'_, OffsetDateTime> {
        self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something will be due after this delay.
    pub(super) fn expect(&self, delay: Duration) {
        let due = clock::add(self.clock.now(), delay);
        let mut next = self.next();
        if due < *next {
            *next = due;
            self.changed.notify_one();
        }
    }

    /// Somebody waits for up to so many deliveries.
    pub(super) fn want(&self, count: usize) {
        if self.wanted.swap(count, Ordering::AcqRel) == 0 {
            self.changed.notify_one();
        }
    }

    /// Claims what is due, as much as is wanted, and hands it over. Ends with the receiver.
    pub(super) async fn poll(self: Arc<Self>, arrivals: UnboundedSender<Arrival>) {
        let policy = DelayPolicy::exponential(Duration::from_millis(100))
            .with_jitter(Jitter::Equal)
            .with_cap(Duration::from_secs(10));
        let mut patient = policy.delays(fastrand::u64(..));
        while !arrivals.is_closed() {
            let left = left(*self.next(), self.clock.now());
            let count = self.wanted.load(Ordering::Acquire).min(CLAIM_MAX);
            if count == 0 {
                self.changed.notified().await;
                continue;
            }
            if !left.is_zero() {
                tokio::select! {
                    () = self.clock.sleep(left.max(PAUSE_MIN)) => {}
                    () = self.changed.notified() => {}
                }
                continue;
            }
            // Before the question, so that what is expected meanwhile is not forgotten.
            *self.next() = clock::add(self.clock.now(), IDLE_MAX);
            let asked = Instant::now();
            match self.store.claim(&self.consumer, count, self.lease).await {
                Ok(claims) => {
                    patient.reset();
                    self.condition.room(None);
                    for (position, error) in &claims.unreadable {
                        warn!(consumer = self.consumer, position, %error, "a row of the waiting room cannot be read");
                    }
                    match claims.next_in {
                        _ if claims.rows.len() == count => self.expect(Duration::ZERO),
                        Some(next_in) => self.expect(next_in),
                        None => {}
                    }
                    if !claims.rows.is_empty() {
                        self.wanted.store(0, Ordering::Release);
                    }
                    for row in claims.rows {
                        let arrival = self.arrival(row, asked);
                        // Nobody takes it any more: dropped, it is given back.
                        let _ = arrivals.send(arrival);
                    }
                }
                Err(error) => {
                    self.condition.room(Some(&error));
                    let pause = patient.next_delay();
                    warn!(consumer = self.consumer, %error, ?pause, "waiting room does not answer");
                    self.clock.sleep(pause).await;
                    self.expect(Duration::ZERO);
                }
            }
        }
    }

    fn arrival(self: &Arc<Self>, row: Claimed, asked: Instant) -> Arrival {
        let claim = row.claim;
        let until = asked + clock::at_most_a_day(self.lease);
        self.held()
            .claims
            .insert(claim.position, (claim.token, until));
        event::observe(
            &event::CONSUMER_WAITING_LATE,
            &[Value::Name(&self.consumer)],
            row.late,
        );
        let origin = row.letter.story.origin.clone();
        let coordinates = origin.unwrap_or_else(|| Origin {
            topic: row.source.clone(),
            partition: None,
            offset: None,
        });
        Arrival {
            delivery: Delivery {
                incoming: Incoming {
                    message: row.letter.message,
                    story: row.letter.story,
                    id_missing: false,
                },
                source: row.source,
                coordinates,
                redelivered: row.again,
                receipt: Box::new(Place {
                    room: self.clone(),
                    claim,
                    settled: false,
                }),
            },
            ticket: Some(Ticket {
                claim,
                parked: row.parked,
            }),
        }
    }

    /// Keeps claims alive, and gives back what was dropped. Never returns.
    pub(super) async fn keep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(self.lease / 3).await;
            self.give_back_dropped().await;
            let claims: Vec<Claim> = (self.held().claims.iter())
                .map(|(&position, &(token, _))| Claim { position, token })
                .collect();
            if claims.is_empty() {
                continue;
            }
            let asked = Instant::now();
            match self.store.renew(&claims, self.lease).await {
                Ok(kept) => self.renewed(&claims, &kept, asked),
                Err(error) => {
                    warn!(consumer = self.consumer, %error, "claims in the waiting room are not renewed");
                }
            }
        }
    }

    fn renewed(&self, asked_for: &[Claim], kept: &[Claim], asked: Instant) {
        let until = asked + clock::at_most_a_day(self.lease);
        let mut held = self.held();
        for claim in asked_for {
            let known = held.claims.get_mut(&claim.position);
            let Some(known) = known.filter(|(token, _)| *token == claim.token) else {
                continue;
            };
            if kept.contains(claim) {
                known.1 = until;
            } else {
                // Its message went on another way: it was stored again, or another member took it over.
                held.claims.remove(&claim.position);
            }
        }
    }

    /// Prolongs a claim whose lease has ended, if nobody has claimed the row since.
    pub(super) async fn regain(&self, claim: Claim) -> Result<()> {
        if !self.is_held(claim) {
            let asked = Instant::now();
            let kept = self.store.renew(&[claim], self.lease).await?;
            self.renewed(&[claim], &kept, asked);
        }
        Ok(())
    }

    /// Gives back what was dropped without a settlement.
    pub(super) async fn give_back_dropped(&self) {
        let dropped = std::mem::take(&mut self.held().dropped);
        if !dropped.is_empty() {
            self.give_back(&dropped).await;
        }
    }

    async fn give_back(&self, claims: &[Claim]) {
        if let Err(error) = self.store.give_back(claims, Duration::ZERO).await {
            debug!(consumer = self.consumer, %error, "what waits again is free when its lease ends");
        }
        self.expect(Duration::ZERO);
    }

    /// Gives back everything, within so long.
    pub(super) async fn leave(&self, deadline: Duration) {
        let mut claims = std::mem::take(&mut *self.held());
        let held = claims.claims.into_iter();
        let held = held.map(|(position, (token, _))| Claim { position, token });
        claims.dropped.extend(held);
        if !claims.dropped.is_empty() {
            let given_back = self.give_back(&claims.dropped);
            let _ = tokio::time::timeout(deadline, given_back).await;
        }
    }

    fn is_held(&self, claim: Claim) -> bool {
        let held = self.held();
        held.claims
            .get(&claim.position)
            .is_some_and(|(token, until)| *token == claim.token && Instant::now() < *until)
    }

    fn let_go(&self, claim: Claim) {
        let mut held = self.held();
        let ours = held.claims.get(&claim.position);
        if ours.is_some_and(|(token, _)| *token == claim.token) {
            held.claims.remove(&claim.position);
        }
    }

    /// Ends a row. What does not succeed is tried a few times: others of its line wait for it.
    async fn finish(&self, claim: Claim) -> Result<()> {
        let policy = DelayPolicy::exponential(Duration::from_millis(50)).with_jitter(Jitter::Equal);
        let mut pauses = policy.delays(fastrand::u64(..));
        for _ in 1..FINISH_TRIES {
            match self.finish_once(claim).await {
                Err(error) if error.is_transient() => {
                    tokio::time::sleep(pauses.next_delay()).await;
                }
                ended => return ended,
            }
        }
        self.finish_once(claim).await
    }

    async fn finish_once(&self, claim: Claim) -> Result<(), Error> {
        let finished = self.store.finish(claim).await?;
        if finished.promoted {
            self.expect(Duration::ZERO);
        }
        Ok(())
    }
}

/// How long nobody has to ask. No question is ever planned further ahead than [`IDLE_MAX`]: where it is, the clock was put back.
fn left(next: OffsetDateTime, now: OffsetDateTime) -> Duration {
    let left = Duration::try_from(next - now).unwrap_or_default();
    if left > IDLE_MAX {
        Duration::ZERO
    } else {
        left
    }
}

/// The receipt of a delivery out of the waiting room.
struct Place {
    room: Arc<Room>,
    claim: Claim,
    settled: bool,
}

impl Receipt for Place {
    fn is_current(&self) -> bool {
        self.room.is_held(self.claim)
    }

    fn settle(mut self: Box<Self>, settlement: Settlement) -> BoxFuture<'static, Result<()>> {
        self.settled = true;
        let (room, claim) = (self.room.clone(), self.claim);
        Box::pin(async move {
            let ended = match settlement {
                Settlement::Acknowledge => room.finish(claim).await,
                Settlement::Release { delay } => {
                    let given_back = room.store.give_back(&[claim], delay).await;
                    room.expect(delay);
                    given_back
                }
            };
            room.let_go(claim);
            ended
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.settled {
            self.room.let_go(self.claim);
            self.room.held().dropped.push(self.claim);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn a_clock_that_was_put_back_keeps_nobody_from_asking() {
        let now = datetime!(2026-01-05 10:00 UTC);
        let in_micros = |micros| left(now + time::Duration::microseconds(micros), now);
        assert_eq!(in_micros(-1), Duration::ZERO);
        assert_eq!(in_micros(1), Duration::from_micros(1));
        assert_eq!(in_micros(1_000_000), IDLE_MAX);
        assert_eq!(in_micros(1_000_001), Duration::ZERO);
        assert_eq!(in_micros(2 * 3_600_000_000), Duration::ZERO);
    }
}
