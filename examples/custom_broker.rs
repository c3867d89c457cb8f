//! A broker of your own under the contract suite: the smallest one that keeps every rule, in one process and in memory.
//!
//! ```sh
//! cargo run --example custom_broker --features conformance
//! ```
//!
//! Each case of the suite is a sentence of the contracts; the last line counts them. `examples/custom_broker/shelf.rs` is
//! what such a broker stores, this file is what an adapter adds: the three traits and a fixture.

#[path = "custom_broker/shelf.rs"]
mod shelf;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::broker::{
    Backlog, Delivery, Health, PublishOutcome, Publisher, PublisherCapabilities, Receipt,
    RejectionScope, Retention, Settlement, Subscriber, SubscriberCapabilities, Subscription,
    SubscriptionRequest, TopologyMode,
};
use relaybox::conformance::{self, Fixture, Verdict, fresh};
use relaybox::envelope::Outgoing;
use relaybox::{Error, ErrorKind, Result};

use shelf::{Shelf, Ticket};

/// The adapter. A clone is another handle on the same shelf.
#[derive(Clone, Default)]
struct Small(Arc<Shelf>);

fn missing(operation: &'static str, names: &[&String]) -> Error {
    Error::new(
        ErrorKind::NotFound,
        operation,
        format!("no such topic: {names:?}"),
    )
}

impl Small {
    /// Whether all these are there; the error names every one that is not.
    fn find<'a>(
        &self,
        operation: &'static str,
        names: impl IntoIterator<Item = &'a String>,
    ) -> Result<()> {
        let absent: Vec<_> = names.into_iter().filter(|name| !self.0.has(name)).collect();
        if absent.is_empty() {
            return Ok(());
        }
        Err(missing(operation, &absent))
    }
}

impl Publisher for Small {
    fn capabilities(&self) -> PublisherCapabilities {
        // Its order is `Gap`, the default: what follows a refused message is stored.
        PublisherCapabilities::new("small")
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        let bytes_max = Publisher::capabilities(self).limits.message_bytes_max;
        let store = move |outgoing: &Outgoing| {
            let message = &outgoing.message;
            if message.bytes() > bytes_max {
                return PublishOutcome::Rejected {
                    scope: RejectionScope::Message,
                    error: Error::new(ErrorKind::Rejected, "publish", "too large"),
                };
            }
            if !self.0.put(outgoing) {
                return PublishOutcome::Rejected {
                    scope: RejectionScope::Destination,
                    error: missing("publish", &[&message.destination]),
                };
            }
            PublishOutcome::Confirmed
        };
        Box::pin(async move { batch.iter().map(store).collect() })
    }

    fn health(&self) -> Health {
        Health::up()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move { self.find("check", destinations) })
    }

    fn close(&self, _deadline: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

impl Subscriber for Small {
    fn capabilities(&self) -> SubscriberCapabilities {
        let mut capabilities = SubscriberCapabilities::new("small");
        capabilities.marks_redelivery = true;
        capabilities
    }

    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        Box::pin(async move {
            let rungs = || request.rungs.iter().map(|rung| &rung.destination);
            let own = || rungs().chain(&request.dead_letters);
            match request.topology {
                TopologyMode::Create => {
                    self.find("subscribe", &request.sources)?;
                    own().for_each(|name| self.0.make(name));
                }
                TopologyMode::Verify => {
                    self.find("subscribe", request.sources.iter().chain(own()))?;
                }
                _ => {}
            }
            let sources = request.sources.iter().map(|source| (source.clone(), false));
            let topics = sources
                .chain(rungs().map(|rung| (rung.clone(), true)))
                .collect();
            let member = Member {
                number: self
                    .0
                    .join(&request.consumer, topics, request.in_flight_max),
                shelf: Arc::clone(&self.0),
            };
            Ok(Box::new(member) as Box<dyn Subscription>)
        })
    }

    fn key_affinity(&self, _source: &str) -> bool {
        false
    }

    fn depth<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        let backlog = self.0.backlog(None, destination);
        Box::pin(async move { backlog.ok_or_else(|| missing("depth", &[&destination.into()])) })
    }

    fn lag<'a>(&'a self, consumer: &'a str, source: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        let backlog = self.0.backlog(Some(consumer), source);
        Box::pin(async move { backlog.ok_or_else(|| missing("lag", &[&source.into()])) })
    }

    /// Nobody but a subscription moves what waits on a rung.
    fn destinations<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        Box::pin(async move { Ok(self.0.named(prefix)) })
    }

    /// What is acknowledged stays away: a place on the shelf is never put back.
    fn retention<'a>(&'a self, source: &'a str) -> BoxFuture<'a, Result<Retention>> {
        let found = self.find("retention", [&source.to_owned()]);
        Box::pin(async move { found.map(|()| Retention::UntilSettled) })
    }
}

/// A member of a consumer. Dropping it gives back what it holds.
struct Member {
    number: u64,
    shelf: Arc<Shelf>,
}

impl Subscription for Member {
    fn receive(&mut self, count_max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let taken = self.shelf.take(self.number, count_max).await;
            let deliver = |(ticket, received): (Ticket, relaybox::envelope::Received)| Delivery {
                source: received.coordinates.topic.clone(),
                coordinates: received.coordinates.clone(),
                redelivered: ticket.redelivered,
                incoming: received.read(),
                receipt: Box::new(Slip {
                    ticket: Some(ticket),
                    shelf: Arc::clone(&self.shelf),
                }),
            };
            Ok(taken.into_iter().map(deliver).collect())
        })
    }

    fn health(&self) -> Health {
        Health::up()
    }

    fn close(self: Box<Self>, _deadline: Duration) -> BoxFuture<'static, Result<()>> {
        drop(self);
        Box::pin(async { Ok(()) })
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.shelf.leave(self.number);
    }
}

/// The right to settle one delivery, once. Dropped unused it releases.
struct Slip {
    ticket: Option<Ticket>,
    shelf: Arc<Shelf>,
}

impl Receipt for Slip {
    fn is_current(&self) -> bool {
        let ticket = self.ticket.as_ref();
        ticket.is_some_and(|ticket| self.shelf.is_current(ticket))
    }

    fn settle(mut self: Box<Self>, settlement: Settlement) -> BoxFuture<'static, Result<()>> {
        if let Some(ticket) = self.ticket.take() {
            self.shelf.settle(ticket, settlement);
        }
        Box::pin(async { Ok(()) })
    }
}

impl Drop for Slip {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            let delay = Duration::ZERO;
            self.shelf.settle(ticket, Settlement::Release { delay });
        }
    }
}

impl Fixture for Small {
    fn topic(&self, _partitions: usize) -> BoxFuture<'_, String> {
        let name = fresh("topic");
        self.0.make(&name);
        Box::pin(async { name })
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(self.clone())
    }

    fn subscriber(&self) -> Arc<dyn Subscriber> {
        Arc::new(self.clone())
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let summary = conformance::run_all(
        || async { Small::default() },
        |case, verdict| match verdict {
            Verdict::Passed => println!("kept      {}", case.name),
            Verdict::LeftOut(need) => println!("left out  {} (needs {need:?})", case.name),
            other => println!("BROKEN    {}: {other:?}", case.name),
        },
    )
    .await;
    println!(
        "cases={} kept={} broken={} left_out={}",
        summary.passed + summary.failed + summary.left_out,
        summary.passed,
        summary.failed,
        summary.left_out
    );
    if summary.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
