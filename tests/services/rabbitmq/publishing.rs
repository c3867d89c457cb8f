//! Refusals and limits.

use std::future::poll_fn;
use std::task::Poll;

use lapin::types::AMQPValue;
use relaybox::Message;
use relaybox::broker::rabbitmq::{QueueKind, RabbitMq, RabbitMqConfig};
use relaybox::broker::{self, FailureScope, PublishOutcome, Publisher, RejectionScope, Stored};
use relaybox_testcontainers::{Proxy, shared_rabbitmq, unique_name};

use super::{
    SECOND, config, connect, eventually, message, publish, publish_all, queue, raw, raw_queue,
    request, subscribe, take, until_confirmed,
};

#[tokio::test]
async fn a_full_queue_refuses_and_takes_again_once_there_is_room() {
    let rabbitmq = connect().await;
    let name = unique_name("full");
    let channel = raw(&shared_rabbitmq().await.url()).await;
    let arguments = [
        ("x-max-length", AMQPValue::LongInt(10)),
        ("x-overflow", AMQPValue::LongString("reject-publish".into())),
    ];
    raw_queue(&channel, &name, &arguments).await;
    let batch: Vec<_> = (0..15).map(|n| message(&name, n.to_string())).collect();
    let outcomes = publish(&rabbitmq, &batch).await;
    let confirmed = outcomes.iter().filter(|o| o.is_confirmed()).count();
    assert_eq!(confirmed, 10, "{outcomes:?}");
    for outcome in outcomes.iter().filter(|outcome| !outcome.is_confirmed()) {
        let refused = matches!(
            outcome,
            PublishOutcome::Failed {
                scope: FailureScope::Destination,
                stored: Stored::Unknown,
                ..
            }
        );
        assert!(refused, "{outcome:?}");
    }
    let mut subscription = subscribe(&rabbitmq, request(&name)).await;
    let mut seen = take(&mut subscription, 10).await;
    for (sent, outcome) in batch.iter().zip(&outcomes) {
        if !outcome.is_confirmed() {
            until_confirmed(&rabbitmq, sent).await;
        }
    }
    seen.extend(take(&mut subscription, 5).await);
    seen.sort_by_key(|n| n.parse::<u32>().unwrap());
    let all: Vec<_> = (0..15).map(|n| n.to_string()).collect();
    assert_eq!(seen, all);
}

#[tokio::test]
async fn an_oversized_and_an_unroutable_message_harm_no_others() {
    let rabbitmq = connect().await;
    let name = queue(&rabbitmq, "orders").await;
    let large = vec![b'x'; rabbitmq.capabilities().limits.message_bytes_max + 128 * 1_024];
    let batch = [
        message(&name, "0"),
        Message::new(&name, "T").with_payload(large).into(),
        message(&unique_name("missing"), "2"),
        message(&name, "3"),
    ];
    let outcomes = publish(&rabbitmq, &batch).await;
    assert!(outcomes[0].is_confirmed(), "{outcomes:?}");
    assert!(outcomes[3].is_confirmed(), "{outcomes:?}");
    for (at, blamed) in [
        (1, RejectionScope::Message),
        (2, RejectionScope::Destination),
    ] {
        let refused =
            matches!(&outcomes[at], PublishOutcome::Rejected { scope, .. } if *scope == blamed);
        assert!(refused, "{outcomes:?}");
    }
}

/// The largest message that the limits allow passes, in many frames.
#[tokio::test]
async fn a_message_of_the_largest_size_passes() {
    let rabbitmq = connect().await;
    let name = queue(&rabbitmq, "large").await;
    let limits = rabbitmq.capabilities().limits;
    let mut sent = Message::new(&name, "T").with_header("h", "x".repeat(30 * 1_024));
    sent.payload = Some(vec![b'x'; limits.message_bytes_max - sent.bytes()].into());
    sent.validate(&limits).unwrap();
    (rabbitmq.capabilities().refuse)(&sent).unwrap();
    publish_all(&rabbitmq, &[sent.clone().into()]).await;
    let mut subscription = subscribe(&rabbitmq, request(&name)).await;
    let delivery = super::receive(&mut subscription, 1).await.remove(0);
    assert_eq!(delivery.incoming.message, sent);
}

/// The broker would close the whole connection.
#[tokio::test]
async fn headers_over_a_frame_are_refused_before_a_byte_is_sent() {
    let url = format!("{}?frame_max=8192", shared_rabbitmq().await.url());
    let rabbitmq = RabbitMq::connect(config(url)).await.unwrap();
    let name = queue(&rabbitmq, "frames").await;
    let large = Message::new(&name, "T").with_header("h", "x".repeat(9_000));
    let batch = [
        message(&name, "0"),
        large.into(),
        message(&name, "2".repeat(20_000)),
    ];
    let outcomes = publish(&rabbitmq, &batch).await;
    assert!(outcomes[0].is_confirmed(), "{outcomes:?}");
    assert!(outcomes[2].is_confirmed(), "{outcomes:?}");
    let refused = matches!(
        &outcomes[1],
        PublishOutcome::Rejected {
            scope: RejectionScope::Message,
            error
        } if error.violation().is_some_and(|violation| violation.field == "headers")
    );
    assert!(refused, "{outcomes:?}");
}

/// The broker stores, and its word is lost.
#[tokio::test]
async fn what_is_stored_and_not_confirmed_is_unknown() {
    let shared = shared_rabbitmq().await;
    let proxy = Proxy::start(shared.address()).await.unwrap();
    let url = shared.url_by(&proxy.address());
    let rabbitmq = RabbitMq::connect(config(url)).await.unwrap();
    let direct = connect().await;
    let name = queue(&direct, "orders").await;
    publish_all(&rabbitmq, &[message(&name, "0")]).await;
    proxy.cut_after_from_server(0);
    let batch = [message(&name, "1")];
    let outcomes = publish(&rabbitmq, &batch).await;
    let unknown = matches!(
        &outcomes[0],
        PublishOutcome::Failed {
            stored: Stored::Unknown,
            ..
        }
    );
    assert!(unknown, "{outcomes:?}");
    let mut subscription = subscribe(&direct, request(&name)).await;
    assert_eq!(take(&mut subscription, 2).await, ["0", "1"]);
    proxy.pass();
    until_confirmed(&rabbitmq, &batch[0]).await;
    let again = super::receive(&mut subscription, 1).await.remove(0);
    assert_eq!(again.incoming.message.id, batch[0].message.id);
}

/// Nothing refuses at the first: its silence must not take the time of the second.
#[tokio::test]
async fn a_silent_first_address_leaves_time_for_the_second() {
    let shared = shared_rabbitmq().await;
    let proxy = Proxy::start(shared.address()).await.unwrap();
    proxy.blackhole();
    let config = config(shared.url_by(&proxy.address())).with_url(shared.url());
    let rabbitmq = RabbitMq::connect(config).await.unwrap();
    let name = queue(&rabbitmq, "orders").await;
    publish_all(&rabbitmq, &[message(&name, "0")]).await;
}

/// What waits to be written when a call is given up is written all the same, and harms nobody on the connection.
#[tokio::test]
async fn calls_given_up_in_the_middle_harm_no_others() {
    const CALLS: usize = 24;
    let shared = shared_rabbitmq().await;
    let proxy = Proxy::start(shared.address()).await.unwrap();
    let config = RabbitMqConfig::new(shared.url_by(&proxy.address()))
        .with_heartbeat(60 * SECOND)
        .with_channels(CALLS);
    let rabbitmq = RabbitMq::connect(config).await.unwrap();
    let direct = connect().await;
    let prefix = unique_name("given-up");
    let mut each = Vec::new();
    for number in 0..CALLS {
        let name = format!("{prefix}-{number}");
        direct
            .declare_queue(&name, QueueKind::Classic)
            .await
            .unwrap();
        each.push(message(&name, "0"));
    }
    // As many idle channels as calls.
    publish_all(&rabbitmq, &each).await;
    let before = proxy.connections();
    let name = &each[0].message.destination;
    let large = "x".repeat(512 * 1_024);
    let batch = [message(name, large.clone()), message(name, large)];
    // More than all buffers on the way hold.
    proxy.blackhole();
    for _ in 0..CALLS {
        let mut call = Box::pin(rabbitmq.publish(&batch));
        let begun = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
        assert!(begun.is_pending());
    }
    proxy.pass();
    until_confirmed(&rabbitmq, &each[1]).await;
    eventually("all are there", || async {
        broker::Subscriber::depth(&direct, name)
            .await
            .unwrap()
            .messages
            == 1 + 2 * CALLS as u64
    })
    .await;
    publish_all(&rabbitmq, &each).await;
    assert_eq!(proxy.connections(), before);
}

#[tokio::test]
async fn a_second_address_is_tried() {
    let config = config("amqp://guest:guest@127.0.0.1:9/%2f".to_owned())
        .with_url(shared_rabbitmq().await.url());
    let rabbitmq = RabbitMq::connect(config).await.unwrap();
    let name = queue(&rabbitmq, "orders").await;
    publish_all(&rabbitmq, &[message(&name, "0")]).await;
    rabbitmq.close(SECOND).await.unwrap();
    let outcomes = publish(&rabbitmq, &[message(&name, "1")]).await;
    let closed = matches!(
        &outcomes[0],
        PublishOutcome::Failed {
            stored: Stored::No,
            ..
        }
    );
    assert!(closed, "{outcomes:?}");
}
