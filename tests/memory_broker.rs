//! The memory broker against the broker contract, and what only it has: bounds, outages, inspection.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use relaybox::broker::memory::{MemoryBroker, MemoryConfig};
use relaybox::broker::{
    FailureScope, PublishOutcome, Publisher, RejectionScope, Settlement, Stored, Subscriber,
    Subscription, SubscriptionRequest,
};
use relaybox::{ErrorKind, Message};

use futures_util::future::BoxFuture;
use relaybox::conformance::{
    Fixture, Line, fresh, numbered, numbers, publish, publish_all, receive_count, within,
};
use relaybox::testing::FaultyPublisher;

struct Memory(MemoryBroker);

impl Fixture for Memory {
    fn topic(&self, partitions: usize) -> BoxFuture<'_, String> {
        let name = fresh("topic");
        self.0.create_topic(&name, partitions).unwrap();
        Box::pin(async { name })
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(self.0.clone())
    }

    fn subscriber(&self) -> Arc<dyn Subscriber> {
        Arc::new(self.0.clone())
    }

    fn line(&self) -> Option<Arc<dyn Line>> {
        Some(Arc::new(Self(self.0.clone())))
    }
}

/// In memory a line is broken or not; silence is what a broken one is.
impl Line for Memory {
    fn pass(&self) -> BoxFuture<'_, ()> {
        self.0.set_available(true);
        Box::pin(async {})
    }

    fn cut(&self) -> BoxFuture<'_, ()> {
        self.0.set_available(false);
        Box::pin(async {})
    }

    fn silence(&self) -> BoxFuture<'_, ()> {
        self.cut()
    }
}

mod directly {
    use super::*;
    relaybox::broker_tests!(Memory(MemoryBroker::new()));
}

/// The contracts behind pointers: an adapter chosen at run time.
mod behind_dyn {
    use super::*;

    struct Behind(Memory);

    impl Fixture for Behind {
        fn topic(&self, partitions: usize) -> BoxFuture<'_, String> {
            self.0.topic(partitions)
        }

        fn publisher(&self) -> Arc<dyn Publisher> {
            Arc::new(self.0.publisher())
        }

        fn subscriber(&self) -> Arc<dyn Subscriber> {
            Arc::new(self.0.subscriber())
        }

        fn line(&self) -> Option<Arc<dyn Line>> {
            self.0.line()
        }
    }

    relaybox::broker_tests!(Behind(Memory(MemoryBroker::new())));
}

/// The wrapper that fails on command, told nothing.
mod behind_a_wrapper {
    use super::*;

    struct Wrapped(Memory);

    impl Fixture for Wrapped {
        fn topic(&self, partitions: usize) -> BoxFuture<'_, String> {
            self.0.topic(partitions)
        }

        fn publisher(&self) -> Arc<dyn Publisher> {
            Arc::new(FaultyPublisher::new(self.0.0.clone()))
        }

        fn subscriber(&self) -> Arc<dyn Subscriber> {
            self.0.subscriber()
        }

        fn line(&self) -> Option<Arc<dyn Line>> {
            self.0.line()
        }
    }

    relaybox::broker_tests!(Wrapped(Memory(MemoryBroker::new())));
}

fn broker_with(topic: &str, partitions: usize) -> MemoryBroker {
    let broker = MemoryBroker::new();
    broker.create_topic(topic, partitions).unwrap();
    broker
}

async fn subscribed(broker: &MemoryBroker, topic: &str) -> Box<dyn Subscription> {
    let request = SubscriptionRequest::new("billing", vec![topic.into()]);
    broker.subscribe(request).await.unwrap()
}

async fn until(awaited: &str, condition: impl Fn() -> bool) {
    let asking = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    within(awaited, asking).await;
}

fn outcome(outcome: &PublishOutcome) -> (FailureScope, Stored, ErrorKind) {
    match outcome {
        PublishOutcome::Failed {
            scope,
            stored,
            error,
        } => (*scope, *stored, error.kind()),
        other => panic!("not failed: {other:?}"),
    }
}

#[tokio::test]
async fn beyond_its_bytes_it_is_busy_and_holds_back_the_key() {
    let config = MemoryConfig::default()
        .with_record_bytes_max(16 * 1_024)
        .with_bytes_max(20 * 1_024);
    let broker = MemoryBroker::with_config(config).unwrap();
    broker.create_topic("orders", 1).unwrap();
    let sized = |key: &str, bytes| {
        Message::new("orders", "T")
            .with_key(key)
            .with_payload(vec![0; bytes])
            .into()
    };
    let batch = [
        sized("a", 12_000),
        sized("a", 12_000),
        sized("a", 1),
        sized("b", 1),
    ];
    let outcomes = publish(&broker, &batch).await;
    assert!(outcomes[0].is_confirmed());
    let busy = (FailureScope::Destination, Stored::No, ErrorKind::Busy);
    assert_eq!(outcome(&outcomes[1]), busy);
    assert!(
        matches!(outcomes[2], PublishOutcome::Withheld),
        "it would fit, but its key waits"
    );
    assert!(outcomes[3].is_confirmed());
    assert_eq!(broker.log("orders").len(), 2);
}

#[tokio::test]
async fn behind_a_rejected_message_its_key_is_withheld() {
    let broker = broker_with("orders", 1);
    let large = Message::new("orders", "T")
        .with_key("a")
        .with_payload(vec![0; 2_000_000]);
    let batch = [
        large.into(),
        numbered("orders", "a", 1),
        numbered("orders", "b", 2),
    ];
    let outcomes = publish(&broker, &batch).await;
    assert!(matches!(
        outcomes[0],
        PublishOutcome::Rejected {
            scope: RejectionScope::Message,
            ..
        }
    ));
    assert!(matches!(outcomes[1], PublishOutcome::Withheld));
    assert!(outcomes[2].is_confirmed());
}

#[tokio::test]
async fn settings_out_of_bounds_are_refused_by_name() {
    let field = |config: MemoryConfig| {
        let error = MemoryBroker::with_config(config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration);
        error.violation().unwrap().field
    };
    let config = MemoryConfig::default();
    assert_eq!(
        field(config.clone().with_record_bytes_max(1)),
        "record_bytes_max"
    );
    assert_eq!(field(config.with_bytes_max(100_000)), "bytes_max");
    let broker = broker_with("orders", 2);
    broker.create_topic("orders", 2).unwrap();
    for (name, partitions) in [("orders", 3), ("", 1), ("other", 0), ("other", 1_025)] {
        let error = broker.create_topic(name, partitions).unwrap_err();
        assert_eq!(
            error.kind(),
            ErrorKind::Configuration,
            "{name} {partitions}"
        );
    }
    assert_eq!(broker.topics(), ["orders"]);
    let mut request = SubscriptionRequest::new("billing", vec!["orders".into()]);
    request.in_flight_max = 0;
    let error = broker.subscribe(request).await.err().unwrap();
    assert_eq!(error.violation().unwrap().field, "in_flight_max");
}

#[tokio::test]
async fn an_outage_fails_publishes_holds_receives_and_loses_nothing() {
    let broker = broker_with("orders", 1);
    publish_all(&broker, &[numbered("orders", "a", 0)]).await;
    let mut subscription = subscribed(&broker, "orders").await;
    let delivery = receive_count(&mut *subscription, 1).await.remove(0);

    broker.set_available(false);
    let outcomes = publish(&broker, &[numbered("orders", "a", 1)]).await;
    let down = (FailureScope::Broker, Stored::No, ErrorKind::Unavailable);
    assert_eq!(outcome(&outcomes[0]), down);
    let check = broker.check(&["orders".into()]).await.unwrap_err();
    assert_eq!(check.kind(), ErrorKind::Unavailable);
    let request = SubscriptionRequest::new("other", vec!["orders".into()]);
    let refused = broker.subscribe(request).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    let settled = delivery.receipt.settle(Settlement::Acknowledge).await;
    assert!(settled.unwrap_err().is_transient());
    assert!(subscription.receive(1).now_or_never().is_none());

    broker.set_available(true);
    let again = receive_count(&mut *subscription, 1).await.remove(0);
    assert!(again.redelivered);
    again.receipt.settle(Settlement::Acknowledge).await.unwrap();
    assert_eq!(broker.committed("billing", "orders"), [1]);
    assert_eq!(broker.deliveries("billing"), 2);
}

#[tokio::test]
async fn a_waiting_receive_is_woken_by_a_publish_and_by_the_end_of_an_outage() {
    let broker = broker_with("orders", 1);
    let mut subscription = subscribed(&broker, "orders").await;
    let waiting = tokio::spawn(async move {
        let first = receive_count(&mut *subscription, 1).await;
        let second = receive_count(&mut *subscription, 1).await;
        [numbers(&first), numbers(&second)]
    });
    tokio::task::yield_now().await;
    publish_all(&broker, &[numbered("orders", "a", 0)]).await;
    until("the first delivery", || broker.deliveries("billing") > 0).await;
    publish_all(&broker, &[numbered("orders", "a", 1)]).await;
    broker.set_available(false);
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert_eq!(broker.deliveries("billing"), 1, "nothing while it is down");
    broker.set_available(true);
    let seen = within("both deliveries", waiting).await.unwrap();
    assert_eq!(seen, [[0], [1]]);
}

#[tokio::test]
async fn the_log_keeps_what_was_stored_and_positions_follow_the_finished_prefix() {
    let broker = broker_with("orders", 1);
    let batch: Vec<_> = (0..3).map(|n| numbered("orders", "a", n)).collect();
    publish_all(&broker, &batch).await;
    let stored: Vec<_> = broker
        .log("orders")
        .into_iter()
        .map(|incoming| incoming.message)
        .collect();
    let sent: Vec<_> = batch.into_iter().map(|outgoing| outgoing.message).collect();
    assert_eq!(stored, sent);
    assert!(broker.log("nothing").is_empty());
    assert!(broker.committed("billing", "orders").is_empty());

    let mut subscription = subscribed(&broker, "orders").await;
    let mut committed = Vec::new();
    let mut deliveries = receive_count(&mut *subscription, 3).await;
    for place in [1, 0, 0] {
        let receipt = deliveries.remove(place).receipt;
        receipt.settle(Settlement::Acknowledge).await.unwrap();
        committed.extend(broker.committed("billing", "orders"));
    }
    assert_eq!(committed, [0, 2, 3]);
}

#[tokio::test]
async fn messages_without_a_key_spread_over_the_partitions() {
    let broker = broker_with("orders", 4);
    let keyless: Vec<_> = (0..8).map(|_| Message::new("orders", "T").into()).collect();
    publish_all(&broker, &keyless).await;
    let mut subscription = subscribed(&broker, "orders").await;
    let deliveries = receive_count(&mut *subscription, 8).await;
    let mut partitions: Vec<_> = deliveries
        .iter()
        .map(|delivery| delivery.coordinates.partition.clone())
        .collect();
    partitions.dedup();
    assert_eq!(partitions.len(), 4, "two on each: {partitions:?}");
}

#[cfg(feature = "testing")]
mod on_a_manual_clock {
    use relaybox::broker::Rung;
    use relaybox::clock::Clock;
    use relaybox::envelope::Outgoing;
    use relaybox::story::Story;
    use relaybox::testing::ManualClock;

    use super::*;

    fn clocked() -> (ManualClock, MemoryBroker) {
        let clock = ManualClock::default();
        let config = MemoryConfig::default().with_clock(clock.clone());
        let broker = MemoryBroker::with_config(config).unwrap();
        broker.create_topic("orders", 1).unwrap();
        (clock, broker)
    }

    async fn acknowledge_all(deliveries: Vec<relaybox::broker::Delivery>) {
        for delivery in deliveries {
            relaybox::conformance::acknowledge(delivery).await;
        }
    }

    #[tokio::test]
    async fn inside_one_rung_nobody_waits_for_a_longer_one() {
        let (clock, broker) = clocked();
        let mut request = SubscriptionRequest::new("billing", vec!["orders".into()]);
        request.rungs = vec![Rung {
            destination: "rung".into(),
            delay: Duration::from_secs(60),
            source: "orders".into(),
        }];
        let mut subscription = broker.subscribe(request).await.unwrap();
        let due_in = |seconds, n| Outgoing {
            story: Story::default().due(clock.now() + Duration::from_secs(seconds)),
            message: numbered("rung", "a", n).message,
        };
        let batch = [due_in(60, 2), due_in(10, 1), due_in(0, 0)];
        publish_all(&broker, &batch).await;
        for (n, seconds) in [(0, 10), (1, 50), (2, 0)] {
            let deliveries = receive_count(&mut *subscription, 1).await;
            assert_eq!(numbers(&deliveries), [n]);
            acknowledge_all(deliveries).await;
            assert!(subscription.receive(9).now_or_never().is_none());
            clock.advance(Duration::from_secs(seconds));
        }
        assert_eq!(broker.committed("billing", "rung"), [3]);
    }

    #[tokio::test]
    async fn a_due_time_on_a_source_delays_nothing() {
        let (clock, broker) = clocked();
        let story = Story::default().due(clock.now() + Duration::from_secs(60));
        let message = numbered("orders", "a", 0).message;
        publish_all(&broker, &[Outgoing { message, story }]).await;
        let mut subscription = subscribed(&broker, "orders").await;
        assert!(subscription.receive(1).now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_released_message_waits_while_others_go_on_and_the_delay_outlives_its_member() {
        let (clock, broker) = clocked();
        let batch = [numbered("orders", "a", 0), numbered("orders", "a", 1)];
        publish_all(&broker, &batch).await;
        let mut subscription = subscribed(&broker, "orders").await;
        let mut deliveries = receive_count(&mut *subscription, 2).await;
        let delay = Duration::from_secs(30);
        let release = Settlement::Release { delay };
        deliveries.remove(0).receipt.settle(release).await.unwrap();
        acknowledge_all(deliveries).await;
        drop(subscription);

        // The position cannot tell that the second is finished, so it comes again; the first still waits.
        let mut subscription = subscribed(&broker, "orders").await;
        let deliveries = receive_count(&mut *subscription, 1).await;
        assert_eq!(numbers(&deliveries), [1]);
        assert!(deliveries[0].redelivered);
        acknowledge_all(deliveries).await;
        clock.advance(Duration::from_secs(29));
        assert!(subscription.receive(1).now_or_never().is_none());

        let waiting = tokio::spawn(async move { receive_count(&mut *subscription, 1).await });
        until("the wait for the delay", || clock.sleepers() > 0).await;
        clock.advance(Duration::from_secs(1));
        let deliveries = waiting.await.unwrap();
        assert_eq!(numbers(&deliveries), [0]);
        assert!(deliveries[0].redelivered);
    }
}

/// Members come and go, settle, release and drop at random; every message is acknowledged in the end, and per key the
/// first time that each is seen follows the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_while_members_come_and_go() {
    for seed in 0..20 {
        let mut dice = fastrand::Rng::with_seed(seed);
        let broker = broker_with("orders", 5);
        let batch: Vec<_> = (0..300)
            .map(|n| numbered("orders", &(n % 11).to_string(), n))
            .collect();
        publish_all(&broker, &batch).await;
        let mut seen = Vec::new();
        let mut members = vec![subscribed(&broker, "orders").await];
        let mut held = Vec::new();
        let finished = || broker.committed("billing", "orders").iter().sum::<u64>() == 300;
        let mut steps = 0;
        while !finished() {
            steps += 1;
            // A receive that is asked only once looks empty to a task that has used up its turn.
            tokio::task::yield_now().await;
            assert!(steps < 100_000, "seed {seed} makes no progress");
            match dice.u32(..300) {
                0 if members.len() < 4 => members.push(subscribed(&broker, "orders").await),
                1 if members.len() > 1 => drop(members.swap_remove(dice.usize(..members.len()))),
                2 => held.clear(),
                3..=60 => {
                    let member = dice.usize(..members.len());
                    let received = members[member].receive(dice.usize(1..20)).now_or_never();
                    let deliveries = received.transpose().unwrap().unwrap_or_default();
                    seen.extend(
                        deliveries
                            .iter()
                            .filter(|delivery| !delivery.redelivered)
                            .map(relaybox::conformance::number),
                    );
                    held.extend(deliveries);
                }
                _ if held.is_empty() => {}
                choice => {
                    let near = held.len().min(5);
                    let delivery = held.remove(dice.usize(..near));
                    let settlement = match choice {
                        61..=80 => Settlement::Release {
                            delay: Duration::ZERO,
                        },
                        _ => Settlement::Acknowledge,
                    };
                    delivery.receipt.settle(settlement).await.unwrap();
                }
            }
        }
        for key in 0..11 {
            let first: Vec<_> = seen.iter().copied().filter(|n| n % 11 == key).collect();
            let sent: Vec<_> = (0..300).filter(|n| n % 11 == key).collect();
            assert_eq!(first, sent, "seed {seed}, key {key}");
        }
    }
}
