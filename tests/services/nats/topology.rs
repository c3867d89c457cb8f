//! What is made, what is accepted, and what is refused.

use async_nats::jetstream::consumer::{self, AckPolicy, ReplayPolicy, pull};
use async_nats::jetstream::stream;
use relaybox::ErrorKind;
use relaybox::broker::{Retention, Rung};

use super::*;

async fn refused(nats: &Nats, request: SubscriptionRequest) -> relaybox::Error {
    match within("an answer", nats.subscribe(request)).await {
        Ok(_) => panic!("subscribed"),
        Err(error) => error,
    }
}

fn rung(source: &str, destination: &str) -> Rung {
    Rung {
        destination: destination.to_owned(),
        delay: 5 * SECOND,
        source: source.to_owned(),
    }
}

/// The copies would come back at once, and to every consumer of the stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rung_that_the_source_would_hold_is_refused_and_both_are_named() {
    let nats = connect().await;
    let name = unique_name("wide");
    nats.create_stream(&name, [format!("{name}.>")])
        .await
        .unwrap();
    let destination = format!("{name}.billing.retry.5s");
    let mut asked = request("billing", &name);
    asked.rungs = vec![rung(&name, &destination)];
    let error = refused(&nats, asked).await;
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
    let text = error.to_string();
    assert!(
        text.contains(&destination) && text.contains(&format!("stream {name}")),
        "{text}"
    );
    assert!(text.contains("template"), "{text}");

    let dead = format!("{name}.DLQ");
    let mut asked = request("billing", &name);
    asked.dead_letters = vec![dead.clone()];
    let error = refused(&nats, asked).await;
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
    assert!(error.to_string().contains(&dead), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rung_belongs_to_one_consumer() {
    let nats = connect().await;
    let name = stream("shared_rung").await;
    let mut asked = request("billing", &name);
    asked.rungs = vec![rung(&name, &format!("{name}.retry.5s"))];
    drop(subscribe(&nats, asked.clone()).await);
    asked.consumer = "shipping".into();
    let error = refused(&nats, asked).await;
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
    assert!(error.to_string().contains("template"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_with_other_settings_is_refused_and_both_values_are_named() {
    let url = shared_nats().await.url();
    let name = stream("other").await;
    let stream = client(&url).await.get_stream(&name).await.unwrap();
    let other = pull::Config {
        durable_name: Some("reader".into()),
        ack_policy: AckPolicy::Explicit,
        ack_wait: 77 * SECOND,
        max_ack_pending: 10_000,
        ..pull::Config::default()
    };
    stream.create_consumer(other).await.unwrap();
    let error = refused(&connect().await, request("reader", &name)).await;
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
    let text = error.to_string();
    assert!(
        text.contains("ack_wait") && text.contains("5s") && text.contains("77s"),
        "{text}"
    );
}

/// Each of these would deliver less than there is, later, or nothing at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_consumer_that_holds_something_back_is_refused() {
    let url = shared_nats().await.url();
    let name = stream("foreign").await;
    let stream = client(&url).await.get_stream(&name).await.unwrap();
    let nats = connect().await;
    let made_by_us = subscribe(&nats, request("ours", &name)).await;
    made_by_us.close(DEADLINE).await.unwrap();
    let mut ours = stream.consumer_info("ours").await.unwrap().config;
    ours.durable_name = Some("theirs".into());
    ours.name = None;
    let with = |change: fn(&mut consumer::Config)| {
        let mut theirs = ours.clone();
        change(&mut theirs);
        theirs
    };
    for (field, theirs) in [
        ("headers_only", with(|config| config.headers_only = true)),
        (
            "inactive_threshold",
            with(|config| config.inactive_threshold = 600 * SECOND),
        ),
        (
            "replay_policy",
            with(|config| config.replay_policy = ReplayPolicy::Original),
        ),
        ("max_batch", with(|config| config.max_batch = 1)),
        ("max_expires", with(|config| config.max_expires = SECOND)),
    ] {
        stream.create_consumer(theirs).await.unwrap();
        let error = refused(&nats, request("theirs", &name)).await;
        assert_eq!(error.violation().unwrap().field, field, "{error}");
        stream.delete_consumer("theirs").await.unwrap();
    }
    let spacious = with(|config| config.max_batch = 10_000);
    stream.create_consumer(spacious).await.unwrap();
    drop(subscribe(&nats, request("theirs", &name)).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rung_that_would_let_messages_expire_is_refused() {
    let url = shared_nats().await.url();
    let name = stream("expiring").await;
    let destination = format!("{name}.retry.5s");
    let settings = stream::Config {
        subjects: vec![destination.clone()],
        max_age: 60 * SECOND,
        ..stream::Config::default()
    };
    stream_with(&url, "rung", settings).await;
    let mut asked = request("billing", &name);
    asked.rungs = vec![rung(&name, &destination)];
    let error = refused(&connect().await, asked).await;
    assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
    assert!(error.to_string().contains("max_age"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_alias_gives_a_part_of_a_stream_under_its_own_name() {
    let url = shared_nats().await.url();
    let name = unique_name("parts");
    let subject = |part: &str| format!("{name}.{part}");
    let config = config(&url)
        .with_source("paid orders", &name, [subject("paid"), subject("refunded")])
        .with_source("placed", &name, [subject("placed")]);
    let nats = Nats::connect(config).await.unwrap();
    nats.create_stream(&name, [subject(">")]).await.unwrap();
    let batch = ["placed", "paid", "shipped", "refunded"].map(|part| message(&subject(part), part));
    publish_all(&nats, &batch).await;
    let sources = vec!["paid orders".to_owned(), "placed".to_owned()];
    let asked = SubscriptionRequest::new("my.consumer/1", sources);
    let version = client(&url).await.client().server_info().version;
    if version.starts_with("2.9.") {
        let error = refused(&nats, asked).await;
        assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
        assert!(error.to_string().contains(&version), "{error}");
        return;
    }
    let mut subscription = subscribe(&nats, asked).await;
    let mut seen = Vec::new();
    for delivery in receive(&mut subscription, 3).await {
        assert_eq!(delivery.coordinates.topic, subject(&text(&delivery)));
        assert_eq!(
            delivery.coordinates.partition.as_deref(),
            Some(name.as_str())
        );
        seen.push((delivery.source.clone(), text(&delivery)));
        acknowledge(delivery).await;
    }
    seen.sort();
    let expected = [
        ("paid orders", "paid"),
        ("paid orders", "refunded"),
        ("placed", "placed"),
    ];
    let expected = expected.map(|(source, part)| (source.to_owned(), part.to_owned()));
    assert_eq!(seen, expected);
    assert_eq!(nats.depth("paid orders").await.unwrap().messages, 2);
    let other = nats.lag("other", "paid orders").await.unwrap();
    assert_eq!(other.messages, 2);
    assert!(other.oldest.is_some());
    subscription.close(DEADLINE).await.unwrap();
    assert_eq!(
        nats.lag("my.consumer/1", "paid orders")
            .await
            .unwrap()
            .messages,
        0
    );
    assert_eq!(nats.depth(&name).await.unwrap().messages, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_is_kept_as_its_stream_says() {
    let url = shared_nats().await.url();
    let nats = connect().await;
    let day = 24 * 3_600 * SECOND;
    let aged = stream::Config {
        max_age: day,
        ..stream::Config::default()
    };
    let worked_off = stream::Config {
        retention: stream::RetentionPolicy::WorkQueue,
        ..stream::Config::default()
    };
    for (settings, expected) in [
        (stream::Config::default(), Retention::Unbounded),
        (aged, Retention::Bounded(day)),
        (worked_off, Retention::UntilSettled),
    ] {
        let name = stream_with(&url, "kept", settings).await;
        assert_eq!(nats.retention(&name).await.unwrap(), expected);
        let config = config(url.clone()).with_source("part", &name, [&name]);
        let aliased = Nats::connect(config).await.unwrap();
        assert_eq!(aliased.retention("part").await.unwrap(), expected);
    }
    let made = unique_name("made");
    let config = config(url).with_stream_retention(day);
    let keeping = Nats::connect(config).await.unwrap();
    keeping.create_stream(&made, [&made]).await.unwrap();
    assert_eq!(
        nats.retention(&made).await.unwrap(),
        Retention::Bounded(day)
    );
    // As an auditor asks for it: by its subject.
    let dead = format!("{made}.DLQ");
    let mut asked = request("billing", &made);
    asked.dead_letters = vec![dead.clone()];
    drop(subscribe(&nats, asked).await);
    assert_eq!(nats.retention(&dead).await.unwrap(), Retention::Unbounded);
}
