//! A broker that is watched, and refuses or forgets on command.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::broker::{
    Backlog, Broker, Delivery, FailureScope, Health, PublishOutcome, Publisher,
    PublisherCapabilities, Receipt, RejectionScope, Retention, Settlement, Stored, Subscriber,
    SubscriberCapabilities, Subscription, SubscriptionRequest,
};
use relaybox::envelope::Outgoing;
use relaybox::{Error, ErrorKind, Result};

pub const THROUGH: u8 = 0;
pub const REFUSE: u8 = 1;
pub const LOSE_CONFIRM: u8 = 2;

#[derive(Clone)]
pub struct Watched {
    pub inner: Arc<dyn Broker>,
    pub book: Arc<Book>,
}

#[derive(Default)]
pub struct Book {
    mode: AtomicU8,
    /// Copies that the consumer was told are stored.
    confirmed: Mutex<HashSet<String>>,
    /// Messages whose first confirmation was lost.
    pub lost: Mutex<HashSet<String>>,
    pub refused: Mutex<HashSet<String>>,
    pub acknowledged: Mutex<HashSet<String>>,
    /// Acknowledged before the copy was confirmed.
    pub too_early: Mutex<Vec<String>>,
}

impl Book {
    pub fn is(&self, mode: u8) {
        self.mode.store(mode, Ordering::SeqCst);
    }

    pub fn count(of: &Mutex<HashSet<String>>) -> usize {
        of.lock().unwrap().len()
    }

    fn outcome(&self, id: &str, outcome: PublishOutcome) -> PublishOutcome {
        if !outcome.is_confirmed() {
            return outcome;
        }
        let loses = self.mode.load(Ordering::SeqCst) == LOSE_CONFIRM;
        if loses && self.lost.lock().unwrap().insert(id.to_owned()) {
            return PublishOutcome::Failed {
                scope: FailureScope::Destination,
                stored: Stored::Unknown,
                error: Error::new(ErrorKind::Timeout, "publish", "the confirmation is lost"),
            };
        }
        self.confirmed.lock().unwrap().insert(id.to_owned());
        outcome
    }
}

impl Publisher for Watched {
    fn capabilities(&self) -> PublisherCapabilities {
        Publisher::capabilities(&*self.inner)
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            let ids = batch.iter().map(|sent| sent.message.id.to_string());
            if self.book.mode.load(Ordering::SeqCst) == REFUSE {
                let refuse = |id| {
                    self.book.refused.lock().unwrap().insert(id);
                    let error = Error::new(ErrorKind::Rejected, "publish", "not now");
                    let scope = RejectionScope::Destination;
                    PublishOutcome::Rejected { scope, error }
                };
                return ids.map(refuse).collect();
            }
            let outcomes = self.inner.publish(batch).await;
            let told = ids.zip(outcomes);
            told.map(|(id, outcome)| self.book.outcome(&id, outcome))
                .collect()
        })
    }

    fn scope<'a>(&'a self, destination: &'a str) -> &'a str {
        self.inner.scope(destination)
    }

    fn health(&self) -> Health {
        Publisher::health(&*self.inner)
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        Publisher::close(&*self.inner, deadline)
    }
}

impl Subscriber for Watched {
    fn capabilities(&self) -> SubscriberCapabilities {
        Subscriber::capabilities(&*self.inner)
    }

    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        Box::pin(async move {
            let inner = self.inner.subscribe(request).await?;
            let book = Arc::clone(&self.book);
            Ok(Box::new(WatchedSubscription { inner, book }) as Box<dyn Subscription>)
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

    fn retention<'a>(&'a self, source: &'a str) -> BoxFuture<'a, Result<Retention>> {
        self.inner.retention(source)
    }

    fn destinations<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        self.inner.destinations(prefix)
    }
}

struct WatchedSubscription {
    inner: Box<dyn Subscription>,
    book: Arc<Book>,
}

impl Subscription for WatchedSubscription {
    fn receive(&mut self, count_max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let mut deliveries = self.inner.receive(count_max).await?;
            for delivery in &mut deliveries {
                let id = delivery.incoming.message.id.to_string();
                let book = Arc::clone(&self.book);
                let nothing = Box::new(Nothing) as Box<dyn Receipt>;
                let inner = std::mem::replace(&mut delivery.receipt, nothing);
                delivery.receipt = Box::new(WatchedReceipt { inner, id, book });
            }
            Ok(deliveries)
        })
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn close(self: Box<Self>, deadline: Duration) -> BoxFuture<'static, Result<()>> {
        self.inner.close(deadline)
    }
}

struct WatchedReceipt {
    inner: Box<dyn Receipt>,
    id: String,
    book: Arc<Book>,
}

impl Receipt for WatchedReceipt {
    fn is_current(&self) -> bool {
        self.inner.is_current()
    }

    fn settle(self: Box<Self>, settlement: Settlement) -> BoxFuture<'static, Result<()>> {
        if settlement == Settlement::Acknowledge {
            if !self.book.confirmed.lock().unwrap().contains(&self.id) {
                self.book.too_early.lock().unwrap().push(self.id.clone());
            }
            self.book.acknowledged.lock().unwrap().insert(self.id);
        }
        self.inner.settle(settlement)
    }
}

/// Stands where a receipt was.
struct Nothing;

impl Receipt for Nothing {
    fn is_current(&self) -> bool {
        false
    }

    fn settle(self: Box<Self>, _: Settlement) -> BoxFuture<'static, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}
