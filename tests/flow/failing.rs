//! What fails: up the ladder, to the dead letters, never silently away.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use relaybox::broker::{FailureScope, PublishOutcome, RejectionScope, Stored};
use relaybox::consumer::{Failure, MissingId, Outcome, handler_fn};
use relaybox::dlq::DeadLetters;
use relaybox::envelope::Incoming;
use relaybox::ladder::Ladder;
use relaybox::store::DeadLetterStore;
use relaybox::testing::eventually;
use relaybox::{Error, ErrorKind, Message};
use sqlx::sqlite::SqliteConnection;

use super::support::{Altered, DEADLINE, House, Shared, loaded, quick, run, write_effect};

/// Does as the payload says.
async fn obey(
    attempts: &Shared<String>,
    db: &mut SqliteConnection,
    incoming: &Incoming,
) -> Outcome {
    let payload = incoming.message.payload.as_deref().unwrap_or_default();
    let order = String::from_utf8_lossy(payload).into_owned();
    attempts.lock().unwrap().push(order.clone());
    write_effect(db, "billing", incoming).await;
    match order.as_str() {
        "fail once" if incoming.story.retry_count == 0 => Outcome::Retry(Failure::new("not yet")),
        "fail" => Outcome::Retry(Failure::new("x".repeat(300_000))),
        "later" if incoming.story.retry_count == 0 => {
            Outcome::RetryAfter(Duration::from_millis(60), Failure::new("come back"))
        }
        "never" => Outcome::Permanent(Failure::new("pointless")),
        "panic" => panic!("the handler fell over {}", incoming.message.id),
        "hang" => std::future::pending().await,
        "swallow" => {
            let _ = sqlx::query("INSERT INTO no_such_table VALUES (1)")
                .execute(db)
                .await;
            Outcome::Done
        }
        "?" => match sqlx::query("INSERT INTO no_such_table VALUES (1)")
            .execute(db)
            .await
        {
            Ok(_) => Outcome::Done,
            Err(error) => Outcome::Retry(error.into()),
        },
        _ => Outcome::Done,
    }
}

fn order(id: &str, payload: &str) -> Message {
    Message::new("orders", "Order")
        .with_id(id)
        .with_key(id)
        .with_payload(payload.to_owned())
}

async fn settled(house: &House) {
    for topic in house.broker.topics() {
        if !topic.ends_with(".DLQ") {
            house.consumed("billing", &topic).await;
        }
    }
}

#[tokio::test]
async fn each_failure_ends_where_it_should_and_the_others_go_on() {
    let house = House::new().await;
    let orders = [
        "ok",
        "fail once",
        "fail",
        "later",
        "never",
        "panic",
        "?",
        "ok",
    ];
    let messages: Vec<Message> = orders
        .iter()
        .enumerate()
        .map(|(n, payload)| order(&format!("m-{n}"), payload).with_header("tenant", "acme"))
        .collect();
    house.publish(&messages).await;
    let attempts = Shared::default();
    let consumer = house.consume("billing", handler_fn(attempts.clone(), obey));
    eventually(DEADLINE, "everything ended", || async {
        house.effects("billing").await.len() + house.dead("billing").len() >= 8
    })
    .await;
    settled(&house).await;
    consumer.stop().await.unwrap();

    let mut effects = house.effects("billing").await;
    effects.sort();
    assert_eq!(
        effects,
        ["m-0", "m-1", "m-3", "m-7"],
        "failed attempts left nothing behind"
    );
    let dead: HashMap<String, Incoming> = house
        .dead("billing")
        .into_iter()
        .map(|letter| (letter.message.id.to_string(), letter))
        .collect();
    let told = |id: &str| {
        let story = &dead[id].story;
        (
            story.reason.as_ref().unwrap().as_str().to_owned(),
            story.retry_count,
            story.last_error.clone().unwrap(),
        )
    };
    assert_eq!(dead.len(), 4);
    assert_eq!(
        told("m-4"),
        ("permanent".into(), 1, "handler: pointless".into())
    );
    assert_eq!(
        told("m-5"),
        (
            "retries-exhausted".into(),
            3,
            "panic: the handler fell over m-5".into()
        )
    );
    let (reason, count, error) = told("m-2");
    assert_eq!(
        (reason.as_str(), count, error.len()),
        ("retries-exhausted", 3, 1_024)
    );
    assert!(
        told("m-6").2.contains("no_such_table"),
        "the first error is reported"
    );
    for letter in dead.values() {
        let origin = letter.story.origin.as_ref().unwrap();
        assert_eq!(origin.topic, "orders");
        assert!(origin.partition.is_some() && origin.offset.is_some());
        assert_eq!(letter.story.consumer.as_deref(), Some("billing"));
        assert!(letter.story.first_failed_at <= letter.story.last_failed_at);
        let original = messages.iter().find(|m| m.id == letter.message.id).unwrap();
        assert_eq!(letter.message.payload, original.payload);
        assert_eq!(letter.message.headers, original.headers);
        assert_eq!(letter.message.key, original.key);
    }
    let tries = attempts
        .lock()
        .unwrap()
        .iter()
        .filter(|order| *order == "fail")
        .count();
    assert_eq!(tries, 3, "one attempt, and one per rung");
}

#[tokio::test]
async fn a_hanging_handler_is_ended_and_its_connection_is_not_reused() {
    let house = House::new().await;
    house
        .publish(&[order("m-0", "hang"), order("m-1", "ok")])
        .await;
    let config = quick()
        .with_handler_timeout(Duration::from_millis(100))
        .with_concurrency(1);
    let consumer = house
        .consumer("billing")
        .with_config(config)
        .with_ladder(Ladder::none());
    let consumer = run(consumer, handler_fn(Shared::default(), obey));
    eventually(DEADLINE, "both ended", || async {
        house.effects("billing").await.len() + house.dead("billing").len() >= 2
    })
    .await;
    consumer.stop().await.unwrap();
    assert_eq!(house.effects("billing").await, ["m-1"]);
    let letter = &house.dead("billing")[0];
    assert!(
        letter
            .story
            .last_error
            .as_ref()
            .unwrap()
            .starts_with("timeout: ")
    );
}

#[tokio::test]
async fn nothing_is_acknowledged_while_dead_letters_are_not_taken() {
    let house = House::new().await;
    house.publish(&[order("m-0", "never")]).await;
    let (listens, refused) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let deaf = Altered::answering(house.broker.clone(), {
        let (listens, refused) = (listens.clone(), refused.clone());
        move |_| {
            if listens.load(Ordering::SeqCst) {
                return None;
            }
            refused.fetch_add(1, Ordering::SeqCst);
            Some(PublishOutcome::Failed {
                scope: FailureScope::Destination,
                stored: Stored::No,
                error: Error::new(ErrorKind::Busy, "publish", "full"),
            })
        }
    });
    let consumer = house
        .consumer("billing")
        .with_publisher(deaf)
        .with_ladder(Ladder::none());
    let consumer = run(consumer, handler_fn(Shared::default(), obey));
    eventually(DEADLINE, "the dead letter was tried twice", || async {
        loaded(&refused) >= 2
    })
    .await;
    let read: u64 = house.broker.committed("billing", "orders").iter().sum();
    assert_eq!(read, 0);
    listens.store(true, Ordering::SeqCst);
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(house.dead("billing").len(), 1);
}

#[tokio::test]
async fn a_message_too_large_for_its_story_still_becomes_a_dead_letter() {
    let house = House::new().await;
    // Refuses whatever tells an error: there is room for the message, not for its story.
    let cramped = Altered::answering(house.broker.clone(), |sent| {
        sent.story
            .last_error
            .is_some()
            .then(|| PublishOutcome::Rejected {
                scope: RejectionScope::Message,
                error: Error::new(ErrorKind::Rejected, "publish", "too large"),
            })
    });
    let consumer = house
        .consumer("billing")
        .with_publisher(cramped)
        .with_ladder(Ladder::none());
    house.publish(&[order("m-0", "never")]).await;
    let consumer = run(consumer, handler_fn(Shared::default(), obey));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    let story = &house.dead("billing")[0].story;
    assert_eq!(story.reason.as_ref().unwrap().as_str(), "permanent");
    assert_eq!(story.last_error, None);
}

#[tokio::test]
async fn messages_without_an_id_follow_the_rule() {
    for (rule, dead, effects) in [
        (MissingId::DeadLetter, 1, 0),
        (MissingId::BrokerCoordinates, 0, 1),
    ] {
        let house = House::new().await;
        house
            .publish(&[Message::new("orders", "Foreign")
                .with_id(" ")
                .with_payload("ok")])
            .await;
        let config = quick().with_missing_id(rule);
        let consumer = house.consumer("billing").with_config(config);
        let consumer = run(consumer, handler_fn(Shared::default(), obey));
        house.consumed("billing", "orders").await;
        consumer.stop().await.unwrap();
        assert_eq!(house.dead("billing").len(), dead);
        assert_eq!(house.effects("billing").await.len(), effects);
        if let [letter] = house.dead("billing").as_slice() {
            assert_eq!(letter.story.reason.as_ref().unwrap().as_str(), "missing-id");
        }
    }
}

#[tokio::test]
async fn dead_letters_may_be_a_table() {
    let house = House::new().await;
    house.publish(&[order("m-0", "never")]).await;
    let consumer = house
        .consumer("billing")
        .with_dead_letters(DeadLetters::table(house.store.clone()));
    let consumer = run(consumer, handler_fn(Shared::default(), obey));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert!(house.dead("billing").is_empty());
    let letters = house.store.list("billing", 0, 10).await.unwrap();
    assert_eq!(letters.len(), 1);
    assert_eq!(letters[0].letter.message.id.as_str(), "m-0");
    assert_eq!(
        letters[0].letter.story.reason.as_ref().unwrap().as_str(),
        "permanent"
    );
}

#[tokio::test]
async fn a_retry_goes_to_the_failing_consumer_only() {
    let house = House::new().await;
    house.publish(&[order("m-0", "fail once")]).await;
    let calls = Shared::default();
    let billing = house.consume("billing", handler_fn(calls.clone(), obey));
    house.consumed("billing", "orders").await;
    eventually(DEADLINE, "billing is done", || async {
        house.effects("billing").await.len() == 1
    })
    .await;
    let others = Shared::<String>::default();
    async fn note(seen: &Shared<String>, _: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
        seen.lock().unwrap().push(incoming.message.id.to_string());
        Outcome::Done
    }
    let mail = house.consume("mail", handler_fn(others.clone(), note));
    house.consumed("mail", "orders").await;
    mail.stop().await.unwrap();
    billing.stop().await.unwrap();
    assert_eq!(*others.lock().unwrap(), ["m-0"]);
}
