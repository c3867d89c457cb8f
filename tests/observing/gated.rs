//! A store that stops answering on command, and goes on.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::Result;
use relaybox::store::{
    DestinationControl, Due, FetchRequest, Lease, OutboxAdmin, OutboxReader, OutboxStore, Page,
    Settled, SettlementBatch, Standing,
};
use tokio::sync::watch;

/// Lets pass what comes while it is open.
#[derive(Clone)]
pub struct Gate(Arc<watch::Sender<bool>>);

impl Gate {
    pub fn open() -> Self {
        Self(Arc::new(watch::Sender::new(true)))
    }

    pub fn set(&self, open: bool) {
        self.0.send_replace(open);
    }

    async fn pass(&self) {
        let _ = self.0.subscribe().wait_for(|open| *open).await;
    }
}

/// Gives no answer to a fetch, or to the keeper, while the gate is shut.
pub struct Gated<S> {
    pub inner: S,
    pub fetches: Gate,
    pub keeper: Gate,
}

struct GatedReader {
    inner: Box<dyn OutboxReader>,
    fetches: Gate,
}

impl OutboxReader for GatedReader {
    fn fetch<'a>(&'a mut self, request: &'a FetchRequest) -> BoxFuture<'a, Result<Page>> {
        Box::pin(async move {
            self.fetches.pass().await;
            self.inner.fetch(request).await
        })
    }

    fn settle<'a>(&'a mut self, batch: &'a SettlementBatch) -> BoxFuture<'a, Result<Settled>> {
        self.inner.settle(batch)
    }
}

impl<S: OutboxStore> OutboxStore for Gated<S> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn check(&self) -> BoxFuture<'_, Result<()>> {
        self.inner.check()
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
        self.inner.lease(relay, count_max, duration)
    }

    fn renew<'a>(
        &'a self,
        leases: &'a [Lease],
        duration: Duration,
    ) -> BoxFuture<'a, Result<Vec<Lease>>> {
        self.inner.renew(leases, duration)
    }

    fn release<'a>(&'a self, leases: &'a [Lease]) -> BoxFuture<'a, Result<()>> {
        self.inner.release(leases)
    }

    fn reader(&self) -> Box<dyn OutboxReader> {
        Box::new(GatedReader {
            inner: self.inner.reader(),
            fetches: self.fetches.clone(),
        })
    }

    fn release_due(&self, count_max: usize) -> BoxFuture<'_, Result<Due>> {
        self.inner.release_due(count_max)
    }

    fn controls(&self) -> BoxFuture<'_, Result<Vec<DestinationControl>>> {
        Box::pin(async move {
            self.keeper.pass().await;
            self.inner.controls().await
        })
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
