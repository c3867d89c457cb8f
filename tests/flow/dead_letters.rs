//! Where dead letters go: topics, tables, places of one's own, and what happens while one of them takes nothing.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::broker::{FailureScope, PublishOutcome, RejectionScope, Stored};
use relaybox::consumer::{Failure, Outcome, handler_fn};
use relaybox::dlq::DeadLetters;
use relaybox::envelope::{Incoming, Outgoing};
use relaybox::ladder::Ladder;
use relaybox::readiness::NotReady;
use relaybox::store::{DeadLetterSink, DeadLetterStore};
use relaybox::testing::eventually;
use relaybox::{Error, ErrorKind, Message, Result};
use sqlx::sqlite::SqliteConnection;

use super::support::{Altered, DEADLINE, House, Shared, loaded, quick, refused, run, write_effect};

/// `bad` can never work; all else is done.
async fn obey(_: &(), db: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    write_effect(db, "billing", incoming).await;
    match incoming.message.payload.as_deref() {
        Some(b"bad") => Outcome::Permanent(Failure::new("pointless")),
        Some(b"failing") => Outcome::Retry(Failure::new("not today")),
        _ => Outcome::Done,
    }
}

fn order(id: &str, payload: &'static str) -> Message {
    let order = Message::new("orders", "Order").with_id(id).with_key(id);
    order.with_payload(payload)
}

/// A place of one's own, which may take nothing for a while.
#[derive(Clone, Default)]
struct Drawer {
    letters: Arc<Mutex<Vec<Outgoing>>>,
    mood: Arc<Mutex<Mood>>,
    puts: Arc<AtomicU64>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Mood {
    #[default]
    Takes,
    Refuses,
    Panics,
    IsMissing,
}

impl Drawer {
    fn is(mood: Mood) -> Self {
        let drawer = Self::default();
        drawer.becomes(mood);
        drawer
    }

    fn becomes(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    fn ids(&self) -> Vec<String> {
        let letters = self.letters.lock().unwrap();
        letters
            .iter()
            .map(|letter| letter.message.id.to_string())
            .collect()
    }
}

impl DeadLetterSink for Drawer {
    fn check<'a>(&'a self, consumer: &'a str) -> BoxFuture<'a, Result<()>> {
        assert_eq!(consumer, "billing");
        let missing = *self.mood.lock().unwrap() == Mood::IsMissing;
        Box::pin(async move {
            if missing {
                return Err(Error::new(ErrorKind::NotFound, "check", "no drawer"));
            }
            Ok(())
        })
    }

    fn put<'a>(&'a self, letter: &'a Outgoing) -> BoxFuture<'a, Result<()>> {
        self.puts.fetch_add(1, Ordering::SeqCst);
        let mood = *self.mood.lock().unwrap();
        Box::pin(async move {
            assert!(mood != Mood::Panics, "the drawer is stuck");
            if mood == Mood::Refuses {
                return Err(Error::new(ErrorKind::Unavailable, "put", "locked"));
            }
            self.letters.lock().unwrap().push(letter.clone());
            Ok(())
        })
    }
}

#[tokio::test]
async fn owner_and_note_travel_with_each_letter_to_every_place() {
    let house = House::new().await;
    house
        .publish(&[order("m-0", "bad"), order("m-1", "good")])
        .await;
    let drawer = Drawer::default();
    let letters = DeadLetters::topic()
        .and_table(house.store.clone())
        .and_custom("the drawer", drawer.clone())
        .with_owner("team-billing")
        .with_note("runbook: wiki/billing");
    let consumer = house.consumer("billing").with_dead_letters(letters);
    let consumer = run(consumer, handler_fn((), obey));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    let table = house.store.list("billing", 0, 10).await.unwrap();
    assert_eq!(drawer.ids(), ["m-0"]);
    let stories = [
        house.dead("billing")[0].story.clone(),
        table[0].letter.story.clone(),
        drawer.letters.lock().unwrap()[0].story.clone(),
    ];
    for story in stories {
        assert_eq!(story.owner.as_deref(), Some("team-billing"));
        assert_eq!(story.note.as_deref(), Some("runbook: wiki/billing"));
        assert_eq!(story.reason.unwrap().as_str(), "permanent");
    }
    // Where it is handled anew, what was said of its letter is not said of the message.
    let again = house.dead("billing").remove(0);
    assert_eq!(again.message.headers.len(), 0);
}

#[tokio::test]
async fn owner_and_note_are_bounded_and_a_missing_sink_is_found_at_start() {
    let house = House::new().await;
    for letters in [
        DeadLetters::topic().with_owner("x".repeat(256)),
        DeadLetters::topic().with_owner(""),
        DeadLetters::topic().with_note("x".repeat(513)),
        DeadLetters::topic().with_note("two\nlines"),
    ] {
        let consumer = house.consumer("billing").with_dead_letters(letters);
        let error = run(consumer, handler_fn((), obey))
            .ended()
            .await
            .unwrap_err();
        assert!(error.violation().unwrap().field.starts_with("dead letter"));
    }
    let letters = DeadLetters::custom("the drawer", Drawer::is(Mood::IsMissing));
    let consumer = house.consumer("billing").with_dead_letters(letters);
    let error = run(consumer, handler_fn((), obey))
        .ended()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn a_sink_that_fails_or_panics_holds_its_message_visibly_and_no_other() {
    for mood in [Mood::Refuses, Mood::Panics] {
        let house = House::new().await;
        house
            .publish(&[order("m-0", "bad"), order("m-1", "good")])
            .await;
        let drawer = Drawer::is(mood);
        let letters = DeadLetters::custom("the drawer", drawer.clone());
        let consumer = house.consumer("billing").with_dead_letters(letters);
        let (probe, counts) = (consumer.probe(), consumer.counts());
        let consumer = run(consumer, handler_fn((), obey));
        eventually(
            DEADLINE,
            "it was tried twice, and the probe names it",
            || async {
                let reasons = probe.readiness().reasons;
                let named = reasons.iter().any(|reason| {
                matches!(reason, NotReady::CopiesRefused { place, .. } if place == "the drawer")
            });
                named && loaded(&drawer.puts) >= 2
            },
        )
        .await;
        eventually(DEADLINE, "the other one is done", || async {
            house.effects("billing").await == ["m-1"]
        })
        .await;
        assert_eq!(loaded(&counts.dead), 0);
        drawer.becomes(Mood::Takes);
        house.consumed("billing", "orders").await;
        eventually(DEADLINE, "it is ready again", || async {
            probe.readiness().is_ready()
        })
        .await;
        consumer.stop().await.unwrap();
        assert_eq!(drawer.ids(), ["m-0"]);
        assert!(house.dead("billing").is_empty());
    }
}

#[tokio::test]
async fn dead_letters_that_a_broker_does_not_take_show_in_the_probe_until_it_does() {
    let house = House::new().await;
    let bad: Vec<Message> = (0..5).map(|n| order(&format!("bad-{n}"), "bad")).collect();
    house.publish(&bad).await;
    let listens = Arc::new(AtomicBool::new(false));
    let deaf = Altered::answering(house.broker.clone(), {
        let listens = listens.clone();
        move |_| {
            (!listens.load(Ordering::SeqCst)).then(|| PublishOutcome::Failed {
                scope: FailureScope::Destination,
                stored: Stored::No,
                error: Error::new(ErrorKind::Busy, "publish", "full"),
            })
        }
    });
    let consumer = house.consumer("billing").with_publisher(deaf);
    let probe = consumer.probe();
    let consumer = run(consumer, handler_fn((), obey));
    eventually(DEADLINE, "the probe names the place", || async {
        let text = probe.readiness().to_string();
        text.contains("orders.billing.DLQ takes no copies") && text.contains("full")
    })
    .await;
    house.publish(&[order("good", "good")]).await;
    eventually(DEADLINE, "others go on", || async {
        house.effects("billing").await == ["good"]
    })
    .await;
    let read: u64 = house.broker.committed("billing", "orders").iter().sum();
    assert!(read < 6, "what is not confirmed is not acknowledged");
    listens.store(true, Ordering::SeqCst);
    house.consumed("billing", "orders").await;
    assert!(probe.readiness().is_ready());
    consumer.stop().await.unwrap();
    let dead = house.dead("billing");
    let ids: HashSet<&str> = dead
        .iter()
        .map(|letter| letter.message.id.as_str())
        .collect();
    assert_eq!((ids.len(), dead.len()), (5, 5));
}

#[tokio::test]
async fn a_message_without_room_for_its_story_on_a_rung_is_a_dead_letter_and_its_key_goes_on() {
    let house = House::new().await;
    let messages = ["failing", "good"].map(|payload| {
        let message = order(payload, payload);
        message.with_key("k")
    });
    house.publish(&messages).await;
    // Room for the message and nothing else, as for one of exactly the largest size.
    let tells = Shared::<bool>::default();
    let cramped = Altered::answering(house.broker.clone(), {
        let tells = tells.clone();
        move |sent: &Outgoing| {
            let tells_something = sent.story != relaybox::story::Story::default();
            tells.lock().unwrap().push(sent.story.reason.is_some());
            tells_something.then(|| refused(RejectionScope::Message))
        }
    });
    let consumer = house.consumer("billing").with_publisher(cramped);
    let consumer = consumer.with_ladder(Ladder::rungs([Duration::from_millis(50)]));
    let consumer = run(consumer.with_config(quick()), handler_fn((), obey));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(house.effects("billing").await, ["good"]);
    let dead = house.dead("billing");
    assert_eq!(dead.len(), 1);
    assert_eq!(dead[0].message.payload, messages[0].payload);
    // Rung: all and shrunk. Dead letter: all, shrunk, the reason alone, nothing.
    let tried = tells.lock().unwrap().clone();
    assert_eq!(tried, [false, false, true, true, true, false]);
}

#[tokio::test]
async fn a_dead_letter_with_room_for_its_reason_has_it() {
    let house = House::new().await;
    house.publish(&[order("m-0", "bad")]).await;
    let cramped = Altered::answering(house.broker.clone(), |sent| {
        (sent.story.consumer.is_some()).then(|| refused(RejectionScope::Message))
    });
    let consumer = house.consumer("billing").with_publisher(cramped);
    let consumer = run(consumer, handler_fn((), obey));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    let story = &house.dead("billing")[0].story;
    assert_eq!(story.reason.as_ref().unwrap().as_str(), "permanent");
    assert_eq!((story.retry_count, &story.last_error), (0, &None));
}
