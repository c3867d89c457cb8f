//! Messages that are handled on one connection, one after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::Result;
use relaybox::broker::memory::MemoryBroker;
use relaybox::broker::{
    Backlog, Delivery, Health, PublishOutcome, Publisher, PublisherCapabilities, Receipt,
    Retention, Settlement, Subscriber, SubscriberCapabilities, Subscription, SubscriptionRequest,
};
use relaybox::consumer::{Consumer, ConsumerConfig, handler_fn};
use relaybox::envelope::{Incoming, Outgoing};
use relaybox::store::postgres::PostgresStore;
use relaybox::testing::{ManualClock, Signal, eventually};
use relaybox_testcontainers::shared_postgres;
use sqlx::PgConnection;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use time::macros::datetime;

use crate::consuming::{DEADLINE, House, effect, run, write};

const MESSAGES: usize = 30;

async fn published(house: &House) {
    for n in 0..MESSAGES {
        house.publish(&format!("k-{n}"), &[&format!("m-{n}")]).await;
    }
}

fn one_at_a_time() -> ConsumerConfig {
    ConsumerConfig::default()
        .with_concurrency(1)
        .with_shutdown_deadline(Duration::from_secs(5))
}

/// A pool with connections to spare while the inbox is cleaned up, and how often one went back to it.
async fn counted(house: &House) -> (PostgresStore, Arc<AtomicU64>) {
    let count = Arc::new(AtomicU64::new(0));
    let released = count.clone();
    let pool = PgPoolOptions::new()
        .max_connections(4)
        .after_release(move |_, _| {
            released.fetch_add(1, Ordering::SeqCst);
            Box::pin(async { Ok(true) })
        });
    let options = PgConnectOptions::clone(&house.store.pool().connect_options());
    let pool = pool.connect_with(options).await.unwrap();
    (PostgresStore::new(pool), count)
}

#[tokio::test]
async fn waiting_messages_use_a_connection_in_a_row_and_each_its_own_where_that_is_asked_for() {
    for alone in [false, true] {
        let house = House::on(shared_postgres().await, 4).await;
        published(&house).await;
        let (mut store, released) = counted(&house).await;
        if alone {
            store = store.with_in_a_row_max(1);
        }
        let consumer = Consumer::new("billing", "orders", house.broker.clone(), store)
            .with_config(one_at_a_time());
        let consumer = run(consumer, handler_fn((), effect));
        house.consumed().await;
        consumer.stop().await;
        assert_eq!(house.effects().await.len(), MESSAGES);
        // The check at start and the clean-up are among them.
        let each = || released.load(Ordering::SeqCst) >= MESSAGES as u64;
        if alone {
            // A connection goes back in a task of its own.
            eventually(DEADLINE, "each message gave it back", || async { each() }).await;
        } else {
            assert!(!each(), "{released:?} times");
        }
    }
}

#[tokio::test]
async fn what_a_handler_leaves_to_the_next_transaction_is_no_trouble_of_the_next_message() {
    let house = House::on(shared_postgres().await, 4).await;
    published(&house).await;
    async fn and_reads_only(
        _: &(),
        db: &mut PgConnection,
        incoming: &Incoming,
    ) -> sqlx::Result<()> {
        write(&mut *db, incoming).await?;
        // AND CHAIN hands this on, and recording a key is then an error.
        sqlx::raw_sql("SET TRANSACTION READ ONLY")
            .execute(db)
            .await
            .map(drop)
    }
    let consumer = house.consumer().with_config(one_at_a_time());
    // On this clock a pause would never end.
    let consumer = consumer.with_clock(ManualClock::new(datetime!(2026-01-01 0:00 UTC)));
    let counts = consumer.counts();
    let consumer = run(consumer, handler_fn((), and_reads_only));
    house.consumed().await;
    consumer.stop().await;
    assert_eq!(house.effects().await.len(), MESSAGES);
    assert_eq!(counts.handled.load(Ordering::SeqCst), MESSAGES as u64);
    assert_eq!(counts.retried.load(Ordering::SeqCst), 0);
}

/// A broker that takes acknowledgements only once it is told to.
struct Slow {
    inner: MemoryBroker,
    open: Signal,
}

impl Subscriber for Slow {
    fn capabilities(&self) -> SubscriberCapabilities {
        Subscriber::capabilities(&self.inner)
    }

    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        Box::pin(async move {
            let inner = self.inner.subscribe(request).await?;
            let open = self.open.clone();
            Ok(Box::new(SlowSubscription { inner, open }) as Box<dyn Subscription>)
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

impl Publisher for Slow {
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

struct SlowSubscription {
    inner: Box<dyn Subscription>,
    open: Signal,
}

impl Subscription for SlowSubscription {
    fn receive(&mut self, count_max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let mut deliveries = self.inner.receive(count_max).await?;
            for delivery in &mut deliveries {
                // Swapped in, because a receipt is used up by settling.
                let unused = SlowReceipt {
                    inner: None,
                    open: self.open.clone(),
                };
                let inner = std::mem::replace(&mut delivery.receipt, Box::new(unused));
                delivery.receipt = Box::new(SlowReceipt {
                    inner: Some(inner),
                    open: self.open.clone(),
                });
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

struct SlowReceipt {
    inner: Option<Box<dyn Receipt>>,
    open: Signal,
}

impl Receipt for SlowReceipt {
    fn is_current(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.is_current())
    }

    fn settle(self: Box<Self>, settlement: Settlement) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            self.open.wait().await;
            self.inner.unwrap().settle(settlement).await
        })
    }
}

#[tokio::test]
async fn no_connection_is_held_while_acknowledgements_are_on_their_way() {
    let house = House::on(shared_postgres().await, 4).await;
    published(&house).await;
    let open = Signal::new();
    let broker = Slow {
        inner: house.broker.clone(),
        open: open.clone(),
    };
    let (store, _) = counted(&house).await;
    let pool = store.pool().clone();
    let consumer = Consumer::new("billing", "orders", broker, store).with_config(one_at_a_time());
    let consumer = run(consumer, handler_fn((), effect));
    // One at a time, and nevertheless all, though not one is acknowledged.
    eventually(DEADLINE, "all are handled", || async {
        house.effects().await.len() == MESSAGES
    })
    .await;
    eventually(DEADLINE, "all connections are back", || async {
        pool.num_idle() == pool.size() as usize
    })
    .await;
    let committed: u64 = house.broker.committed("billing", "orders").iter().sum();
    assert_eq!(committed, 0);
    open.set();
    house.consumed().await;
    consumer.stop().await;
}
