//! The way back from the dead letters: what was failing and is handled after all.

mod collecting;
mod desk;
mod runs;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use relaybox::backoff::DelayPolicy;
use relaybox::broker::{FailureScope, PublishOutcome, Publisher, RejectionScope, Stored};
use relaybox::consumer::{Failure, InboxKey, Outcome, handler_fn};
use relaybox::dlq::DeadLetters;
use relaybox::dlq::redrive::{Canary, CollectLimits, Order, Redrive, RedriveConfig, Refusal, Run};
use relaybox::envelope::{Incoming, Outgoing};
use relaybox::ladder::Ladder;
use relaybox::store::sqlite::SqliteStore;
use relaybox::store::{DeadLetterStore, InboxStore, LetterFilter, RedriveStore, RunState};
use relaybox::story::{Origin, Reason, Story};
use relaybox::testing::eventually;
use relaybox::{Error, ErrorKind, Message};
use sqlx::sqlite::SqliteConnection;

use super::support::{
    Altered, DEADLINE, House, Running, Shared, names, numbered, refused, run, write_effect,
};

/// A handler that fails until it is repaired, and writes down what it sees.
#[derive(Clone, Default)]
struct Billing {
    repaired: Arc<AtomicBool>,
    seen: Shared<Incoming>,
}

async fn bill(app: &Billing, db: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    app.seen.lock().unwrap().push(incoming.clone());
    write_effect(db, "billing", incoming).await;
    if app.repaired.load(Ordering::SeqCst) {
        Outcome::Done
    } else {
        Outcome::Permanent(Failure::new("no stock"))
    }
}

impl Billing {
    fn repair(&self) {
        self.repaired.store(true, Ordering::SeqCst);
    }

    fn start(&self, house: &House, dead_letters: DeadLetters) -> Running {
        let consumer = house
            .consumer("billing")
            .with_ladder(Ladder::none())
            .with_dead_letters(dead_letters);
        run(consumer, handler_fn(self.clone(), bill))
    }
}

fn desk_over(house: &House, publisher: impl Publisher) -> Redrive {
    let config = RedriveConfig::default()
        .with_rate_max(100_000)
        .with_attempts_max(2)
        .with_backoff(DelayPolicy::fixed(Duration::from_millis(1)));
    Redrive::new("billing", "orders", publisher, house.store.clone()).with_config(config)
}

fn desk(house: &House) -> Redrive {
    desk_over(house, house.broker.clone())
}

const BRIEF: CollectLimits = CollectLimits {
    count_max: 10_000,
    idle: Duration::from_millis(300),
};

async fn plan(desk: &Redrive) -> Run {
    plan_of(desk, Order::of(LetterFilter::all())).await
}

async fn plan_of(desk: &Redrive, order: Order) -> Run {
    desk.plan("ann", &order).await.unwrap()
}

async fn run_all(desk: &Redrive) -> Run {
    let planned = plan(desk).await;
    desk.run("ann", planned.row.id, |_| {}).await.unwrap()
}

async fn buried(house: &House, count: u64) {
    eventually(DEADLINE, "the letters are in the table", || async {
        house.store.count("billing").await.unwrap() == count
    })
    .await;
}

/// Entries without a consumer's help.
async fn bury(house: &House, messages: impl IntoIterator<Item = Message>) {
    for message in messages {
        put(house, message, Story::default()).await;
    }
}

async fn put(house: &House, message: Message, story: Story) {
    let origin = Origin {
        topic: "orders".into(),
        partition: Some("0".into()),
        offset: Some("7".into()),
    };
    let mut story = story;
    story.origin.get_or_insert(origin);
    story.consumer = Some("billing".into());
    story.reason = Some(Reason::new(Reason::PERMANENT));
    let letter = Outgoing { message, story };
    house.store.put(&letter).await.unwrap();
}

fn way_back(house: &House) -> Vec<Incoming> {
    house.broker.log("orders.billing.redrive")
}

fn open_way_back(house: &House) {
    house
        .broker
        .create_topic("orders.billing.redrive", 3)
        .unwrap();
}

/// With everything in it that a way might spoil.
fn precious() -> Vec<Message> {
    let mut full = Message::new("orders", "Order")
        .with_id("m-full")
        .with_key([0xff, 0])
        .with_payload(&[0, 0xfe, 0x80][..])
        .with_content_type("application/x-odd")
        .with_version(-4)
        .with_trace("00-aa-bb-01", Some("v=1".into()))
        .with_header("repeated", "1")
        .with_header("bytes", &b"\0\xc3\x28"[..])
        .with_header("repeated", "2")
        .with_header("empty", "");
    full.headers.push_optional("null", None);
    let bare = Message::new("orders", "Order").with_id("m-null");
    let empty = Message::new("orders", "Order")
        .with_id("m-empty")
        .with_key("")
        .with_payload("");
    vec![full, bare, empty]
}

#[tokio::test]
async fn a_redriven_message_is_the_original_byte_for_byte_and_its_attempts_begin_anew() {
    for dead_letters in ["table", "broker", "both"] {
        let house = House::new().await;
        let billing = Billing::default();
        let consumer = billing.start(
            &house,
            match dead_letters {
                "table" => DeadLetters::table(house.store.clone()),
                "broker" => DeadLetters::topic(),
                _ => DeadLetters::topic().and_table(house.store.clone()),
            },
        );
        let sent = precious();
        house.publish(&sent).await;
        house.consumed("billing", "orders").await;
        let desk = desk(&house);
        if dead_letters != "table" {
            let collected = desk.collect(&house.broker, BRIEF).await.unwrap();
            let known = if dead_letters == "both" { 3 } else { 0 };
            assert_eq!((collected.stored, collected.known), (3 - known, known));
        }
        billing.repair();
        let first: BTreeMap<_, _> = seen(&billing);
        billing.seen.lock().unwrap().clear();
        let run = run_all(&desk).await;
        assert_eq!((run.row.state, run.row.sent), (RunState::Done, 3));
        house.consumed("billing", "orders.billing.redrive").await;
        consumer.stop().await.unwrap();

        let second = seen(&billing);
        assert_eq!(second.len(), 3, "{dead_letters}");
        for message in &sent {
            let (before, after) = (&first[message.id.as_str()], &second[message.id.as_str()]);
            let mut back = after.message.clone();
            back.destination.clone_from(&message.destination);
            assert_eq!(back, *message, "{dead_letters}");
            assert_eq!(
                (before.story.redrive_count, after.story.redrive_count),
                (0, 1)
            );
            assert_eq!(after.story.retry_count, 0);
            assert_eq!(after.story.reason, None);
            assert_eq!(after.story.last_error, None);
            assert_eq!(after.story.consumer.as_deref(), Some("billing"));
            assert_eq!(after.story.origin.as_ref().unwrap().topic, "orders");
        }
        assert_eq!(house.effects("billing").await.len(), 3);
        assert_eq!(house.store.count("billing").await.unwrap(), 0);
        let audit = desk.audit(0, 10).await.unwrap();
        assert_eq!(audit.len(), 3);
        for entry in &audit {
            assert_eq!(
                (entry.operator.as_str(), entry.verb.as_str()),
                ("ann", "redrive")
            );
            assert_eq!(entry.outcome, "sent");
            assert_eq!(entry.run, Some(run.row.id));
        }
    }
}

fn seen(billing: &Billing) -> BTreeMap<String, Incoming> {
    let seen = billing.seen.lock().unwrap();
    let by_id = |incoming: &Incoming| (incoming.message.id.to_string(), incoming.clone());
    seen.iter().map(by_id).collect()
}

#[tokio::test]
async fn a_redrive_goes_to_the_failing_consumer_only() {
    let house = House::new().await;
    let billing = Billing::default();
    let consumer = billing.start(&house, DeadLetters::table(house.store.clone()));
    let others = Shared::<String>::default();
    async fn note(seen: &Shared<String>, _: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
        seen.lock().unwrap().push(incoming.message.id.to_string());
        Outcome::Done
    }
    let mail = house.consume("mail", handler_fn(others.clone(), note));
    house.publish(&numbered("a", "m", 2)).await;
    buried(&house, 2).await;
    billing.repair();
    run_all(&desk(&house)).await;
    house.consumed("billing", "orders.billing.redrive").await;
    house.consumed("mail", "orders").await;
    for topic in ["orders.mail.redrive", "orders.mail.DLQ"] {
        assert!(house.broker.log(topic).is_empty());
    }
    assert_eq!(
        house.ids("orders").len(),
        2,
        "nothing went to the shared topic"
    );
    consumer.stop().await.unwrap();
    mail.stop().await.unwrap();
    assert_eq!(others.lock().unwrap().len(), 2);
    assert_eq!(house.effects("billing").await.len(), 2);
}

#[tokio::test]
async fn a_way_back_that_consumers_share_leads_each_copy_to_its_own() {
    let house = House::new().await;
    let shared = || DeadLetters::table(house.store.clone()).with_way_back("{topic}.redrive");
    let billing = Billing::default();
    let consumer = billing.start(&house, shared());
    let others = Shared::<String>::default();
    async fn note(seen: &Shared<String>, _: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
        seen.lock().unwrap().push(incoming.message.id.to_string());
        Outcome::Done
    }
    let mail = house.consumer("mail").with_dead_letters(shared());
    let mail = run(mail, handler_fn(others.clone(), note));
    house.publish(&numbered("a", "m", 2)).await;
    buried(&house, 2).await;
    billing.repair();
    let desk = desk(&house).with_dead_letters(shared());
    assert_eq!(run_all(&desk).await.row.sent, 2);
    house.consumed("billing", "orders.redrive").await;
    house.consumed("mail", "orders.redrive").await;
    house.consumed("mail", "orders").await;
    consumer.stop().await.unwrap();
    mail.stop().await.unwrap();
    assert_eq!(others.lock().unwrap().len(), 2);
    assert_eq!(house.effects("billing").await.len(), 2);
}

#[tokio::test]
async fn what_fails_again_is_a_new_entry_and_not_of_the_same_run() {
    let house = House::new().await;
    let billing = Billing::default();
    let consumer = billing.start(&house, DeadLetters::table(house.store.clone()));
    house.publish(&numbered("a", "m", 30)).await;
    buried(&house, 30).await;
    let desk = desk(&house).with_config(
        RedriveConfig::default()
            .with_rate_max(100_000)
            .with_batch_max(1),
    );
    let planned = plan(&desk).await;
    // Each comes back before the next one goes.
    let ended = desk
        .run("ann", planned.row.id, |run| {
            let sent = usize::try_from(run.row.sent).unwrap();
            let until = std::time::Instant::now() + DEADLINE;
            while house.broker.log("orders.billing.redrive").len() < sent {
                assert!(std::time::Instant::now() < until);
            }
        })
        .await
        .unwrap();
    assert_eq!((ended.row.state, ended.row.sent), (RunState::Done, 30));
    house.consumed("billing", "orders.billing.redrive").await;
    consumer.stop().await.unwrap();
    assert_eq!(way_back(&house).len(), 30);
    let again = desk.list(&LetterFilter::all(), 0, 100).await.unwrap();
    assert_eq!(again.len(), 30);
    assert!(again.iter().all(|entry| entry.story.redrive_count == 1));
    assert!(again.iter().all(|entry| entry.position > planned.row.end));
}
