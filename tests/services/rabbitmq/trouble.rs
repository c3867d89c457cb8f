//! A node that raises an alarm, closes connections, restarts or ends.

use std::time::Duration;

use relaybox::broker::rabbitmq::RabbitMq;
use relaybox::broker::{
    ConnectionState, FailureScope, PublishOutcome, Publisher, Settlement, Stored,
};
use relaybox_testcontainers as services;

use super::{
    SECOND, acknowledge, config, consumers, eventually, message, own_node, publish, publish_all,
    queue, raw, receive, request, subscribe, take, text, until_confirmed, within,
};

async fn on(node: &services::RabbitMq) -> RabbitMq {
    RabbitMq::connect(config(node.url())).await.unwrap()
}

#[tokio::test]
async fn an_alarm_fails_publishing_at_once_and_consuming_goes_on() {
    let node = own_node().await;
    let rabbitmq = on(&node).await;
    let name = queue(&rabbitmq, "orders").await;
    let batch: Vec<_> = (0..20).map(|n| message(&name, n.to_string())).collect();
    publish_all(&rabbitmq, &batch).await;
    node.block().await.unwrap();
    // The broker tells a connection when it publishes.
    eventually("the alarm is told", || async {
        let outcomes = publish(&rabbitmq, &[message(&name, "during")]).await;
        assert!(matches!(
            &outcomes[0],
            PublishOutcome::Confirmed
                | PublishOutcome::Failed {
                    scope: FailureScope::Broker,
                    ..
                }
        ));
        rabbitmq.health().state == ConnectionState::Blocked
    })
    .await;
    let outcomes = publish(&rabbitmq, &batch).await;
    let not_written = outcomes.iter().all(|outcome| {
        matches!(
            outcome,
            PublishOutcome::Failed {
                scope: FailureScope::Broker,
                stored: Stored::No,
                ..
            }
        )
    });
    assert!(not_written, "{outcomes:?}");
    // However often, and for as many queues as never had a channel: at once, and for this reason.
    for turn in 0..12 {
        let batch = [message(&name, "0"), message(&format!("{name}-{turn}"), "0")];
        for outcome in publish(&rabbitmq, &batch).await {
            assert!(format!("{outcome:?}").contains("alarm"), "{outcome:?}");
        }
    }

    let mut subscription = subscribe(&rabbitmq, request(&name)).await;
    assert_eq!(take(&mut subscription, 20).await.len(), 20);
    assert!(subscription.health().is_up());
    within("a close", subscription.close(10 * SECOND))
        .await
        .unwrap();

    node.unblock().await.unwrap();
    until_confirmed(&rabbitmq, &message(&name, "after")).await;
    assert!(rabbitmq.health().is_up());
}

#[tokio::test]
async fn connections_closed_in_the_middle_lose_nothing() {
    let node = own_node().await;
    let rabbitmq = on(&node).await;
    let name = queue(&rabbitmq, "orders").await;
    let mut subscription = subscribe(&rabbitmq, request(&name)).await;
    let mut left: Vec<_> = (0..4_000).map(|n| message(&name, n.to_string())).collect();
    let mut confirmed = Vec::new();
    let closing = async {
        for _ in 0..2 {
            node.close_all_connections().await.unwrap();
        }
    };
    let publishing = async {
        while !left.is_empty() {
            let outcomes = publish(&rabbitmq, &left).await;
            let mut outcomes = outcomes.iter();
            left.retain(|sent| {
                let done = outcomes.next().unwrap().is_confirmed();
                if done {
                    confirmed.push(sent.message.id.clone());
                }
                !done
            });
            tokio::task::yield_now().await;
        }
    };
    let consuming = async {
        let mut seen = std::collections::HashSet::new();
        while seen.len() < 4_000 {
            for delivery in receive(&mut subscription, 1).await {
                seen.insert(delivery.incoming.message.id.clone());
                drop(delivery.receipt.settle(Settlement::Acknowledge).await);
            }
        }
        seen
    };
    let (_, (), seen) = within("all of it", async {
        tokio::join!(closing, publishing, consuming)
    })
    .await;
    assert!(confirmed.iter().all(|id| seen.contains(id)));
}

#[tokio::test]
async fn after_each_restart_exactly_one_consumer_is_attached() {
    let node = own_node().await;
    let rabbitmq = on(&node).await;
    let name = queue(&rabbitmq, "orders").await;
    let mut subscription = subscribe(&rabbitmq, request(&name)).await;
    for turn in 0..3 {
        if turn == 1 {
            node.kill().await.unwrap();
            node.start_again().await.unwrap();
        } else {
            node.restart().await.unwrap();
        }
        let sent = message(&name, turn.to_string());
        until_confirmed(&rabbitmq, &sent).await;
        // Sent again where its confirm was lost.
        while take(&mut subscription, 1).await != [turn.to_string()] {}
        let channel = raw(&node.url()).await;
        assert_eq!(consumers(&channel, &name).await, 1);
        assert!(subscription.health().is_up());
    }
}

#[tokio::test]
async fn a_late_acknowledgement_of_an_old_channel_does_nothing() {
    let node = own_node().await;
    let rabbitmq = on(&node).await;
    let name = queue(&rabbitmq, "orders").await;
    let mut subscription = subscribe(&rabbitmq, request(&name)).await;
    publish_all(&rabbitmq, &[message(&name, "0"), message(&name, "1")]).await;
    let held = receive(&mut subscription, 2).await;
    node.close_all_connections().await.unwrap();
    let current = || async { held.iter().all(|delivery| !delivery.receipt.is_current()) };
    eventually("the receipts are void", current).await;
    let again = receive(&mut subscription, 2).await;
    assert!(again.iter().all(|delivery| delivery.redelivered));
    for delivery in held {
        acknowledge(delivery).await;
    }
    // A tag of the old channel sent on the new one would have acknowledged or closed it.
    assert!(again.iter().all(|delivery| delivery.receipt.is_current()));
    for delivery in again {
        acknowledge(delivery).await;
    }
    until_confirmed(&rabbitmq, &message(&name, "2")).await;
    assert_eq!(take(&mut subscription, 1).await, ["2"]);
}

#[tokio::test]
async fn a_delivery_held_beyond_the_brokers_patience_comes_again() {
    let node = own_node().await;
    let eval = "application:set_env(rabbit, consumer_timeout, 1000), \
                application:set_env(rabbit, channel_tick_interval, 500).";
    node.ctl(&["eval", eval]).await.unwrap();
    let rabbitmq = on(&node).await;
    let name = queue(&rabbitmq, "orders").await;
    let mut subscription = subscribe(&rabbitmq, request(&name)).await;
    publish_all(&rabbitmq, &[message(&name, "0")]).await;
    let held = receive(&mut subscription, 1).await.remove(0);
    let again = receive(&mut subscription, 1).await.remove(0);
    assert!(again.redelivered);
    assert_eq!(text(&again), "0");
    assert!(!held.receipt.is_current());
    acknowledge(held).await;
}

/// Foreign text in a field that the protocol wants in UTF-8 ends the connection on which it comes.
#[tokio::test]
async fn a_message_that_cannot_be_read_is_told_and_costs_no_others() {
    let node = own_node().await;
    let rabbitmq = on(&node).await;
    let name = queue(&rabbitmq, "orders").await;
    let batch: Vec<_> = (0..3).map(|n| message(&name, n.to_string())).collect();
    publish_all(&rabbitmq, &batch).await;
    let latin = format!(
        "rabbit_basic:publish(rabbit_misc:r(<<\"/\">>, exchange, <<>>), <<\"{name}\">>, \
         [{{message_id, <<255>>}}], <<\"x\">>)."
    );
    node.ctl(&["eval", &latin]).await.unwrap();
    let mut subscription = subscribe(&rabbitmq, request(&name)).await;
    let unread = || async {
        let health = subscription.health().detail.unwrap_or_default();
        health.contains(&name) && health.contains("parse")
    };
    eventually("it is told", unread).await;
    // One at a time, what is in front of it is handled.
    for number in ["0", "1", "2"] {
        assert_eq!(take(&mut subscription, 1).await, [number]);
    }
}

#[tokio::test]
async fn a_stopped_node_ends_every_call_in_time() {
    let node = own_node().await;
    let rabbitmq = on(&node).await;
    let name = queue(&rabbitmq, "orders").await;
    let subscription = subscribe(&rabbitmq, request(&name)).await;
    publish_all(&rabbitmq, &[message(&name, "0")]).await;
    node.stop().await.unwrap();
    let outcomes = publish(&rabbitmq, &[message(&name, "1")]).await;
    assert!(matches!(&outcomes[0], PublishOutcome::Failed { .. }));
    let short = Duration::from_millis(500);
    // A connection that was given up already owes no answer.
    let is_lost = !subscription.health().is_up();
    let closed = within("a close", subscription.close(short)).await;
    assert!(is_lost || closed.is_err());
    within("a close", rabbitmq.close(short)).await.unwrap();
    assert_eq!(rabbitmq.health().state, ConnectionState::Closed);
    node.cont().await.unwrap();
}
