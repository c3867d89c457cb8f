//! Points at which the process ends as if it had been killed there, and the broker and store that pass them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use relaybox::Result;
use relaybox::broker::{
    Backlog, Broker, Delivery, Health, PublishOutcome, Publisher, PublisherCapabilities, Receipt,
    Retention, Settlement, Subscriber, SubscriberCapabilities, Subscription, SubscriptionRequest,
};
use relaybox::envelope::Outgoing;
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{
    Arrival, AuditEntry, DeadLetter, DeadLetterStore, Leaving, LetterEntry, LetterFilter, NewRun,
    Note, RedriveStore, RunRow, RunState, RunStep, WholeLetter,
};

/// Names of the points: before and after a letter is stored, acknowledged, a run taken, a batch announced, published or settled, and a
/// run ended.
const POINTS: [&str; 14] = [
    "store",
    "stored",
    "acknowledge",
    "acknowledged",
    "take",
    "taken",
    "hand",
    "handed",
    "publish",
    "published",
    "settle",
    "settled",
    "end",
    "ended",
];

/// Where the process is to end, if anywhere.
#[derive(Debug, Default)]
pub struct Plan {
    point: Option<&'static str>,
    passages_left: AtomicU32,
}

impl Plan {
    /// Of `POINT:N`: it ends at the N-th passage.
    pub fn parse(words: &str) -> Result<Self, String> {
        let (name, passages) = words.split_once(':').ok_or("POINT:N is wanted")?;
        let named = POINTS.into_iter().find(|point| *point == name);
        let passages: u32 = passages
            .parse()
            .map_err(|_| format!("no number: {passages}"))?;
        Ok(Self {
            point: Some(named.ok_or(format!("no point {name:?}"))?),
            passages_left: AtomicU32::new(passages),
        })
    }

    /// Runs nothing on the way out: no destructor, no flush, no farewell to database or broker.
    fn reach(&self, point: &str) {
        if self.point == Some(point) && self.passages_left.fetch_sub(1, Ordering::SeqCst) == 1 {
            std::process::abort();
        }
    }
}

/// Forwards everything.
pub struct FragileBroker {
    inner: Arc<dyn Broker>,
    plan: Arc<Plan>,
}

impl FragileBroker {
    pub fn new(inner: Arc<dyn Broker>, plan: Arc<Plan>) -> Self {
        Self { inner, plan }
    }
}

impl Publisher for FragileBroker {
    fn capabilities(&self) -> PublisherCapabilities {
        Publisher::capabilities(&self.inner)
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        async move {
            self.plan.reach("publish");
            let outcomes = self.inner.publish(batch).await;
            self.plan.reach("published");
            outcomes
        }
        .boxed()
    }

    fn scope<'a>(&'a self, destination: &'a str) -> &'a str {
        self.inner.scope(destination)
    }

    fn health(&self) -> Health {
        Publisher::health(&self.inner)
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        self.inner.close(deadline)
    }
}

impl Subscriber for FragileBroker {
    fn capabilities(&self) -> SubscriberCapabilities {
        Subscriber::capabilities(&self.inner)
    }

    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        async move {
            let subscription = FragileSubscription {
                inner: self.inner.subscribe(request).await?,
                plan: self.plan.clone(),
            };
            Ok(Box::new(subscription) as Box<dyn Subscription>)
        }
        .boxed()
    }

    fn key_affinity(&self, source: &str) -> bool {
        self.inner.key_affinity(source)
    }

    fn depth<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        self.inner.depth(destination)
    }

    fn lag<'a>(&'a self, consumer: &'a str, source: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        self.inner.lag(consumer, source)
    }

    fn destinations<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        self.inner.destinations(prefix)
    }

    fn retention<'a>(&'a self, source: &'a str) -> BoxFuture<'a, Result<Retention>> {
        self.inner.retention(source)
    }
}

struct FragileSubscription {
    inner: Box<dyn Subscription>,
    plan: Arc<Plan>,
}

impl Subscription for FragileSubscription {
    fn receive(&mut self, count_max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        async move {
            let mut deliveries = self.inner.receive(count_max).await?;
            for delivery in &mut deliveries {
                let inner = std::mem::replace(&mut delivery.receipt, Box::new(Nothing));
                let plan = self.plan.clone();
                delivery.receipt = Box::new(FragileReceipt { inner, plan });
            }
            Ok(deliveries)
        }
        .boxed()
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn close(self: Box<Self>, deadline: Duration) -> BoxFuture<'static, Result<()>> {
        self.inner.close(deadline)
    }
}

/// Stands where a receipt was taken out.
struct Nothing;

impl Receipt for Nothing {
    fn is_current(&self) -> bool {
        false
    }

    fn settle(self: Box<Self>, _: Settlement) -> BoxFuture<'static, Result<()>> {
        async { Ok(()) }.boxed()
    }
}

struct FragileReceipt {
    inner: Box<dyn Receipt>,
    plan: Arc<Plan>,
}

impl Receipt for FragileReceipt {
    fn is_current(&self) -> bool {
        self.inner.is_current()
    }

    fn settle(self: Box<Self>, settlement: Settlement) -> BoxFuture<'static, Result<()>> {
        async move {
            self.plan.reach("acknowledge");
            self.inner.settle(settlement).await?;
            self.plan.reach("acknowledged");
            Ok(())
        }
        .boxed()
    }
}

/// Forwards everything.
pub struct FragileStore {
    inner: PostgresStore,
    plan: Arc<Plan>,
}

impl FragileStore {
    pub const fn new(inner: PostgresStore, plan: Arc<Plan>) -> Self {
        Self { inner, plan }
    }
}

impl DeadLetterStore for FragileStore {
    fn put<'a>(&'a self, letter: &'a Outgoing) -> BoxFuture<'a, Result<()>> {
        self.inner.put(letter)
    }

    fn list<'a>(
        &'a self,
        consumer: &'a str,
        after: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<DeadLetter>>> {
        self.inner.list(consumer, after, count_max)
    }

    fn count<'a>(&'a self, consumer: &'a str) -> BoxFuture<'a, Result<u64>> {
        self.inner.count(consumer)
    }

    fn remove(&self, position: i64) -> BoxFuture<'_, Result<bool>> {
        self.inner.remove(position)
    }
}

impl RedriveStore for FragileStore {
    fn take_in<'a>(&'a self, letter: &'a Outgoing) -> BoxFuture<'a, Result<Arrival>> {
        async move {
            self.plan.reach("store");
            let arrival = self.inner.take_in(letter).await?;
            self.plan.reach("stored");
            Ok(arrival)
        }
        .boxed()
    }

    fn entries<'a>(
        &'a self,
        consumer: &'a str,
        filter: &'a LetterFilter,
        range: (i64, i64),
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<LetterEntry>>> {
        self.inner.entries(consumer, filter, range, count_max)
    }

    fn letters<'a>(
        &'a self,
        consumer: &'a str,
        filter: &'a LetterFilter,
        range: (i64, i64),
        count_max: usize,
        bytes_max: usize,
    ) -> BoxFuture<'a, Result<Vec<WholeLetter>>> {
        self.inner
            .letters(consumer, filter, range, count_max, bytes_max)
    }

    fn last_position(&self) -> BoxFuture<'_, Result<i64>> {
        self.inner.last_position()
    }

    fn take_out<'a>(
        &'a self,
        leaving: &'a [Leaving],
        note: &'a Note<'a>,
    ) -> BoxFuture<'a, Result<u64>> {
        self.inner.take_out(leaving, note)
    }

    fn replace<'a>(
        &'a self,
        old: &'a Leaving,
        new: &'a Outgoing,
        note: &'a Note<'a>,
    ) -> BoxFuture<'a, Result<Option<i64>>> {
        self.inner.replace(old, new, note)
    }

    fn may_have_sent<'a>(
        &'a self,
        consumer: &'a str,
        position: i64,
    ) -> BoxFuture<'a, Result<Option<i64>>> {
        self.inner.may_have_sent(consumer, position)
    }

    fn enter<'a>(
        &'a self,
        new: &'a Outgoing,
        told: &'a Leaving,
        note: &'a Note<'a>,
    ) -> BoxFuture<'a, Result<i64>> {
        self.inner.enter(new, told, note)
    }

    fn plan<'a>(&'a self, run: &'a NewRun<'a>) -> BoxFuture<'a, Result<RunRow>> {
        self.inner.plan(run)
    }

    fn find_run<'a>(&'a self, consumer: &'a str, id: i64) -> BoxFuture<'a, Result<Option<RunRow>>> {
        self.inner.find_run(consumer, id)
    }

    fn runs<'a>(
        &'a self,
        consumer: &'a str,
        before: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<RunRow>>> {
        self.inner.runs(consumer, before, count_max)
    }

    fn take_run<'a>(
        &'a self,
        consumer: &'a str,
        id: i64,
        from: &'a [RunState],
    ) -> BoxFuture<'a, Result<Option<RunRow>>> {
        async move {
            self.plan.reach("take");
            let taken = self.inner.take_run(consumer, id, from).await?;
            self.plan.reach("taken");
            Ok(taken)
        }
        .boxed()
    }

    fn take_in_hand<'a>(
        &'a self,
        run: &'a RunRow,
        positions: &'a [i64],
    ) -> BoxFuture<'a, Result<Option<Vec<i64>>>> {
        async move {
            self.plan.reach("hand");
            let there = self.inner.take_in_hand(run, positions).await?;
            self.plan.reach("handed");
            Ok(there)
        }
        .boxed()
    }

    fn settle_run<'a>(&'a self, run: &'a RunRow, step: &'a RunStep) -> BoxFuture<'a, Result<bool>> {
        async move {
            self.plan.reach("settle");
            let settled = self.inner.settle_run(run, step).await?;
            self.plan.reach("settled");
            Ok(settled)
        }
        .boxed()
    }

    fn end_run<'a>(
        &'a self,
        run: &'a RunRow,
        state: RunState,
        error: Option<&'a str>,
    ) -> BoxFuture<'a, Result<bool>> {
        async move {
            self.plan.reach("end");
            let ended = self.inner.end_run(run, state, error).await?;
            self.plan.reach("ended");
            Ok(ended)
        }
        .boxed()
    }

    fn cancel_run<'a>(
        &'a self,
        consumer: &'a str,
        id: i64,
        because: &'a str,
    ) -> BoxFuture<'a, Result<bool>> {
        self.inner.cancel_run(consumer, id, because)
    }

    fn audit<'a>(
        &'a self,
        consumer: &'a str,
        after: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<AuditEntry>>> {
        self.inner.audit(consumer, after, count_max)
    }

    fn clean_up_audit<'a>(
        &'a self,
        consumer: &'a str,
        age: Duration,
        rows_max: usize,
    ) -> BoxFuture<'a, Result<u64>> {
        self.inner.clean_up_audit(consumer, age, rows_max)
    }
}
