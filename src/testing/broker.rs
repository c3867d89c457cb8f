//! A broker as a consumer under test sees it: everything is passed on and written down.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::clock::ManualClock;
use super::ledger::{Known, Ledger, Returned, Waiting};
use crate::broker::{
    Backlog, Delivery, Health, PublishOutcome, Publisher, PublisherCapabilities, Receipt,
    Retention, Settlement, Subscriber, SubscriberCapabilities, Subscription, SubscriptionRequest,
};
use crate::clock::{Clock, add};
use crate::envelope::Outgoing;
use crate::error::Result;

/// What the wrappers of one consumer under test share.
pub(super) struct Book {
    ledger: Mutex<Ledger>,
    /// Told after every change. One waits.
    pub(super) changed: Notify,
    pub(super) clock: ManualClock,
}

impl Book {
    pub(super) fn new(clock: ManualClock) -> Arc<Self> {
        Arc::new(Self {
            ledger: Mutex::default(),
            changed: Notify::new(),
            clock,
        })
    }

    pub(super) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> T {
        let changed = change(&mut self.ledger());
        self.changed.notify_one();
        changed
    }
}

/// The broker of a [`TestConsumer`](super::TestConsumer), as its consumer gets it and as a relay of the test may use it: it
/// passes everything on. A clone is the same.
pub struct TestBroker<B> {
    inner: Arc<B>,
    book: Arc<Book>,
}

impl<B> Clone for TestBroker<B> {
    fn clone(&self) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
            book: Arc::clone(&self.book),
        }
    }
}

impl<B> TestBroker<B> {
    pub(super) fn new(inner: B, book: &Arc<Book>) -> Self {
        Self {
            inner: Arc::new(inner),
            book: Arc::clone(book),
        }
    }
}

impl<B> fmt::Debug for TestBroker<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestBroker").finish_non_exhaustive()
    }
}

impl<B: Publisher> Publisher for TestBroker<B> {
    fn capabilities(&self) -> PublisherCapabilities {
        self.inner.capabilities()
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            let now = self.book.clock.now();
            self.book.write(|ledger| {
                for sending in batch {
                    ledger.sending(sending, now);
                }
            });
            let outcomes = self.inner.publish(batch).await;
            self.book.write(|ledger| {
                for (at, sending) in batch.iter().enumerate() {
                    match outcomes.get(at) {
                        Some(outcome) if outcome.is_confirmed() => ledger.sent(sending),
                        _ => ledger.not_sent(sending),
                    }
                }
            });
            outcomes
        })
    }

    fn scope<'a>(&'a self, destination: &'a str) -> &'a str {
        self.inner.scope(destination)
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        self.inner.close(deadline)
    }
}

impl<B: Subscriber> Subscriber for TestBroker<B> {
    fn capabilities(&self) -> SubscriberCapabilities {
        self.inner.capabilities()
    }

    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        Box::pin(async move {
            let inner = self.inner.subscribe(request.clone()).await?;
            self.book.write(|ledger| ledger.subscribed(request));
            let book = Arc::clone(&self.book);
            Ok(Box::new(Watched { inner, book }) as Box<dyn Subscription>)
        })
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

struct Watched {
    inner: Box<dyn Subscription>,
    book: Arc<Book>,
}

impl Watched {
    fn watch(&self, mut delivery: Delivery) -> Delivery {
        let now = self.book.clock.now();
        let incoming = &delivery.incoming;
        let (place, is_foreign) = self.book.write(|ledger| {
            let is_foreign = ledger.is_foreign(&delivery.source, incoming);
            (ledger.handed(&delivery.source, incoming, now), is_foreign)
        });
        let known = Known {
            id: incoming.message.id.clone(),
            id_missing: incoming.id_missing,
            is_foreign,
        };
        delivery.receipt = Box::new(Slip {
            inner: Some(delivery.receipt),
            place: Some(place),
            known,
            book: Arc::clone(&self.book),
        });
        delivery
    }
}

impl Subscription for Watched {
    fn receive(&mut self, count_max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let deliveries = self.inner.receive(count_max).await?;
            Ok(deliveries.into_iter().map(|d| self.watch(d)).collect())
        })
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn close(self: Box<Self>, deadline: Duration) -> BoxFuture<'static, Result<()>> {
        self.inner.close(deadline)
    }
}

/// The right to settle one delivery. Dropped unused it tells that the delivery came back.
struct Slip {
    inner: Option<Box<dyn Receipt>>,
    /// Taken when it is settled.
    place: Option<Waiting>,
    known: Known,
    book: Arc<Book>,
}

impl Slip {
    async fn end(mut self, settlement: Settlement) -> Result<()> {
        let dies = settlement == Settlement::Acknowledge
            && self.book.write(|ledger| {
                ledger.died |= ledger.dies;
                std::mem::take(&mut ledger.dies)
            });
        if dies {
            return std::future::pending().await;
        }
        let Some(inner) = self.inner.take() else {
            return Ok(());
        };
        inner.settle(settlement).await?;
        let now = self.book.clock.now();
        if let Some(place) = self.place.take() {
            self.book.write(|ledger| match settlement {
                Settlement::Acknowledge => ledger.acknowledged(&place, &self.known),
                Settlement::Release { delay } => {
                    let released = Returned::Released(add(now, delay));
                    ledger.returned(place, &self.known.id, released);
                }
            });
        }
        Ok(())
    }
}

impl Receipt for Slip {
    fn is_current(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.is_current())
    }

    fn settle(self: Box<Self>, settlement: Settlement) -> BoxFuture<'static, Result<()>> {
        Box::pin(self.end(settlement))
    }
}

impl Drop for Slip {
    fn drop(&mut self) {
        // The broker hears of it first, so that what waits again can be had.
        drop(self.inner.take());
        if let Some(place) = self.place.take() {
            let (book, id) = (&self.book, &self.known.id);
            book.write(|ledger| ledger.returned(place, id, Returned::Dropped));
        }
    }
}
