//! A consumer under test.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::PATIENCE;
use super::broker::{Book, TestBroker};
use super::clock::ManualClock;
use super::crash::CrashPoint;
use super::ledger::{Fate, Next};
use super::signal::Signal;
use super::watching::{Pauses, Watching};
use crate::broker::{Publisher, Subscriber};
use crate::clock::Clock;
use crate::consumer::{BatchHandler, Consumer, Handler, OutsideHandler};
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind, Result};
use crate::message::MessageId;
use crate::store::InboxStore;

/// How long nobody takes what is due before the clock is moved on to what is due next: an earlier message may be in its way.
const BLOCKED: Duration = Duration::from_millis(100);
type Run = BoxFuture<'static, Result<()>>;
type Start<B> = Box<dyn Fn(TestBroker<B>, Signal) -> Run + Send + Sync>;

/// Runs a handler as a [`Consumer`] runs it, over any broker and inbox, and tells what became of each message.
///
/// Time stands still but for what is waited for: as soon as the consumer has nothing to do before a message on a rung is due,
/// the clock moves there. The broker needs the same clock for that. Pauses after trouble (a database that is away, a conflict,
/// a copy that is not taken, most attempts failing) pass by themselves, a thousand times as fast; a handler's timeout is real
/// time.
///
/// The consumer is made by a function, because one that dies is made anew, as a process that starts again.
///
#[cfg_attr(feature = "memory", doc = "```")]
#[cfg_attr(not(feature = "memory"), doc = "```ignore")]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> relaybox::Result<()> {
/// use std::time::Duration;
///
/// use relaybox::broker::memory::{MemoryBroker, MemoryConfig};
/// use relaybox::testing::{ManualClock, MemoryInbox, TestConsumer};
/// use relaybox::{Consumer, Failure, Incoming, Ladder, Message, Outcome, handler_fn};
///
/// /// The first attempt fails, the second books.
/// async fn book(_: &(), ledger: &mut Vec<String>, incoming: &Incoming) -> Outcome {
///     ledger.push(incoming.message.id.to_string());
///     match incoming.story.retry_count {
///         0 => Outcome::Retry(Failure::new("the bank did not answer")),
///         _ => Outcome::Done,
///     }
/// }
///
/// let clock = ManualClock::default();
/// let broker = MemoryBroker::with_config(MemoryConfig::default().with_clock(clock.clone()))?;
/// broker.create_topic("orders", 1)?;
/// let inbox = MemoryInbox::new(Vec::new());
/// let store = inbox.clone();
/// let make = move |broker| {
///     Consumer::new("billing", "orders", broker, store.clone()).with_ladder(Ladder::rungs([Duration::from_secs(600)]))
/// };
/// let mut billing = TestConsumer::start(broker, clock, make, handler_fn((), book)).await?;
///
/// let order = Message::new("orders", "OrderPlaced").with_id("o-1");
/// let fate = billing.deliver(order.clone()).await;
/// assert_eq!(fate.to_string(), "retried on orders.billing.retry.10m, done");
/// assert_eq!(billing.deliver(order).await.to_string(), "duplicate");
/// assert_eq!(inbox.state(), ["o-1"]);
/// billing.stop().await
/// # }
/// ```
///
/// Dropping it ends the consumer on the spot.
pub struct TestConsumer<B> {
    book: Arc<Book>,
    broker: TestBroker<B>,
    start: Start<B>,
    running: Option<Running>,
    crash_on: Option<watch::Receiver<u64>>,
}

struct Running {
    task: JoinHandle<Result<()>>,
    stop: Signal,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl<B: Publisher + Subscriber> TestConsumer<B> {
    /// Starts the consumer that `make` builds, with this handler, and waits until it has subscribed.
    ///
    /// `clock` must be the broker's, too. `make` need not set a clock. Let handlers run one at a time (the inboxes of SQLite
    /// and of memory do) where a test delivers several messages of one id at once.
    ///
    /// # Errors
    /// What the consumer refuses to start with.
    pub async fn start<S, H>(
        broker: B,
        clock: ManualClock,
        make: impl Fn(TestBroker<B>) -> Consumer<S> + Send + Sync + 'static,
        handler: H,
    ) -> Result<Self>
    where
        S: InboxStore,
        H: Handler<S::Connection>,
    {
        let run = |consumer: Consumer<S>, handler, stopped| {
            Box::pin(consumer.run_until(handler, stopped)) as Run
        };
        Self::start_as(broker, clock, make, handler, run).await
    }

    /// As [`start`](Self::start), with a handler of batches. A message that is handled again alone counts one attempt more.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub async fn start_batches<S, H>(
        broker: B,
        clock: ManualClock,
        make: impl Fn(TestBroker<B>) -> Consumer<S> + Send + Sync + 'static,
        batch_max: usize,
        handler: H,
    ) -> Result<Self>
    where
        S: InboxStore,
        H: BatchHandler<S::Connection>,
    {
        let run = move |consumer: Consumer<S>, handler, stopped| {
            Box::pin(consumer.run_batches_until(batch_max, handler, stopped)) as Run
        };
        Self::start_as(broker, clock, make, handler, run).await
    }

    /// As [`start`](Self::start), with a handler that works outside of any transaction.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub async fn start_outside<S, H>(
        broker: B,
        clock: ManualClock,
        make: impl Fn(TestBroker<B>) -> Consumer<S> + Send + Sync + 'static,
        handler: H,
    ) -> Result<Self>
    where
        S: InboxStore,
        H: OutsideHandler,
    {
        let run = |consumer: Consumer<S>, handler, stopped| {
            Box::pin(consumer.run_outside_until(handler, stopped)) as Run
        };
        Self::start_as(broker, clock, make, handler, run).await
    }

    async fn start_as<S, H>(
        broker: B,
        clock: ManualClock,
        make: impl Fn(TestBroker<B>) -> Consumer<S> + Send + Sync + 'static,
        handler: H,
        run: impl Fn(Consumer<S>, Watching<H>, BoxFuture<'static, ()>) -> Run + Send + Sync + 'static,
    ) -> Result<Self>
    where
        S: InboxStore,
        H: Send + Sync + 'static,
    {
        let book = Book::new(clock);
        let handler = Arc::new(handler);
        let of_start = Arc::clone(&book);
        let start: Start<B> = Box::new(move |broker, stop| {
            let consumer = make(broker).with_clock(Pauses::of(of_start.clock.clone()));
            let handler = Watching::new(&handler, &of_start);
            run(
                consumer,
                handler,
                Box::pin(async move { stop.wait().await }),
            )
        });
        let mut consumer = Self {
            broker: TestBroker::new(broker, &book),
            book,
            start,
            running: None,
            crash_on: None,
        };
        consumer.begin().await?;
        Ok(consumer)
    }

    /// The broker, for a relay of the test: only what goes through here is waited for.
    #[must_use]
    pub fn broker(&self) -> TestBroker<B> {
        self.broker.clone()
    }

    /// The clock.
    #[must_use]
    pub fn clock(&self) -> ManualClock {
        self.book.clock.clone()
    }

    /// Publishes a message, runs until everything is settled, over all rungs, and tells what became of it since.
    ///
    /// # Panics
    /// As [`send`](Self::send) and [`settle`](Self::settle).
    pub async fn deliver(&mut self, message: impl Into<Outgoing>) -> Fate {
        let outgoing = message.into();
        let id = outgoing.message.id.clone();
        let before = self.fate(&id);
        self.send(outgoing).await;
        self.settle().await;
        let fate = self.fate(&id);
        Fate {
            steps: fate.steps[before.steps.len()..].to_vec(),
            attempts: fate.attempts - before.attempts,
        }
    }

    /// Publishes a message. The consumer begins with it at once.
    ///
    /// # Panics
    /// When the broker does not take it.
    pub async fn send(&self, message: impl Into<Outgoing>) {
        let outcomes = self.broker.publish(&[message.into()]).await;
        let confirmed = outcomes
            .first()
            .is_some_and(crate::broker::PublishOutcome::is_confirmed);
        assert!(confirmed, "the message was not taken: {outcomes:?}");
    }

    /// Runs until everything is settled, and moves the clock over all rungs.
    ///
    /// # Panics
    /// When the consumer ended by itself, or after a minute of real time, telling what is left.
    pub async fn settle(&mut self) {
        self.drive(None).await;
    }

    /// Runs until everything is settled that is due within this time, and moves the clock so far.
    ///
    /// # Panics
    /// As [`settle`](Self::settle).
    pub async fn advance(&mut self, time: Duration) {
        let end = crate::clock::add(self.book.clock.now(), time);
        self.drive(Some(end)).await;
    }

    /// What became of a message so far.
    #[must_use]
    pub fn fate(&self, id: &MessageId) -> Fate {
        self.book.ledger().fate(id)
    }

    /// What was published to a destination through here, rungs and dead letters included, in order.
    #[must_use]
    pub fn published(&self, destination: &str) -> Vec<Outgoing> {
        self.book.ledger().sent_to(destination)
    }

    /// The consumer's dead letters at the broker, each with its story.
    #[must_use]
    pub fn dead_letters(&self) -> Vec<Outgoing> {
        self.book.ledger().dead_letters()
    }

    /// Lets the consumer die in place of its next acknowledgement: the effect, or the copy, is durable, and the broker does not
    /// know. Another one takes over.
    pub fn crash_before_acknowledging(&mut self) {
        self.book.ledger().dies = true;
    }

    /// Lets the consumer die each time that `point` is reached from now on. Another one takes over.
    pub fn crash_on(&mut self, point: &CrashPoint) {
        self.crash_on = Some(point.watch());
    }

    /// Stops as a service does, and returns how the consumer ended.
    ///
    /// # Errors
    /// Those of [`Consumer::run_until`].
    pub async fn stop(mut self) -> Result<()> {
        match self.running.take() {
            Some(running) => {
                running.stop.set();
                end_of(running).await
            }
            None => Ok(()),
        }
    }

    async fn begin(&mut self) -> Result<()> {
        let stop = Signal::new();
        let run = (self.start)(self.broker.clone(), stop.clone());
        let book = Arc::clone(&self.book);
        let task = tokio::spawn(async move {
            let ended = run.await;
            book.changed.notify_one();
            ended
        });
        let running = Running { task, stop };
        let started = Instant::now();
        while !self.book.ledger().is_subscribed() {
            if running.task.is_finished() {
                return end_of(running).await;
            }
            self.wait(started, PATIENCE).await;
        }
        self.running = Some(running);
        Ok(())
    }

    /// Kills what runs and starts another one.
    #[allow(
        clippy::panic,
        reason = "a test whose consumer cannot start has to fail"
    )]
    async fn crash(&mut self) {
        if let Some(mut running) = self.running.take() {
            running.task.abort();
            let _ = (&mut running.task).await;
        }
        // Tasks that were dropped with it end a moment later.
        let started = Instant::now();
        while self.book.ledger().is_in_hand() {
            self.wait(started, PATIENCE).await;
        }
        self.book.ledger().ended();
        if let Err(error) = self.begin().await {
            panic!("the consumer did not start again: {error}");
        }
    }

    async fn drive(&mut self, end: Option<OffsetDateTime>) {
        let started = Instant::now();
        let beyond = |at: OffsetDateTime| end.is_some_and(|end| at > end);
        loop {
            if self.is_dead() {
                self.crash().await;
            }
            self.assert_running().await;
            let next = self.book.ledger().next(self.book.clock.now());
            match next {
                Next::Nothing => break,
                Next::Until(at) if beyond(at) => break,
                Next::Until(at) => self.move_to(at),
                Next::Progress {
                    in_hand: false,
                    then: Some(at),
                } if !beyond(at) => {
                    if !self.wait(started, BLOCKED).await {
                        self.move_to(at);
                    }
                }
                Next::Progress { .. } => drop(self.wait(started, PATIENCE).await),
            }
        }
        if let Some(end) = end {
            self.move_to(end);
        }
    }

    fn move_to(&self, at: OffsetDateTime) {
        let ahead = at - self.book.clock.now();
        self.book
            .clock
            .advance(Duration::try_from(ahead).unwrap_or_default());
    }

    fn is_dead(&mut self) -> bool {
        let point = self.crash_on.as_mut();
        let reached = point.is_some_and(|point| {
            let reached = point.has_changed().unwrap_or(false);
            point.mark_unchanged();
            reached
        });
        std::mem::take(&mut self.book.ledger().died) || reached
    }

    /// Waits for a change; whether there was one in time.
    async fn wait(&self, started: Instant, most: Duration) -> bool {
        let crash = async {
            if let Some(mut point) = self.crash_on.clone()
                && point.changed().await.is_ok()
            {
                return;
            }
            std::future::pending().await
        };
        let changed = async {
            tokio::select! {
                () = self.book.changed.notified() => {}
                () = crash => {}
            }
        };
        let in_time = tokio::time::timeout(most, changed).await.is_ok();
        assert!(
            started.elapsed() < PATIENCE,
            "waited {PATIENCE:?} in vain until everything is settled; has the broker the test's clock? {:?}",
            self.book.ledger(),
        );
        in_time
    }

    #[allow(clippy::panic, reason = "a test whose consumer ended has to fail")]
    async fn assert_running(&mut self) {
        if let Some(running) = self.running.take_if(|running| running.task.is_finished()) {
            match end_of(running).await {
                Ok(()) => panic!("the consumer ended"),
                Err(error) => panic!("the consumer ended: {error}"),
            }
        }
    }
}

impl<B> fmt::Debug for TestConsumer<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestConsumer")
            .field("clock", &self.book.clock)
            .finish_non_exhaustive()
    }
}

async fn end_of(mut running: Running) -> Result<()> {
    (&mut running.task).await.unwrap_or_else(|join| {
        let error = Error::new(ErrorKind::Other, "consume", "the consumer panicked");
        Err(error.with_source(join))
    })
}
