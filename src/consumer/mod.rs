//! The consumer: deliveries in, effects once, failures up the ladder.

mod config;
mod copies;
mod earlier;
mod follow;
mod form;
mod guard;
mod handler;
mod health;
mod intake;
mod job;
mod lines;
mod outcome;
mod pauses;
mod process;
mod request;
mod room;
mod router;
mod routes;
#[cfg(feature = "metrics")]
mod sample;
mod schedule;
mod suspects;
mod tell;
mod typed;
mod version_guard;
mod work;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, FutureExt};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::broker::{Publisher, Rung, Subscriber, SubscriptionRequest};
use crate::clock::{Clock, SystemClock};
use crate::dlq::DeadLetters;
use crate::error::Result;
use crate::inbox::Inbox;
use crate::ladder::Ladder;
use crate::readiness::Probe;
use crate::store::{InboxStore, WaitingStore};

pub(crate) use config::validate_name;
pub use config::{ConsumerConfig, MissingId};
pub use earlier::EarlierRung;
pub use guard::FailureGuard;
pub use handler::{
    BatchFunction, BatchHandler, Handler, HandlerFn, HandlerFunction, OutsideFunction,
    OutsideHandler, handler_fn,
};
pub use job::{BusinessKey, InboxKey};
pub use outcome::{Failure, Outcome};
pub use process::ConsumerCounts;
pub use router::{Router, UnknownHandler, UnknownType};
pub use routes::{Route, Routed, Routes};
pub use typed::{TypedBatchFunction, TypedFn, TypedFunction, TypedOutsideFunction, typed_fn};
pub use version_guard::{Unversioned, VersionGuard};

use copies::Copies;
use form::{Batches, Form, Outside, Single};
use health::Condition;
use intake::Intake;
use job::Homes;
use process::Processor;
use request::no_circle;
use room::Room;
use suspects::Memory;
use work::Work;

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
    routes: Routes,
    dead_letters: DeadLetters,
    room: Option<Arc<dyn WaitingStore>>,
    config: ConsumerConfig,
    clock: Arc<dyn Clock>,
    counts: Arc<ConsumerCounts>,
    condition: Arc<Condition>,
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
            routes: Routes::new(),
            dead_letters: DeadLetters::topic(),
            room: None,
            config: ConsumerConfig::default(),
            clock: Arc::new(SystemClock),
            counts: Arc::default(),
            condition: Arc::default(),
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

    /// Sets what becomes of failures by their class (default: each goes to the next rung). Handlers may have routes of their own,
    /// which come first: [`Routed`].
    #[must_use]
    pub fn with_routes(mut self, routes: Routes) -> Self {
        self.routes = routes;
        self
    }

    /// Sets where dead letters go (default [`DeadLetters::topic`]).
    #[must_use]
    pub fn with_dead_letters(mut self, dead_letters: DeadLetters) -> Self {
        self.dead_letters = dead_letters;
        self
    }

    /// Sets where messages wait that no rung at the broker can keep: those of [`Ladder::backoff`], [`Ladder::stored`],
    /// [`Ladder::by_key`] and [`Ladder::in_place`] (default nowhere: such a ladder is refused at start).
    ///
    /// A table in the consumer's own database, by its clock: give the store that is the inbox. What waits there is handled
    /// whatever the ladder is now.
    #[must_use]
    pub fn with_waiting_room(mut self, store: impl WaitingStore) -> Self {
        self.room = Some(Arc::new(store));
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

    /// A handle for health checks, to be taken before the consumer runs.
    ///
    /// It is ready while it runs, database and broker answer, and the loop that takes deliveries makes its turns
    /// ([`ConsumerConfig::with_silence_max`]). Handlers that fail do not make it unready; a rung or
    /// place of dead letters that takes nothing does, as long as messages wait for it.
    #[must_use]
    pub fn probe(&self) -> Probe {
        let (condition, publisher) = (self.condition.clone(), self.publisher.clone());
        Probe::new(&self.condition.vitals, move || {
            condition.troubles(&publisher.health())
        })
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
    /// At start: [`Configuration`](crate::ErrorKind::Configuration), a missing source, rung or dead letter destination, or a
    /// database or broker that cannot be reached. Later: when the subscription ended for good.
    pub async fn run_until<H>(
        self,
        handler: H,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<()>
    where
        H: Handler<S::Connection>,
    {
        self.run(Single(handler), shutdown).await
    }

    /// As [`run_until`](Self::run_until), with up to `batch_max` messages in one transaction: what is ready when a handler is
    /// free, nothing is waited for. What fails in a batch is handled again, each message alone.
    ///
    /// `in_flight_max` bounds what is at hand: for full batches it has to be `batch_max` for each concurrent handler and more.
    ///
    /// ```no_run
    /// # #[cfg(all(feature = "sqlite", feature = "memory"))]
    /// # mod example {
    /// use relaybox::{Consumer, Incoming, Outcome, handler_fn};
    /// use sqlx::SqliteConnection;
    ///
    /// async fn charge(_app: &(), db: &mut SqliteConnection, batch: &[&Incoming]) -> Result<Outcome, sqlx::Error> {
    ///     let mut insert = sqlx::QueryBuilder::new("INSERT INTO charge (id) ");
    ///     insert.push_values(batch, |mut row, incoming| {
    ///         row.push_bind(incoming.message.id.as_str());
    ///     });
    ///     insert.build().execute(db).await?;
    ///     Ok(Outcome::Done)
    /// }
    ///
    /// # use relaybox::{broker::memory::MemoryBroker, store::sqlite::SqliteStore};
    /// # async fn run(broker: MemoryBroker, store: SqliteStore, shutdown: impl Future<Output = ()> + Send) -> relaybox::Result<()> {
    /// Consumer::new("billing", "orders", broker, store)
    ///     .run_batches_until(100, handler_fn((), charge), shutdown)
    ///     .await
    /// # }
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`run_until`](Self::run_until).
    pub async fn run_batches_until<H>(
        self,
        batch_max: usize,
        handler: H,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<()>
    where
        H: BatchHandler<S::Connection>,
    {
        let count_max = batch_max;
        self.run(Batches { count_max, handler }, shutdown).await
    }

    /// As [`run_until`](Self::run_until), with no transaction around the work; see [`OutsideHandler`]. For a consumer without a
    /// database there is [`NoInbox`](crate::store::NoInbox).
    ///
    /// # Errors
    /// As [`run_until`](Self::run_until).
    pub async fn run_outside_until<H>(
        self,
        handler: H,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<()>
    where
        H: OutsideHandler,
    {
        self.run(Outside(handler), shutdown).await
    }

    async fn run<F: Form<S>>(
        self,
        handler: F,
        shutdown: impl Future<Output = ()> + Send,
    ) -> Result<()> {
        config::validate_name(&self.name)?;
        self.ladder.validate()?;
        self.routes.validate_with(&self.ladder)?;
        self.dead_letters.validate()?;
        self.config
            .validate(self.ladder.duration(), handler.batch_max())?;
        self.config.can_identify(&self.subscriber.capabilities())?;
        self.can_wait()?;
        let mut request = self.request();
        no_circle(&request)?;
        if self.store.remembers() {
            let ladder = self.ladder.duration();
            let asked = self
                .config
                .outlasts(&*self.subscriber, &self.sources, ladder);
            asked.await?;
        }
        self.store.check().await?;
        self.dead_letters.check(&self.name).await?;
        if let Some(room) = &self.room {
            room.check().await?;
        }
        request.earlier_rungs = self.find_earlier(&request).await;
        let earlier = request.earlier_rungs.clone();
        // Not the ways back, which an operator sends to.
        let rungs = request.rungs.iter().filter(|rung| !rung.delay.is_zero());
        let copies: Vec<String> = rungs
            .map(|rung| &rung.destination)
            .chain(&request.dead_letters)
            .cloned()
            .collect();
        let sampling = self.sampling(&request);
        let subscription = self.subscriber.subscribe(request).await?;
        // Copies may go through another publisher than the broker subscribed to, and must come back.
        self.publisher.check(&copies).await?;
        info!(consumer = self.name, sources = ?self.sources, "consumer started");

        let condition = self.condition.clone();
        let running = condition.vitals.start();
        let (stop, stopped) = watch::channel(false);
        let deadline = self.config.shutdown_deadline;
        let name = self.name.clone();
        let processor = Arc::new(self.into_processor(handler, &earlier));
        let mut intake = Intake::new(subscription, processor.copies.room.clone());
        let mut work = Work::new(processor.clone(), stopped);
        let ended = tokio::select! {
            result = work.run(&mut intake) => result,
            () = clean_up(&processor) => Ok(()),
            () = sampling => Ok(()),
            () = shutdown => Ok(()),
        };
        drop(running);
        stop.send_replace(true);
        let stopping = Instant::now();
        // In this order: the first thing that a drain does is to drop what waits.
        let drained = async { tokio::join!(biased; work.drain(), intake.claim_no_more()) };
        let drained = tokio::time::timeout(deadline, drained).await.is_ok();
        if !drained {
            processor.forget_what_was_cut_off().await;
        }
        let left = deadline.saturating_sub(stopping.elapsed());
        let closed = intake.close(left.max(Duration::from_secs(1))).await;
        if let Err(error) = &closed {
            warn!(consumer = name, %error, "subscription was not closed cleanly");
        }
        info!(consumer = name, drained, "consumer stopped");
        ended
    }

    fn into_processor<F>(self, form: F, earlier: &[Rung]) -> Processor<S, F> {
        let homes = Homes::new(&self.sources, &self.rungs()).with_earlier(earlier);
        let mut config = self.config;
        config.concurrency = config.concurrency.min(self.store.concurrency_max());
        let room = self.room.map(|store| {
            let (clock, condition) = (self.clock.clone(), self.condition.clone());
            Room::new(
                store,
                self.name.clone(),
                clock,
                condition,
                config.waiting_lease,
            )
        });
        Processor {
            homes,
            inbox: Inbox {
                store: self.store,
                consumer: self.name.clone(),
                handler_timeout: config.handler_timeout,
            },
            form,
            routes: self.routes,
            copies: Copies {
                consumer: self.name,
                ladder: self.ladder,
                dead_letters: self.dead_letters,
                publisher: self.publisher,
                room,
                clock: self.clock.clone(),
            },
            config,
            clock: self.clock,
            counts: self.counts,
            condition: self.condition,
            memory: Memory::new(),
        }
    }

    /// Samples the gauges, or nothing; does not end.
    #[cfg(feature = "metrics")]
    fn sampling(&self, request: &SubscriptionRequest) -> BoxFuture<'static, ()> {
        crate::event::describe();
        match self.config.sample_interval {
            Some(interval) => sample::run(self.subscriber.clone(), request, interval).boxed(),
            None => std::future::pending().boxed(),
        }
    }

    #[cfg(not(feature = "metrics"))]
    fn sampling(&self, _request: &SubscriptionRequest) -> BoxFuture<'static, ()> {
        std::future::pending().boxed()
    }
}

/// Deletes old inbox records in small bites, now and then, beside the work. Never returns.
async fn clean_up<S: InboxStore, F>(processor: &Processor<S, F>) {
    loop {
        let deleted = processor
            .inbox
            .store
            .clean_up(
                &processor.inbox.consumer,
                processor.config.inbox_retention,
                CLEAN_UP_ROWS_MAX,
            )
            .await;
        processor.condition.database(deleted.as_ref().err());
        match deleted {
            Ok(rows) if rows >= CLEAN_UP_ROWS_MAX as u64 => continue,
            Ok(_) => {}
            Err(error) => {
                warn!(consumer = processor.inbox.consumer, %error, "inbox was not cleaned up")
            }
        }
        if let Some(room) = &processor.copies.room {
            let (consumer, age) = (&processor.inbox.consumer, processor.config.inbox_retention);
            let cleaned = room.store.clean_up(consumer, age, CLEAN_UP_ROWS_MAX).await;
            if let Err(error) = cleaned {
                warn!(consumer, %error, "waiting room was not cleaned up");
            }
        }
        processor.clock.sleep(CLEAN_UP_PAUSE).await;
    }
}
