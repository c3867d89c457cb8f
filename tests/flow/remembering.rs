//! An inbox that would forget a message before its source does is refused before anything begins.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::broker::memory::MemoryBroker;
use relaybox::broker::{
    Backlog, Health, PublishOutcome, Publisher, PublisherCapabilities, Retention, Subscriber,
    SubscriberCapabilities, Subscription, SubscriptionRequest, TopologyMode,
};
use relaybox::consumer::{Consumer, ConsumerConfig, Outcome, handler_fn};
use relaybox::envelope::{Incoming, Outgoing};
use relaybox::ladder::Ladder;
use relaybox::store::NoInbox;
use relaybox::store::sqlite::SqliteStore;
use relaybox::{Error, ErrorKind, Result};
use sqlx::sqlite::SqliteConnection;

use super::support::{House, Running, loaded, numbered, quick, run, write_effect};

const HOUR: Duration = Duration::from_secs(3_600);

/// The memory broker, said to keep messages for so long.
#[derive(Clone)]
struct Keeping {
    inner: MemoryBroker,
    retention: Retention,
    asked: Arc<AtomicU64>,
}

impl Publisher for Keeping {
    fn capabilities(&self) -> PublisherCapabilities {
        Publisher::capabilities(&self.inner)
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        self.inner.publish(batch)
    }

    fn health(&self) -> Health {
        Publisher::health(&self.inner)
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        Publisher::close(&self.inner, deadline)
    }
}

impl Subscriber for Keeping {
    fn capabilities(&self) -> SubscriberCapabilities {
        Subscriber::capabilities(&self.inner)
    }

    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        self.inner.subscribe(request)
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
        self.asked.fetch_add(1, Ordering::SeqCst);
        let retention = self.retention;
        Box::pin(async move { self.inner.retention(source).await.map(|_| retention) })
    }
}

/// A ladder of one hour, and an inbox that remembers for a day.
fn consumer(
    house: &House,
    retention: Retention,
    change: impl FnOnce(ConsumerConfig) -> ConsumerConfig,
) -> (Consumer<SqliteStore>, Arc<AtomicU64>) {
    let asked = Arc::default();
    let broker = Keeping {
        inner: house.broker.clone(),
        retention,
        asked: Arc::clone(&asked),
    };
    let config = change(quick().with_inbox_retention(24 * HOUR));
    let consumer = Consumer::new("billing", "orders", broker, house.store.clone())
        .with_ladder(Ladder::rungs([HOUR]))
        .with_config(config);
    (consumer, asked)
}

async fn effect(_: &(), db: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    write_effect(db, "billing", incoming).await;
    Outcome::Done
}

async fn refused(consumer: Consumer<SqliteStore>) -> Error {
    let running = consumer.run_until(handler_fn((), effect), pending());
    let ended = tokio::time::timeout(super::support::DEADLINE, running).await;
    ended.expect("it is refused").unwrap_err()
}

#[tokio::test]
async fn an_inbox_that_forgets_before_its_source_does_is_refused_and_nothing_is_made() {
    let house = House::new().await;
    for retention in [
        Retention::Bounded(23 * HOUR),
        Retention::Unbounded,
        Retention::Unknown,
    ] {
        let error = refused(consumer(&house, retention, |config| config).0).await;
        assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
        let violation = error.violation().unwrap();
        assert_eq!(violation.field, "inbox_retention");
        assert!(violation.limit.contains("orders"), "{error}");
    }
    assert_eq!(
        house.broker.topics(),
        ["orders"],
        "no rung, no dead letters"
    );
}

#[tokio::test]
async fn every_source_is_asked() {
    let house = House::new().await;
    house.broker.create_topic("returns", 1).unwrap();
    let (two, asked) = consumer(&house, Retention::UntilSettled, |config| config);
    let running = run(two.with_source("returns"), handler_fn((), effect));
    running.stop().await.unwrap();
    assert_eq!(loaded(&asked), 2);
    let (two, _) = consumer(&house, Retention::UntilSettled, |config| config);
    let error = refused(two.with_source("missing")).await;
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(error.to_string().contains("missing"), "{error}");
}

#[tokio::test]
async fn what_is_stated_counts_and_not_what_the_broker_says() {
    let house = House::new().await;
    let (stated, asked) = consumer(&house, Retention::Bounded(HOUR), |config| {
        config.with_source_retention(23 * HOUR)
    });
    let error = refused(stated).await;
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
    house.publish(&numbered("k", "m", 2)).await;
    let (stated, also_asked) = consumer(&house, Retention::Unbounded, |config| {
        config.with_source_retention(22 * HOUR)
    });
    let running = run(stated, handler_fn((), effect));
    house.consumed("billing", "orders").await;
    running.stop().await.unwrap();
    assert_eq!(house.effects("billing").await, ["m-0", "m-1"]);
    assert_eq!(loaded(&asked) + loaded(&also_asked), 0);
}

#[tokio::test]
async fn a_bounded_source_and_a_queue_are_consumed_without_a_word() {
    for retention in [Retention::Bounded(22 * HOUR), Retention::UntilSettled] {
        let house = House::new().await;
        house.publish(&numbered("k", "m", 1)).await;
        let (consumer, asked) = consumer(&house, retention, |config| config);
        let running = run(consumer, handler_fn((), effect));
        house.consumed("billing", "orders").await;
        running.stop().await.unwrap();
        assert_eq!(loaded(&asked), 1, "{retention:?}");
    }
}

/// For a user who may ask nothing; what is stated still counts.
#[tokio::test]
async fn unchecked_topology_asks_for_no_retention() {
    let house = House::new().await;
    let unchecked = |config: ConsumerConfig| config.with_topology(TopologyMode::Unchecked);
    let (stated, _) = consumer(&house, Retention::Unbounded, |config| {
        unchecked(config).with_source_retention(23 * HOUR)
    });
    let error = refused(stated).await;
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
    for topic in ["orders.billing.retry.1h", "orders.billing.DLQ"] {
        house.broker.create_topic(topic, 1).unwrap();
    }
    house.publish(&numbered("k", "m", 1)).await;
    let (consumer, asked) = consumer(&house, Retention::Unbounded, unchecked);
    let running = run(consumer, handler_fn((), effect));
    house.consumed("billing", "orders").await;
    running.stop().await.unwrap();
    assert_eq!(loaded(&asked), 0);
}

#[tokio::test]
async fn a_consumer_that_remembers_nothing_asks_for_no_retention() {
    async fn call(_: &(), _: &Incoming) -> Outcome {
        Outcome::Done
    }
    let house = House::new().await;
    house.publish(&numbered("k", "m", 1)).await;
    let broker = Keeping {
        inner: house.broker.clone(),
        retention: Retention::Unbounded,
        asked: Arc::default(),
    };
    let consumer = Consumer::new("billing", "orders", broker, NoInbox);
    let handler = handler_fn((), call);
    let running = Running::start(|stop| consumer.run_outside_until(handler, stop));
    house.consumed("billing", "orders").await;
    running.stop().await.unwrap();
}
