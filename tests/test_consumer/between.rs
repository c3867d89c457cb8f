//! The broker contract, over what a consumer under test sees of its broker.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use relaybox::broker::memory::MemoryBroker;
use relaybox::broker::{Publisher, Subscriber};
use relaybox::conformance::{Fixture, fresh};
use relaybox::handler_fn;
use relaybox::testing::{ManualClock, MemoryInbox, TestBroker, TestConsumer};

use super::{Bookings, consumer, obey};

/// What stands between a consumer under test and its broker keeps all the rules of a broker.
struct Between {
    broker: MemoryBroker,
    _consumer: TestConsumer<MemoryBroker>,
    seen: TestBroker<MemoryBroker>,
}

impl Between {
    async fn new() -> Self {
        let broker = MemoryBroker::new();
        broker.create_topic("orders", 1).unwrap();
        let inbox = MemoryInbox::new(Bookings::new());
        let make = move |broker| consumer(broker, inbox.clone());
        let handler = handler_fn(Arc::default(), obey);
        let clock = ManualClock::default();
        let consumer = TestConsumer::start(broker.clone(), clock, make, handler);
        let consumer = consumer.await.unwrap();
        Self {
            broker,
            seen: consumer.broker(),
            _consumer: consumer,
        }
    }
}

impl Fixture for Between {
    fn topic(&self, partitions: usize) -> BoxFuture<'_, String> {
        let name = fresh("topic");
        self.broker.create_topic(&name, partitions).unwrap();
        Box::pin(async { name })
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(self.seen.clone())
    }

    fn subscriber(&self) -> Arc<dyn Subscriber> {
        Arc::new(self.seen.clone())
    }
}

relaybox::broker_tests!(Between::new().await);
