//! Messages that end the process that handles them, and consumers whose messages mostly fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use relaybox::backoff::DelayPolicy;
use relaybox::broker::RejectionScope;
use relaybox::consumer::{Consumer, Failure, FailureGuard, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::ladder::Ladder;
use relaybox::store::{InboxStore, NoInbox};
use relaybox::testing::{Fault, FaultyPublisher, ManualClock, Signal, eventually};
use sqlx::sqlite::SqliteConnection;

use super::support::{
    Altered, DEADLINE, House, Running, Shared, loaded, numbered, quick, refused, run, write_effect,
};

/// Handles what it gets, but for `poison`: that one reaches the point at which it would take the process along.
async fn fragile(reached: &Signal, db: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    if incoming.message.id.as_str() == "poison" {
        reached.set();
        std::future::pending::<()>().await;
    }
    write_effect(db, "billing", incoming).await;
    Outcome::Done
}

/// Runs consumers until the poison is dead. Each that gets it is killed. Returns how many were.
async fn kill_until_dead(house: &House, ladder: &Ladder) -> u32 {
    for kills in 0..20 {
        let reached = Signal::new();
        let consumer = house.consumer("billing").with_ladder(ladder.clone());
        let consumer = run(consumer, handler_fn(reached.clone(), fragile));
        tokio::select! {
            () = reached.wait() => consumer.kill().await,
            () = eventually(DEADLINE, "it is dead", || async { !house.dead("billing").is_empty() }) => {
                house.consumed("billing", "orders").await;
                consumer.stop().await.unwrap();
                return kills;
            }
        }
    }
    panic!("it killed 20 consumers and is still there");
}

#[tokio::test]
async fn a_message_that_ends_its_process_is_found_and_its_neighbours_are_unharmed() {
    for (ladder, kills_max, attempts) in [
        (Ladder::none(), 2, 1),
        // Back from a rung it is suspected at once.
        (Ladder::rungs([20, 40].map(Duration::from_millis)), 4, 3),
    ] {
        let house = House::new().await;
        let mut messages: Vec<_> = (0..6)
            .flat_map(|n| numbered(&format!("k-{n}"), &format!("m{n}"), 2))
            .collect();
        messages[5].id = "poison".into();
        house.publish(&messages).await;
        let kills = kill_until_dead(&house, &ladder).await;
        assert_eq!(kills, kills_max, "{ladder:?}");
        let mut effects = house.effects("billing").await;
        effects.sort();
        assert_eq!(effects.len(), 11, "{effects:?}");
        effects.dedup();
        assert_eq!(effects.len(), 11);
        let dead = house.dead("billing");
        assert_eq!(dead.len(), 1);
        let story = &dead[0].story;
        assert_eq!(dead[0].message.id.as_str(), "poison");
        assert_eq!(story.retry_count, attempts);
        assert_eq!(story.reason.as_ref().unwrap().as_str(), "retries-exhausted");
        assert!(story.last_error.as_ref().unwrap().starts_with("crash: "));
        let starts: i64 = sqlx::query_scalar("SELECT count(*) FROM relaybox_inbox_start")
            .fetch_one(house.store.pool())
            .await
            .unwrap();
        let crashes = i64::from(attempts);
        assert_eq!(starts, crashes, "what came to an end is forgotten");
    }
}

#[tokio::test]
async fn a_message_found_to_end_its_process_is_not_tried_again_when_its_acknowledgement_is_lost() {
    let house = House::new().await;
    let mut messages = numbered("k", "m", 1);
    messages[0].id = "poison".into();
    house.publish(&messages).await;
    let consumer = || house.consumer("billing").with_ladder(Ladder::none());
    for _ in 0..2 {
        let reached = Signal::new();
        let consumer = run(consumer(), handler_fn(reached.clone(), fragile));
        reached.wait().await;
        consumer.kill().await;
    }
    // The dead letter is there; another crash comes before the acknowledgement.
    let (reached, confirmed) = (Signal::new(), Signal::new());
    let crash = {
        let confirmed = confirmed.clone();
        Fault::crash(move || confirmed.set())
    };
    let publisher = FaultyPublisher::new(house.broker.clone()).with_fault(1, crash);
    let dying = consumer().with_publisher(publisher);
    let dying = run(dying, handler_fn(reached.clone(), fragile));
    confirmed.wait().await;
    dying.kill().await;
    let last = run(consumer(), handler_fn(reached.clone(), fragile));
    tokio::select! {
        () = reached.wait() => panic!("it was tried again"),
        () = house.consumed("billing", "orders") => {}
    }
    last.stop().await.unwrap();
    let dead = house.dead("billing");
    assert_eq!(dead.len(), 2, "one more with the same id");
    assert!(dead.iter().all(|letter| letter.story.retry_count == 1));
}

#[tokio::test]
async fn a_consumer_killed_again_and_again_between_messages_blames_none_of_them() {
    let house = House::new().await;
    house.publish(&numbered("k", "m", 8)).await;
    // Killed when it has done one more; whatever it was at then ran alone and came to its end, or never began.
    for done in 1..=8 {
        let consumer = house.consume("billing", handler_fn(Signal::new(), fragile));
        eventually(DEADLINE, "one more is done", || async {
            house.effects("billing").await.len() >= done
        })
        .await;
        consumer.kill().await;
    }
    let consumer = house.consume("billing", handler_fn(Signal::new(), fragile));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(house.effects("billing").await.len(), 8);
    assert!(house.dead("billing").is_empty());
}

#[tokio::test]
async fn a_start_of_somebody_who_is_alive_is_no_crash() {
    let house = House::new().await;
    house.publish(&numbered("k", "m", 1)).await;
    // A first member died with it.
    let reached = Signal::new();
    async fn hang(reached: &Signal, _: &mut SqliteConnection, _: &Incoming) -> Outcome {
        reached.set();
        std::future::pending().await
    }
    let first = house.consume("billing", handler_fn(reached.clone(), hang));
    reached.wait().await;
    first.kill().await;
    // Another one finished it meanwhile and died before its acknowledgement.
    let mut transaction = house.store.begin().await.unwrap();
    house
        .store
        .record(&mut transaction, "billing", &["m-0"])
        .await
        .unwrap();
    house.store.commit(transaction).await.unwrap();
    house
        .store
        .note_start("billing", "m-0", "another")
        .await
        .unwrap();
    let consumer = house.consumer("billing");
    let counts = consumer.counts();
    let consumer = run(consumer, handler_fn(Signal::new(), fragile));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(loaded(&counts.duplicates), 1);
    assert_eq!(loaded(&counts.crashed), 0);
}

#[derive(Clone, Default)]
struct Crowd {
    now: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
    done: Arc<AtomicU64>,
    hangs: Arc<AtomicBool>,
}

async fn crowded(crowd: &Crowd, _: &Incoming) -> Outcome {
    let now = crowd.now.fetch_add(1, Ordering::SeqCst) + 1;
    crowd.most.fetch_max(now, Ordering::SeqCst);
    // Long enough for others to begin, if they may.
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
    if crowd.hangs.load(Ordering::SeqCst) {
        std::future::pending::<()>().await;
    }
    crowd.now.fetch_sub(1, Ordering::SeqCst);
    crowd.done.fetch_add(1, Ordering::SeqCst);
    Outcome::Done
}

#[tokio::test]
async fn what_may_have_ended_a_process_is_handled_while_nothing_else_runs() {
    let house = House::new().await;
    let messages: Vec<_> = (0..12)
        .flat_map(|n| numbered(&format!("k-{n}"), &format!("m{n}"), 1))
        .collect();
    house.publish(&messages).await;
    let consumer = || Consumer::new("billing", "orders", house.broker.clone(), NoInbox);
    let crowd = Crowd::default();
    crowd.hangs.store(true, Ordering::SeqCst);
    let handler = handler_fn(crowd.clone(), crowded);
    let first = Running::start(|stop| consumer().run_outside_until(handler, stop));
    eventually(DEADLINE, "all places are taken", || async {
        crowd.most.load(Ordering::SeqCst) == 8
    })
    .await;
    first.kill().await;

    let crowd = Crowd::default();
    let handler = handler_fn(crowd.clone(), crowded);
    let second = Running::start(|stop| consumer().run_outside_until(handler, stop));
    eventually(DEADLINE, "all are done", || async {
        loaded(&crowd.done) == 12
    })
    .await;
    second.stop().await.unwrap();
    let most = crowd.most.load(Ordering::SeqCst);
    assert_eq!(most, 1, "all twelve were in the hands of the one that died");
}

// The guard

#[derive(Clone, Default)]
struct Dependency {
    works: Arc<AtomicBool>,
    calls: Shared<String>,
}

async fn depend(
    dependency: &Dependency,
    db: &mut SqliteConnection,
    incoming: &Incoming,
) -> Outcome {
    let id = incoming.message.id.to_string();
    dependency.calls.lock().unwrap().push(id);
    if dependency.works.load(Ordering::SeqCst) {
        write_effect(db, "billing", incoming).await;
        return Outcome::Done;
    }
    Outcome::Retry(Failure::new("the service that it needs is away"))
}

#[tokio::test]
async fn when_most_messages_fail_the_source_is_not_poured_into_the_dead_letters() {
    let house = House::new().await;
    house.publish(&numbered("k", "m", 60)).await;
    let clock = ManualClock::default();
    let guard = FailureGuard::default()
        .with_window(10)
        .with_pause(DelayPolicy::fixed(Duration::from_secs(60)));
    let consumer = house
        .consumer("billing")
        .with_ladder(Ladder::none())
        .with_clock(clock.clone())
        .with_config(quick().with_failure_guard(guard));
    let dependency = Dependency::default();
    let consumer = run(consumer, handler_fn(dependency.clone(), depend));
    // The consumer's clean-up of the inbox sleeps too.
    let paused = || async { clock.sleepers() == 2 };
    let dead = |count| {
        let house = &house;
        move || async move { house.dead("billing").len() == count }
    };
    eventually(DEADLINE, "ten are dead", dead(10)).await;
    eventually(DEADLINE, "it pauses", paused).await;
    for probes in 1..=3 {
        clock.advance(Duration::from_secs(60));
        eventually(DEADLINE, "a probe failed", dead(10 + probes)).await;
        eventually(DEADLINE, "it pauses again", paused).await;
        assert_eq!(dependency.calls.lock().unwrap().len(), 10 + probes);
    }
    dependency.works.store(true, Ordering::SeqCst);
    clock.advance(Duration::from_secs(60));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(house.dead("billing").len(), 13);
    assert_eq!(house.effects("billing").await.len(), 47);
}

#[tokio::test]
async fn a_probe_whose_copy_nobody_takes_does_not_hold_the_others() {
    let house = House::new().await;
    let of_keys = |n: usize| numbered(&format!("k-{n}"), &format!("m{n}"), 1);
    let messages: Vec<_> = (0..40).flat_map(of_keys).collect();
    house.publish(&messages).await;
    // The dead letters take ten and no more.
    let taken = AtomicU64::new(0);
    let full = Altered::answering(house.broker.clone(), move |_| {
        (taken.fetch_add(1, Ordering::SeqCst) >= 10).then(|| refused(RejectionScope::Destination))
    });
    let guard = FailureGuard::default()
        .with_window(10)
        .with_pause(DelayPolicy::fixed(Duration::from_millis(20)));
    let consumer = house
        .consumer("billing")
        .with_publisher(full)
        .with_ladder(Ladder::none())
        .with_config(quick().with_failure_guard(guard));
    let dependency = Dependency::default();
    let consumer = run(consumer, handler_fn(dependency.clone(), depend));
    eventually(DEADLINE, "two probes are stuck", || async {
        dependency.calls.lock().unwrap().len() >= 12
    })
    .await;
    dependency.works.store(true, Ordering::SeqCst);
    eventually(DEADLINE, "the others are done", || async {
        house.effects("billing").await.len() >= 20
    })
    .await;
    consumer.stop().await.unwrap();
}

#[tokio::test]
async fn work_that_a_stop_cuts_off_is_no_crash() {
    let house = House::new().await;
    house.publish(&numbered("k", "poison", 1)).await;
    // A member dies over it, so that it is a suspect; two more are stopped before it comes to its end.
    for stops in [false, true, true] {
        let reached = Signal::new();
        let config = quick().with_shutdown_deadline(Duration::from_millis(50));
        let consumer = house.consumer("billing").with_config(config);
        let consumer = run(consumer, handler_fn(reached.clone(), stuck));
        reached.wait().await;
        if stops {
            consumer.stop().await.unwrap();
        } else {
            consumer.kill().await;
        }
    }
    let consumer = house.consumer("billing");
    let counts = consumer.counts();
    let consumer = run(consumer, handler_fn(Signal::new(), fragile));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(loaded(&counts.crashed), 0);
    assert_eq!(house.effects("billing").await, ["poison-0"]);
}

async fn stuck(reached: &Signal, _: &mut SqliteConnection, _: &Incoming) -> Outcome {
    reached.set();
    std::future::pending().await
}
