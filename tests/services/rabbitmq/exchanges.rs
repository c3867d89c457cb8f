//! Destinations through exchanges of every kind.

use relaybox::Message;
use relaybox::broker::rabbitmq::{ExchangeKind, QueueKind, RabbitMq};
use relaybox::broker::{PublishOutcome, Publisher, RejectionScope, Subscriber};
use relaybox_testcontainers::{shared_rabbitmq, unique_name};

use super::{config, connect, message, publish, publish_all, queue, request, subscribe, take};

fn is_unroutable(outcome: &PublishOutcome) -> bool {
    matches!(
        outcome,
        PublishOutcome::Rejected {
            scope: RejectionScope::Destination,
            error
        } if error.to_string().contains("unroutable")
    )
}

#[tokio::test]
async fn an_unroutable_message_is_refused_until_a_binding_is_added() {
    let rabbitmq = connect().await;
    let exchange = unique_name("events");
    rabbitmq
        .declare_exchange(&exchange, ExchangeKind::Topic)
        .await
        .unwrap();
    let batch = [message(&format!("{exchange}/order.placed"), "1")];
    let outcomes = publish(&rabbitmq, &batch).await;
    assert!(is_unroutable(&outcomes[0]), "{outcomes:?}");

    let queue = queue(&rabbitmq, "orders").await;
    rabbitmq
        .bind(&queue, &exchange, "order.*", &[])
        .await
        .unwrap();
    publish_all(&rabbitmq, &batch).await;
    let mut subscription = subscribe(&rabbitmq, request(&queue)).await;
    assert_eq!(take(&mut subscription, 1).await, ["1"]);
}

/// The client hands returned messages to the wrong confirms, and the broker confirms many at once. A classic queue confirms
/// together with what was returned, a quorum queue later.
#[tokio::test]
async fn of_many_in_one_run_exactly_the_unroutable_are_refused() {
    let rabbitmq = connect().await;
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for kind in [QueueKind::Classic, QueueKind::Quorum] {
        let exchange = unique_name("events");
        rabbitmq
            .declare_exchange(&exchange, ExchangeKind::Direct)
            .await
            .unwrap();
        let queue = unique_name("orders");
        rabbitmq.declare_queue(&queue, kind).await.unwrap();
        rabbitmq
            .bind(&queue, &exchange, "bound", &[])
            .await
            .unwrap();
        let bound: Vec<bool> = (0..900).map(|_| random.bool()).collect();
        let batch: Vec<_> = bound
            .iter()
            .enumerate()
            .map(|(n, bound)| {
                let key = if *bound { "bound" } else { "nobody" };
                message(&format!("{exchange}/{key}"), n.to_string())
            })
            .collect();
        let outcomes = publish(&rabbitmq, &batch).await;
        for ((n, bound), outcome) in bound.iter().enumerate().zip(&outcomes) {
            assert_eq!(outcome.is_confirmed(), *bound, "{n}: {outcome:?}");
            assert!(*bound || is_unroutable(outcome), "{n}: {outcome:?}");
        }
        let depth = rabbitmq.depth(&queue).await.unwrap();
        let stored = bound.iter().filter(|bound| **bound).count();
        assert_eq!(depth.messages, stored as u64);
    }
}

/// With one key for all of them each would get every message.
#[tokio::test]
async fn a_name_with_shards_is_not_bound_as_one() {
    let name = unique_name("sharded");
    let url = shared_rabbitmq().await.url();
    let rabbitmq = RabbitMq::connect(config(url).with_shards(&name, 2))
        .await
        .unwrap();
    rabbitmq
        .declare_queue(&name, QueueKind::Quorum)
        .await
        .unwrap();
    let exchange = unique_name("events");
    rabbitmq
        .declare_exchange(&exchange, ExchangeKind::Direct)
        .await
        .unwrap();
    let refused = rabbitmq.bind(&name, &exchange, "k", &[]).await.unwrap_err();
    assert_eq!(refused.violation().unwrap().field, "queue");
    rabbitmq
        .bind(&format!("{name}.0"), &exchange, "k", &[])
        .await
        .unwrap();
    publish_all(&rabbitmq, &[message(&format!("{exchange}/k"), "0")]).await;
    assert_eq!(rabbitmq.depth(&name).await.unwrap().messages, 1);
}

#[tokio::test]
async fn every_kind_of_exchange_routes() {
    let rabbitmq = connect().await;
    let of = |kind| {
        let rabbitmq = &rabbitmq;
        async move {
            let exchange = unique_name("exchange");
            rabbitmq.declare_exchange(&exchange, kind).await.unwrap();
            let queues = [
                queue(rabbitmq, "first").await,
                queue(rabbitmq, "second").await,
            ];
            (exchange, queues)
        }
    };
    let (direct, [first, second]) = of(ExchangeKind::Direct).await;
    rabbitmq.bind(&first, &direct, "a", &[]).await.unwrap();
    rabbitmq.bind(&second, &direct, "b", &[]).await.unwrap();
    publish_all(&rabbitmq, &[message(&format!("{direct}/b"), "b")]).await;
    let count = |queue: String| {
        let rabbitmq = &rabbitmq;
        async move { rabbitmq.depth(&queue).await.unwrap().messages }
    };
    assert_eq!((count(first).await, count(second).await), (0, 1));

    let (topic, [first, second]) = of(ExchangeKind::Topic).await;
    rabbitmq.bind(&first, &topic, "order.#", &[]).await.unwrap();
    rabbitmq
        .bind(&second, &topic, "*.placed", &[])
        .await
        .unwrap();
    let name = format!("{topic}/order.placed");
    publish_all(&rabbitmq, &[message(&name, "1")]).await;
    publish_all(&rabbitmq, &[message(&format!("{topic}/order.a.b"), "2")]).await;
    assert_eq!((count(first).await, count(second).await), (2, 1));

    let (fanout, [first, second]) = of(ExchangeKind::Fanout).await;
    rabbitmq.bind(&first, &fanout, "", &[]).await.unwrap();
    rabbitmq.bind(&second, &fanout, "", &[]).await.unwrap();
    publish_all(&rabbitmq, &[message(&format!("{fanout}/"), "1")]).await;
    assert_eq!((count(first).await, count(second).await), (1, 1));

    let (by_headers, [first, second]) = of(ExchangeKind::Headers).await;
    let acme = [("x-match", "all"), ("tenant", "acme")];
    rabbitmq.bind(&first, &by_headers, "", &acme).await.unwrap();
    let other = [("x-match", "all"), ("tenant", "other")];
    rabbitmq
        .bind(&second, &by_headers, "", &other)
        .await
        .unwrap();
    let sent = Message::new(format!("{by_headers}/"), "T").with_header("tenant", "acme");
    publish_all(&rabbitmq, &[sent.into()]).await;
    assert_eq!((count(first).await, count(second).await), (1, 0));
}

#[tokio::test]
async fn a_missing_exchange_refuses_its_messages_and_no_others() {
    let rabbitmq = connect().await;
    let queue = queue(&rabbitmq, "orders").await;
    let missing = unique_name("missing");
    let batch = [
        message(&queue, "0"),
        message(&format!("{missing}/a"), "1"),
        message(&format!("{missing}/b"), "2"),
        message(&queue, "3"),
    ];
    let outcomes = publish(&rabbitmq, &batch).await;
    let refused = |outcome: &PublishOutcome| {
        matches!(
            outcome,
            PublishOutcome::Rejected {
                scope: RejectionScope::Destination,
                ..
            }
        )
    };
    assert!(
        outcomes[0].is_confirmed() && outcomes[3].is_confirmed(),
        "{outcomes:?}"
    );
    assert!(
        refused(&outcomes[1]) && refused(&outcomes[2]),
        "{outcomes:?}"
    );
    let asked = [format!("{missing}/a"), queue];
    let error = rabbitmq.check(&asked).await.unwrap_err();
    assert!(error.to_string().contains(&missing), "{error}");
}

#[tokio::test]
async fn what_is_there_with_other_settings_is_named() {
    let rabbitmq = connect().await;
    let queue = queue(&rabbitmq, "orders").await;
    rabbitmq
        .declare_queue(&queue, QueueKind::Quorum)
        .await
        .unwrap();
    let error = rabbitmq
        .declare_queue(&queue, QueueKind::Classic)
        .await
        .unwrap_err();
    let text = error.to_string();
    for part in [&*queue, "x-queue-type", "classic", "quorum"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

/// The broker sends a message on to whatever a table of these names lists.
#[tokio::test]
async fn headers_that_route_elsewhere_never_route() {
    let rabbitmq = connect().await;
    let (queue, other) = (
        queue(&rabbitmq, "orders").await,
        queue(&rabbitmq, "other").await,
    );
    let names = ["CC", "BCC", "cc", "x-delay", "x-death"];
    let sent = names.iter().fold(Message::new(&queue, "T"), |sent, name| {
        // Twice, since only an array routes.
        sent.with_header(*name, other.clone())
            .with_header(*name, other.clone())
    });
    publish_all(&rabbitmq, &[sent.clone().into()]).await;
    let mut subscription = subscribe(&rabbitmq, request(&queue)).await;
    let delivery = super::receive(&mut subscription, 1).await.remove(0);
    assert_eq!(delivery.incoming.message, sent);
    assert_eq!(rabbitmq.depth(&other).await.unwrap().messages, 0);
}
