//! Subscribing: a connection of its own for each subscription, and one puller for each of its durable consumers.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use super::config::NatsConfig;
use super::desk::Desk;
use super::link::{Link, Renewable};
use super::puller::Puller;
use super::shelf::Shelf;
use super::topology;
use super::warnings::Warnings;
use crate::broker::{Delivery, Health, Subscription, SubscriptionRequest};
use crate::clock::at_most_a_day;
use crate::error::{Error, ErrorKind, Result};

/// A running membership.
struct Membership {
    desk: Arc<Desk>,
    links: Arc<Renewable>,
    close: watch::Sender<Option<Instant>>,
    pullers: Vec<JoinHandle<Result<()>>>,
}

/// A connection of its own, because a message with headers that the client cannot read costs the connection it came by.
pub(super) async fn subscribe(
    config: &NatsConfig,
    warnings: &Warnings,
    request: SubscriptionRequest,
) -> Result<Box<dyn Subscription>> {
    topology::check(config, &request)?;
    let link = Arc::new(Link::connect(config).await?);
    let feeds = topology::prepare(config, &link, warnings, &request).await?;
    let desk = Desk::new(request.in_flight_max);
    let (close, closing) = watch::channel(None);
    let links = Arc::new(Renewable::new(config, link));
    let mut ready = Vec::with_capacity(feeds.len());
    for feed in feeds {
        let shelf = Shelf::new(feed.source.clone(), feed.quota);
        let puller = Puller::new(config, Arc::clone(&links), feed, shelf, Arc::clone(&desk));
        ready.push(puller.await?);
    }
    let pullers = ready
        .into_iter()
        .map(|puller| tokio::spawn(puller.run(closing.clone())))
        .collect();
    Ok(Box::new(Membership {
        desk,
        links,
        close,
        pullers,
    }))
}

impl Subscription for Membership {
    fn receive(&mut self, count_max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(self.desk.receive(count_max))
    }

    fn health(&self) -> Health {
        if self.desk.has_ended() {
            return Health::closed();
        }
        self.links.current().health()
    }

    fn close(mut self: Box<Self>, deadline: Duration) -> BoxFuture<'static, Result<()>> {
        self.end(deadline);
        let pullers = std::mem::take(&mut self.pullers);
        Box::pin(async move {
            let late = || {
                let detail = format!("what was acknowledged was not confirmed within {deadline:?}");
                Error::new(ErrorKind::Timeout, "close", detail)
            };
            let ended = timeout(deadline, join_all(pullers))
                .await
                .map_err(|_| late())?;
            // A puller that panicked has its messages delivered again, by the ack wait.
            ended.into_iter().flatten().collect()
        })
    }
}

impl Membership {
    fn end(&self, within: Duration) {
        self.desk.close();
        let until = Instant::now() + at_most_a_day(within);
        self.close.send_if_modified(|close| {
            let first = close.is_none();
            close.get_or_insert(until);
            first
        });
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        // A little time to give back what is held; the pullers take it in the background.
        self.end(Duration::from_secs(5));
    }
}
