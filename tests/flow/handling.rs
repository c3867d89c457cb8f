//! Forms of handlers: typed payloads, routes, and what a handler sends on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use relaybox::codec::{CodecError, Decode, Encode, Json};
use relaybox::consumer::{Handler, Outcome, Router, UnknownType, handler_fn, typed_fn};
use relaybox::envelope::Incoming;
use relaybox::testing::{Signal, eventually};
use relaybox::{ErrorKind, Failure, Message, Outbox};
use sqlx::sqlite::SqliteConnection;

use super::support::{DEADLINE, House, Running, Shared, brisk, loaded, run, write_effect};

pub type Db = SqliteConnection;

pub fn sent(id: &str, event_type: &str) -> Message {
    Message::new("orders", event_type)
        .with_id(id)
        .with_key("order-17")
}

pub fn reasons(dead: &[Incoming]) -> Vec<(&str, &str)> {
    let mut told = Vec::new();
    for letter in dead {
        let reason = letter.story.reason.as_ref().unwrap();
        told.push((letter.message.id.as_str(), reason.as_str()));
    }
    told
}

/// Everything published is read and settled.
pub async fn handled(house: &House, handler: impl Handler<Db>) {
    let running = house.consume("billing", handler);
    house.consumed("billing", "orders").await;
    running.stop().await.unwrap();
}

// Typed payloads

#[derive(serde::Serialize, serde::Deserialize)]
struct OrderPlaced {
    cents: u64,
}

#[tokio::test]
async fn a_payload_that_cannot_be_decoded_is_dead_at_once_with_its_bytes_as_they_came() {
    let house = House::new().await;
    let odd = b"{\"cents\":\"4111\"}\xff\0".to_vec();
    let messages = [
        sent("good", "OrderPlaced")
            .with_payload_of(&Json(OrderPlaced { cents: 4200 }))
            .unwrap(),
        sent("odd", "OrderPlaced")
            .with_payload(odd.clone())
            .with_header("a", vec![0xff]),
        sent("wrong", "OrderPlaced").with_payload(r#"{"cents":"4111"}"#),
        sent("empty", "OrderPlaced").with_payload(""),
        sent("null", "OrderPlaced"),
    ];
    house.publish(&messages).await;
    async fn book(
        sum: &Arc<AtomicU64>,
        db: &mut Db,
        Json(order): Json<OrderPlaced>,
        incoming: &Incoming,
    ) -> Result<(), Failure> {
        sum.fetch_add(order.cents, Ordering::SeqCst);
        write_effect(db, "billing", incoming).await;
        Ok(())
    }
    let sum = Arc::new(AtomicU64::new(0));
    handled(&house, typed_fn(sum.clone(), book)).await;
    assert_eq!(house.effects("billing").await, ["good"]);
    assert_eq!(sum.load(Ordering::SeqCst), 4200);
    let dead = house.dead("billing");
    let expected = ["odd", "wrong", "empty", "null"].map(|id| (id, "undecodable"));
    assert_eq!(reasons(&dead), expected);
    assert_eq!(dead[0].message.payload.as_deref(), Some(&*odd));
    assert_eq!(dead[0].message.headers, messages[1].headers);
    assert_eq!(dead[3].message.payload, None);
    for letter in &dead {
        assert_eq!(letter.story.retry_count, 1);
        let told = letter.story.last_error.as_deref().unwrap();
        assert!(!told.contains("4111"), "{told}");
    }
}

#[tokio::test]
async fn a_tombstone_is_none_for_a_handler_that_expects_one() {
    let house = House::new().await;
    let messages = [
        sent("set", "Address").with_payload("\"Rue 1\""),
        sent("gone", "Address"),
        sent("odd", "Address").with_payload("Rue 1"),
    ];
    house.publish(&messages).await;
    let seen = Shared::<Option<String>>::default();
    async fn moved(seen: &Shared<Option<String>>, _: &mut Db, to: Option<Json<String>>) -> Outcome {
        seen.lock().unwrap().push(to.map(|to| to.0));
        Outcome::Done
    }
    handled(&house, typed_fn(seen.clone(), moved)).await;
    assert_eq!(*seen.lock().unwrap(), [Some("Rue 1".to_owned()), None]);
    assert_eq!(reasons(&house.dead("billing")), [("odd", "undecodable")]);
}

fn numbers<const N: usize>(numbers: [&str; N]) -> [Message; N] {
    numbers.map(|number| sent(number, "Number").with_payload(number.to_owned()))
}

/// Notes how many came together at most.
async fn write_numbers(
    most: &Arc<AtomicU64>,
    db: &mut Db,
    numbers: Vec<Json<u64>>,
    batch: &[&Incoming],
) -> Outcome {
    most.fetch_max(numbers.len() as u64, Ordering::SeqCst);
    assert_eq!(numbers.len(), batch.len());
    for (Json(number), incoming) in numbers.iter().zip(batch) {
        assert_eq!(number.to_string(), incoming.message.id.as_str());
        write_effect(db, "billing", incoming).await;
    }
    Outcome::Done
}

#[tokio::test]
async fn a_batch_comes_as_types_and_only_its_bad_one_fails() {
    let house = House::new().await;
    house.publish(&numbers(["1", "2", "3", "4", "5"])).await;
    house
        .publish(&numbers(["six", "7", "8", "9", "10", "11", "12"]))
        .await;
    let most = Arc::<AtomicU64>::default();
    let handler = typed_fn(most.clone(), write_numbers);
    let consumer = house.consumer("billing");
    let running = Running::start(|stop| consumer.run_batches_until(5, handler, stop));
    house.consumed("billing", "orders").await;
    running.stop().await.unwrap();
    let effects = house.effects("billing").await;
    let good = ["1", "2", "3", "4", "5", "7", "8", "9", "10", "11", "12"];
    assert_eq!(effects, good);
    assert!(loaded(&most) > 1);
    assert_eq!(reasons(&house.dead("billing")), [("six", "undecodable")]);
}

#[tokio::test]
async fn work_outside_of_transactions_takes_its_payload_as_a_type_too() {
    let house = House::new().await;
    house.publish(&numbers(["1", "two", "3"])).await;
    async fn add(sum: &Arc<AtomicU64>, Json(number): Json<u64>) -> Result<(), Failure> {
        sum.fetch_add(number, Ordering::SeqCst);
        Ok(())
    }
    let sum = Arc::<AtomicU64>::default();
    let handler = typed_fn(sum.clone(), add);
    let consumer = house.consumer("mail");
    let running = Running::start(|stop| consumer.run_outside_until(handler, stop));
    house.consumed("mail", "orders").await;
    running.stop().await.unwrap();
    assert_eq!(loaded(&sum), 4);
    assert_eq!(reasons(&house.dead("mail")), [("two", "undecodable")]);
}

/// A codec of a user's own: lines of numbers, in anything but JSON.
#[derive(Debug, PartialEq)]
struct Lines(Vec<u32>);

impl Decode for Lines {
    fn decode(payload: &bytes::Bytes) -> Result<Self, CodecError> {
        let lines = std::str::from_utf8(payload)?.lines();
        Ok(Self(lines.map(str::parse).collect::<Result<_, _>>()?))
    }
}

impl Encode for Lines {
    const CONTENT_TYPE: &str = "text/plain";

    fn encode(&self) -> Result<bytes::Bytes, CodecError> {
        if self.0.is_empty() {
            return Err("no line".into());
        }
        let lines: Vec<_> = self.0.iter().map(u32::to_string).collect();
        Ok(lines.join("\n").into())
    }
}

#[tokio::test]
async fn a_codec_of_a_users_own_serves_both_sides() {
    let house = House::new().await;
    let message = sent("good", "Lines")
        .with_payload_of(&Lines(vec![1, 2]))
        .unwrap();
    assert_eq!(message.content_type.as_deref(), Some("text/plain"));
    let refused = sent("", "Lines").with_payload_of(&Lines(vec![]));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    let bad = sent("bad", "Lines").with_payload("1\ntwo");
    house.publish(&[message, bad]).await;
    let seen = Shared::<Lines>::default();
    async fn keep(seen: &Shared<Lines>, _: &mut Db, lines: Lines) -> Result<(), Failure> {
        seen.lock().unwrap().push(lines);
        Ok(())
    }
    handled(&house, typed_fn(seen.clone(), keep)).await;
    assert_eq!(*seen.lock().unwrap(), [Lines(vec![1, 2])]);
    assert_eq!(reasons(&house.dead("billing")), [("bad", "undecodable")]);
}

#[tokio::test]
async fn a_dead_letter_has_the_reason_its_handler_gave() {
    let house = House::new().await;
    let told = sent("told", "T").with_payload("card-declined");
    house.publish(&[told, sent("plain", "T")]).await;
    async fn refuse(_: &(), _: &mut Db, incoming: &Incoming) -> Outcome {
        let failure = Failure::new("no");
        Outcome::Permanent(match &incoming.message.payload {
            Some(_) => failure.with_reason(relaybox::story::Reason::new("card-declined")),
            None => failure,
        })
    }
    handled(&house, handler_fn((), refuse)).await;
    assert_eq!(
        reasons(&house.dead("billing")),
        [("told", "card-declined"), ("plain", "permanent")]
    );
}

// Routes

async fn placed(name: &&'static str, db: &mut Db, _: Json<u32>, incoming: &Incoming) -> Outcome {
    write_effect(db, name, incoming).await;
    Outcome::Done
}

pub async fn raw(name: &&'static str, db: &mut Db, incoming: &Incoming) -> Outcome {
    write_effect(db, name, incoming).await;
    Outcome::Done
}

fn routes(rule: UnknownType<Db>) -> Router<Db> {
    Router::new(rule)
        .with_route("Placed", typed_fn("placed", placed))
        .unwrap()
        .with_route("Cancelled", handler_fn("cancelled", raw))
        .unwrap()
}

async fn publish_types(house: &House) {
    let messages = [
        sent("1", "Placed").with_payload("1"),
        sent("2", "Unknown"),
        sent("3", "Cancelled").with_payload("{"),
        sent("4", "placed").with_payload("1"),
        sent("5", "Placed").with_payload("one"),
    ];
    house.publish(&messages).await;
}

#[tokio::test]
async fn a_type_goes_to_its_handler_and_an_unknown_one_is_skipped() {
    let house = House::new().await;
    publish_types(&house).await;
    let router = routes(UnknownType::Skip);
    let unknown = router.unknown();
    let consumer = house.consumer("billing");
    let counts = consumer.counts();
    let running = run(consumer, router);
    house.consumed("billing", "orders").await;
    running.stop().await.unwrap();
    assert_eq!(house.effects("placed").await, ["1"]);
    assert_eq!(house.effects("cancelled").await, ["3"]);
    assert_eq!(reasons(&house.dead("billing")), [("5", "undecodable")]);
    assert_eq!(loaded(&unknown), 2);
    // Skipped is handled: it is recorded and does not come again.
    assert_eq!(loaded(&counts.handled), 4);
}

#[tokio::test]
async fn an_unknown_type_is_a_dead_letter_by_choice() {
    let house = House::new().await;
    publish_types(&house).await;
    handled(&house, routes(UnknownType::DeadLetter)).await;
    let dead = house.dead("billing");
    assert_eq!(
        reasons(&dead),
        [
            ("2", "unknown-type"),
            ("4", "unknown-type"),
            ("5", "undecodable")
        ]
    );
    assert!(
        dead[0]
            .story
            .last_error
            .as_deref()
            .unwrap()
            .contains("Unknown")
    );
}

#[tokio::test]
async fn an_unknown_type_goes_to_the_handler_for_all_others_by_choice() {
    let house = House::new().await;
    publish_types(&house).await;
    let untyped = Message::new("orders", "").with_id("6").with_key("order-17");
    house.publish(&[untyped]).await;
    let others = UnknownType::handler(handler_fn("others", raw));
    handled(&house, routes(others)).await;
    assert_eq!(house.effects("others").await, ["2", "4", "6"]);
    assert_eq!(house.effects("cancelled").await, ["3"]);
}

#[tokio::test]
async fn a_second_handler_of_a_type_is_refused_by_name() {
    let second = routes(UnknownType::Skip).with_route("Placed", handler_fn("again", raw));
    let error = second.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
    let violation = error.violation().unwrap();
    assert_eq!(
        (violation.field, violation.value.as_str()),
        ("event type", "Placed")
    );
}

// What a handler sends on

/// Charges, and tells so in the same transaction.
struct Till {
    outbox: Outbox<relaybox::store::sqlite::SqliteStore>,
    attempts: AtomicU64,
    entered: Signal,
}

async fn charge(
    till: &Till,
    db: &mut Db,
    Json(cents): Json<u32>,
    incoming: &Incoming,
) -> Result<(), relaybox::Error> {
    write_effect(db, "billing", incoming).await;
    let taken = Message::new("payments", "PaymentTaken")
        .with_key("order-17")
        .with_payload_of(&Json(cents))?
        .caused_by(incoming);
    till.outbox.enqueue(db, taken).await?;
    match till.attempts.fetch_add(1, Ordering::SeqCst) {
        0 => std::future::pending().await,
        1 => panic!("after all was written"),
        _ => Ok(()),
    }
}

#[tokio::test]
async fn what_a_handler_sends_on_exists_once_and_tells_its_cause() {
    let house = House::new().await;
    house.broker.create_topic("payments", 1).unwrap();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let order = sent("order-1", "OrderPlaced")
        .with_payload("4200")
        .with_trace(trace, Some("v=1".into()));
    house.enqueue(std::slice::from_ref(&order)).await;
    let relay = house.relay(house.broker.clone(), brisk());
    house.drained().await;
    // The broker has it twice.
    house.publish(&[order]).await;

    let till = || Till {
        outbox: Outbox::new(house.store.clone()),
        attempts: AtomicU64::new(0),
        entered: Signal::new(),
    };
    // Killed with all written and nothing committed; then a panic at the same place, a retry, and a duplicate.
    let first = Arc::new(till());
    async fn shared(
        till: &Arc<Till>,
        db: &mut Db,
        cents: Json<u32>,
        incoming: &Incoming,
    ) -> Result<(), relaybox::Error> {
        till.entered.set();
        charge(till, db, cents, incoming).await
    }
    let killed = house.consume("billing", typed_fn(first.clone(), shared));
    first.entered.wait().await;
    eventually(DEADLINE, "it hangs after all was written", || async {
        first.attempts.load(Ordering::SeqCst) == 1
    })
    .await;
    killed.kill().await;
    let running = house.consume("billing", typed_fn(first.clone(), shared));
    house.consumed("billing", "orders").await;
    house.consumed("billing", "orders.billing.retry.50ms").await;
    house.drained().await;
    running.stop().await.unwrap();
    relay.stop().await.unwrap();
    assert_eq!(first.attempts.load(Ordering::SeqCst), 3);
    assert_eq!(house.effects("billing").await, ["order-1"]);

    let payments = house.broker.log("payments");
    assert_eq!(payments.len(), 1);
    let seen = Shared::<Message>::default();
    async fn keep(seen: &Shared<Message>, _: &mut Db, incoming: &Incoming) -> Outcome {
        seen.lock().unwrap().push(incoming.message.clone());
        Outcome::Retry(Failure::new("not today"))
    }
    let consumer = relaybox::Consumer::new(
        "mail",
        "payments",
        house.broker.clone(),
        house.store.clone(),
    )
    .with_ladder(relaybox::Ladder::rungs([Duration::from_millis(50)]));
    let running = run(consumer, handler_fn(seen.clone(), keep));
    eventually(DEADLINE, "it is a dead letter", || async {
        !house.broker.log("payments.mail.DLQ").is_empty()
    })
    .await;
    running.stop().await.unwrap();
    let seen = seen.lock().unwrap().clone();
    let dead = &house.broker.log("payments.mail.DLQ")[0].message;
    for message in seen.iter().chain([dead]) {
        assert_eq!(message.causation_id(), Some("order-1"));
        assert_eq!(message.id, payments[0].message.id);
        let carried = message.trace.as_ref().unwrap();
        assert_eq!(carried.parent, trace);
        assert_eq!(carried.state.as_deref(), Some("v=1"));
    }
    assert_eq!(seen.len(), 2);
}
