//! What was picked together, from the first attempt to the settlement.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tracing::{Instrument, Span, debug, error, warn};

use crate::backoff::{DelayPolicy, Delays, Jitter};
use crate::broker::{Receipt, Settlement};
use crate::clock::Clock;
use crate::error::Error;
use crate::event::{handle_batch_span, handle_span, handled};
use crate::inbox::{Attempt, Ended, Inbox, Keyed};
use crate::ladder::{Ask, Step};
use crate::store::{InboxStore, Recorded};
use crate::story::Reason;

use super::config::ConsumerConfig;
use super::copies::Copies;
use super::form::Form;
use super::health::Condition;
use super::job::{Homes, Job, Lot};
use super::outcome::Failure;
use super::tell::{Became, tell_attempt, tell_crash, tell_end};

/// Local re-runs of one attempt after conflicts and broken connections; beyond that it counts as failed.
const RERUNS_MAX: u32 = 5;

/// How long a message stays away that is being handled elsewhere.
const BUSY_DELAY: Duration = Duration::from_secs(1);

/// What became of deliveries, counted since the start. A snapshot for people; the truth is in database and broker.
#[derive(Debug, Default)]
pub struct ConsumerCounts {
    /// Handled and committed (done or skip).
    pub handled: AtomicU64,
    /// Acknowledged because their effect was there already.
    pub duplicates: AtomicU64,
    /// Sent to a rung.
    pub retried: AtomicU64,
    /// Made a dead letter.
    pub dead: AtomicU64,
    /// Found to have ended the process that handled them. They are among the retried or dead.
    pub crashed: AtomicU64,
}

/// Everything that handling needs, shared by all tasks of a consumer.
pub(super) struct Processor<S, F> {
    pub(super) inbox: Inbox<S>,
    pub(super) form: F,
    pub(super) homes: Homes,
    pub(super) copies: Copies,
    pub(super) config: ConsumerConfig,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) counts: Arc<ConsumerCounts>,
    pub(super) condition: Arc<Condition>,
}

/// How work ended, for the schedule and the guard.
#[derive(Default)]
pub(super) struct Report {
    /// To be handled again, each alone.
    pub(super) returned: Vec<Job>,
    /// Attempts that ended, and whether they failed.
    pub(super) attempts: Vec<bool>,
}

/// What a task may do: occupy a handler, and go on until it is told to stop.
pub(super) struct Leave {
    /// Given up when only the broker is waited for.
    pub(super) place: Option<OwnedSemaphorePermit>,
    pub(super) stop: watch::Receiver<bool>,
}

/// What is known of a suspect before it is handled.
enum Past {
    Clean,
    Crashed,
    Duplicate,
    Busy,
    /// It is no longer ours, or the consumer stops.
    Gone,
}

impl<S, F> Processor<S, F>
where
    S: InboxStore,
    F: Form<S>,
{
    /// Works to the settlement of each. Returns without settling what is no longer ours, and at a stop: then it is delivered
    /// again.
    pub(super) async fn process(&self, mut jobs: Vec<Job>, mut leave: Leave) -> Report {
        match jobs.len() {
            0 => Report::default(),
            1 => match jobs.pop() {
                Some(job) => {
                    let incoming = &job.message.incoming;
                    let span = handle_span(&self.inbox.consumer, &job.topic, incoming);
                    self.one(job, &mut leave).instrument(span).await
                }
                None => Report::default(),
            },
            _ => {
                let traces = jobs.iter().map(|job| &job.message.incoming.message.trace);
                let span = handle_batch_span(&self.inbox.consumer, traces.map(Option::as_ref));
                self.several(jobs, &mut leave).instrument(span).await
            }
        }
    }

    /// All in one transaction; if that does not work, they are to be handled each alone.
    async fn several(&self, mut jobs: Vec<Job>, leave: &mut Leave) -> Report {
        let mut pauses = Pauses::new(&self.config);
        loop {
            jobs.retain(|job| job.receipt.is_current());
            let batch: Vec<&Keyed> = jobs.iter().map(|job| &job.message).collect();
            if batch.is_empty() {
                return Report::default();
            }
            let pause = match self.attempt(&batch).await {
                Attempt::Settled(ended) => {
                    let attempts = ended.iter().filter(|ended| **ended != Ended::Duplicate);
                    let attempts = attempts.map(|_| false).collect();
                    let settled = jobs.into_iter().zip(ended);
                    let settled =
                        settled.map(|(job, ended)| self.acknowledge(job, Became::of(ended)));
                    join_all(settled).await;
                    return Report {
                        attempts,
                        ..Report::default()
                    };
                }
                Attempt::Rerun(failure) => self.quick(&mut pauses, &failure),
                Attempt::Unavailable(error) => Some(self.patient(&mut pauses, &error)),
                Attempt::Failed { .. } | Attempt::Busy | Attempt::Unrecorded(..) => None,
            };
            match pause {
                Some(pause) if self.wait(pause, leave).await => return Report::default(),
                Some(_) => {}
                None => {
                    return Report {
                        returned: jobs,
                        ..Report::default()
                    };
                }
            }
        }
    }

    async fn one(&self, job: Job, leave: &mut Leave) -> Report {
        let past = match job.lot {
            Lot::Foreign => {
                debug!(
                    consumer = self.inbox.consumer,
                    "copy on a shared rung belongs to another consumer"
                );
                self.settle(job.receipt, Settlement::Acknowledge).await;
                return Report::default();
            }
            Lot::Unkeyed => {
                let failure = Failure::new("the message has no usable id");
                let ask = Ask::Never(Some(Reason::new(Reason::MISSING_ID)));
                return self.fail(job, &failure, ask, leave).await;
            }
            Lot::Work => Past::Clean,
            Lot::Suspect => self.past(&job, leave).await,
        };
        match past {
            Past::Clean => self.attempts(job, leave).await,
            Past::Crashed => {
                self.counts.crashed.fetch_add(1, Ordering::Relaxed);
                tell_crash(&self.inbox.consumer);
                self.fail(job, &Failure::crash(), Ask::Next, leave).await
            }
            Past::Duplicate => {
                self.acknowledge(job, Became::Duplicate).await;
                Report::default()
            }
            Past::Busy => self.put_off(job).await,
            Past::Gone => Report::default(),
        }
    }

    async fn attempts(&self, job: Job, leave: &mut Leave) -> Report {
        let mut pauses = Pauses::new(&self.config);
        while job.receipt.is_current() {
            let attempt = self.attempt(&[&job.message]).await;
            let (failure, ask) = match attempt {
                Attempt::Settled(ended) => return self.succeed(job, ended.first(), leave).await,
                Attempt::Unrecorded(ended, error) => {
                    return self.record_late(job, ended, error, leave).await;
                }
                Attempt::Busy => {
                    self.end(&job, leave).await;
                    return self.put_off(job).await;
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
                    Some(_) => continue,
                    None => (failure, Ask::Next),
                },
            };
            return self.fail(job, &failure, ask, leave).await;
        }
        // It went to another member, or the consumer stops while the database is away: no process ended over it.
        self.end(&job, leave).await;
        Report::default()
    }

    async fn succeed(&self, job: Job, ended: Option<&Ended>, leave: &mut Leave) -> Report {
        let ended = *ended.unwrap_or(&Ended::Done);
        self.end(&job, leave).await;
        self.acknowledge(job, Became::of(ended)).await;
        Report::attempt(ended != Ended::Duplicate, false)
    }

    /// The work is done, outside of any transaction: only the record of it is tried again.
    async fn record_late(
        &self,
        job: Job,
        ended: Ended,
        mut error: Error,
        leave: &mut Leave,
    ) -> Report {
        let mut pauses = Pauses::new(&self.config);
        while job.receipt.is_current() {
            let pause = self.patient(&mut pauses, &error);
            if self.wait(pause, leave).await {
                break;
            }
            match self.inbox.remember(&job.message.key).await {
                Ok(()) => return self.succeed(job, Some(&ended), leave).await,
                Err(again) => error = again,
            }
        }
        Report::default()
    }

    /// Puts the copy where the ladder says, and only after its confirm acknowledges the original. While the copy is not
    /// confirmed nothing is acknowledged, and the message's key waits.
    async fn fail(&self, job: Job, failure: &Failure, ask: Ask, leave: &mut Leave) -> Report {
        let report = Report::attempt(true, true);
        let step = self.copies.step(&job, failure, ask);
        // Before the copy can be seen: there, an old start would look like another crash.
        if !self.end(&job, leave).await {
            return report;
        }
        let mut patient = self.config.backoff.delays(fastrand::u64(..));
        while job.receipt.is_current() {
            match self.copies.put(&step, &job).await {
                Ok(()) => {
                    self.copies.tell(&step, &job);
                    let became = match step {
                        Step::Climb { .. } => Became::Retried,
                        Step::Bury { story } => Became::Dead(story.reason),
                    };
                    self.acknowledge(job, became).await;
                    break;
                }
                Err(error) => error!(
                    consumer = self.inbox.consumer, id = %job.message.incoming.message.id, %error,
                    "copy of a failed message is not confirmed; the message stays and is tried again"
                ),
            }
            // Messages whose copies nobody takes must not keep the handlers from those that need none.
            drop(leave.place.take());
            if self.wait(patient.next_delay(), leave).await {
                break;
            }
        }
        report
    }

    async fn put_off(&self, job: Job) -> Report {
        let release = Settlement::Release { delay: BUSY_DELAY };
        handled(&Span::current(), "put off", false);
        self.settle(job.receipt, release).await;
        Report::default()
    }

    // ---- Suspects

    /// Notes that the work begins, and tells whether an earlier start never came to its end.
    async fn past(&self, job: &Job, leave: &mut Leave) -> Past {
        let mut pauses = Pauses::new(&self.config);
        while job.receipt.is_current() {
            match self.look_back(job).await {
                Ok(past) => return past,
                Err(error) => {
                    let pause = self.patient(&mut pauses, &error);
                    if self.wait(pause, leave).await {
                        break;
                    }
                }
            }
        }
        Past::Gone
    }

    async fn look_back(&self, job: &Job) -> Result<Past, Error> {
        let Inbox {
            store, consumer, ..
        } = &self.inbox;
        let key = &*job.message.key;
        // Whoever works on it holds its key: it is alive, and its start no sign of a crash.
        let mut transaction = store.begin().await?;
        let recorded = store.record(&mut transaction, consumer, &[key]).await;
        let rolled_back = store.rollback(transaction).await;
        match recorded {
            Err(error) if error.kind() == crate::ErrorKind::Busy => return Ok(Past::Busy),
            Err(error) => return Err(error),
            Ok(recorded) if recorded.first() == Some(&Recorded::Duplicate) => {
                return Ok(Past::Duplicate);
            }
            Ok(_) => rolled_back?,
        }
        let crashed = store.note_start(consumer, key).await? > 0;
        Ok(if crashed { Past::Crashed } else { Past::Clean })
    }

    /// The work has come to an end, also where the message went to another member meanwhile: forgets the start of a suspect.
    /// Whether that was done before the consumer had to stop.
    async fn end(&self, job: &Job, leave: &mut Leave) -> bool {
        if job.lot != Lot::Suspect {
            return true;
        }
        let Inbox {
            store, consumer, ..
        } = &self.inbox;
        let mut pauses = Pauses::new(&self.config);
        loop {
            match store.forget_starts(consumer, &job.message.key).await {
                Ok(()) => return true,
                Err(error) => {
                    let pause = self.patient(&mut pauses, &error);
                    if self.wait(pause, leave).await {
                        return false;
                    }
                }
            }
        }
    }

    // ---- Settlements and pauses

    async fn attempt(&self, batch: &[&Keyed]) -> Attempt {
        let began = Instant::now();
        let attempt = self.form.run(&self.inbox, batch).await;
        tell_attempt(&self.inbox.consumer, &attempt, batch.len(), began.elapsed());
        match &attempt {
            Attempt::Unavailable(error) => self.condition.database(Some(error)),
            _ => self.condition.database(None),
        }
        attempt
    }

    async fn acknowledge(&self, job: Job, became: Became) {
        let count = match became {
            Became::Handled => &self.counts.handled,
            Became::Duplicate => &self.counts.duplicates,
            Became::Retried => &self.counts.retried,
            Became::Dead(_) => &self.counts.dead,
        };
        count.fetch_add(1, Ordering::Relaxed);
        let message = &job.message.incoming.message;
        tell_end(&self.inbox.consumer, message, &became, || self.clock.now());
        self.settle(job.receipt, Settlement::Acknowledge).await;
    }

    async fn settle(&self, receipt: Box<dyn Receipt>, settlement: Settlement) {
        if let Err(error) = receipt.settle(settlement).await {
            // The effect is durable; at worst the message comes again and the inbox suppresses it.
            warn!(consumer = self.inbox.consumer, %error, "settlement did not reach the broker");
        }
    }

    /// The pause before the transaction is run again; `None` when that was often enough.
    fn quick(&self, pauses: &mut Pauses, failure: &Failure) -> Option<Duration> {
        pauses.reruns += 1;
        let pause = (pauses.reruns <= RERUNS_MAX).then(|| pauses.quick.next_delay());
        if pause.is_some() {
            debug!(consumer = self.inbox.consumer, reruns = pauses.reruns, %failure, "transaction is run again");
        }
        pause
    }

    fn patient(&self, pauses: &mut Pauses, error: &Error) -> Duration {
        warn!(consumer = self.inbox.consumer, %error, "database away; the message waits");
        self.condition.database(Some(error));
        pauses.patient.next_delay()
    }

    /// Waits; `true` when the consumer is told to stop meanwhile.
    async fn wait(&self, pause: Duration, leave: &mut Leave) -> bool {
        tokio::select! {
            () = self.clock.sleep(pause) => false,
            _ = leave.stop.wait_for(|stop| *stop) => true,
        }
    }
}

impl Report {
    fn attempt(was_one: bool, failed: bool) -> Self {
        Self {
            attempts: if was_one { vec![failed] } else { Vec::new() },
            ..Self::default()
        }
    }
}

/// How long to wait before a transaction is run again, and while the database is away.
struct Pauses {
    reruns: u32,
    quick: Delays,
    patient: Delays,
}

impl Pauses {
    fn new(config: &ConsumerConfig) -> Self {
        let quick = DelayPolicy::exponential(Duration::from_millis(5))
            .with_jitter(Jitter::Full)
            .with_cap(Duration::from_millis(200));
        Self {
            reruns: 0,
            quick: quick.delays(fastrand::u64(..)),
            patient: config.backoff.delays(fastrand::u64(..)),
        }
    }
}
