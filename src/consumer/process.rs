//! What was picked together, from the first attempt to the settlement.

use std::collections::HashSet;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tracing::{Instrument, Span, debug, error, warn};

use crate::backoff::{DelayPolicy, Delays, Jitter};
use crate::broker::{Receipt, Settlement};
use crate::clock::Clock;
use crate::error::{Error, ErrorKind};
use crate::event::{handle_batch_span, handle_span, handled};
use crate::inbox::{Attempt, Ended, Inbox, Keyed};
use crate::ladder::{Ask, Step};
use crate::message::MessageId;
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
const RERUNS_MAX: u32 = 10;
/// However the pauses are set, nobody asks a database that is away without one.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// How long a stop may take to note that it cut work off.
const CUT_OFF_MAX: Duration = Duration::from_secs(2);
/// Keys of messages that were put off, at most; beyond that one more is examined when it comes again.
const PUT_OFF_MAX: usize = 10_000;

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
    pub(super) memory: Memory,
}

/// What one run of a consumer knows about its own doings.
#[derive(Default)]
pub(super) struct Memory {
    /// Names this run where it notes that work begins.
    run: String,
    /// The start that is noted, one at a time.
    noted: Mutex<Option<String>>,
    /// Keys of messages that were put off: they come again as redelivered, and are no suspects for that.
    put_off: Mutex<HashSet<String>>,
}

impl Memory {
    pub(super) fn new() -> Self {
        Self {
            run: MessageId::generate().as_str().to_owned(),
            ..Self::default()
        }
    }

    fn noted(&self) -> MutexGuard<'_, Option<String>> {
        self.noted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_off(&self) -> MutexGuard<'_, HashSet<String>> {
        self.put_off.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether an attempt failed, and the number of the probe that it was.
pub(super) struct Verdict {
    pub(super) probe: Option<u64>,
    pub(super) failed: bool,
}

/// What a task may do: occupy a handler, and go on until it is told to stop.
pub(super) struct Leave {
    /// Given up when only the broker is waited for.
    pub(super) place: Option<OwnedSemaphorePermit>,
    pub(super) stop: watch::Receiver<bool>,
    pub(super) probe: Option<u64>,
    pub(super) verdicts: UnboundedSender<Verdict>,
}

impl Leave {
    /// At once, and not with the end of the task: that may wait for the broker to take a copy.
    fn ended(&self, failed: bool) {
        let probe = self.probe;
        let _ = self.verdicts.send(Verdict { probe, failed });
    }
}

/// How it stands with a suspect.
#[derive(PartialEq, Eq)]
enum Standing {
    /// Nobody works on it, and nobody has.
    Free,
    Done,
    InWork,
}

impl<S, F> Processor<S, F>
where
    S: InboxStore,
    F: Form<S>,
{
    /// Works to the settlement of each, and returns those that are to be handled again, alone. What is no longer ours is left
    /// unsettled, and so is everything at a stop: then it is delivered again.
    pub(super) async fn process(&self, mut jobs: Vec<Job>, mut leave: Leave) -> Vec<Job> {
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
    async fn several(&self, mut jobs: Vec<Job>, leave: &mut Leave) -> Vec<Job> {
        let mut pauses = Pauses::new(&self.config);
        loop {
            jobs.retain(|job| job.receipt.is_current());
            let batch: Vec<&Keyed> = jobs.iter().map(|job| &job.message).collect();
            if batch.is_empty() {
                return jobs;
            }
            let pause = match self.attempt(&batch).await {
                Attempt::Settled(ended) => {
                    let attempts = ended.iter().filter(|ended| **ended != Ended::Duplicate);
                    attempts.for_each(|_| leave.ended(false));
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

    async fn one(&self, mut job: Job, leave: &mut Leave) -> Vec<Job> {
        match job.lot {
            Lot::Work => self.attempts(job, leave).await,
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
                self.fail(job, &failure, ask, leave).await;
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
                Some(Standing::InWork) => self.put_off(job).await,
                None => {}
            },
            Lot::Watched => match self.patiently(&job, leave, || self.begin(&job)).await {
                Some(true) => {
                    self.memory.noted().take();
                    self.counts.crashed.fetch_add(1, Ordering::Relaxed);
                    tell_crash(&self.inbox.consumer);
                    self.fail(job, &Failure::crash(), Ask::Next, leave).await;
                }
                Some(false) => self.attempts(job, leave).await,
                None => {
                    self.end(&job, leave).await;
                }
            },
        }
        Vec::new()
    }

    async fn attempts(&self, job: Job, leave: &mut Leave) {
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
    }

    async fn succeed(&self, job: Job, ended: Option<&Ended>, leave: &mut Leave) {
        let ended = *ended.unwrap_or(&Ended::Done);
        if ended != Ended::Duplicate {
            leave.ended(false);
        }
        self.end(&job, leave).await;
        self.acknowledge(job, Became::of(ended)).await;
    }

    /// The work is done, outside of any transaction: only the record of it is tried again, also where the message went to
    /// another member meanwhile, who would do it again.
    async fn record_late(&self, job: Job, ended: Ended, mut error: Error, leave: &mut Leave) {
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
    /// confirmed nothing is acknowledged, and the message's key waits.
    async fn fail(&self, job: Job, failure: &Failure, ask: Ask, leave: &mut Leave) {
        leave.ended(true);
        let step = self.copies.step(&job, failure, ask);
        // The start of an attempt that was a crash stays. If the acknowledgement is lost, in the next crash of another message
        // for example, the delivery comes again: then it is known, and not tried once more.
        if failure.class() != Failure::CRASH && !self.end(&job, leave).await {
            return;
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
            let pause = patient.next_delay().max(PAUSE_MIN);
            if self.wait(pause, leave).await {
                break;
            }
        }
    }

    async fn put_off(&self, job: Job) {
        warn!(
            consumer = self.inbox.consumer, id = %job.message.incoming.message.id,
            "message is in work elsewhere, in a transaction that does not end; it is put off"
        );
        handled(&Span::current(), "put off", false);
        {
            let mut put_off = self.memory.put_off();
            if put_off.len() < PUT_OFF_MAX {
                put_off.insert(job.message.key.clone());
            }
        }
        let release = Settlement::Release { delay: BUSY_DELAY };
        self.settle(job.receipt, release).await;
    }

    /// What a delivery is to this run: one that it put off itself is no suspect.
    pub(super) fn recognise(&self, job: &mut Job) {
        if job.lot == Lot::Suspect && self.memory.put_off().remove(&job.message.key) {
            job.lot = Lot::Work;
        }
    }

    // ---- Suspects

    /// Asks until the database answers; `None` when the message is no longer ours, or the consumer stops.
    async fn patiently<T, A>(&self, job: &Job, leave: &mut Leave, ask: impl Fn() -> A) -> Option<T>
    where
        A: Future<Output = Result<T, Error>>,
    {
        let mut pauses = Pauses::new(&self.config);
        while job.receipt.is_current() {
            match ask().await {
                Ok(answer) => return Some(answer),
                Err(error) => {
                    let pause = self.patient(&mut pauses, &error);
                    if self.wait(pause, leave).await {
                        break;
                    }
                }
            }
        }
        None
    }

    /// Whoever works on a message holds its key.
    async fn standing(&self, job: &Job) -> Result<Standing, Error> {
        let Inbox {
            store, consumer, ..
        } = &self.inbox;
        let keys = [&*job.message.key];
        let mut transaction = store.begin().await?;
        let recorded = store.record(&mut transaction, consumer, &keys).await;
        let rolled_back = store.rollback(transaction).await;
        match recorded {
            Err(error) if error.kind() == ErrorKind::Busy => Ok(Standing::InWork),
            Err(error) => Err(error),
            Ok(recorded) if recorded.first() == Some(&Recorded::Duplicate) => Ok(Standing::Done),
            Ok(_) => rolled_back.map(|()| Standing::Free),
        }
    }

    /// Notes that the work begins, and tells whether that of another run never came to its end.
    async fn begin(&self, job: &Job) -> Result<bool, Error> {
        let Inbox {
            store, consumer, ..
        } = &self.inbox;
        let start = start_of(job);
        *self.memory.noted() = Some(start.clone());
        store.note_start(consumer, &start, &self.memory.run).await
    }

    /// The work has come to an end, also where the message went to another member meanwhile: forgets its start. Whether that
    /// was done before the consumer had to stop.
    async fn end(&self, job: &Job, leave: &mut Leave) -> bool {
        if !matches!(job.lot, Lot::Suspect | Lot::Watched) {
            return true;
        }
        let Inbox {
            store, consumer, ..
        } = &self.inbox;
        let (start, mut pauses) = (start_of(job), Pauses::new(&self.config));
        loop {
            match store.forget_start(consumer, &start).await {
                Ok(()) => {
                    self.memory.noted().take_if(|noted| *noted == start);
                    return true;
                }
                Err(error) => {
                    let pause = self.patient(&mut pauses, &error);
                    if self.wait(pause, leave).await {
                        return false;
                    }
                }
            }
        }
    }

    /// Work that was cut off by the deadline of a stop has ended no process.
    pub(super) async fn forget_what_was_cut_off(&self) {
        let Some(start) = self.memory.noted().take() else {
            return;
        };
        let forgotten = self.inbox.store.forget_start(&self.inbox.consumer, &start);
        if !matches!(
            tokio::time::timeout(CUT_OFF_MAX, forgotten).await,
            Ok(Ok(()))
        ) {
            warn!(
                consumer = self.inbox.consumer,
                "a message that was cut off by the stop will look as if it had ended the process"
            );
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
        pauses.patient.next_delay().max(PAUSE_MIN)
    }

    /// Waits; `true` when the consumer is told to stop meanwhile.
    async fn wait(&self, pause: Duration, leave: &mut Leave) -> bool {
        tokio::select! {
            () = self.clock.sleep(pause) => false,
            _ = leave.stop.wait_for(|stop| *stop) => true,
        }
    }
}

/// What the start of this attempt is noted by: its copy on the next rung is another one, and so is one that an operator sent
/// back.
fn start_of(job: &Job) -> String {
    let story = &job.message.incoming.story;
    let (redrives, failures) = (story.redrive_count, story.retry_count);
    format!("{}#{redrives}.{failures}", job.message.key)
}

/// How long to wait before a transaction is run again, and while the database is away.
struct Pauses {
    reruns: u32,
    quick: Delays,
    patient: Delays,
}

impl Pauses {
    fn new(config: &ConsumerConfig) -> Self {
        let quick = DelayPolicy::exponential(Duration::from_millis(10))
            .with_jitter(Jitter::Equal)
            .with_cap(Duration::from_secs(1));
        Self {
            reruns: 0,
            quick: quick.delays(fastrand::u64(..)),
            patient: config.backoff.delays(fastrand::u64(..)),
        }
    }
}
