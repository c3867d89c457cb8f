//! A user's handler test needs no service: what the consumer under test tells, and what its inboxes do.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use relaybox::broker::memory::{MemoryBroker, MemoryConfig};
use relaybox::clock::Clock;
use relaybox::consumer::{ConsumerConfig, Route, Routes};
use relaybox::store::InboxStore;
use relaybox::testing::{
    CrashPoint, FaultyInbox, InboxCall, InboxFault, ManualClock, MemoryInbox, Step, TestBroker,
    TestConsumer,
};
use relaybox::{
    Consumer, ErrorKind, Failure, Incoming, Ladder, Message, MessageId, Outcome, handler_fn,
};

mod between;
mod forms;
mod inboxes;

const SECOND: Duration = Duration::from_secs(1);

/// How often each message was booked: a fake repository.
type Bookings = BTreeMap<String, u32>;

/// Books, and then does as the payload says: the rollback has something to undo.
async fn obey(calls: &Arc<AtomicU32>, bookings: &mut Bookings, incoming: &Incoming) -> Outcome {
    calls.fetch_add(1, Ordering::SeqCst);
    let id = incoming.message.id.to_string();
    *bookings.entry(id).or_default() += 1;
    let attempt = incoming.story.retry_count;
    match incoming.message.payload.as_deref().unwrap_or_default() {
        b"fail once" if attempt == 0 => Outcome::Retry(Failure::new("not yet")),
        b"fail twice" if attempt < 2 => Outcome::Retry(Failure::new("not yet")),
        b"later" if attempt == 0 => Outcome::RetryAfter(60 * SECOND, Failure::new("later")),
        b"fail" => Outcome::Retry(Failure::new("never")),
        b"poison" => Outcome::Permanent(Failure::new("pointless")),
        b"skip" => Outcome::Skip,
        b"panic" => panic!("as asked"),
        b"hang" => std::future::pending().await,
        _ => Outcome::Done,
    }
}

struct Bench {
    consumer: TestConsumer<MemoryBroker>,
    broker: MemoryBroker,
    inbox: MemoryInbox<Bookings>,
    calls: Arc<AtomicU32>,
}

fn broker(clock: &ManualClock) -> MemoryBroker {
    let config = MemoryConfig::default().with_clock(clock.clone());
    let broker = MemoryBroker::with_config(config).unwrap();
    broker.create_topic("orders", 1).unwrap();
    broker
}

fn consumer<S: InboxStore>(broker: TestBroker<MemoryBroker>, store: S) -> Consumer<S> {
    let config = ConsumerConfig::default().with_handler_timeout(SECOND);
    Consumer::new("billing", "orders", broker, store)
        .with_ladder(Ladder::rungs([5, 60].map(Duration::from_secs)))
        .with_config(config)
}

impl Bench {
    async fn new() -> Self {
        Self::with(|inbox| inbox).await
    }

    async fn with<S: InboxStore<Connection = Bookings> + Clone + Sync>(
        wrap: impl FnOnce(MemoryInbox<Bookings>) -> S,
    ) -> Self {
        let clock = ManualClock::default();
        let inbox = MemoryInbox::new(Bookings::new());
        let (broker, calls) = (broker(&clock), Arc::default());
        let store = wrap(inbox.clone());
        let handler = handler_fn(Arc::clone(&calls), obey);
        let make = move |broker| consumer(broker, store.clone());
        Self {
            consumer: TestConsumer::start(broker.clone(), clock, make, handler)
                .await
                .unwrap(),
            broker,
            inbox,
            calls,
        }
    }

    /// What becomes of a message, in words.
    async fn fate(&mut self, message: Message) -> String {
        self.consumer.deliver(message).await.to_string()
    }

    fn booked(&self) -> Vec<(String, u32)> {
        self.inbox.state().into_iter().collect()
    }
}

fn order(id: &str, payload: &'static str) -> Message {
    let order = Message::new("orders", "Order").with_id(id).with_key("k");
    order.with_payload(payload)
}

fn once(ids: &[&str]) -> Vec<(String, u32)> {
    ids.iter().map(|id| ((*id).to_owned(), 1)).collect()
}

#[tokio::test]
async fn it_tells_what_became_of_each_message() {
    let mut bench = Bench::new().await;
    let (first, second) = ("orders.billing.retry.5s", "orders.billing.retry.1m");
    for (id, payload, fate) in [
        ("o-1", "", "done".to_owned()),
        ("o-1", "", "duplicate".to_owned()),
        ("o-2", "skip", "skipped".to_owned()),
        ("o-3", "fail once", format!("retried on {first}, done")),
        ("o-4", "later", format!("retried on {second}, done")),
        (
            "o-5",
            "fail",
            format!("retried on {first}, retried on {second}, dead: retries-exhausted"),
        ),
        ("o-6", "poison", "dead: permanent".to_owned()),
        (
            "o-7",
            "panic",
            format!("retried on {first}, retried on {second}, dead: retries-exhausted"),
        ),
        (" ", "", "dead: missing-id".to_owned()),
    ] {
        assert_eq!(bench.fate(order(id, payload)).await, fate, "{payload}");
    }
    // What was skipped committed what its handler wrote.
    assert_eq!(bench.booked(), once(&["o-1", "o-2", "o-3", "o-4"]));
    let dead = bench.consumer.dead_letters();
    let ids: Vec<_> = dead
        .iter()
        .map(|letter| letter.message.id.as_str())
        .collect();
    assert_eq!(ids[..3], ["o-5", "o-6", "o-7"]);
    assert_eq!(dead.len(), bench.broker.log("orders.billing.DLQ").len());
    assert_eq!(bench.consumer.published(first).len(), 3);
    bench.consumer.stop().await.unwrap();
}

#[tokio::test]
async fn errors_and_attempts_are_told_beside_the_steps() {
    let mut bench = Bench::new().await;
    let fate = bench.consumer.deliver(order("o-1", "panic")).await;
    assert_eq!((fate.attempts, fate.error()), (3, Some("panic: as asked")));
    let fate = bench.consumer.deliver(order("o-2", "poison")).await;
    let reason = "permanent".to_owned();
    let error = "handler: pointless".to_owned();
    assert_eq!(fate.end(), Some(&Step::Dead { reason, error }));
    let fate = bench.consumer.deliver(order("o-3", "hang")).await;
    assert!(fate.error().unwrap().starts_with("timeout: "), "{fate:?}");
    assert_eq!(bench.booked(), []);
}

#[tokio::test]
async fn time_passes_only_where_somebody_waits_and_never_for_real() {
    let mut bench = Bench::new().await;
    let clock = bench.consumer.clock();
    let start = clock.now();
    bench.fate(order("o-1", "")).await;
    assert_eq!(clock.now(), start);
    bench.fate(order("o-2", "fail twice")).await;
    assert_eq!(clock.now() - start, 65 * SECOND);

    bench.consumer.send(order("o-3", "fail once")).await;
    bench.consumer.advance(4 * SECOND).await;
    let id = MessageId::new("o-3");
    let fate = bench.consumer.fate(&id);
    assert_eq!(fate.to_string(), "retried on orders.billing.retry.5s");
    assert_eq!(clock.now() - start, 69 * SECOND);
    bench.consumer.advance(SECOND).await;
    assert_eq!(bench.consumer.fate(&id).end(), Some(&Step::Done));
}

#[tokio::test]
async fn messages_on_rungs_let_others_pass() {
    let mut bench = Bench::new().await;
    for (id, payload) in [("o-1", "fail"), ("o-2", "later"), ("o-3", "")] {
        bench.consumer.send(order(id, payload)).await;
    }
    bench.consumer.advance(Duration::ZERO).await;
    assert_eq!(bench.booked(), once(&["o-3"]));
    bench.consumer.settle().await;
    assert_eq!(bench.booked(), once(&["o-2", "o-3"]));
    assert_eq!(bench.consumer.dead_letters().len(), 1);
}

#[tokio::test]
async fn a_consumer_that_dies_before_acknowledging_did_it_once() {
    let mut bench = Bench::new().await;
    bench.consumer.crash_before_acknowledging();
    assert_eq!(bench.fate(order("o-1", "")).await, "crashed, duplicate");
    assert_eq!(bench.booked(), once(&["o-1"]));
    assert_eq!(bench.calls.load(Ordering::SeqCst), 1);
    assert_eq!(bench.fate(order("o-2", "")).await, "done", "it dies once");
    // A crash behind a copy leaves two of them, and the inbox one effect.
    bench.consumer.crash_before_acknowledging();
    bench.fate(order("o-3", "fail once")).await;
    let rung = bench.consumer.published("orders.billing.retry.5s");
    assert_eq!(rung.len(), 2);
    assert_eq!(bench.booked(), once(&["o-1", "o-2", "o-3"]));
}

#[tokio::test]
async fn a_crash_point_of_the_inbox_ends_the_consumer_and_another_goes_on() {
    for (call, fate) in [
        (InboxCall::Begin, "done"),
        (InboxCall::Record, "done"),
        (InboxCall::Commit, "crashed, duplicate"),
    ] {
        let crash = CrashPoint::new();
        let fault = InboxFault::crash({
            let crash = crash.clone();
            move || crash.reach()
        });
        let mut bench =
            Bench::with(|inbox| FaultyInbox::new(inbox).with_fault(call, 1, fault)).await;
        bench.consumer.crash_on(&crash);
        assert_eq!(bench.fate(order("o-1", "")).await, fate, "{call:?}");
        assert_eq!(bench.booked(), once(&["o-1"]));
        assert_eq!(crash.reached(), 1);
    }
}

#[tokio::test]
async fn a_database_in_trouble_burns_no_attempt_and_doubles_nothing() {
    use InboxFault::{Fail, LoseAnswer};
    for (call, fault, calls) in [
        (InboxCall::Begin, Fail(ErrorKind::Unavailable), 1),
        (InboxCall::Record, Fail(ErrorKind::Conflict), 1),
        (InboxCall::Record, LoseAnswer, 1),
        (InboxCall::Commit, Fail(ErrorKind::Conflict), 2),
        (InboxCall::Commit, LoseAnswer, 1),
    ] {
        let case = format!("{call:?} {fault:?}");
        let mut bench =
            Bench::with(|inbox| FaultyInbox::new(inbox).with_fault(call, 1, fault)).await;
        assert_eq!(bench.fate(order("o-1", "")).await, "done", "{case}");
        assert_eq!(bench.booked(), once(&["o-1"]), "{case}");
        assert_eq!(bench.calls.load(Ordering::SeqCst), calls, "{case}");
    }
}

#[tokio::test]
async fn what_is_given_back_comes_again_and_holds_nobody_up_for_ever() {
    let busy = InboxFault::Fail(ErrorKind::Busy);
    let mut bench =
        Bench::with(|inbox| FaultyInbox::new(inbox).with_fault(InboxCall::Record, 1, busy)).await;
    let start = bench.consumer.clock().now();
    for id in ["o-1", "o-2"] {
        bench.consumer.send(order(id, "")).await;
    }
    bench.consumer.settle().await;
    let fate = |id: &str| bench.consumer.fate(&MessageId::new(id)).to_string();
    assert_eq!(
        (fate("o-1"), fate("o-2")),
        ("released, done".into(), "done".into())
    );
    assert_eq!(bench.booked(), once(&["o-1", "o-2"]));
    assert!(bench.consumer.clock().now() > start);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_messages_at_once_on_many_threads_each_have_their_fate() {
    let mut bench = Bench::new().await;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut dice = fastrand::Rng::with_seed(seed);
    let payloads = [
        "",
        "skip",
        "fail once",
        "fail twice",
        "later",
        "fail",
        "poison",
        "panic",
    ];
    let mut sent = Vec::new();
    for n in 0..100 {
        let payload = payloads[dice.usize(..payloads.len())];
        if dice.u32(..20) == 0 {
            bench.consumer.crash_before_acknowledging();
        }
        let id = format!("o-{n}");
        bench.consumer.send(order(&id, payload).with_key(&id)).await;
        sent.push((id, payload));
    }
    bench.consumer.settle().await;
    for (id, payload) in &sent {
        let fate = bench.consumer.fate(&MessageId::new(id.as_str()));
        let dead = matches!(*payload, "fail" | "poison" | "panic");
        let letters = bench.consumer.dead_letters();
        let lies = letters
            .iter()
            .any(|letter| letter.message.id.as_str() == id);
        assert_eq!(lies, dead, "{id} {payload}: {fate}");
        let booked = bench.inbox.state().get(id).copied();
        assert_eq!(booked, (!dead).then_some(1), "{id} {payload}: {fate}");
        assert!(fate.attempts > 0, "{id} {payload}: {fate}");
    }
}

#[tokio::test]
async fn most_messages_failing_makes_nobody_wait_for_the_guard() {
    let mut bench = Bench::new().await;
    for n in 0..110 {
        let id = format!("o-{n}");
        bench
            .consumer
            .send(order(&id, "poison").with_key(&id))
            .await;
    }
    bench.consumer.settle().await;
    assert_eq!(bench.consumer.dead_letters().len(), 110);
}

#[tokio::test]
async fn what_a_consumer_refuses_is_told_at_start() {
    let clock = ManualClock::default();
    let inbox = MemoryInbox::new(Bookings::new());
    let make = move |broker| {
        let config = ConsumerConfig::default().with_concurrency(0);
        consumer(broker, inbox.clone()).with_config(config)
    };
    let handler = handler_fn(Arc::default(), obey);
    let started = TestConsumer::start(broker(&clock), clock, make, handler).await;
    let error = started.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
}

#[tokio::test]
#[should_panic(expected = "was not taken")]
async fn a_message_that_is_not_taken_fails_the_test() {
    let mut bench = Bench::new().await;
    bench.consumer.deliver(Message::new("nowhere", "T")).await;
}

#[tokio::test]
async fn it_tells_what_a_route_made_of_a_failure() {
    let clock = ManualClock::default();
    let inbox = MemoryInbox::new(Bookings::new());
    let store = inbox.clone();
    let routes = || {
        Routes::new().with("handler", Route::Skip).with(
            "panic",
            Route::Local {
                times: 2,
                delay: SECOND,
            },
        )
    };
    let make = move |broker| consumer(broker, store.clone()).with_routes(routes());
    let calls: Arc<AtomicU32> = Arc::default();
    let handler = handler_fn(Arc::clone(&calls), obey);
    let mut consumer = TestConsumer::start(broker(&clock), clock, make, handler)
        .await
        .unwrap();
    let fate = consumer.deliver(order("o-1", "fail")).await;
    assert_eq!((fate.to_string().as_str(), fate.attempts), ("skipped", 1));
    let fate = consumer.deliver(order("o-2", "panic")).await;
    let rungs = "retried on orders.billing.retry.5s, retried on orders.billing.retry.1m";
    assert_eq!(
        fate.to_string(),
        format!("{rungs}, dead: retries-exhausted")
    );
    assert_eq!(fate.attempts, 9, "three tries on each of three steps");
    assert!(inbox.state().is_empty());
    consumer.stop().await.unwrap();
}
