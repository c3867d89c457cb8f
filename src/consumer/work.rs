//! Deliveries in hand: taken from the subscription, started as the schedule allows, ended.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt, pending};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{MissedTickBehavior, Sleep};
use tracing::{debug, info, warn};

use crate::error::{Error, ErrorKind, Result};
use crate::store::InboxStore;

use super::RECEIVE_PAUSE;
use super::form::Form;
use super::guard::{Gate, Watch};
use super::intake::Intake;
use super::job::Job;
use super::process::{Leave, Place, Processor, Word};
use super::room::Arrival;
use super::schedule::{Company, Picked, Schedule, Slot};

/// The longest that the loop waits before it makes a turn.
const TURN_MAX: Duration = Duration::from_secs(1);

/// Deliveries waiting and running.
pub(super) struct Work<S: InboxStore, F> {
    processor: Arc<Processor<S, F>>,
    schedule: Schedule<Job>,
    /// One for each handler at a time, all for what must be isolated. What runs without one only waits for the broker to take
    /// a copy.
    places: Arc<Semaphore>,
    /// Places that tasks gave up since the last turn. What they hold is used or dropped in the next one.
    freed: Vec<Place<S::Transaction>>,
    running: JoinSet<Finished>,
    /// Deliveries and their bytes in running tasks.
    running_count: usize,
    running_bytes: usize,
    waiting_bytes: usize,
    /// The largest delivery so far.
    bytes_seen: usize,
    guard: Watch,
    pause: BoxFuture<'static, ()>,
    /// Not before its end anything is received, after trouble.
    rest: Option<Pin<Box<Sleep>>>,
    words: Words<S::Transaction>,
    stopped: watch::Receiver<bool>,
}

type Words<T> = (UnboundedSender<Word<T>>, UnboundedReceiver<Word<T>>);

/// What a task brings back.
struct Finished {
    slots: Vec<Slot>,
    count: usize,
    bytes: usize,
    probe: Option<u64>,
    returned: Vec<Job>,
}

impl<S, F> Work<S, F>
where
    S: InboxStore,
    F: Form<S>,
{
    pub(super) fn new(processor: Arc<Processor<S, F>>, stopped: watch::Receiver<bool>) -> Self {
        Self {
            places: Arc::new(Semaphore::new(processor.config.concurrency)),
            schedule: Schedule::new(),
            running: JoinSet::new(),
            running_count: 0,
            running_bytes: 0,
            waiting_bytes: 0,
            bytes_seen: 0,
            words: unbounded_channel(),
            rest: None,
            freed: Vec::new(),
            guard: Watch::new(processor.config.failure_guard.clone()),
            pause: pending().boxed(),
            stopped,
            processor,
        }
    }

    /// Takes deliveries and starts handlers. Returns only with an error.
    pub(super) async fn run(&mut self, intake: &mut Intake) -> Result<()> {
        let places = self.places.clone();
        let condition = self.processor.condition.clone();
        let pulse = condition
            .vitals
            .pulse("deliveries", self.processor.config.silence_max);
        let mut ticks = tokio::time::interval(TURN_MAX);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            pulse.rest(TURN_MAX);
            self.start_ready();
            let room = self.room();
            let (places_wanted, gate) = (self.places_wanted(), self.guard.gate());
            let may_start = self.may_start();
            tokio::select! {
                // A turn now and then shows that the loop lives.
                _ = ticks.tick() => {
                    condition.subscription(&intake.health());
                    self.drop_what_is_gone();
                }
                Some(word) = self.words.1.recv() => self.hear(Some(word)),
                Some(ended) = self.running.join_next() => self.finish(ended)?,
                // Something ready found no place; one that is given up need not have ended.
                _ = places.acquire_many(places_wanted), if may_start => {}
                () = &mut self.pause, if gate == Gate::Paused => self.guard.resume(),
                () = rest(&mut self.rest), if self.rest.is_some() => self.rest = None,
                received = intake.receive(room.max(1)), if room > 0 && self.rest.is_none() => match received {
                    Ok(arrivals) => self.take(arrivals),
                    Err(error) if error.is_transient() => {
                        warn!(consumer = self.name(), %error, "broker in trouble");
                        self.rest = Some(Box::pin(tokio::time::sleep(RECEIVE_PAUSE)));
                    }
                    Err(error) => return Err(error),
                },
            }
        }
    }

    fn name(&self) -> &str {
        &self.processor.inbox.consumer
    }

    /// How many deliveries may still be taken.
    fn room(&self) -> usize {
        let config = &self.processor.config;
        let held = self.schedule.len() + self.running_count;
        let bytes_held = self.running_bytes + self.waiting_bytes;
        let bytes_left = config.in_flight_bytes_max.saturating_sub(bytes_held);
        if held > 0 && bytes_left == 0 {
            return 0;
        }
        let room = config.in_flight_max.saturating_sub(held);
        // What comes is not larger than the largest so far, most likely; the first comes alone.
        let fitting = bytes_left.checked_div(self.bytes_seen).unwrap_or(1);
        room.min(fitting.max(1))
    }

    /// Deliveries that went to another member must not seem to be in work: a rebalance waits for what is.
    fn drop_what_is_gone(&mut self) {
        self.schedule.retain(|job| job.receipt.is_current());
        self.waiting_bytes = self.schedule.items().map(Job::bytes).sum();
    }

    /// All that was said so far: no place waits for another turn.
    fn hear(&mut self, first: Option<Word<S::Transaction>>) {
        let mut word = first.or_else(|| self.words.1.try_recv().ok());
        while let Some(Word {
            probe,
            attempts,
            failed,
            place,
        }) = word
        {
            self.freed.extend(place);
            if attempts == 0 {
                self.guard.finished(probe);
            }
            for _ in 0..attempts {
                self.judge(probe, failed);
            }
            word = self.words.1.try_recv().ok();
        }
    }

    fn judge(&mut self, probe: Option<u64>, failed: bool) {
        let was = self.guard.gate();
        if let Some(pause) = self.guard.ended(probe, failed) {
            warn!(
                consumer = self.name(),
                ?pause,
                "most attempts fail; nothing is started until the pause is over, and then one message"
            );
            self.pause = self.processor.clock.sleep(pause);
        } else if was != Gate::Open && self.guard.gate() == Gate::Open {
            info!(consumer = self.name(), "an attempt succeeded; all goes on");
        }
    }

    fn take(&mut self, arrivals: Vec<Arrival>) {
        let Processor {
            inbox,
            homes,
            config,
            ..
        } = &*self.processor;
        let in_place = self.processor.copies.ladder.is_in_place();
        for arrival in arrivals {
            let mut job = Job::of(
                arrival,
                &inbox.consumer,
                homes,
                &config.inbox_key,
                config.missing_id,
            );
            if in_place {
                job = job.in_lane();
            }
            self.processor.recognise(&mut job);
            self.waiting_bytes += job.bytes();
            self.bytes_seen = self.bytes_seen.max(job.bytes());
            self.schedule.push(job.slot(), job.company(), job);
        }
    }

    fn may_start(&self) -> bool {
        self.schedule.has_ready() && matches!(self.guard.gate(), Gate::Open | Gate::Probe)
    }

    fn places_wanted(&self) -> u32 {
        let isolated = self.schedule.next_company() == Some(Company::Isolated);
        let places = if isolated {
            self.processor.config.concurrency
        } else {
            1
        };
        u32::try_from(places).unwrap_or(u32::MAX)
    }

    fn start_ready(&mut self) {
        while self.may_start() {
            let Some(place) = self.place() else {
                break;
            };
            let probe = self.guard.started();
            let count_max = match probe {
                Some(_) => 1,
                None => self.processor.form.batch_max(),
            };
            if let Some(picked) = self.schedule.next(count_max) {
                self.start(picked, probe, place);
            }
        }
        self.freed.clear();
    }

    /// One that was given up is there at once.
    fn place(&mut self) -> Option<Place<S::Transaction>> {
        let wanted = self.places_wanted();
        if wanted == 1
            && let Some(freed) = self.freed.pop()
        {
            return Some(freed);
        }
        self.freed.clear();
        let places = self.places.clone();
        let permit = places.try_acquire_many_owned(wanted).ok()?;
        Some(Place {
            _permit: permit,
            next: None,
        })
    }

    fn start(&mut self, picked: Picked<Job>, probe: Option<u64>, mut place: Place<S::Transaction>) {
        let Picked { slots, items } = picked;
        self.waiting_bytes -= items.iter().map(Job::bytes).sum::<usize>();
        let (items, gone): (Vec<_>, Vec<_>) =
            (items.into_iter()).partition(|job| job.receipt.is_current());
        if !gone.is_empty() {
            debug!(
                consumer = self.name(),
                count = gone.len(),
                "deliveries went to another member"
            );
        }
        if items.is_empty() {
            self.guard.finished(probe);
            self.schedule.finish(slots, Vec::new());
            return;
        }
        let (count, bytes) = (items.len(), items.iter().map(Job::bytes).sum());
        self.running_count += count;
        self.running_bytes += bytes;
        if !items.iter().all(Job::begins_with_an_attempt) {
            place.give_transaction_back();
        }
        let processor = self.processor.clone();
        let leave = Leave {
            place: Some(place),
            stop: self.stopped.clone(),
            probe,
            words: self.words.0.clone(),
        };
        self.running.spawn(async move {
            let returned = processor.process(items, leave).await;
            Finished {
                slots,
                count,
                bytes,
                probe,
                returned,
            }
        });
    }

    /// A task that panicked outside the handler is a fault of ours: better loud than a key that waits for ever.
    fn finish(&mut self, ended: Result<Finished, JoinError>) -> Result<()> {
        let ended = ended.map_err(|join| {
            let detail = "a handling task ended by itself";
            Error::new(ErrorKind::Other, "consume", detail).with_source(join)
        })?;
        self.running_count -= ended.count;
        self.running_bytes -= ended.bytes;
        // What the task said before it ended.
        self.hear(None);
        self.guard.finished(ended.probe);
        let returned = ended.returned.into_iter().map(|job| {
            self.waiting_bytes += job.bytes();
            let company = match job.company() {
                Company::Batch => Company::Alone,
                other => other,
            };
            (job.slot(), company, job)
        });
        let returned = returned.collect();
        self.schedule.finish(ended.slots, returned);
        Ok(())
    }

    /// Drops what waits and lets what runs end.
    pub(super) async fn drain(mut self) {
        self.schedule = Schedule::new();
        // Places that are given up from here on hold no connection.
        self.words.1.close();
        while self.words.1.try_recv().is_ok() {}
        self.freed.clear();
        while self.running.join_next().await.is_some() {}
    }
}

async fn rest(until: &mut Option<Pin<Box<Sleep>>>) {
    if let Some(sleep) = until {
        sleep.await;
    }
}
