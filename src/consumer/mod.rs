//! The consumer: deliveries in, effects once, failures up the ladder.

mod config;
mod handler;
mod outcome;
mod process;
mod schedule;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tracing::{debug, info, warn};

use crate::broker::{Delivery, Publisher, Subscriber, Subscription, SubscriptionRequest};
use crate::clock::{Clock, SystemClock};
use crate::dlq::DeadLetters;
use crate::error::{Error, ErrorKind, Result};
use crate::ladder::Ladder;
use crate::store::InboxStore;

pub use config::{ConsumerConfig, MissingId};
pub use handler::{Handler, HandlerFn, HandlerFunction, handler_fn};
pub use outcome::{Failure, Outcome};
pub use process::ConsumerCounts;

use process::{Homes, Processor};
use schedule::{Schedule, Slot};

/// Pause between clean-ups of the inbox.
const CLEAN_UP_PAUSE: Duration = Duration::from_secs(60);
/// Rows per clean-up statement.
const CLEAN_UP_ROWS_MAX: usize = 1_000;
/// Pause after a transient error of the subscription, so that a broken broker is not asked in a tight loop.
const RECEIVE_PAUSE: Duration = Duration::from_millis(200);

/// Handles the messages of one or more sources, each effect once.
///
/// Members with the same name share the messages. The name is part of the inbox key and of the names of rungs and dead
/// letter destinations: changing it makes another consumer that begins at the oldest message.
pub struct Consumer<S> {
    name: String,
    sources: Vec<String>,
    subscriber: Arc<dyn Subscriber>,
    publisher: Arc<dyn Publisher>,
    store: S,
    ladder: Ladder,
    dead_letters: DeadLetters,
    config: ConsumerConfig,
    clock: Arc<dyn Clock>,
    counts: Arc<ConsumerCounts>,
}

impl<S: InboxStore> Consumer<S> {
    /// A consumer of `source` on `broker`, with its inbox in `store`, no ladder, and dead letters in a topic.
    pub fn new<B>(name: impl Into<String>, source: impl Into<String>, broker: B, store: S) -> Self
    where
        B: Subscriber + Publisher,
    {
        let broker = Arc::new(broker);
        Self {
            name: name.into(),
            sources: vec![source.into()],
            subscriber: broker.clone(),
            publisher: broker,
            store,
            ladder: Ladder::none(),
            dead_letters: DeadLetters::topic(),
            config: ConsumerConfig::default(),
            clock: Arc::new(SystemClock),
            counts: Arc::default(),
        }
    }

    /// Also consumes another source.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<String>) -> Self {
        self.sources.push(source.into());
        self
    }

    /// Sends rungs and dead letters through another publisher.
    #[must_use]
    pub fn with_publisher(mut self, publisher: impl Publisher) -> Self {
        self.publisher = Arc::new(publisher);
        self
    }

    /// Sets the ladder (default none: the first failure makes a dead letter).
    #[must_use]
    pub fn with_ladder(mut self, ladder: Ladder) -> Self {
        self.ladder = ladder;
        self
    }

    /// Sets where dead letters go (default [`DeadLetters::topic`]).
    #[must_use]
    pub fn with_dead_letters(mut self, dead_letters: DeadLetters) -> Self {
        self.dead_letters = dead_letters;
        self
    }

    /// Takes other settings.
    #[must_use]
    pub fn with_config(mut self, config: ConsumerConfig) -> Self {
        self.config = config;
        self
    }

    /// Uses another clock for stories, due times and pauses.
    #[must_use]
    pub fn with_clock(mut self, clock: impl Clock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Follows what became of deliveries.
    #[must_use]
    pub fn counts(&self) -> Arc<ConsumerCounts> {
        self.counts.clone()
    }

    /// Runs until `shutdown` completes, then takes nothing more, waits for running handlers (at most the shutdown
    /// deadline) and leaves. What was taken and not started comes again, to another member or the next run.
    ///
    /// Outages of database or broker after the start do not end it.
    ///
    /// Cancel safety: dropping the future drops running handlers; their connections are closed, their transactions
    /// rolled back, their messages delivered again.
    ///
    /// # Errors
    /// At start: [`Configuration`](ErrorKind::Configuration), a missing source, rung or dead letter destination, or a
    /// database or broker that cannot be reached. Later: when the subscription ended for good.
    pub async fn run_until<H>(
        self,
        handler: H,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<()>
    where
        H: Handler<S::Connection>,
    {
        config::validate_name(&self.name)?;
        self.ladder.validate()?;
        self.config.validate(self.ladder.duration())?;
        self.config.can_identify(&self.subscriber.capabilities())?;
        let request = self.request();
        no_circle(&request)?;
        self.store.check().await?;
        self.dead_letters.check(&self.name).await?;
        let copies: Vec<String> = rung_names(&request)
            .chain(&request.dead_letters)
            .cloned()
            .collect();
        let mut subscription = self.subscriber.subscribe(request).await?;
        // Copies may go through another publisher than the broker subscribed to, and must come back.
        self.publisher.check(&copies).await?;
        info!(consumer = self.name, sources = ?self.sources, "consumer started");

        let (stop, stopped) = watch::channel(false);
        let deadline = self.config.shutdown_deadline;
        let name = self.name.clone();
        let mut config = self.config;
        config.concurrency = config.concurrency.min(self.store.concurrency_max());
        let processor = Arc::new(Processor {
            homes: Homes::new(&self.sources, &self.ladder, &self.name),
            name: self.name,
            config,
            ladder: self.ladder,
            dead_letters: self.dead_letters,
            publisher: self.publisher,
            store: self.store,
            handler,
            clock: self.clock,
            counts: self.counts,
        });
        let mut work = Work {
            places: Arc::new(Semaphore::new(processor.config.concurrency)),
            processor: processor.clone(),
            schedule: Schedule::new(),
            running: JoinSet::new(),
            running_bytes: 0,
            waiting_bytes: 0,
            stopped,
        };
        let ended = tokio::select! {
            result = work.run(&mut *subscription) => result,
            () = clean_up(&processor) => Ok(()),
            () = shutdown => Ok(()),
        };
        stop.send_replace(true);
        let stopping = Instant::now();
        let drained = tokio::time::timeout(deadline, work.drain()).await.is_ok();
        let left = deadline.saturating_sub(stopping.elapsed());
        let closed = subscription.close(left.max(Duration::from_secs(1))).await;
        if let Err(error) = &closed {
            warn!(consumer = name, %error, "subscription was not closed cleanly");
        }
        info!(consumer = name, drained, "consumer stopped");
        ended
    }

    fn request(&self) -> SubscriptionRequest {
        let mut request = SubscriptionRequest::new(&self.name, self.sources.clone());
        request.rungs = self
            .sources
            .iter()
            .flat_map(|source| self.ladder.rungs_of(source, &self.name))
            .collect();
        request.dead_letters = self.dead_letter_destinations();
        request.topology = self.config.topology;
        request.in_flight_max = self.config.in_flight_max;
        request
    }

    fn dead_letter_destinations(&self) -> Vec<String> {
        self.sources
            .iter()
            .filter_map(|source| self.dead_letters.destination(source, &self.name))
            .collect()
    }
}

fn rung_names(request: &SubscriptionRequest) -> impl Iterator<Item = &String> {
    request.rungs.iter().map(|rung| &rung.destination)
}

/// Refuses names by which a message would come round again without end.
fn no_circle(request: &SubscriptionRequest) -> Result<()> {
    let is_source = |name: &String| request.sources.contains(name);
    if let Some(rung) = rung_names(request).find(|name| is_source(name)) {
        let limit = "a name that no source has";
        return Err(Error::configuration("ladder template", limit, rung));
    }
    let read = |name: &&String| is_source(name) || rung_names(request).any(|rung| rung == *name);
    if let Some(dead) = request.dead_letters.iter().find(read) {
        let limit = "a name that no source and no rung has";
        return Err(Error::configuration("dead letter template", limit, dead));
    }
    Ok(())
}

/// Deliveries waiting and running.
struct Work<S, H> {
    processor: Arc<Processor<S, H>>,
    schedule: Schedule<Delivery>,
    /// One for each handler at a time. What runs without one only waits for the broker to take a copy.
    places: Arc<Semaphore>,
    running: JoinSet<(Slot, usize)>,
    running_bytes: usize,
    waiting_bytes: usize,
    stopped: watch::Receiver<bool>,
}

impl<S, H> Work<S, H>
where
    S: InboxStore,
    H: Handler<S::Connection>,
{
    /// Takes deliveries and starts handlers. Returns only with an error.
    async fn run(&mut self, subscription: &mut dyn Subscription) -> Result<()> {
        let places = self.places.clone();
        loop {
            self.start_ready();
            let room = self.room();
            tokio::select! {
                Some(ended) = self.running.join_next() => self.finish(ended)?,
                // Something ready found no place; one that is given up need not have ended.
                _ = places.acquire(), if self.schedule.has_ready() => {}
                received = subscription.receive(room.max(1)), if room > 0 => match received {
                    Ok(deliveries) => self.take(deliveries),
                    Err(error) if error.is_transient() => {
                        warn!(consumer = self.processor.name, %error, "broker in trouble");
                        tokio::time::sleep(RECEIVE_PAUSE).await;
                    }
                    Err(error) => return Err(error),
                },
            }
        }
    }

    /// How many deliveries may still be taken.
    fn room(&self) -> usize {
        let config = &self.processor.config;
        let held = self.schedule.len() + self.running.len();
        if held > 0 && self.running_bytes + self.waiting_bytes >= config.in_flight_bytes_max {
            return 0;
        }
        config.in_flight_max.saturating_sub(held)
    }

    fn take(&mut self, deliveries: Vec<Delivery>) {
        for delivery in deliveries {
            self.waiting_bytes += delivery.incoming.message.bytes();
            self.schedule
                .push(delivery.incoming.message.key.clone(), delivery);
        }
    }

    fn start_ready(&mut self) {
        while let Ok(place) = self.places.clone().try_acquire_owned() {
            let Some((slot, delivery)) = self.schedule.next() else {
                return;
            };
            let bytes = delivery.incoming.message.bytes();
            self.waiting_bytes -= bytes;
            if !delivery.receipt.is_current() {
                debug!(
                    consumer = self.processor.name,
                    "delivery went to another member"
                );
                self.schedule.finish(slot);
                continue;
            }
            self.running_bytes += bytes;
            let processor = self.processor.clone();
            let stopped = self.stopped.clone();
            self.running.spawn(async move {
                processor.process(delivery, place, stopped).await;
                (slot, bytes)
            });
        }
    }

    /// A task that panicked outside the handler is a fault of ours: better loud than a key that waits for ever.
    fn finish(&mut self, ended: Result<(Slot, usize), tokio::task::JoinError>) -> Result<()> {
        let (slot, bytes) = ended.map_err(|join| {
            Error::new(
                ErrorKind::Other,
                "consume",
                "a handling task ended by itself",
            )
            .with_source(join)
        })?;
        self.running_bytes -= bytes;
        self.schedule.finish(slot);
        Ok(())
    }

    /// Drops what waits and lets what runs end.
    async fn drain(mut self) {
        self.schedule = Schedule::new();
        while self.running.join_next().await.is_some() {}
    }
}

/// Deletes old inbox records in small bites, now and then, beside the work. Never returns.
async fn clean_up<S: InboxStore, H>(processor: &Processor<S, H>) {
    loop {
        let deleted = processor
            .store
            .clean_up(
                &processor.name,
                processor.config.inbox_retention,
                CLEAN_UP_ROWS_MAX,
            )
            .await;
        match deleted {
            Ok(rows) if rows >= CLEAN_UP_ROWS_MAX as u64 => continue,
            Ok(_) => {}
            Err(error) => warn!(consumer = processor.name, %error, "inbox was not cleaned up"),
        }
        processor.clock.sleep(CLEAN_UP_PAUSE).await;
    }
}
