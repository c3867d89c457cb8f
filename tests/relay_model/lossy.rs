//! A store whose reads fail and whose settlements are lost, before or after they were carried out.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::store::{
    DestinationControl, Due, FetchRequest, Lease, OutboxAdmin, OutboxReader, OutboxStore, Page,
    Settled, SettlementBatch, Standing,
};
use relaybox::{Error, ErrorKind, Result};

/// How often statements are lost, in percent; shared by all stores of a case.
#[derive(Clone)]
pub struct Losses {
    percent: Arc<AtomicU32>,
    random: Arc<Mutex<fastrand::Rng>>,
}

impl Losses {
    pub fn new(seed: u64) -> Self {
        Self {
            percent: Arc::new(AtomicU32::new(0)),
            random: Arc::new(Mutex::new(fastrand::Rng::with_seed(seed))),
        }
    }

    pub fn set(&self, percent: u32) {
        self.percent.store(percent, Ordering::SeqCst);
    }

    fn lose(&self) -> Result<()> {
        let dice = self.random.lock().unwrap().u32(..100);
        match dice < self.percent.load(Ordering::SeqCst) {
            true => Err(Error::new(ErrorKind::Unavailable, "model", "lost")),
            false => Ok(()),
        }
    }
}

pub struct Lossy<S> {
    pub inner: S,
    pub losses: Losses,
}

struct LossyReader {
    inner: Box<dyn OutboxReader>,
    losses: Losses,
}

impl<S: OutboxStore> OutboxStore for Lossy<S> {
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
        Box::new(LossyReader {
            inner: self.inner.reader(),
            losses: self.losses.clone(),
        })
    }

    fn release_due(&self, count_max: usize) -> BoxFuture<'_, Result<Due>> {
        self.inner.release_due(count_max)
    }

    fn controls(&self) -> BoxFuture<'_, Result<Vec<DestinationControl>>> {
        self.inner.controls()
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

impl OutboxReader for LossyReader {
    fn fetch<'a>(&'a mut self, request: &'a FetchRequest) -> BoxFuture<'a, Result<Page>> {
        Box::pin(async move {
            let page = self.inner.fetch(request).await?;
            self.losses.lose()?;
            Ok(page)
        })
    }

    fn settle<'a>(&'a mut self, batch: &'a SettlementBatch) -> BoxFuture<'a, Result<Settled>> {
        Box::pin(async move {
            self.losses.lose()?;
            let settled = self.inner.settle(batch).await?;
            self.losses.lose()?;
            Ok(settled)
        })
    }
}
