//! From the outbox to the broker.

use std::time::Duration;

use relaybox::broker::{FailureScope, RejectionScope};
use relaybox::outbox::Outbox;
use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::OutboxStore;
use relaybox::store::sqlite::SqliteStore;
use relaybox::testing::{Fault, FaultyPublisher, Signal, eventually};
use relaybox::{ErrorKind, Message};

use super::support::{Altered, DEADLINE, House, Running, brisk, numbered};

#[tokio::test]
async fn a_rolled_back_message_never_leaves_and_a_later_one_does() {
    let house = House::new().await;
    let outbox = Outbox::new(house.store.clone());
    let mut tx = house.store.pool().begin().await.unwrap();
    outbox
        .enqueue(&mut tx, Message::new("orders", "T").with_id("gone"))
        .await
        .unwrap();
    tx.rollback().await.unwrap();

    let mut tx = house.store.pool().begin().await.unwrap();
    let mut savepoint = sqlx::Connection::begin(&mut *tx).await.unwrap();
    outbox
        .enqueue(
            &mut savepoint,
            Message::new("orders", "T").with_id("also gone"),
        )
        .await
        .unwrap();
    savepoint.rollback().await.unwrap();
    outbox
        .enqueue(&mut tx, Message::new("orders", "T").with_id("kept"))
        .await
        .unwrap();
    tx.commit().await.unwrap();

    let relay = house.relay(house.broker.clone(), brisk());
    house.drained().await;
    relay.stop().await.unwrap();
    assert_eq!(house.ids("orders"), ["kept"]);
}

#[tokio::test]
async fn a_refused_message_leaves_the_transaction_usable() {
    let house = House::new().await;
    let outbox = Outbox::new(house.store.clone());
    let mut tx = house.store.pool().begin().await.unwrap();
    let reserved = Message::new("orders", "T").with_header("X-Message-Id", "x");
    let huge = Message::new("orders", "T").with_payload(vec![0; 2_000_000]);
    for (message, field) in [
        (reserved, "header name"),
        (huge, "message"),
        (Message::new("", "T"), "destination"),
    ] {
        let error = outbox.enqueue(&mut tx, message).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert_eq!(error.violation().unwrap().field, field);
    }
    let batch = [numbered("k", "good", 1), vec![Message::new("orders", "")]].concat();
    assert!(outbox.enqueue_all(&mut tx, &batch).await.is_err());
    outbox
        .enqueue(&mut tx, Message::new("orders", "T"))
        .await
        .unwrap();
    tx.commit().await.unwrap();
    assert_eq!(
        house.pending().await,
        1,
        "one bad message refuses its whole call, and only that"
    );
}

#[tokio::test]
async fn after_a_crash_between_publish_and_mark_the_same_bytes_go_out_again() {
    let house = House::new().await;
    let message = numbered("k", "m", 1)
        .remove(0)
        .with_header("tenant", "acme");
    house.enqueue(&[message]).await;
    let crashed = Signal::new();
    let dying = FaultyPublisher::new(house.broker.clone()).with_fault(
        1,
        Fault::crash({
            let crashed = crashed.clone();
            move || crashed.set()
        }),
    );
    let first = house.relay(dying, brisk());
    crashed.wait().await;
    first.kill().await;
    assert_eq!(
        house.pending().await + house.store.aside(9).await.unwrap(),
        1
    );

    let second = house.relay(house.broker.clone(), brisk());
    house.drained().await;
    second.stop().await.unwrap();
    let log = house.broker.log("orders");
    assert_eq!(log.len(), 2);
    assert_eq!(log[0], log[1]);
}

#[tokio::test]
async fn a_relay_that_may_wait_for_ever_sends_and_stops() {
    let house = House::new().await;
    house.enqueue(&numbered("k", "m", 2)).await;
    let config = brisk()
        .with_patience(Duration::MAX)
        .with_shutdown_deadline(Duration::MAX)
        .with_idle_poll_max(Duration::MAX);
    let relay = house.relay(house.broker.clone(), config);
    house.drained().await;
    relay.stop().await.unwrap();
    assert_eq!(house.ids("orders").len(), 2);
}

#[tokio::test]
async fn an_outage_burns_nothing_and_the_backlog_keeps_its_order() {
    let house = House::new().await;
    house.broker.set_available(false);
    let messages = numbered("k", "m", 20);
    house.enqueue(&messages[..5]).await;
    let relay = Relay::new(house.store.clone(), house.broker.clone()).with_config(brisk());
    let status = relay.status();
    let relay = Running::start(|stop| relay.run_until(stop));
    eventually(
        DEADLINE,
        "the relay says that the broker is down",
        || async { status.borrow().broker_down.is_some() },
    )
    .await;
    house.enqueue(&messages[5..]).await;
    house.broker.set_available(true);
    house.drained().await;
    eventually(DEADLINE, "the relay is well again", || async {
        status.borrow().broker_down.is_none()
    })
    .await;
    relay.stop().await.unwrap();
    let expected: Vec<String> = (0..20).map(|n| format!("m-{n}")).collect();
    assert_eq!(house.ids_of("k"), expected);
    assert_eq!(house.store.aside(10).await.unwrap(), 0);
}

#[tokio::test]
async fn a_refused_message_is_parked_and_stops_nobody() {
    let house = House::new().await;
    house.enqueue(&numbered("k", "m", 3)).await;
    let refusing = FaultyPublisher::new(house.broker.clone())
        .with_fault(2, Fault::Reject(RejectionScope::Message));
    let relay = house.relay(refusing, brisk());
    house.drained().await;
    relay.stop().await.unwrap();
    assert_eq!(house.ids_of("k"), ["m-0", "m-2"]);
    assert_eq!(house.store.aside(10).await.unwrap(), 1);
}

#[tokio::test]
async fn a_missing_destination_waits_while_others_flow() {
    let house = House::new().await;
    let mut lost = numbered("k", "lost", 30);
    for message in &mut lost {
        message.destination = "missing".into();
    }
    house.enqueue(&lost).await;
    house.enqueue(&numbered("k", "m", 5)).await;
    let relay = Relay::new(house.store.clone(), house.broker.clone())
        .with_config(brisk().with_batch_rows_max(16));
    let status = relay.status();
    let relay = Running::start(|stop| relay.run_until(stop));
    eventually(DEADLINE, "the good ones are out", || async {
        house.ids("orders").len() == 5
    })
    .await;
    eventually(DEADLINE, "the others make room for them", || async {
        house.pending().await == 0 && house.aside("waiting").await == 30
    })
    .await;
    eventually(DEADLINE, "the missing one is told of", || async {
        status.borrow().destinations_down.contains_key("missing")
    })
    .await;
    house.broker.create_topic("missing", 1).unwrap();
    house.drained().await;
    assert!(status.borrow().destinations_down.is_empty());
    relay.stop().await.unwrap();
    let expected: Vec<String> = (0..30).map(|n| format!("lost-{n}")).collect();
    assert_eq!(house.ids("missing"), expected);
    assert_eq!(house.store.aside(10).await.unwrap(), 0);
}

#[tokio::test]
async fn failing_heads_keep_their_key_in_order_and_other_keys_flow() {
    let house = House::new().await;
    for n in 0..10 {
        let one = |key: &str| numbered(key, key, 10).remove(n);
        house.enqueue(&[one("a"), one("b")]).await;
    }
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let failing = Altered::gap(
        FaultyPublisher::new(house.broker.clone()).with_random_faults(
            seed,
            30,
            Fault::Fail(FailureScope::Destination),
        ),
    );
    let config = brisk().with_backoff(relaybox::backoff::DelayPolicy::fixed(
        Duration::from_millis(1),
    ));
    let relay = house.relay(failing, config);
    house.drained().await;
    relay.stop().await.unwrap();
    for key in ["a", "b"] {
        let expected: Vec<String> = (0..10).map(|n| format!("{key}-{n}")).collect();
        assert_eq!(house.ids_of(key), expected);
    }
}

#[tokio::test]
async fn a_lost_confirm_costs_a_copy_and_keeps_the_order_of_first_appearances() {
    let house = House::new().await;
    house.enqueue(&numbered("k", "m", 6)).await;
    let losing =
        Altered::gap(FaultyPublisher::new(house.broker.clone()).with_fault(3, Fault::LoseConfirm));
    let relay = house.relay(losing, brisk());
    house.drained().await;
    relay.stop().await.unwrap();
    let mut ids = house.ids_of("k");
    assert_eq!(ids.len(), 7);
    ids.dedup();
    assert_eq!(ids, ["m-0", "m-1", "m-2", "m-3", "m-4", "m-5"]);
}

#[tokio::test]
async fn relays_started_together_send_everything_once() {
    let house = House::new().await;
    for n in 0..20 {
        house
            .enqueue(&numbered(&format!("k{n}"), &format!("k{n}"), 25))
            .await;
    }
    let relays: Vec<_> = (0..4)
        .map(|n| {
            house.relay(
                house.broker.clone(),
                brisk().with_batch_rows_max(50).with_workers(1 + n % 2),
            )
        })
        .collect();
    house.drained().await;
    for relay in relays {
        relay.stop().await.unwrap();
    }
    let mut ids = house.ids("orders");
    assert_eq!(ids.len(), 500);
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 500);
    for n in 0..20 {
        let expected: Vec<String> = (0..25).map(|m| format!("k{n}-{m}")).collect();
        assert_eq!(house.ids_of(&format!("k{n}")), expected);
    }
}

#[tokio::test]
async fn a_stop_waits_for_confirms_and_gives_the_lanes_back_at_once() {
    let house = House::new().await;
    house.enqueue(&numbered("k", "m", 3)).await;
    let (reached, release) = (Signal::new(), Signal::new());
    let hang = Fault::Hang {
        reached: reached.clone(),
        release: release.clone(),
    };
    let hanging = FaultyPublisher::new(house.broker.clone()).with_fault(1, hang);
    // A lease far longer than the test: only lanes that were given back can be taken over.
    let config = || RelayConfig::default().with_lease(Duration::from_secs(3_600));
    let first = house.relay(hanging, config());
    reached.wait().await;
    let stopping = tokio::spawn(first.stop());
    release.set();
    stopping.await.unwrap().unwrap();
    assert_eq!(house.pending().await, 0, "what was confirmed is marked");
    assert_eq!(house.ids("orders").len(), 3);

    house.enqueue(&numbered("k", "later", 1)).await;
    let second = house.relay(house.broker.clone(), config());
    house.drained().await;
    second.stop().await.unwrap();
}

#[tokio::test]
async fn what_is_unconfirmed_at_the_stop_deadline_stays_pending() {
    let house = House::new().await;
    house.enqueue(&numbered("k", "m", 1)).await;
    let reached = Signal::new();
    let hang = Fault::Hang {
        reached: reached.clone(),
        release: Signal::new(),
    };
    let hanging = FaultyPublisher::new(house.broker.clone()).with_fault(1, hang);
    let relay = house.relay(
        hanging,
        brisk().with_shutdown_deadline(Duration::from_millis(50)),
    );
    reached.wait().await;
    relay.stop().await.unwrap();
    // In one of both tables: on a slow machine it may have been given up waiting for.
    assert_eq!(
        house.pending().await + house.store.aside(9).await.unwrap(),
        1
    );
}

#[tokio::test]
async fn what_was_sent_is_kept_for_as_long_as_was_asked() {
    let mut house = House::new().await;
    house.store = house.store.with_keep_published(Duration::from_secs(3_600));
    house.enqueue(&numbered("k", "old", 1_200)).await;
    let relay = house.relay(house.broker.clone(), brisk());
    house.drained().await;
    relay.stop().await.unwrap();
    let kept = async || -> i64 {
        let count = "SELECT count(*) FROM relaybox_outbox_history";
        let counted = sqlx::query_scalar(count).fetch_one(house.store.pool());
        counted.await.unwrap()
    };
    assert_eq!(kept().await, 1_200);
    sqlx::query("UPDATE relaybox_outbox_history SET published_at = published_at - 3600000000")
        .execute(house.store.pool())
        .await
        .unwrap();

    house.enqueue(&numbered("k", "new", 10)).await;
    let relays = [(); 2].map(|()| house.relay(house.broker.clone(), brisk()));
    house.drained().await;
    eventually(DEADLINE, "what is old is gone", || async {
        kept().await == 10
    })
    .await;
    for relay in relays {
        relay.stop().await.unwrap();
    }
    assert_eq!(kept().await, 10);
    assert_eq!(house.ids("orders").len(), 1_210);
}

#[tokio::test]
async fn a_lease_that_a_publish_may_outlive_is_refused() {
    let house = House::new().await;
    let relay = house.relay(
        house.broker.clone(),
        RelayConfig::default().with_lease(Duration::from_secs(1)),
    );
    let error = relay.ended().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
    assert_eq!(error.violation().unwrap().field, "lease");
}

#[tokio::test]
async fn a_store_without_tables_is_an_error_at_start() {
    let directory = tempfile::tempdir().unwrap();
    let store = SqliteStore::connect(directory.path().join("empty.db"))
        .await
        .unwrap();
    let house = House::new().await;
    let relay = Relay::new(store, house.broker.clone()).with_config(brisk());
    let error = relay.run_until(std::future::pending()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}
