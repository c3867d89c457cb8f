//! What was picked together, from the first attempt to the settlement.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tracing::{Instrument, Span, debug, error, warn};

use crate::broker::{Receipt, Settlement};
use crate::clock::Clock;
use crate::dlq::Refused;
use crate::error::Error;
use crate::event::{handle_batch_span, handle_span, handled};
use crate::inbox::{Attempt, Ended, Inbox, Keyed};
use crate::ladder::{Ask, Step};
use crate::store::InboxStore;
use crate::story::Reason;

use super::config::ConsumerConfig;
use super::copies::Copies;
use super::form::Form;
use super::health::Condition;
use super::job::{Homes, Job, Lot};
use super::lines::Admitted;
use super::outcome::Failure;
use super::pauses::{PAUSE_MIN, Pauses};
use super::routes::Routes;
use super::suspects::{Memory, Standing};
use super::tell::{Became, tell_attempt, tell_crash, tell_end, tell_lateness, tell_refused};

/// How long a message stays away that is being handled elsewhere.
const BUSY_DELAY: Duration = Duration::from_secs(1);

/// What became of deliveries, counted since the start. A snapshot for people; the truth is in database and broker.
#[derive(Debug, Default)]
pub struct ConsumerCounts {
    /// Handled and committed (done or skip).
    pub handled: AtomicU64,
    /// Acknowledged because their effect was there already.
    pub duplicates: AtomicU64,
    /// Failed, and to be tried again: on a rung, or where else the ladder lets them wait.
    pub retried: AtomicU64,
    /// Put behind a message of their key that waits, without an attempt.
    pub behind: AtomicU64,
    /// Made a dead letter.
    pub dead: AtomicU64,
    /// Failed, and recorded without their effect because their [route](super::Route) says so.
    pub skipped: AtomicU64,
    /// Found to have ended the process that handled them. They are among the retried or dead.
    pub crashed: AtomicU64,
}

/// Everything that handling needs, shared by all tasks of a consumer.
pub(super) struct Processor<S, F> {
    pub(super) inbox: Inbox<S>,
    pub(super) form: F,
    pub(super) homes: Homes,
    pub(super) routes: Routes,
    pub(super) copies: Copies,
    pub(super) config: ConsumerConfig,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) counts: Arc<ConsumerCounts>,
    pub(super) condition: Arc<Condition>,
    pub(super) memory: Memory,
}

/// What a task tells while it goes on.
pub(super) struct Word<T> {
    pub(super) probe: Option<u64>,
    /// How many attempts have ended, and whether they failed. None: no probe.
    pub(super) attempts: usize,
    pub(super) failed: bool,
    /// The task only waits for the broker from here on.
    pub(super) place: Option<Place<T>>,
}

/// The right to occupy a handler.
pub(super) struct Place<T> {
    pub(super) _permit: OwnedSemaphorePermit,
    /// A transaction that the last commit here began. It waits for nothing but the loop, which starts another message in it
    /// at once or drops it.
    pub(super) next: Option<T>,
}

impl<T> Place<T> {
    /// What comes first is another thing, over which the transaction would stay open.
    pub(super) fn give_transaction_back(&mut self) {
        self.next = None;
    }
}

/// What a task may do: occupy a handler, and go on until it is told to stop.
pub(super) struct Leave<T> {
    /// Given up when only the broker is waited for.
    pub(super) place: Option<Place<T>>,
    pub(super) stop: watch::Receiver<bool>,
    pub(super) probe: Option<u64>,
    pub(super) words: UnboundedSender<Word<T>>,
}

impl<T> Leave<T> {
    /// At once, and not with the end of the task: that may wait for the broker to take a copy.
    pub(super) fn failed(&self) {
        self.say(1, true, None);
    }

    /// At once, as well: the acknowledgement may take its time.
    fn succeeded(&mut self, ended: &[Ended], gives_up_place: bool) {
        let attempts = ended.iter().filter(|ended| **ended != Ended::Duplicate);
        let place = self.place.take_if(|_| gives_up_place);
        self.say(attempts.count(), false, place);
    }

    /// No attempt comes of it for now: if it is the guard's probe, another message can be that.
    pub(super) fn makes_no_attempt(&self) {
        self.say(0, false, None);
    }

    fn say(&self, attempts: usize, failed: bool, place: Option<Place<T>>) {
        let _ = self.words.send(Word {
            probe: self.probe,
            attempts,
            failed,
            place,
        });
    }
}

impl<S, F> Processor<S, F>
where
    S: InboxStore,
    F: Form<S>,
{
    /// Works to the settlement of each, and returns those that are to be handled again, alone. What is no longer ours is left
    /// unsettled, and so is everything at a stop: then it is delivered again.
    pub(super) async fn process(
        &self,
        jobs: Vec<Job>,
        mut leave: Leave<S::Transaction>,
    ) -> Vec<Job> {
        let mut jobs = match self.admit(jobs, &mut leave).await {
            Admitted::Now(jobs) => jobs,
            Admitted::Alone(jobs) => return jobs,
            Admitted::None => return Vec::new(),
        };
        for job in &jobs {
            let story = &job.message.incoming.story;
            tell_lateness(&self.inbox.consumer, story, || self.clock.now());
        }
        match jobs.len() {
            0 => Vec::new(),
            1 => match jobs.pop() {
                Some(job) => {
                    let incoming = &job.message.incoming;
                    let span = handle_span(&self.inbox.consumer, &job.topic, incoming);
                    self.one(job, &mut leave).instrument(span).await
                }
                None => Vec::new(),
            },
            _ => {
                let traces = jobs.iter().map(|job| &job.message.incoming.message.trace);
                let span = handle_batch_span(&self.inbox.consumer, traces.map(Option::as_ref));
                self.several(jobs, &mut leave).instrument(span).await
            }
        }
    }

    /// All in one transaction; if that does not work, they are to be handled each alone.
    async fn several(&self, mut jobs: Vec<Job>, leave: &mut Leave<S::Transaction>) -> Vec<Job> {
        let mut pauses = Pauses::new(&self.config);
        loop {
            jobs.retain(|job| job.receipt.is_current());
            let batch: Vec<&Keyed> = jobs.iter().map(|job| &job.message).collect();
            if batch.is_empty() {
                return jobs;
            }
            let pause = match self.attempt(&batch, leave).await {
                Attempt::Settled(ended) => {
                    leave.succeeded(&ended, true);
                    let settled = jobs.into_iter().zip(ended);
                    let settled =
                        settled.map(|(job, ended)| self.acknowledge(job, Became::of(ended)));
                    join_all(settled).await;
                    return Vec::new();
                }
                Attempt::Rerun(failure) => self.quick(&mut pauses, &failure),
                Attempt::Unavailable(error) => Some(self.patient(&mut pauses, &error)),
                Attempt::Failed { failure, .. } => {
                    let (consumer, count) = (&self.inbox.consumer, jobs.len());
                    debug!(consumer, count, %failure, "a batch failed; its messages are handled alone");
                    None
                }
                Attempt::Busy | Attempt::Unrecorded(..) => None,
            };
            match pause {
                Some(pause) if self.wait(pause, leave).await => return Vec::new(),
                Some(_) => {}
                None => return jobs,
            }
        }
    }

    async fn one(&self, mut job: Job, leave: &mut Leave<S::Transaction>) -> Vec<Job> {
        match job.lot {
            _ if job.ticket.is_some_and(|ticket| ticket.parked) => {
                leave.makes_no_attempt();
                let step = self.copies.park(&job);
                return self.carry_out(step, job, leave).await;
            }
            Lot::Work => return self.attempts(job, leave).await,
            Lot::Foreign => {
                debug!(
                    consumer = self.inbox.consumer,
                    "copy on a shared rung belongs to another consumer"
                );
                self.settle(job.receipt, Settlement::Acknowledge).await;
            }
            Lot::Unkeyed => {
                let failure = Failure::new("the message has no usable id");
                let ask = Ask::Never(Some(Reason::new(Reason::MISSING_ID)));
                return self.fail(job, &failure, ask, leave).await;
            }
            Lot::Suspect => match self.patiently(&job, leave, || self.standing(&job)).await {
                Some(Standing::Free) => {
                    job.lot = Lot::Watched;
                    return vec![job];
                }
                Some(Standing::Done) => {
                    self.end(&job, leave).await;
                    self.acknowledge(job, Became::Duplicate).await;
                }
                Some(Standing::InWork) => return self.put_off(job, leave).await,
                None => {}
            },
            Lot::Watched => match self.patiently(&job, leave, || self.begin(&job)).await {
                Some(true) => {
                    self.memory.keep_the_note();
                    self.counts.crashed.fetch_add(1, Ordering::Relaxed);
                    tell_crash(&self.inbox.consumer);
                    let crash = Failure::crash();
                    return self.follow(job, crash, Ask::Next, leave).await;
                }
                Some(false) => return self.attempts(job, leave).await,
                None => {
                    self.end(&job, leave).await;
                }
            },
        }
        Vec::new()
    }

    /// Returns the message if it is to be handled again.
    async fn attempts(&self, job: Job, leave: &mut Leave<S::Transaction>) -> Vec<Job> {
        let mut pauses = Pauses::new(&self.config);
        while job.receipt.is_current() {
            let attempt = self.attempt(&[&job.message], leave).await;
            let (failure, ask) = match attempt {
                Attempt::Settled(ended) => {
                    self.succeed(job, ended.first(), leave).await;
                    return Vec::new();
                }
                Attempt::Unrecorded(ended, error) => {
                    self.record_late(job, ended, error, leave).await;
                    return Vec::new();
                }
                Attempt::Busy => {
                    self.end(&job, leave).await;
                    return self.put_off(job, leave).await;
                }
                Attempt::Failed { failure, ask } => (failure, ask),
                Attempt::Unavailable(error) => {
                    let pause = self.patient(&mut pauses, &error);
                    if self.wait(pause, leave).await {
                        break;
                    }
                    continue;
                }
                Attempt::Rerun(failure) => match self.quick(&mut pauses, &failure) {
                    Some(pause) if self.wait(pause, leave).await => break,
                    Some(_) => {
                        self.regain(&job, leave).await;
                        continue;
                    }
                    None => (failure, Ask::Next),
                },
            };
            return self.follow(job, failure, ask, leave).await;
        }
        // It went to another member, or the consumer stops while the database is away: no process ended over it.
        self.end(&job, leave).await;
        Vec::new()
    }

    async fn succeed(&self, job: Job, ended: Option<&Ended>, leave: &mut Leave<S::Transaction>) {
        let ended = *ended.unwrap_or(&Ended::Done);
        // Of a suspect there is still something to write, on another connection.
        let is_all = job.lot == Lot::Work;
        if let Some(place) = leave.place.as_mut().filter(|_| !is_all) {
            place.give_transaction_back();
        }
        leave.succeeded(&[ended], is_all);
        self.end(&job, leave).await;
        self.acknowledge(job, Became::of(ended)).await;
    }

    /// The work is done, outside of any transaction: only the record of it is tried again, also where the message went to
    /// another member meanwhile, who would do it again.
    async fn record_late(
        &self,
        job: Job,
        ended: Ended,
        mut error: Error,
        leave: &mut Leave<S::Transaction>,
    ) {
        let mut pauses = Pauses::new(&self.config);
        loop {
            let pause = self.patient(&mut pauses, &error);
            if self.wait(pause, leave).await {
                self.end(&job, leave).await;
                return;
            }
            match self.inbox.remember(&job.message.key).await {
                Ok(()) => return self.succeed(job, Some(&ended), leave).await,
                Err(again) => error = again,
            }
        }
    }

    /// Puts the copy where the ladder says, and only after its confirm acknowledges the original. While the copy is not
    /// confirmed nothing is acknowledged, and the message's key waits. Returns the message if it is to be handled again.
    pub(super) async fn fail(
        &self,
        job: Job,
        failure: &Failure,
        ask: Ask,
        leave: &mut Leave<S::Transaction>,
    ) -> Vec<Job> {
        leave.failed();
        let step = self.copies.step(&job, failure, ask);
        // The start of an attempt that was a crash stays. If the acknowledgement is lost, in the next crash of another message
        // for example, the delivery comes again: then it is known, and not tried once more.
        if failure.class() != Failure::CRASH && !self.end(&job, leave).await {
            return Vec::new();
        }
        self.carry_out(step, job, leave).await
    }

    async fn carry_out(
        &self,
        mut step: Step,
        mut job: Job,
        leave: &mut Leave<S::Transaction>,
    ) -> Vec<Job> {
        let mut patient = self.config.backoff.delays(fastrand::u64(..));
        // As long as it lives, the probe tells that this message waits for its copy to be taken.
        let mut _waiting = None;
        // A count in the waiting room only grows: whoever claimed the message since may be told of this attempt too.
        let may_be_late = job.ticket.is_some() && matches!(step, Step::Wait { .. });
        while may_be_late || job.receipt.is_current() {
            match self.copies.put(&step, &job).await {
                Ok(()) => {
                    self.copies.tell(&step, &job);
                    let became = match step {
                        Step::Climb { .. } | Step::Wait { .. } => Became::Retried,
                        Step::Bury { story } => Became::Dead(story.reason),
                        Step::Stay { delay, story } => {
                            self.counts.retried.fetch_add(1, Ordering::Relaxed);
                            job.stay(story, delay);
                            return vec![job];
                        }
                    };
                    self.acknowledge(job, became).await;
                    break;
                }
                Err(refused) => {
                    tell_refused(&self.inbox.consumer, &refused.place);
                    error!(
                        consumer = self.inbox.consumer, id = %job.message.incoming.message.id,
                        place = refused.place, error = %refused.error,
                        "copy of a failed message is not confirmed; the message stays and is tried again"
                    );
                    let Refused {
                        place,
                        error,
                        for_good,
                    } = refused;
                    if for_good && matches!(step, Step::Climb { .. }) {
                        step = Copies::without_rung(step);
                        continue;
                    }
                    _waiting = Some(self.condition.waits_for(place, &error));
                }
            }
            // Messages whose copies nobody takes must not keep the handlers from those that need none.
            drop(leave.place.take());
            let pause = patient.next_delay().max(PAUSE_MIN);
            if self.wait(pause, leave).await {
                break;
            }
        }
        Vec::new()
    }

    /// Returns the message if it is to be handled again.
    async fn put_off(&self, mut job: Job, leave: &mut Leave<S::Transaction>) -> Vec<Job> {
        warn!(
            consumer = self.inbox.consumer, id = %job.message.incoming.message.id,
            "message is in work elsewhere, in a transaction that does not end; it is put off"
        );
        handled(&Span::current(), "put off", false);
        if self.copies.ladder.is_in_place() && job.ticket.is_none() {
            job.pause = Some(BUSY_DELAY);
            return vec![job];
        }
        if let Some((room, waiting)) = self.copies.in_line(&job) {
            // Given back to the broker instead, it would be passed by others of its key. It may wait for the room as long as that
            // takes, and holds nobody up meanwhile.
            leave.makes_no_attempt();
            drop(leave.place.take());
            let put = || {
                room.store
                    .put(&self.inbox.consumer, &waiting, true, BUSY_DELAY)
            };
            if self.patiently(&job, leave, put).await.is_some() {
                room.expect(BUSY_DELAY);
                self.settle(job.receipt, Settlement::Acknowledge).await;
            }
            return Vec::new();
        }
        self.memory.remember_put_off(&job.message.key);
        let release = Settlement::Release { delay: BUSY_DELAY };
        self.settle(job.receipt, release).await;
        Vec::new()
    }

    // ---- Settlements and pauses

    async fn attempt(&self, batch: &[&Keyed], leave: &mut Leave<S::Transaction>) -> Attempt {
        let began = Instant::now();
        let mut next = leave.place.as_mut().and_then(|place| place.next.take());
        let attempt = self.form.run(&self.inbox, batch, &mut next).await;
        if let Some(place) = &mut leave.place {
            place.next = next;
        }
        tell_attempt(&self.inbox.consumer, &attempt, batch.len(), began.elapsed());
        // Where it did not answer, the pause that follows says so.
        if !matches!(attempt, Attempt::Unavailable(_)) {
            self.condition.database(None);
        }
        attempt
    }

    pub(super) async fn acknowledge(&self, job: Job, became: Became) {
        let count = match became {
            Became::Handled => &self.counts.handled,
            Became::Duplicate => &self.counts.duplicates,
            Became::Retried => &self.counts.retried,
            Became::Behind => &self.counts.behind,
            Became::Dead(_) => &self.counts.dead,
            Became::Skipped(_) => &self.counts.skipped,
        };
        count.fetch_add(1, Ordering::Relaxed);
        let message = &job.message.incoming.message;
        tell_end(&self.inbox.consumer, message, &became, || self.clock.now());
        let note = job.note();
        self.settle(job.receipt, Settlement::Acknowledge).await;
        if let Some(note) = note {
            self.forget(note).await;
        }
    }

    async fn settle(&self, receipt: Box<dyn Receipt>, settlement: Settlement) {
        if let Err(error) = receipt.settle(settlement).await {
            // The effect is durable; at worst the message comes again and the inbox suppresses it.
            warn!(consumer = self.inbox.consumer, %error, "settlement did not reach the broker");
        }
    }

    /// The pause before the transaction is run again; `None` when that was often enough.
    fn quick(&self, pauses: &mut Pauses, failure: &Failure) -> Option<Duration> {
        let pause = pauses.quick();
        if pause.is_some() {
            debug!(consumer = self.inbox.consumer, reruns = pauses.reruns, %failure, "transaction is run again");
        }
        pause
    }

    pub(super) fn patient(&self, pauses: &mut Pauses, error: &Error) -> Duration {
        warn!(consumer = self.inbox.consumer, %error, "database away; the message waits");
        self.condition.database(Some(error));
        pauses.patient()
    }
}
