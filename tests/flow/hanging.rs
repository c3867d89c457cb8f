//! A destination that does not answer.

use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::Result;
use relaybox::broker::{Health, PublishOutcome, Publisher, PublisherCapabilities};
use relaybox::envelope::Outgoing;
use relaybox::testing::Signal;

/// A publisher that gives no answer for one destination until released.
pub struct Hanging<P> {
    pub inner: P,
    pub destination: &'static str,
    pub reached: Signal,
    pub release: Signal,
}

impl<P: Publisher> Publisher for Hanging<P> {
    fn capabilities(&self) -> PublisherCapabilities {
        self.inner.capabilities()
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            if batch[0].message.destination == self.destination {
                self.reached.set();
                self.release.wait().await;
            }
            self.inner.publish(batch).await
        })
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
