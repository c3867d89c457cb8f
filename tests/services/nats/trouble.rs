//! Servers that die, lines that break, confirmations that are lost.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_nats::jetstream::stream;
use relaybox::broker::{FailureScope, PublishOutcome, Stored};
use relaybox::consumer::{Consumer, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::store::sqlite::SqliteStore;
use relaybox::testing::eventually;
use relaybox_testcontainers::Proxy;
use sqlx::sqlite::SqliteConnection;
use tokio::sync::oneshot;

use super::*;

async fn proxied(url: &str) -> (Proxy, Nats) {
    let target = url.strip_prefix("nats://").unwrap().to_owned();
    let proxy = Proxy::start(target).await.unwrap();
    let through = format!("nats://{}", proxy.address());
    let nats = Nats::connect(config(through)).await.unwrap();
    (proxy, nats)
}

/// Publishes until every message is confirmed, as a relay would.
async fn until_all_confirmed(nats: &Nats, batch: &[Outgoing]) {
    let mut left: Vec<Outgoing> = batch.to_vec();
    within("confirmations", async {
        while !left.is_empty() {
            let outcomes = nats.publish(&left).await;
            let mut outcomes = outcomes.into_iter();
            left.retain(|_| {
                !outcomes
                    .next()
                    .is_some_and(|outcome| outcome.is_confirmed())
            });
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_confirmation_is_unknown_and_sending_again_stores_nothing_twice() {
    let url = shared_nats().await.url();
    let name = stream("unconfirmed").await;
    let (proxy, nats) = proxied(&url).await;
    publish_all(&nats, &[message(&name, "0")]).await;
    proxy.cut_after_from_server(0);
    let batch = [message(&name, "1")];
    let outcomes = publish(&nats, &batch).await;
    assert!(
        matches!(
            outcomes[0],
            PublishOutcome::Failed {
                stored: Stored::Unknown,
                ..
            }
        ),
        "{outcomes:?}"
    );
    eventually(DEADLINE, "it is stored", || async {
        stored(&url, &name).await == 2
    })
    .await;
    proxy.pass();
    until_all_confirmed(&nats, &batch).await;
    assert_eq!(stored(&url, &name).await, 2);
}

/// The client has room, so it would take the message and send it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_had_no_room_until_the_deadline_is_not_sent_after_it() {
    let url = shared_nats().await.url();
    let name = stream("late").await;
    let target = url.strip_prefix("nats://").unwrap().to_owned();
    let proxy = Proxy::start(target).await.unwrap();
    let through = format!("nats://{}", proxy.address());
    let narrow = config(through)
        .with_ping_interval(600 * SECOND)
        .with_in_flight_max(1);
    let nats = Nats::connect(narrow).await.unwrap();
    publish_all(&nats, &[message(&name, "0")]).await;
    proxy.blackhole();
    let outcomes = publish(&nats, &numbered(&name, 1..3)).await;
    let stored = outcomes.iter().map(|outcome| match outcome {
        PublishOutcome::Failed { stored, .. } => Some(*stored),
        _ => None,
    });
    let stored: Vec<_> = stored.collect();
    let expected = [Some(Stored::Unknown), Some(Stored::No)];
    assert_eq!(stored, expected, "{outcomes:?}");
}

/// The window ends by the clock, whatever was sent meanwhile. What is stored twice then is an effect once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sending_again_after_the_window_stores_it_twice_and_the_inbox_keeps_one_effect() {
    let url = shared_nats().await.url();
    let settings = stream::Config {
        duplicate_window: SECOND,
        // Less than the inbox remembers.
        max_age: 3_600 * SECOND,
        ..stream::Config::default()
    };
    let name = stream_with(&url, "window", settings).await;
    let nats = connect().await;
    let batch = [message(&name, "1")];
    publish_all(&nats, &batch).await;
    // Until the server has forgotten the id, which it does by its own clock.
    eventually(DEADLINE, "there are two copies", || async {
        publish_all(&nats, &batch).await;
        stored(&url, &name).await == 2
    })
    .await;

    let directory = tempfile::tempdir().unwrap();
    let store = SqliteStore::connect(directory.path().join("inbox.db"))
        .await
        .unwrap();
    store.migrate().await.unwrap();
    let effects = Arc::new(AtomicU64::new(0));
    let consumer = Consumer::new("billing", &name, nats.clone(), store);
    let (stop, stopped) = oneshot::channel::<()>();
    let handler = handler_fn(Arc::clone(&effects), effect);
    let running = tokio::spawn(consumer.run_until(handler, async {
        let _ = stopped.await;
    }));
    eventually(DEADLINE, "both are settled", || async {
        nats.lag("billing", &name)
            .await
            .is_ok_and(|lag| lag.messages == 0)
            && effects.load(Ordering::SeqCst) > 0
    })
    .await;
    assert_eq!(effects.load(Ordering::SeqCst), 1);
    drop(stop);
    within("the consumer ends", running).await.unwrap().unwrap();
}

async fn effect(
    effects: &Arc<AtomicU64>,
    _db: &mut SqliteConnection,
    _incoming: &Incoming,
) -> Outcome {
    effects.fetch_add(1, Ordering::SeqCst);
    Outcome::Done
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_killed_under_a_batch_loses_nothing_that_was_confirmed() {
    let server = server("").await;
    let nats = Nats::connect(config(server.url())).await.unwrap();
    let name = stream_with(&server.url(), "killed", stream::Config::default()).await;
    publish_all(&nats, &numbered(&name, 0..10)).await;
    let batch = numbered(&name, 10..3_000);
    let (outcomes, killed) = tokio::join!(publish(&nats, &batch), server.kill());
    killed.unwrap();
    let confirmed = outcomes.iter().filter(|o| o.is_confirmed()).count();
    println!(
        "{confirmed} of {} were confirmed before the end",
        batch.len()
    );
    for outcome in &outcomes {
        let fine = matches!(
            outcome,
            PublishOutcome::Confirmed | PublishOutcome::Failed { .. }
        );
        assert!(fine, "{outcome:?}");
    }
    server.start_again().await.unwrap();
    let mut outcomes = outcomes.into_iter();
    let mut left = batch.clone();
    left.retain(|_| {
        !outcomes
            .next()
            .is_some_and(|outcome| outcome.is_confirmed())
    });
    until_all_confirmed(&nats, &left).await;
    let mut subscription = subscribe(&nats, request("reader", &name)).await;
    let mut seen = BTreeSet::new();
    while seen.len() < 3_000 {
        for delivery in receive(&mut subscription, 1).await {
            seen.insert(text(&delivery));
            acknowledge(delivery).await;
        }
    }
}

/// The client would keep such messages and send them at some time after their outcome was told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_server_is_away_nothing_is_kept_to_be_sent_later() {
    let server = server("").await;
    let nats = Nats::connect(config(server.url())).await.unwrap();
    let name = stream_with(&server.url(), "away", stream::Config::default()).await;
    server.kill().await.unwrap();
    eventually(DEADLINE, "the loss is seen", || async {
        !nats.health().is_up()
    })
    .await;
    let outcomes = publish(&nats, &[message(&name, "never")]).await;
    assert!(
        matches!(
            outcomes[0],
            PublishOutcome::Failed {
                scope: FailureScope::Broker,
                stored: Stored::No,
                ..
            }
        ),
        "{outcomes:?}"
    );
    server.start_again().await.unwrap();
    until_all_confirmed(&nats, &[message(&name, "0")]).await;
    assert_eq!(stored(&server.url(), &name).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deliveries_go_on_after_the_server_is_killed_and_restarted() {
    let server = server("").await;
    let nats = Nats::connect(config(server.url())).await.unwrap();
    let name = stream_with(&server.url(), "restarted", stream::Config::default()).await;
    let mut subscription = subscribe(&nats, request("reader", &name)).await;
    for round in 0..3 {
        let sent = message(&name, round.to_string());
        until_all_confirmed(&nats, &[sent]).await;
        loop {
            let delivery = receive(&mut subscription, 1).await.remove(0);
            let number = text(&delivery);
            acknowledge(delivery).await;
            if number == round.to_string() {
                break;
            }
        }
        if round == 0 {
            server.kill().await.unwrap();
            server.start_again().await.unwrap();
        } else {
            server.restart().await.unwrap();
        }
    }
    eventually(DEADLINE, "all is up", || async {
        nats.health().is_up() && subscription.health().is_up()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_keeps_to_its_deadline_with_the_server_gone() {
    let server = server("").await;
    let nats = Nats::connect(config(server.url())).await.unwrap();
    let name = stream_with(&server.url(), "closing", stream::Config::default()).await;
    publish_all(&nats, &numbered(&name, 0..2)).await;
    let mut subscription = subscribe(&nats, request("reader", &name)).await;
    let mut held = receive(&mut subscription, 2).await;
    acknowledge(held.remove(0)).await;
    server.stop().await.unwrap();
    let closed = within("a close", subscription.close(2 * SECOND)).await;
    // Whether the acknowledgement arrived is not known, unless it was confirmed before the stop.
    println!("closed: {closed:?}");
    within("a close", nats.close(2 * SECOND)).await.ok();
    server.cont().await.unwrap();
    let again = Nats::connect(config(server.url())).await.unwrap();
    let mut subscription = subscribe(&again, request("reader", &name)).await;
    let delivery = receive(&mut subscription, 1).await.remove(0);
    assert_eq!(text(&delivery), "1");
}
