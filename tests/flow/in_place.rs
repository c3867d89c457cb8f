//! Ladders whose messages wait in their place.

use std::sync::atomic::Ordering;

use relaybox::Message;
use relaybox::backoff::DelayPolicy;
use relaybox::consumer::{Consumer, Failure, FailureGuard, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::store::WaitingState;
use relaybox::testing::{Signal, eventually};
use sqlx::sqlite::SqliteConnection;

use super::support::{DEADLINE, House, loaded, quick, run, to};
use super::waiting::{Log, MS, fixed, message, obey};

#[tokio::test]
async fn in_place_a_partition_keeps_its_order_and_others_go_on() {
    let house = House::new().await;
    house.broker.create_topic("single", 2).unwrap();
    let log = Log::default();
    // Keys of both partitions.
    let on = |partition: &str, messages: Vec<Message>| {
        let key = partition.to_owned();
        to("single", messages)
            .into_iter()
            .map(move |message| message.with_key(key.clone()))
            .collect::<Vec<_>>()
    };
    let keys: Vec<String> = (0..50).map(|n| format!("key-{n}")).collect();
    for key in &keys {
        let probe = on(key, vec![message(key, 0, "ok")]);
        house.publish(&probe).await;
    }
    let mut failing = on("key-0", vec![message("f", 0, "fail 2")]);
    failing.extend(on("key-0", vec![message("f", 1, "ok")]));
    house.publish(&failing).await;
    let consumer = Consumer::new(
        "billing",
        "single",
        house.broker.clone(),
        house.store.clone(),
    )
    .with_ladder(fixed(100, 5).in_place())
    .with_waiting_room(house.store.clone())
    .with_config(quick());
    let counts = consumer.counts();
    let consumer = run(consumer, handler_fn(log.clone(), obey));
    house.handled(52).await;
    consumer.stop().await.unwrap();
    assert_eq!(log.of("f-"), ["f-0", "f-0", "f-0", "f-1"]);
    assert_eq!(loaded(&counts.retried), 2);
    assert_eq!(house.counted(WaitingState::Noted).await, 0);
}

#[tokio::test]
async fn in_place_attempts_are_counted_across_a_kill_and_the_wait_is_kept() {
    let house = House::new().await;
    let log = Log::default();
    log.closed.store(true, Ordering::SeqCst);
    house
        .publish(&[message("k", 0, "ok"), message("k", 1, "ok")])
        .await;
    let ladder = || fixed(300, 3).in_place();
    let consumer = house.wait_with(ladder(), handler_fn(log.clone(), obey));
    eventually(DEADLINE, "it has failed and waits", || async {
        house.counted(WaitingState::Noted).await == 1
    })
    .await;
    consumer.kill().await;
    let consumer = house.wait_with(ladder(), handler_fn(log.clone(), obey));
    eventually(DEADLINE, "both are dead", || async {
        house.dead("billing").len() == 2
    })
    .await;
    house.handled(2).await;
    consumer.stop().await.unwrap();
    let attempts = log.attempts.lock().unwrap().clone();
    let of = |id: &str| {
        attempts
            .iter()
            .filter(|(of, ..)| of == id)
            .cloned()
            .collect::<Vec<_>>()
    };
    let counts: Vec<u32> = of("k-0").iter().map(|(_, count, _)| *count).collect();
    assert_eq!(counts, [0, 1, 2], "no attempt is made twice, or forgotten");
    assert!(
        of("k-0")
            .windows(2)
            .all(|pair| pair[1].2 - pair[0].2 >= 300 * MS)
    );
    assert!(of("k-0")[2].2 < of("k-1")[0].2, "the order is kept");
    assert_eq!(house.reasons()["k-0"], ("retries-exhausted".into(), 3));
}

/// Fails at its first attempt, and reaches the point at which it would take the process along in each later one.
async fn fail_and_hang(reached: &Signal, _: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    if incoming.story.retry_count == 0 {
        return Outcome::Retry(Failure::new("not yet"));
    }
    reached.set();
    std::future::pending().await
}

#[tokio::test]
async fn in_place_a_message_that_ends_its_process_after_a_failure_is_found() {
    let house = House::new().await;
    house.publish(&[message("k", 0, "poison")]).await;
    let mut kills = 0;
    loop {
        let reached = Signal::new();
        let handler = handler_fn(reached.clone(), fail_and_hang);
        let consumer = house.wait_with(fixed(10, 3).in_place(), handler);
        tokio::select! {
            () = reached.wait() => consumer.kill().await,
            () = house.handled(1) => {
                consumer.stop().await.unwrap();
                break;
            }
        }
        kills += 1;
        assert!(kills < 10, "it kills for ever");
    }
    // The second kill tells it from its neighbours; suspected at once, it needs one more for its last attempt.
    assert_eq!(kills, 3);
    assert_eq!(house.reasons()["k-0"], ("retries-exhausted".into(), 3));
    let story = &house.dead("billing")[0].story;
    assert!(story.last_error.as_ref().unwrap().starts_with("crash: "));
}

#[tokio::test]
async fn what_waits_in_its_place_is_no_probe_of_the_guard() {
    let house = House::new().await;
    let log = Log::default();
    // A partition each.
    house
        .publish(&[keyless("a", "fail 9"), keyless("b", "fail 9")])
        .await;
    let guard = FailureGuard::default()
        .with_window(2)
        .with_pause(DelayPolicy::fixed(20 * MS));
    let consumer = house
        .waiting(fixed(600_000, 2).in_place())
        .with_config(quick().with_failure_guard(guard));
    let counts = consumer.counts();
    let consumer = run(consumer, handler_fn(log.clone(), obey));
    eventually(
        DEADLINE,
        "both failed, and so the guard is closed",
        || async { loaded(&counts.retried) == 2 },
    )
    .await;
    house.publish(&[keyless("c", "ok")]).await;
    eventually(
        DEADLINE,
        "a partition that does not wait goes on",
        || async { house.effects("billing").await == ["c"] },
    )
    .await;
    consumer.stop().await.unwrap();
}

#[tokio::test]
async fn a_partition_that_waits_in_its_place_is_let_go_when_it_changes_hands() {
    let house = House::new().await;
    house.broker.create_topic("single", 2).unwrap();
    let log = Log::default();
    let publish = async |id, payload| {
        house
            .publish(&to("single", vec![keyless(id, payload)]))
            .await
    };
    let member = || {
        let (broker, store) = (house.broker.clone(), house.store.clone());
        let consumer = Consumer::new("billing", "single", broker, store)
            .with_ladder(fixed(600_000, 2).in_place())
            .with_waiting_room(house.store.clone())
            // Holding the one that waits, it has no room for another.
            .with_config(quick().with_concurrency(1).with_in_flight_max(1));
        run(consumer, handler_fn(log.clone(), obey))
    };
    let first = member();
    publish("b", "fail 9").await;
    eventually(DEADLINE, "a partition waits", || async {
        house.counted(WaitingState::Noted).await == 1
    })
    .await;
    // That one goes to the second member, the other one stays.
    let second = member();
    publish("a", "ok").await;
    eventually(DEADLINE, "the first member has room again", || async {
        house.effects("billing").await == ["a"]
    })
    .await;
    first.stop().await.unwrap();
    second.stop().await.unwrap();
    assert_eq!(house.broker.committed("billing", "single"), [1, 0]);
    assert_eq!(log.of("b"), ["b"], "its wait goes on elsewhere");
}

/// Keyless messages take turns among the partitions.
fn keyless(id: &str, payload: &str) -> Message {
    Message::new("orders", "Numbered")
        .with_id(id)
        .with_payload(payload.to_owned())
}
