//! From the broker to the effect.

use relaybox::Message;
use relaybox::consumer::{Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::testing::Signal;
use sqlx::sqlite::SqliteConnection;

use super::support::{House, Shared, brisk, loaded, numbered, run, write_effect};

async fn effect(
    consumer: &&'static str,
    db: &mut SqliteConnection,
    incoming: &Incoming,
) -> Outcome {
    write_effect(db, consumer, incoming).await;
    Outcome::Done
}

#[tokio::test]
async fn a_duplicate_changes_nothing_and_is_acknowledged() {
    let house = House::new().await;
    let message = numbered("k", "m", 1);
    house.publish(&message).await;
    house.publish(&message).await;
    let consumer = house.consumer("billing");
    let counts = consumer.counts();
    let consumer = run(consumer, handler_fn("billing", effect));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert_eq!(house.effects("billing").await, ["m-0"]);
    assert_eq!(loaded(&counts.duplicates), 1);
    assert_eq!(loaded(&counts.handled), 1);
}

#[tokio::test]
async fn two_consumers_on_one_inbox_each_do_their_work() {
    let house = House::new().await;
    house.publish(&numbered("k", "m", 3)).await;
    let billing = house.consume("billing", handler_fn("billing", effect));
    let mail = house.consume("mail", handler_fn("mail", effect));
    house.consumed("billing", "orders").await;
    house.consumed("mail", "orders").await;
    billing.stop().await.unwrap();
    mail.stop().await.unwrap();
    assert_eq!(house.effects("billing").await, ["m-0", "m-1", "m-2"]);
    assert_eq!(house.effects("mail").await, ["m-0", "m-1", "m-2"]);
}

#[tokio::test]
async fn a_killed_consumer_leaves_no_half_effect_and_the_next_one_does_it_once() {
    let house = House::new().await;
    house.publish(&numbered("k", "m", 2)).await;
    let started = Signal::new();
    async fn hang(started: &Signal, db: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
        write_effect(db, "billing", incoming).await;
        started.set();
        std::future::pending().await
    }
    let first = house.consume("billing", handler_fn(started.clone(), hang));
    started.wait().await;
    first.kill().await;
    let second = house.consume("billing", handler_fn("billing", effect));
    house.consumed("billing", "orders").await;
    second.stop().await.unwrap();
    assert_eq!(house.effects("billing").await, ["m-0", "m-1"]);
}

#[tokio::test]
async fn skip_commits_and_acknowledges() {
    let house = House::new().await;
    house.publish(&numbered("k", "m", 1)).await;
    async fn skip(_: &(), _: &mut SqliteConnection, _: &Incoming) -> Outcome {
        Outcome::Skip
    }
    let consumer = house.consume("billing", handler_fn((), skip));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    assert!(house.dead("billing").is_empty());
}

#[derive(Clone, Default)]
struct Gate {
    entered: Signal,
    open: Signal,
}

#[tokio::test]
async fn a_stop_lets_running_work_end_and_leaves_the_rest_to_the_next() {
    let house = House::new().await;
    house.publish(&numbered("k", "m", 5)).await;
    let gate = Gate::default();
    async fn gated(gate: &Gate, db: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
        write_effect(db, "billing", incoming).await;
        gate.entered.set();
        gate.open.wait().await;
        Outcome::Done
    }
    let first = house.consume("billing", handler_fn(gate.clone(), gated));
    gate.entered.wait().await;
    let stopping = tokio::spawn(first.stop());
    tokio::task::yield_now().await;
    gate.open.set();
    stopping.await.unwrap().unwrap();
    let done = house.effects("billing").await;
    assert!(!done.is_empty());
    let second = house.consume("billing", handler_fn("billing", effect));
    house.consumed("billing", "orders").await;
    second.stop().await.unwrap();
    assert_eq!(
        house.effects("billing").await,
        ["m-0", "m-1", "m-2", "m-3", "m-4"]
    );
}

#[tokio::test]
async fn a_missing_source_is_named_at_start() {
    let house = House::new().await;
    let consumer = relaybox::consumer::Consumer::new(
        "billing",
        "no-such-topic",
        house.broker.clone(),
        house.store.clone(),
    );
    let error = consumer
        .run_until(handler_fn("billing", effect), std::future::pending())
        .await
        .unwrap_err();
    assert_eq!(error.kind(), relaybox::ErrorKind::NotFound);
    assert!(error.to_string().contains("no-such-topic"), "{error}");
}

#[tokio::test]
async fn payload_key_and_headers_reach_the_handler_byte_for_byte() {
    let house = House::new().await;
    let mut message = Message::new("orders", "Odd")
        .with_key([0u8, 0xff])
        .with_payload(
            b"{\"z\":1,\"a\":750727362669608961,\"n\":1.10,\"x\":\"\\u0000\"}\xff\x00".to_vec(),
        )
        .with_header("twice", "1")
        .with_header("twice", vec![0u8, 0x80])
        .with_version(i64::MIN)
        .with_trace(
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            None,
        );
    message.headers.push_optional("null", None);
    let tombstone = Message::new("orders", "Gone").with_key("");
    house.enqueue(&[message.clone(), tombstone.clone()]).await;
    let seen = Shared::<Message>::default();
    async fn keep(
        seen: &Shared<Message>,
        _: &mut SqliteConnection,
        incoming: &Incoming,
    ) -> Outcome {
        seen.lock().unwrap().push(incoming.message.clone());
        Outcome::Done
    }
    let relay = house.relay(house.broker.clone(), brisk());
    house.drained().await;
    relay.stop().await.unwrap();
    let consumer = house.consume("billing", handler_fn(seen.clone(), keep));
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    let mut seen = seen.lock().unwrap().clone();
    seen.sort_by_key(|message| message.event_type.clone());
    assert_eq!(seen, [tombstone, message]);
}

#[tokio::test]
async fn large_messages_do_not_exceed_the_bytes_in_flight() {
    let house = House::new().await;
    let large = |message: Message| message.with_payload(vec![7; 100_000]);
    let messages: Vec<Message> = numbered("k", "m", 40).into_iter().map(large).collect();
    house.publish(&messages).await;
    let gate = Gate::default();
    async fn gated(gate: &Gate, _: &mut SqliteConnection, _: &Incoming) -> Outcome {
        gate.entered.set();
        gate.open.wait().await;
        Outcome::Done
    }
    let config = super::support::quick().with_in_flight_bytes_max(500_000);
    let consumer = house.consumer("billing").with_config(config);
    let consumer = run(consumer, handler_fn(gate.clone(), gated));
    gate.entered.wait().await;
    let taken = || async { house.broker.deliveries("billing") >= 4 };
    relaybox::testing::eventually(super::support::DEADLINE, "it takes what fits", taken).await;
    // What it takes too much, it takes at once.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(house.broker.deliveries("billing") <= 5);
    gate.open.set();
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
}
