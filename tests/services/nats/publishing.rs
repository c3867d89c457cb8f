//! To a real server: refusals, limits, ids.

use std::time::Instant;

use async_nats::jetstream::stream::{self, DiscardPolicy};
use futures_util::StreamExt as _;
use relaybox::broker::{FailureScope, PublishOutcome, RejectionScope, Stored};
use relaybox::{ErrorKind, Message};

use super::*;

/// A plain subscriber, of which the server knows.
async fn listen(url: &str, subject: &str) -> async_nats::Subscriber {
    let context = client(url).await;
    let heard = context.client().subscribe(subject.to_owned()).await;
    // Over the same connection: its answer comes after the subscription was taken.
    let nothing = serde_json::json!({});
    let answer: serde_json::Value = context.request("INFO", &nothing).await.unwrap();
    assert!(answer.get("error").is_none(), "{answer}");
    heard.unwrap()
}

fn rejection(outcome: &PublishOutcome) -> Option<(RejectionScope, ErrorKind)> {
    match outcome {
        PublishOutcome::Rejected { scope, error } => Some((*scope, error.kind())),
        _ => None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subject_without_a_stream_is_refused_and_delivered_once_there_is_one() {
    let nats = connect().await;
    let subject = unique_name("late");
    let outcomes = publish(&nats, &[message(&subject, "0")]).await;
    let expected = (RejectionScope::Destination, ErrorKind::NotFound);
    assert_eq!(rejection(&outcomes[0]), Some(expected), "{outcomes:?}");
    nats.create_stream(&subject, [&subject]).await.unwrap();
    publish_all(&nats, &[message(&subject, "0")]).await;
    let mut subscription = subscribe(&nats, request("late", &subject)).await;
    assert_eq!(texts(&receive(&mut subscription, 1).await), ["0"]);
}

/// A plain subscriber answers nothing, so the server does not say that no stream is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn somebody_who_only_listens_is_not_taken_for_a_stream() {
    let nats = connect().await;
    let subject = unique_name("overheard");
    let _heard = listen(&shared_nats().await.url(), &subject).await;
    let outcomes = publish(&nats, &[message(&subject, "0")]).await;
    assert!(
        matches!(
            outcomes[0],
            PublishOutcome::Failed {
                scope: FailureScope::Destination,
                stored: Stored::Unknown,
                ..
            }
        ),
        "{outcomes:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_configured_stream_is_the_scope_and_no_other_may_store_its_messages() {
    let url = shared_nats().await.url();
    let (real, configured) = (stream("real").await, unique_name("configured"));
    let wrong = config(&url).with_stream(&configured, [&real]);
    let nats = Nats::connect(wrong).await.unwrap();
    assert_eq!(nats.scope(&real), configured);
    assert_eq!(nats.scope("orders.placed"), "orders");
    let outcomes = publish(&nats, &[message(&real, "0")]).await;
    assert_eq!(
        rejection(&outcomes[0]).map(|(scope, _)| scope),
        Some(RejectionScope::Destination),
        "{outcomes:?}"
    );
    assert_eq!(stored(&url, &real).await, 0);
    let right = config(&url).with_stream(&real, [&real]);
    publish_all(&Nats::connect(right).await.unwrap(), &[message(&real, "0")]).await;
    assert_eq!(stored(&url, &real).await, 1);
}

/// `discard: new` keeps what is there; the messages stay with the relay until there is room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_stream_stores_nothing_and_takes_more_once_it_is_drained() {
    let nats = connect().await;
    let url = shared_nats().await.url();
    let settings = stream::Config {
        max_messages: 2,
        discard: DiscardPolicy::New,
        ..stream::Config::default()
    };
    let name = stream_with(&url, "full", settings).await;
    let batch = numbered(&name, 0..4);
    let outcomes = publish(&nats, &batch).await;
    assert!(outcomes[..2].iter().all(PublishOutcome::is_confirmed));
    for outcome in &outcomes[2..] {
        assert!(
            matches!(
                outcome,
                PublishOutcome::Failed {
                    scope: FailureScope::Destination,
                    stored: Stored::No,
                    ..
                }
            ),
            "{outcome:?}"
        );
    }
    let stream = client(&url).await.get_stream(&name).await.unwrap();
    stream.purge().await.unwrap();
    publish_all(&nats, &batch[2..]).await;
    assert_eq!(stored(&url, &name).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_sent_again_within_the_window_is_stored_once() {
    let nats = connect().await;
    let name = stream("twice").await;
    let batch = numbered(&name, 0..3);
    publish_all(&nats, &batch).await;
    publish_all(&nats, &batch).await;
    assert_eq!(stored(&shared_nats().await.url(), &name).await, 3);
}

/// Senders repeat ids, and what the server takes for a repetition it confirms and drops.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_messages_of_one_id_are_both_stored_and_each_once() {
    let nats = connect().await;
    let name = stream("one-id").await;
    let mut batch = numbered(&name, 0..2);
    batch[1].message.id = batch[0].message.id.clone();
    let copies = batch.clone().into_iter().map(|mut copy| {
        copy.story.retry_count = 1;
        copy.story.consumer = Some("billing".into());
        copy
    });
    let all: Vec<_> = batch.clone().into_iter().chain(copies).collect();
    publish_all(&nats, &all).await;
    publish_all(&nats, &all).await;
    assert_eq!(stored(&shared_nats().await.url(), &name).await, 4);
}

/// The server compares ids over the whole stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_id_is_stored_once_on_each_subject_of_a_stream() {
    let nats = connect().await;
    let name = unique_name("subjects");
    nats.create_stream(&name, [format!("{name}.>")])
        .await
        .unwrap();
    let on = |subject: &str| {
        let subject = format!("{name}.{subject}");
        Outgoing::from(Message::new(subject, "T").with_id("order-17"))
    };
    let batch = [on("placed"), on("audit")];
    publish_all(&nats, &batch).await;
    publish_all(&nats, &batch).await;
    assert_eq!(stored(&shared_nats().await.url(), &name).await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_header_of_a_user_gives_orders_to_the_server() {
    let nats = connect().await;
    let url = shared_nats().await.url();
    let settings = stream::Config {
        allow_rollup: true,
        ..stream::Config::default()
    };
    let name = stream_with(&url, "orders_to_server", settings).await;
    let evil = |header: &str, value: &str| {
        Outgoing::from(Message::new(&name, "T").with_header(header, value.to_owned()))
    };
    let batch = [
        message(&name, "0"),
        evil("Nats-Rollup", "all"),
        evil("nats-rollup", "sub"),
        evil("Nats-Expected-Last-Sequence", "999"),
        evil("Nats-Msg-Id", "the-same"),
        evil("Nats-Msg-Id", "the-same"),
    ];
    publish_all(&nats, &batch).await;
    assert_eq!(stored(&url, &name).await, 6);
    let mut subscription = subscribe(&nats, request("reader", &name)).await;
    let received = receive(&mut subscription, 6).await;
    for (delivery, sent) in received.iter().zip(&batch) {
        assert_eq!(delivery.incoming.message, sent.message);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_larger_than_the_server_takes_harms_no_other() {
    let server = server("max_payload: 64KB").await;
    let nats = Nats::connect(config(server.url())).await.unwrap();
    assert!(
        nats.warnings()
            .iter()
            .any(|text| text.contains("max_payload"))
    );
    let name = stream_with(&server.url(), "large", stream::Config::default()).await;
    let batch = [
        message(&name, "0"),
        message(&name, "x".repeat(100_000)),
        message(&name, "2"),
    ];
    let outcomes = publish(&nats, &batch).await;
    assert!(outcomes[0].is_confirmed() && outcomes[2].is_confirmed());
    assert_eq!(
        rejection(&outcomes[1]).map(|(scope, _)| scope),
        Some(RejectionScope::Message),
        "{outcomes:?}"
    );
}

/// The stream's own limit, which the client does not know.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_larger_than_the_stream_takes_harms_no_other() {
    let nats = connect().await;
    let url = shared_nats().await.url();
    let settings = stream::Config {
        max_message_size: 1_000,
        ..stream::Config::default()
    };
    let name = stream_with(&url, "narrow", settings).await;
    let batch = [
        message(&name, "0"),
        message(&name, "x".repeat(2_000)),
        message(&name, "2"),
    ];
    let outcomes = publish(&nats, &batch).await;
    assert!(outcomes[0].is_confirmed() && outcomes[2].is_confirmed());
    assert_eq!(
        rejection(&outcomes[1]).map(|(scope, _)| scope),
        Some(RejectionScope::Message),
        "{outcomes:?}"
    );
}

/// The server says it beside the answer, so without a look there the call would wait for its deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forbidden_subject_is_refused_at_once_and_named_in_health() {
    let settings = r#"
        authorization {
            users: [{
                user: writer, password: hunter2,
                permissions: { publish: { deny: ["secret.>"] } }
            }]
        }"#;
    let settings = settings.replace("authorization {", "no_auth_user: admin\nauthorization {");
    let settings = settings.replace("users: [{", "users: [{ user: admin, password: x }, {");
    let server = server(&settings).await;
    let forbidden = stream_with(
        &server.url(),
        "secret",
        stream::Config {
            subjects: vec!["secret.>".into()],
            ..stream::Config::default()
        },
    )
    .await;
    let open = stream_with(&server.url(), "open", stream::Config::default()).await;
    let config = config(server.url())
        .with_user("writer", "hunter2")
        .with_publish_deadline(60 * SECOND);
    let nats = Nats::connect(config).await.unwrap();
    let started = Instant::now();
    let batch = [
        message(&open, "0"),
        message("secret.x", "1"),
        message(&open, "2"),
    ];
    let outcomes = publish(&nats, &batch).await;
    assert!(started.elapsed() < 30 * SECOND, "{:?}", started.elapsed());
    assert!(outcomes[0].is_confirmed() && outcomes[2].is_confirmed());
    let expected = (RejectionScope::Destination, ErrorKind::Rejected);
    assert_eq!(rejection(&outcomes[1]), Some(expected), "{outcomes:?}");
    let detail = nats.health().detail.unwrap_or_default();
    assert!(detail.contains("secret.x"), "{detail}");
    assert!(!detail.contains("hunter2"), "{detail}");
    assert_eq!(stored(&server.url(), &forbidden).await, 0);

    let wrong = NatsConfig::new(server.url()).with_user("writer", "wrong");
    let error = Nats::connect(wrong).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Rejected, "{error}");
    assert!(!error.to_string().contains("wrong"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_core_subject_needs_no_stream_and_reaches_who_listens() {
    let url = shared_nats().await.url();
    let prefix = unique_name("metrics");
    let nats = Nats::connect(config(&url).with_core_subject(format!("{prefix}.>")))
        .await
        .unwrap();
    let subject = format!("{prefix}.cpu");
    let mut heard = listen(&url, &subject).await;
    nats.check(std::slice::from_ref(&subject)).await.unwrap();
    publish_all(&nats, &[message(&subject, "0")]).await;
    let message = within("a message", heard.next()).await.unwrap();
    assert_eq!(message.payload.as_ref(), b"0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_drops_messages_unread_is_warned_about() {
    let nats = connect().await;
    let url = shared_nats().await.url();
    let settings = stream::Config {
        max_messages: 10,
        discard: DiscardPolicy::Old,
        duplicate_window: SECOND,
        ..stream::Config::default()
    };
    let name = stream_with(&url, "dropping", settings).await;
    nats.check(std::slice::from_ref(&name)).await.unwrap();
    let warnings = nats.warnings();
    let about: Vec<_> = warnings
        .iter()
        .filter(|text| text.contains(&name))
        .collect();
    assert_eq!(about.len(), 2, "{warnings:?}");
    let other = connect().await;
    let mut asked = request("reader", &name);
    asked.in_flight_max = 20_000;
    drop(subscribe(&other, asked).await);
    let warnings = other.warnings();
    assert!(
        warnings.iter().filter(|text| text.contains(&name)).count() == 2,
        "{warnings:?}"
    );
    assert!(
        warnings.iter().any(|text| text.contains("in_flight_max")),
        "{warnings:?}"
    );
}
