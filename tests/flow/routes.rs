//! What becomes of failures by their class: again here, skipped, dead at once, a rung.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use relaybox::consumer::{
    Consumer, ConsumerConfig, Failure, FailureGuard, Outcome, Route, Routed, Router, Routes,
    UnknownType, handler_fn,
};
use relaybox::envelope::Incoming;
use relaybox::ladder::Ladder;
use relaybox::store::{InboxStore, NoInbox};
use relaybox::story::Reason;
use relaybox::testing::{ManualClock, eventually};
use relaybox::{ErrorKind, Message};
use sqlx::sqlite::SqliteConnection;

use super::support::{DEADLINE, House, Running, Shared, loaded, quick, run, write_effect};

/// Writes its effect, and fails with the class that the payload names: as often as the number behind it says.
async fn obey(calls: &Shared<String>, db: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    let id = incoming.message.id.to_string();
    calls.lock().unwrap().push(id.clone());
    write_effect(db, "billing", incoming).await;
    answer(calls, &id, incoming)
}

fn answer(calls: &Shared<String>, id: &str, incoming: &Incoming) -> Outcome {
    let payload = incoming.message.payload.as_deref().unwrap_or_default();
    let order = String::from_utf8_lossy(payload).into_owned();
    let (class, times) = order.split_once(' ').unwrap_or((&order, "1000"));
    let called = {
        let calls = calls.lock().unwrap();
        calls.iter().filter(|call| *call == id).count()
    };
    match class {
        "ok" => Outcome::Done,
        "panic" => panic!("as asked"),
        "after" => Outcome::RetryAfter(Duration::from_millis(60), Failure::new("later")),
        _ if called > times.parse().unwrap() => Outcome::Done,
        class => Outcome::Retry(Failure::new(format!("call {called}")).with_class(class)),
    }
}

fn order(id: &str, key: &str, payload: &str) -> Message {
    Message::new("orders", "Order")
        .with_id(id)
        .with_key(key)
        .with_payload(payload.to_owned())
}

fn local(times: u32, delay: Duration) -> Route {
    Route::Local { times, delay }
}

/// Reason, attempts and error of each dead letter, by its id.
fn dead(house: &House) -> BTreeMap<String, (String, u32, String)> {
    let letters = house.dead("billing").into_iter();
    let told = letters.map(|letter| {
        let story = letter.story;
        let reason = story.reason.unwrap().as_str().to_owned();
        let error = story.last_error.unwrap();
        let id = letter.message.id.to_string();
        (id, (reason, story.retry_count, error))
    });
    told.collect()
}

fn entry(id: &str, reason: &str, count: u32, error: &str) -> (String, (String, u32, String)) {
    (id.into(), (reason.into(), count, error.into()))
}

#[tokio::test]
async fn a_local_try_comes_before_the_rung_holds_no_place_and_keeps_the_order_of_its_key() {
    let house = House::new().await;
    let clock = ManualClock::default();
    let messages = [
        order("a-1", "a", "busy 2"),
        order("a-2", "a", "ok"),
        order("b-1", "b", "ok"),
    ];
    house.publish(&messages).await;
    let routes = Routes::new().with("busy", local(2, Duration::from_secs(10)));
    let consumer = house.consumer("billing").with_routes(routes);
    let consumer = consumer.with_clock(clock.clone());
    let counts = consumer.counts();
    let calls = Shared::default();
    let consumer = run(consumer, handler_fn(calls.clone(), obey));
    for tries in 1..=2 {
        // On SQLite there is one place: b-1 got it while a-1 waits.
        eventually(DEADLINE, "a-1 was tried, and b-1 is done", || async {
            let tried = calls
                .lock()
                .unwrap()
                .iter()
                .filter(|id| *id == "a-1")
                .count();
            tried == tries && house.effects("billing").await == ["b-1"]
        })
        .await;
        // Moved until it wakes: nothing says when it began to wait.
        eventually(DEADLINE, "the pause is over", || async {
            clock.advance(Duration::from_secs(10));
            let tried = calls
                .lock()
                .unwrap()
                .iter()
                .filter(|id| *id == "a-1")
                .count();
            tried > tries
        })
        .await;
    }
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(house.effects("billing").await, ["b-1", "a-1", "a-2"]);
    assert_eq!(loaded(&counts.handled), 3);
    assert_eq!(loaded(&counts.retried), 0, "no rung was climbed");
}

#[tokio::test]
async fn an_attempt_with_all_its_local_tries_counts_once() {
    let house = House::new().await;
    house.publish(&[order("m-0", "k", "busy")]).await;
    let routes = Routes::new().with("busy", local(2, Duration::from_millis(1)));
    let consumer = house.consumer("billing").with_routes(routes);
    let calls = Shared::default();
    let consumer = run(consumer, handler_fn(calls.clone(), obey));
    eventually(DEADLINE, "it is dead", || async {
        !dead(&house).is_empty()
    })
    .await;
    consumer.stop().await.unwrap();
    let told = entry("m-0", "retries-exhausted", 3, "busy: call 9");
    assert_eq!(dead(&house), BTreeMap::from([told]));
    assert_eq!(
        calls.lock().unwrap().len(),
        9,
        "three tries on each of three steps"
    );
}

#[tokio::test]
async fn a_skipped_failure_leaves_no_effect_and_is_remembered_as_handled() {
    let house = House::new().await;
    let messages = [
        order("m-0", "k", "gone"),
        order("m-1", "k", "ok"),
        order("m-0", "k", "ok"),
    ];
    house.publish(&messages).await;
    let routes = Routes::new().with("gone", Route::Skip);
    let consumer = house.consumer("billing").with_routes(routes);
    let counts = consumer.counts();
    let calls = Shared::default();
    let consumer = run(consumer, handler_fn(calls.clone(), obey));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(house.effects("billing").await, ["m-1"]);
    assert_eq!(*calls.lock().unwrap(), ["m-0", "m-1"]);
    let counted = [&counts.skipped, &counts.handled, &counts.duplicates].map(loaded);
    assert_eq!(counted, [1, 1, 1]);
    assert!(dead(&house).is_empty());
    assert!(house.store.is_recorded("billing", "m-0").await.unwrap());
}

#[tokio::test]
async fn a_consumer_routes_what_ends_a_handler_and_what_it_said_itself_stands() {
    let house = House::new().await;
    let messages = [
        order("m-0", "a", "panic"),
        order("m-1", "b", "declined"),
        order("m-2", "c", "other"),
        order("m-3", "d", "after"),
    ];
    house.publish(&messages).await;
    let routes = Routes::new()
        .with("panic", Route::DeadLetter(Some(Reason::new("bug"))))
        .with("declined", Route::DeadLetter(None))
        .with("other", Route::After(Duration::from_millis(70)))
        .with_otherwise(Route::Skip);
    let consumer = house.consumer("billing").with_routes(routes);
    let consumer = run(consumer, handler_fn(Shared::default(), obey));
    eventually(DEADLINE, "all are dead", || async {
        dead(&house).len() == 4
    })
    .await;
    consumer.stop().await.unwrap();
    let expected = [
        entry("m-0", "bug", 1, "panic: as asked"),
        entry("m-1", "permanent", 1, "declined: call 1"),
        entry("m-2", "retries-exhausted", 3, "other: call 3"),
        entry("m-3", "retries-exhausted", 3, "handler: later"),
    ];
    assert_eq!(dead(&house), BTreeMap::from(expected));
    assert!(house.broker.log("orders.billing.retry.50ms").is_empty());
}

#[tokio::test]
async fn each_type_of_a_router_may_have_routes_of_its_own() {
    let house = House::new().await;
    let of_type = |id, kind| {
        let mut message = order(id, id, "busy");
        message.event_type = String::from(kind);
        message
    };
    let messages = [
        of_type("m-0", "A"),
        of_type("m-1", "B"),
        of_type("m-2", "C"),
    ];
    house.publish(&messages).await;
    let routed = |route| {
        let routes = Routes::new().with("busy", route);
        Routed::new(routes, handler_fn(Shared::default(), obey)).unwrap()
    };
    let dead_at_once = |reason| Route::DeadLetter(Some(Reason::new(reason)));
    let router = Router::new(UnknownType::DeadLetter)
        .with_route("A", routed(Route::Skip))
        .unwrap()
        .with_route("B", routed(dead_at_once("of-b")))
        .unwrap()
        .with_route("C", handler_fn(Shared::default(), obey))
        .unwrap();
    let routes = Routes::new().with_otherwise(dead_at_once("of-all"));
    let consumer = house.consumer("billing").with_routes(routes);
    let counts = consumer.counts();
    let consumer = run(consumer, router);
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    let expected = [
        entry("m-1", "of-b", 1, "busy: call 1"),
        entry("m-2", "of-all", 1, "busy: call 1"),
    ];
    assert_eq!(dead(&house), BTreeMap::from(expected));
    assert_eq!(loaded(&counts.skipped), 1);
}

async fn obey_in_batches(
    calls: &Shared<String>,
    db: &mut SqliteConnection,
    batch: &[&Incoming],
) -> Outcome {
    for incoming in batch {
        if let failed @ Outcome::Retry(_) = obey(calls, db, incoming).await {
            return failed;
        }
    }
    Outcome::Done
}

#[tokio::test]
async fn what_fails_in_a_batch_goes_its_way_alone() {
    let house = House::new().await;
    let messages: Vec<_> = (0..6)
        .map(|n| order(&format!("m-{n}"), "k", if n == 3 { "gone" } else { "ok" }))
        .collect();
    house.publish(&messages).await;
    let consumer = house.consumer("billing");
    let counts = consumer.counts();
    let routes = Routes::new().with("gone", Route::Skip);
    let handler = Routed::new(routes, handler_fn(Shared::default(), obey_in_batches)).unwrap();
    let consumer = Running::start(|stop| consumer.run_batches_until(6, handler, stop));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    let others = ["m-0", "m-1", "m-2", "m-4", "m-5"];
    assert_eq!(house.effects("billing").await, others);
    assert_eq!((loaded(&counts.skipped), loaded(&counts.handled)), (1, 5));
}

async fn obey_outside(calls: &Shared<String>, incoming: &Incoming) -> Outcome {
    let id = incoming.message.id.to_string();
    calls.lock().unwrap().push(id.clone());
    answer(calls, &id, incoming)
}

#[tokio::test]
async fn work_outside_of_a_transaction_has_routes_too() {
    let house = House::new().await;
    let messages = [order("m-0", "a", "busy 2"), order("m-1", "b", "gone")];
    house.publish(&messages).await;
    let consumer = Consumer::new("billing", "orders", house.broker.clone(), NoInbox);
    let consumer = consumer.with_config(quick());
    let counts = consumer.counts();
    let routes = Routes::new()
        .with("busy", local(2, Duration::from_millis(1)))
        .with("gone", Route::Skip);
    let handler = Routed::new(routes, handler_fn(Shared::default(), obey_outside)).unwrap();
    let consumer = Running::start(|stop| consumer.run_outside_until(handler, stop));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!((loaded(&counts.skipped), loaded(&counts.handled)), (1, 1));
    assert!(dead(&house).is_empty());
}

#[tokio::test]
async fn a_suspect_that_waits_for_a_local_try_is_blamed_for_no_crash_meanwhile() {
    let house = House::new().await;
    let clock = ManualClock::default();
    house.publish(&[order("m-0", "k", "busy 2")]).await;
    let calls = Shared::default();
    let routes = || Routes::new().with("busy", local(1, Duration::from_secs(10)));
    let start = || {
        let consumer = house.consumer("billing").with_routes(routes());
        let consumer = consumer.with_clock(clock.clone());
        (
            consumer.counts(),
            run(consumer, handler_fn(calls.clone(), obey)),
        )
    };
    let called = |times: usize| {
        let calls = calls.clone();
        eventually(DEADLINE, "it was handled", move || {
            let calls = calls.lock().unwrap().len();
            async move { calls == times }
        })
    };
    // Each is killed while the message waits, the second one as a suspect.
    for times in 1..=2 {
        let (_, consumer) = start();
        called(times).await;
        eventually(DEADLINE, "no start is noted", || async {
            let starts: i64 = sqlx::query_scalar("SELECT count(*) FROM relaybox_inbox_start")
                .fetch_one(house.store.pool())
                .await
                .unwrap();
            starts == 0
        })
        .await;
        consumer.kill().await;
    }
    let (counts, consumer) = start();
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(counts.crashed.load(Ordering::Relaxed), 0);
    assert_eq!(house.effects("billing").await, ["m-0"]);
}

#[tokio::test]
async fn the_guard_sees_skipped_failures_and_local_tries() {
    for route in [Route::Skip, local(20, Duration::from_millis(1))] {
        let house = House::new().await;
        let messages: Vec<_> = (0..50)
            .map(|n| order(&format!("m-{n}"), &format!("k-{n}"), "gone"))
            .collect();
        house.publish(&messages).await;
        let pause = relaybox::backoff::DelayPolicy::fixed(Duration::from_secs(3_600));
        let guard = FailureGuard::default().with_window(10).with_pause(pause);
        let config = quick().with_failure_guard(guard);
        let routes = Routes::new().with("gone", route);
        let calls = Shared::default();
        let consumer = house
            .consumer("billing")
            .with_config(config)
            .with_routes(routes);
        let clock = ManualClock::default();
        let probe = consumer.probe();
        let consumer = run(
            consumer.with_clock(clock.clone()),
            handler_fn(calls.clone(), obey),
        );
        eventually(DEADLINE, "the guard is closed", || async {
            clock.advance(Duration::from_millis(1));
            calls.lock().unwrap().len() >= 10
        })
        .await;
        // Nothing is started any more: several turns of the loop change nothing.
        for _ in 0..20 {
            clock.advance(Duration::from_millis(1));
            tokio::task::yield_now().await;
        }
        consumer.stop().await.unwrap();
        let calls = calls.lock().unwrap().len();
        assert!(calls < 50, "{calls} calls, {:?}", probe.readiness());
    }
}

#[tokio::test]
async fn attempts_are_limited_whatever_delays_are_asked_for() {
    let house = House::new().await;
    house
        .publish(&[order("m-0", "a", "after"), order("m-1", "b", "other")])
        .await;
    let ladder = Ladder::rungs([10, 60].map(Duration::from_millis)).with_attempts_max(5);
    let consumer = house.consumer("billing").with_ladder(ladder);
    let consumer = run(consumer, handler_fn(Shared::default(), obey));
    eventually(DEADLINE, "both are dead", || async {
        dead(&house).len() == 2
    })
    .await;
    consumer.stop().await.unwrap();
    let expected = [
        entry("m-0", "retries-exhausted", 5, "handler: later"),
        entry("m-1", "retries-exhausted", 5, "other: call 5"),
    ];
    assert_eq!(dead(&house), BTreeMap::from(expected));
}

#[tokio::test]
async fn a_message_that_would_be_due_too_late_is_dead_at_once() {
    let house = House::new().await;
    house.publish(&[order("m-0", "a", "other")]).await;
    let ladder = Ladder::rungs([Duration::from_millis(10), Duration::from_secs(3_600)])
        .with_age_max(Duration::from_secs(600));
    let consumer = house.consumer("billing").with_ladder(ladder);
    let consumer = run(consumer, handler_fn(Shared::default(), obey));
    eventually(DEADLINE, "it is dead", || async { dead(&house).len() == 1 }).await;
    consumer.stop().await.unwrap();
    let expected = entry("m-0", "too-old", 2, "other: call 2");
    assert_eq!(dead(&house), BTreeMap::from([expected]));
}

#[tokio::test]
async fn routes_that_cannot_be_meant_are_refused_at_start() {
    let house = House::new().await;
    let refused = |routes: Routes, ladder: Ladder| {
        let consumer = house
            .consumer("billing")
            .with_routes(routes)
            .with_ladder(ladder);
        let consumer = consumer.with_config(ConsumerConfig::default());
        run(consumer, handler_fn(Shared::default(), obey)).ended()
    };
    let (skip, after) = (Route::Skip, Route::After(Duration::from_secs(1)));
    for routes in [
        Routes::new().with("crash", skip),
        Routes::new().with_otherwise(after),
        Routes::new().with("A", Route::Rung),
    ] {
        let error = refused(routes, Ladder::none()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration);
        assert!(error.violation().unwrap().field.starts_with("routes"));
    }
}
