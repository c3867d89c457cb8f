//! Claims in the waiting room, and what becomes of a message without one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use relaybox::ErrorKind;
use relaybox::backoff::DelayPolicy;
use relaybox::broker::RejectionScope;
use relaybox::consumer::{Consumer, Failure, FailureGuard, Outcome, handler_fn};
use relaybox::envelope::{Incoming, Outgoing};
use relaybox::ladder::DeadHead;
use relaybox::readiness::NotReady;
use relaybox::store::sqlite::SqliteStore;
use relaybox::store::{Waiting, WaitingStore};
use relaybox::story::Reason;
use relaybox::testing::{FaultyInbox, InboxCall, InboxFault, Signal, eventually};
use sqlx::sqlite::SqliteConnection;

use super::support::{Altered, DEADLINE, House, Running, Shared, loaded, quick, refused, run};
use super::waiting::{Log, MS, fixed, message, obey};

#[tokio::test]
async fn a_message_that_is_parked_is_no_probe_of_the_guard() {
    let house = House::new().await;
    let log = Log::default();
    house
        .publish(&[message("k", 0, "fail 9"), message("k", 1, "ok")])
        .await;
    // No dead letter is taken of a message that stood behind another one.
    let refusals = Arc::new(AtomicU64::new(0));
    let publisher = {
        let refusals = refusals.clone();
        Altered::answering(house.broker.clone(), move |sent: &Outgoing| {
            let reason = sent.story.reason.as_ref().map(Reason::as_str);
            (reason == Some(Reason::PARKED)).then(|| {
                refusals.fetch_add(1, Ordering::SeqCst);
                refused(RejectionScope::Destination)
            })
        })
    };
    // Closed by the two failures of the one in front.
    let guard = FailureGuard::default()
        .with_window(2)
        .with_pause(DelayPolicy::fixed(20 * MS));
    let consumer = house
        .waiting(fixed(300, 2).by_key(DeadHead::Park))
        .with_publisher(publisher)
        .with_config(quick().with_failure_guard(guard));
    let consumer = run(consumer, handler_fn(log.clone(), obey));
    eventually(DEADLINE, "the dead letter is refused", || async {
        loaded(&refusals) > 0
    })
    .await;
    house.publish(&[message("j", 0, "ok")]).await;
    eventually(DEADLINE, "another key goes on", || async {
        house.effects("billing").await == ["j-0"]
    })
    .await;
    consumer.stop().await.unwrap();
}

#[tokio::test]
async fn a_message_in_work_elsewhere_keeps_its_place_while_the_room_refuses_it() {
    let house = House::new().await;
    let log = Log::default();
    house
        .publish(&[message("k", 0, "ok"), message("k", 1, "ok")])
        .await;
    let refuse = "CREATE TRIGGER refuse BEFORE INSERT ON relaybox_waiting BEGIN SELECT RAISE(ABORT, 'no'); END";
    let execute = async |sql| {
        let done = sqlx::raw_sql(sql).execute(house.store.pool());
        done.await.unwrap()
    };
    execute(refuse).await;
    let busy = InboxFault::Fail(ErrorKind::Busy);
    let inbox = FaultyInbox::new(house.store.clone()).with_fault(InboxCall::Record, 1, busy);
    let consumer = Consumer::new("billing", "orders", house.broker.clone(), inbox)
        .with_ladder(fixed(10, 2).by_key(DeadHead::Skip))
        .with_waiting_room(house.store.clone())
        .with_config(quick().with_concurrency(1));
    let probe = consumer.probe();
    let handler = handler_fn(log.clone(), obey);
    let consumer = Running::start(|stop| consumer.run_until(handler, stop));
    let went_on = async || !house.effects("billing").await.is_empty();
    eventually(DEADLINE, "it is refused", || async {
        let reasons = probe.readiness().reasons;
        let refused = |reason: &NotReady| matches!(reason, NotReady::DatabaseDown(_));
        reasons.iter().any(refused) || went_on().await
    })
    .await;
    // It waits for the room and occupies no handler, of which there is one.
    house.publish(&[message("j", 0, "ok")]).await;
    eventually(DEADLINE, "another key goes on", async || went_on().await).await;
    assert_eq!(house.effects("billing").await, ["j-0"]);
    execute("DROP TRIGGER refuse").await;
    house.handled(3).await;
    consumer.stop().await.unwrap();
    assert_eq!(log.of("k"), ["k-0", "k-1"]);
}

/// A number that the waiting room's only row tells.
async fn told(store: &SqliteStore, column: &'static str) -> i64 {
    let question = format!("SELECT {column} FROM relaybox_waiting");
    let question = sqlx::query_scalar(sqlx::AssertSqlSafe(question));
    question.fetch_one(store.pool()).await.unwrap()
}

/// Fails every time, out of the room not before its claim has ended: a handler holds the file's only write lock, so that nobody
/// prolongs it.
async fn outlast(store: &SqliteStore, _: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    if incoming.story.retry_count > 0 {
        let left = "visible_at - CAST(unixepoch('subsec') * 1000000 AS INTEGER)";
        eventually(DEADLINE, "its claim has ended", || async {
            told(store, left).await < 0
        })
        .await;
    }
    Outcome::Retry(Failure::new("late"))
}

#[tokio::test]
async fn an_attempt_that_outlasts_its_claim_counts() {
    for ladder in [fixed(10, 3).stored(), fixed(10, 3).by_key(DeadHead::Skip)] {
        let house = House::new().await;
        house.publish(&[message("k", 0, "ok")]).await;
        let consumer = house.wait_with(ladder, handler_fn(house.store.clone(), outlast));
        house.handled(1).await;
        consumer.stop().await.unwrap();
        assert_eq!(house.reasons()["k-0"], ("retries-exhausted".into(), 3));
    }
}

#[derive(Clone)]
struct Taken {
    store: SqliteStore,
    /// How many failures the row tells of, at each attempt out of the room.
    counts: Shared<i64>,
}

/// Its first attempt out of the room ends when somebody else has claimed the message.
async fn lose(taken: &Taken, incoming: &Incoming) -> Outcome {
    let Taken { store, counts } = taken;
    if incoming.story.retry_count == 0 {
        return Outcome::Retry(Failure::new("first"));
    }
    let count = told(store, "retry_count").await;
    let attempts = {
        let mut counts = counts.lock().unwrap();
        counts.push(count);
        counts.len()
    };
    if attempts > 1 {
        return Outcome::Done;
    }
    let token = told(store, "token").await;
    // Again and again, because its holder goes on prolonging it.
    eventually(DEADLINE, "it is claimed again", || async {
        let end = "UPDATE relaybox_waiting SET visible_at = 0 WHERE token = ?";
        let ended = sqlx::query(end).bind(token).execute(store.pool());
        ended.await.unwrap().rows_affected() == 0
    })
    .await;
    Outcome::Retry(Failure::new("late"))
}

#[tokio::test]
async fn a_count_is_not_lost_with_the_claim() {
    let house = House::new().await;
    house.publish(&[message("k", 0, "ok")]).await;
    let taken = Taken {
        store: house.store.clone(),
        counts: Shared::default(),
    };
    let consumer = house.waiting(fixed(10, 5).by_key(DeadHead::Skip));
    let handler = handler_fn(taken.clone(), lose);
    let consumer = Running::start(|stop| consumer.run_outside_until(handler, stop));
    eventually(DEADLINE, "it came twice out of the room", || async {
        taken.counts.lock().unwrap().len() >= 2
    })
    .await;
    house.handled(0).await;
    consumer.stop().await.unwrap();
    assert_eq!(taken.counts.lock().unwrap()[..2], [1, 2]);
}

/// Hangs at the message `slow`.
async fn hang((entered, release): &(Signal, Signal), incoming: &Incoming) -> Outcome {
    if incoming.message.id.as_str() == "slow-0" {
        entered.set();
        release.wait().await;
    }
    Outcome::Done
}

#[tokio::test]
async fn a_member_that_stops_gives_back_at_once_what_it_does_not_work_on() {
    let house = House::new().await;
    let (entered, release) = (Signal::new(), Signal::new());
    house.publish(&[message("slow", 0, "ok")]).await;
    // With its room taken by that one, it claims nothing that it could begin with.
    let config = quick()
        .with_concurrency(1)
        .with_in_flight_max(1)
        .with_waiting_lease(1_000 * MS)
        .with_shutdown_deadline(2 * DEADLINE);
    let consumer = house.waiting(fixed(10, 2).stored()).with_config(config);
    let handler = handler_fn((entered.clone(), release.clone()), hang);
    let consumer = Running::start(|stop| consumer.run_outside_until(handler, stop));
    entered.wait().await;
    let due = Waiting {
        source: "orders".into(),
        known_as: "m-0".into(),
        letter: message("m", 0, "ok").into(),
    };
    let put = house.store.put("billing", &due, false, Duration::ZERO);
    put.await.unwrap();
    eventually(DEADLINE, "it is claimed all the same", || async {
        told(&house.store, "claims").await == 1
    })
    .await;
    let another = async {
        eventually(DEADLINE, "another member may have it", || async {
            let claims = house.store.claim("billing", 1, DEADLINE).await.unwrap();
            !claims.rows.is_empty()
        })
        .await;
        release.set();
    };
    let (stopped, ()) = tokio::join!(consumer.stop(), another);
    stopped.unwrap();
}
