//! Wrappers that forward everything, and end the process at a planned point as if it had been killed there.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::Result;
use relaybox::broker::{PublishOutcome, Publisher, PublisherCapabilities};
use relaybox::envelope::Outgoing;
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{
    DestinationControl, Due, FetchRequest, Lease, OutboxAdmin, OutboxReader, OutboxStore, Page,
    Settled, SettlementBatch, Standing,
};

/// A place in the relay's circle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// The database has leased lanes; the relay has not heard of it.
    Leased,
    /// Lanes are in a worker's hand; nothing is read.
    Claimed,
    /// A page is read; nothing of it is published.
    Fetched,
    /// The broker has the first half of the page.
    HalfPublished,
    /// The broker has the page; no confirm was seen.
    Published,
    /// All confirms were seen; the settlement is not sent.
    Confirmed,
    /// The page is settled; its lanes are still in hand.
    Settled,
    /// Stopping: everything is settled, the lanes are not given back yet.
    Releasing,
    /// Stopping: the lanes are free; the registration has not ended.
    Released,
}

impl Point {
    const ALL: [(&str, Self); 9] = [
        ("leased", Self::Leased),
        ("claimed", Self::Claimed),
        ("fetched", Self::Fetched),
        ("half-published", Self::HalfPublished),
        ("published", Self::Published),
        ("confirmed", Self::Confirmed),
        ("settled", Self::Settled),
        ("releasing", Self::Releasing),
        ("released", Self::Released),
    ];

    /// How often it is passed before the process ends: what is in the middle of things happens in the second page.
    const fn passes(self) -> u32 {
        match self {
            Self::Leased | Self::Releasing | Self::Released => 0,
            _ => 1,
        }
    }
}

/// Where the process is to end, if anywhere.
#[derive(Debug)]
pub struct Plan {
    point: Option<Point>,
    left: AtomicU32,
}

impl Plan {
    pub fn parse(word: Option<&str>) -> Result<Self, String> {
        let named = |word| Point::ALL.iter().find(|(name, _)| *name == word);
        let point = match word {
            None => None,
            Some(word) => Some(named(word).ok_or(format!("no point {word:?}"))?.1),
        };
        Ok(Self {
            point,
            left: AtomicU32::new(point.map_or(0, Point::passes)),
        })
    }

    /// Whether this is the time to end at `point`.
    fn is_due(&self, point: Point) -> bool {
        let one_less = |left: u32| left.checked_sub(1);
        self.point == Some(point)
            && (self.left)
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less)
                .is_err()
    }

    /// Runs nothing on the way out: no destructor, no flush, no farewell to database or broker.
    fn reach(&self, point: Point) {
        if self.is_due(point) {
            std::process::abort();
        }
    }
}

pub struct CrashingPublisher<P> {
    inner: P,
    plan: Arc<Plan>,
}

impl<P> CrashingPublisher<P> {
    pub const fn new(inner: P, plan: Arc<Plan>) -> Self {
        Self { inner, plan }
    }
}

impl<P: Publisher> Publisher for CrashingPublisher<P> {
    fn capabilities(&self) -> PublisherCapabilities {
        self.inner.capabilities()
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            if self.plan.is_due(Point::HalfPublished) {
                self.inner.publish(&batch[..batch.len().div_ceil(2)]).await;
                std::process::abort();
            }
            let outcomes = self.inner.publish(batch).await;
            self.plan.reach(Point::Published);
            outcomes
        })
    }

    fn scope<'a>(&'a self, destination: &'a str) -> &'a str {
        self.inner.scope(destination)
    }

    fn health(&self) -> relaybox::broker::Health {
        self.inner.health()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        self.inner.close(deadline)
    }
}

pub struct CrashingStore {
    inner: PostgresStore,
    plan: Arc<Plan>,
}

impl CrashingStore {
    pub const fn new(inner: PostgresStore, plan: Arc<Plan>) -> Self {
        Self { inner, plan }
    }
}

impl OutboxStore for CrashingStore {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn check(&self) -> BoxFuture<'_, Result<()>> {
        OutboxStore::check(&self.inner)
    }

    fn heartbeat<'a>(
        &'a self,
        id: &'a str,
        name: &'a str,
        duration: Duration,
    ) -> BoxFuture<'a, Result<Standing>> {
        self.inner.heartbeat(id, name, duration)
    }

    fn standing<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<Standing>> {
        self.inner.standing(id)
    }

    fn leave<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<()>> {
        self.inner.leave(id)
    }

    fn lease<'a>(
        &'a self,
        relay: &'a str,
        count_max: usize,
        duration: Duration,
    ) -> BoxFuture<'a, Result<Vec<Lease>>> {
        Box::pin(async move {
            let leases = self.inner.lease(relay, count_max, duration).await;
            if leases.as_ref().is_ok_and(|leases| !leases.is_empty()) {
                self.plan.reach(Point::Leased);
            }
            leases
        })
    }

    fn renew<'a>(
        &'a self,
        leases: &'a [Lease],
        duration: Duration,
    ) -> BoxFuture<'a, Result<Vec<Lease>>> {
        self.inner.renew(leases, duration)
    }

    fn release<'a>(&'a self, leases: &'a [Lease]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.plan.reach(Point::Releasing);
            let released = self.inner.release(leases).await;
            self.plan.reach(Point::Released);
            released
        })
    }

    fn reader(&self) -> Box<dyn OutboxReader> {
        Box::new(CrashingReader {
            inner: self.inner.reader(),
            plan: self.plan.clone(),
        })
    }

    fn release_due(&self, count_max: usize) -> BoxFuture<'_, Result<Due>> {
        self.inner.release_due(count_max)
    }

    fn controls(&self) -> BoxFuture<'_, Result<Vec<DestinationControl>>> {
        self.inner.controls()
    }

    fn clean_up_history(&self) -> BoxFuture<'_, Result<bool>> {
        self.inner.clean_up_history()
    }

    fn admin(&self) -> Option<&dyn OutboxAdmin> {
        self.inner.admin()
    }

    fn pending(&self, count_max: u64) -> BoxFuture<'_, Result<u64>> {
        self.inner.pending(count_max)
    }

    fn aside(&self, count_max: u64) -> BoxFuture<'_, Result<u64>> {
        self.inner.aside(count_max)
    }
}

struct CrashingReader {
    inner: Box<dyn OutboxReader>,
    plan: Arc<Plan>,
}

impl OutboxReader for CrashingReader {
    fn fetch<'a>(&'a mut self, request: &'a FetchRequest) -> BoxFuture<'a, Result<Page>> {
        Box::pin(async move {
            if !request.leases.is_empty() {
                self.plan.reach(Point::Claimed);
            }
            let page = self.inner.fetch(request).await;
            if page.as_ref().is_ok_and(|page| !page.rows.is_empty()) {
                self.plan.reach(Point::Fetched);
            }
            page
        })
    }

    fn settle<'a>(&'a mut self, batch: &'a SettlementBatch) -> BoxFuture<'a, Result<Settled>> {
        Box::pin(async move {
            self.plan.reach(Point::Confirmed);
            let settled = self.inner.settle(batch).await;
            self.plan.reach(Point::Settled);
            settled
        })
    }
}
