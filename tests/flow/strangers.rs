//! What others put in the way: headers not written here, handlers that misbehave early, settings at odds.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use relaybox::broker::memory::{MemoryBroker, MemoryConfig};
use relaybox::broker::{FailureScope, PublishOutcome, Publisher, Stored};
use relaybox::consumer::{Failure, Handler, Outcome, handler_fn};
use relaybox::dlq::DeadLetters;
use relaybox::envelope::{Incoming, Outgoing};
use relaybox::ladder::Ladder;
use relaybox::story::{Origin, Reason, Story};
use relaybox::testing::eventually;
use relaybox::{Error, ErrorKind, Message};
use sqlx::sqlite::SqliteConnection;
use time::macros::datetime;

use super::support::{
    Altered, DEADLINE, House, Shared, loaded, numbered, quick, run, write_effect,
};

/// Fails every message of the key `poison`, with a text longer than any story.
async fn picky(_: &(), db: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    if incoming.message.key.as_deref() == Some(b"poison") {
        return Outcome::Retry(Failure::new("x".repeat(10_000)));
    }
    write_effect(db, "billing", incoming).await;
    Outcome::Done
}

#[tokio::test]
async fn a_message_that_leaves_no_room_for_its_story_climbs_the_whole_ladder() {
    let mut house = House::new().await;
    let bytes_max = 16 * 1_024;
    let config = MemoryConfig::default().with_record_bytes_max(bytes_max);
    house.broker = MemoryBroker::with_config(config).unwrap();
    house.broker.create_topic("orders", 1).unwrap();
    let large = Message::new("orders", "T")
        .with_id("large")
        .with_key("poison")
        .with_payload(vec![b'x'; bytes_max - 600]);
    house.publish(&[large]).await;
    let consumer = house.consume("billing", handler_fn((), picky));
    eventually(DEADLINE, "it is a dead letter", || async {
        house.dead("billing").len() == 1
    })
    .await;
    consumer.stop().await.unwrap();
    let story = &house.dead("billing")[0].story;
    assert_eq!(story.retry_count, 3);
    assert_eq!(
        story.reason.as_ref().map(Reason::as_str),
        Some("retries-exhausted")
    );
}

/// A dead letter of another consumer, or what a mirrored topic brings along.
#[tokio::test]
async fn failures_of_another_consumer_neither_count_nor_name_where_ours_go() {
    let house = House::new().await;
    let origin = Origin {
        topic: "elsewhere".into(),
        partition: None,
        offset: None,
    };
    let at = datetime!(2026-01-05 10:00 UTC);
    let story = (0..3).fold(Story::default(), |story, _| {
        story.failed("mail", &origin, "handler", "no stock", at)
    });
    let message = Message::new("orders", "T")
        .with_id("m-1")
        .with_key("poison");
    let foreign = Outgoing { message, story };
    assert!(house.broker.publish(&[foreign]).await[0].is_confirmed());
    let consumer = house.consume("billing", handler_fn((), picky));
    eventually(DEADLINE, "it is a dead letter", || async {
        house.dead("billing").len() == 1
    })
    .await;
    consumer.stop().await.unwrap();
    let story = &house.dead("billing")[0].story;
    assert_eq!(
        (story.retry_count, story.consumer.as_deref()),
        (3, Some("billing"))
    );
    assert_eq!(story.origin.as_ref().unwrap().topic, "orders");
    assert!(story.first_failed_at.unwrap() > at);
}

/// The latest instant a header can name lies after the last one a calendar has.
#[tokio::test]
async fn an_instant_beyond_the_calendar_is_a_header_like_any_other() {
    let house = House::new().await;
    let end = datetime!(9999-12-31 23:59:59 -1);
    let mut message = Message::new("orders", "T").with_id("late").with_key("k");
    let name = "x-occurred-at";
    message.headers.push(name, "9999-12-31T23:59:59-01:00");
    let mut own = Message::new("orders", "T").with_id("own").with_key("k");
    own.occurred_at = end;
    house.publish(&[message, own]).await;
    house.publish(&numbered("k", "m", 1)).await;
    let consumer = house.consume("billing", handler_fn((), picky));
    eventually(DEADLINE, "all are handled", || async {
        house.effects("billing").await.len() == 3
    })
    .await;
    consumer.stop().await.unwrap();
}

#[tokio::test]
async fn copies_that_nobody_takes_leave_the_handlers_to_the_others() {
    let house = House::new().await;
    let refused = Arc::new(AtomicU64::new(0));
    let seen = refused.clone();
    let publisher = Altered::answering(house.broker.clone(), move |sent| {
        (sent.message.destination == "orders.billing.DLQ").then(|| {
            seen.fetch_add(1, Ordering::SeqCst);
            PublishOutcome::Failed {
                scope: FailureScope::Destination,
                stored: Stored::No,
                error: Error::new(ErrorKind::Unavailable, "publish", "away"),
            }
        })
    });
    let consumer = house
        .consumer("billing")
        .with_ladder(Ladder::none())
        .with_publisher(publisher)
        .with_config(quick().with_concurrency(1));
    let poison = Message::new("orders", "T").with_id("p").with_key("poison");
    house.publish(&[poison]).await;
    let consumer = run(consumer, handler_fn((), picky));
    eventually(DEADLINE, "the copy was refused", || async {
        loaded(&refused) > 0
    })
    .await;
    house.publish(&numbered("good", "good", 5)).await;
    eventually(DEADLINE, "the others are handled", || async {
        house.effects("billing").await.len() == 5
    })
    .await;
    consumer.stop().await.unwrap();
    let read: u64 = house.broker.committed("billing", "orders").iter().sum();
    assert!(read < 6, "what has no copy is not acknowledged");
}

/// Panics before there is a future to poll.
struct Early(Shared<String>);

impl Handler<SqliteConnection> for Early {
    fn handle(
        &self,
        _: &mut SqliteConnection,
        incoming: &Incoming,
    ) -> impl Future<Output = Outcome> + Send {
        let id = incoming.message.id.to_string();
        assert_ne!(id, "m-1", "the handler fell over");
        self.0.lock().unwrap().push(id);
        std::future::ready(Outcome::Done)
    }
}

#[tokio::test]
async fn a_panic_before_the_first_await_is_a_failure_too() {
    let house = House::new().await;
    house.publish(&numbered("k", "m", 3)).await;
    let handled = Shared::default();
    let consumer = house.consume("billing", Early(handled.clone()));
    eventually(DEADLINE, "all ended", || async {
        handled.lock().unwrap().len() == 2 && house.dead("billing").len() == 1
    })
    .await;
    consumer.stop().await.unwrap();
    assert_eq!(*handled.lock().unwrap(), ["m-0", "m-2"]);
}

#[tokio::test]
async fn names_that_lead_in_a_circle_are_refused() {
    let house = House::new().await;
    let dead = |template: &str| DeadLetters::topic().with_template(template);
    let rungs = |template: &str| {
        Ladder::rungs([50, 100].map(Duration::from_millis)).with_template(template)
    };
    for consumer in [
        house.consumer("billing").with_dead_letters(dead("{topic}")),
        house
            .consumer("billing")
            .with_dead_letters(dead("{topic}.{consumer}.retry.50ms")),
        house
            .consumer("billing")
            .with_ladder(rungs("{topic}.{delay}"))
            .with_source("orders.50ms"),
    ] {
        house.broker.create_topic("orders.50ms", 1).ok();
        let ended = run(consumer, handler_fn((), picky)).ended().await;
        assert_eq!(ended.unwrap_err().kind(), ErrorKind::Configuration);
    }
}

#[tokio::test]
async fn rungs_and_tables_that_are_not_there_are_found_at_start() {
    let house = House::new().await;
    let elsewhere = MemoryBroker::new();
    elsewhere.create_topic("orders.billing.DLQ", 1).unwrap();
    let consumer = house.consumer("billing").with_publisher(elsewhere);
    let error = run(consumer, handler_fn((), picky))
        .ended()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(
        error.to_string().contains("orders.billing.retry.50ms"),
        "{error}"
    );

    sqlx::raw_sql("DROP TABLE relaybox_dead_letter")
        .execute(house.store.pool())
        .await
        .unwrap();
    let consumer = house
        .consumer("billing")
        .with_dead_letters(DeadLetters::table(house.store.clone()));
    let error = run(consumer, handler_fn((), picky))
        .ended()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}
