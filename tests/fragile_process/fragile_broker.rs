//! A broker that passes the points of `crash.rs` and keeps a journal of the copies that are sent.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::Result;
use relaybox::broker::{
    Backlog, Broker, Delivery, Health, PublishOutcome, Publisher, PublisherCapabilities, Receipt,
    Retention, Settlement, Subscriber, SubscriberCapabilities, Subscription, SubscriptionRequest,
};
use relaybox::envelope::Outgoing;

use super::crash::{Plan, Point};

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
        Box::pin(async move {
            self.plan.reach(Point::Publish);
            for Outgoing { message, story } in batch {
                let error = story.last_error.as_deref().unwrap_or_default();
                let class = error.split(':').next().unwrap_or_default();
                println!("copy {} {} {class}", message.id, story.retry_count);
            }
            let outcomes = self.inner.publish(batch).await;
            if outcomes.iter().all(PublishOutcome::is_confirmed) {
                self.plan.reach(Point::Published);
            }
            outcomes
        })
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
        Box::pin(async move {
            let subscription = FragileSubscription {
                inner: self.inner.subscribe(request).await?,
                plan: self.plan.clone(),
            };
            Ok(Box::new(subscription) as Box<dyn Subscription>)
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

struct FragileSubscription {
    inner: Box<dyn Subscription>,
    plan: Arc<Plan>,
}

impl Subscription for FragileSubscription {
    fn receive(&mut self, count_max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        let wrapped = |mut delivery: Delivery| {
            delivery.receipt = Box::new(FragileReceipt {
                inner: delivery.receipt,
                plan: self.plan.clone(),
            });
            delivery
        };
        let received = self.inner.receive(count_max);
        Box::pin(async move { Ok(received.await?.into_iter().map(wrapped).collect()) })
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn close(self: Box<Self>, deadline: Duration) -> BoxFuture<'static, Result<()>> {
        self.inner.close(deadline)
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
        Box::pin(async move {
            self.plan.reach(Point::Settle);
            self.inner.settle(settlement).await?;
            self.plan.reach(Point::Settled);
            Ok(())
        })
    }
}
