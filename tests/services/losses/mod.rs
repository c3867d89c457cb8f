//! Everything fails, over each broker: no letter is lost, whatever its place does, and no byte of it changes.

mod watched;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lapin::options::QueueDeleteOptions;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use relaybox::backoff::DelayPolicy;
use relaybox::broker::{Publisher, Subscriber, SubscriptionRequest, TopologyMode};
use relaybox::consumer::{Consumer, ConsumerConfig, ConsumerCounts, Failure, Outcome, handler_fn};
use relaybox::envelope::{Incoming, Outgoing};
use relaybox::readiness::NotReady;
use relaybox::store::NoInbox;
use relaybox::testing::{Signal, eventually};
use relaybox::{Ladder, Message, Probe, Result};
use relaybox_testcontainers::{shared_kafka, shared_nats, shared_rabbitmq, unique_name};
use tokio::task::JoinHandle;

use crate::end_to_end::broker::{self, Place, Product};
use crate::fragile::place;

use watched::{Book, LOSE_CONFIRM, REFUSE, THROUGH, Watched};

/// Longest wait for anything that must happen; only a failing test waits that long.
const DEADLINE: Duration = Duration::from_secs(180);

struct Scene {
    place: Place,
    broker: Watched,
    topic: String,
    consumer: String,
}

struct Running {
    stop: Signal,
    task: JoinHandle<Result<()>>,
    probe: Probe,
    counts: Arc<ConsumerCounts>,
}

/// What is said of each message: permanent, or an error of this many bytes.
#[derive(Clone, Copy)]
enum Word {
    Permanent,
    Retry(usize),
}

async fn fail(word: &Word, _: &Incoming) -> Outcome {
    match word {
        Word::Permanent => Outcome::Permanent(Failure::new("pointless")),
        Word::Retry(bytes) => Outcome::Retry(Failure::new("é".repeat(bytes / 2))),
    }
}

impl Scene {
    async fn new(product: Product) -> Self {
        let address = match product {
            Product::Kafka => shared_kafka().await.brokers(),
            Product::RabbitMq => shared_rabbitmq().await.url(),
            Product::Nats => shared_nats().await.url(),
        };
        let place = Place { product, address };
        let topic = unique_name("loss");
        place::prepare(&place, &topic).await.unwrap();
        let inner = place::connect(&place, &topic, "test").await.unwrap();
        Self {
            broker: Watched {
                inner,
                book: Arc::default(),
            },
            consumer: unique_name("c"),
            place,
            topic,
        }
    }

    async fn send(&self, messages: &[Message]) {
        let batch: Vec<Outgoing> = messages.iter().cloned().map(Into::into).collect();
        let outcomes = self.broker.inner.publish(&batch).await;
        for outcome in &outcomes {
            assert!(outcome.is_confirmed(), "{outcome:?}");
        }
    }

    async fn send_numbered(&self, numbers: std::ops::Range<usize>) {
        let message = |n: usize| {
            Message::new(&*self.topic, "T")
                .with_id(format!("m-{n}"))
                .with_key(format!("k-{}", n % 10))
                .with_payload(n.to_string())
        };
        let messages: Vec<Message> = numbers.map(message).collect();
        self.send(&messages).await;
    }

    fn run(&self, ladder: Ladder, word: Word) -> Running {
        let config = ConsumerConfig::default()
            .without_failure_guard()
            .with_backoff(DelayPolicy::fixed(Duration::from_millis(200)))
            .with_shutdown_deadline(Duration::from_secs(15));
        let consumer = Consumer::new(&*self.consumer, &*self.topic, self.broker.clone(), NoInbox)
            .with_ladder(ladder)
            .with_config(config);
        let (probe, counts) = (consumer.probe(), consumer.counts());
        let stop = Signal::new();
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let stopped = async move { stopped.wait().await };
            consumer
                .run_outside_until(handler_fn(word, fail), stopped)
                .await
        });
        Running {
            stop,
            task,
            probe,
            counts,
        }
    }

    fn letters(&self) -> String {
        format!("{}.{}.DLQ", self.topic, self.consumer)
    }

    async fn read(&self) -> Vec<Incoming> {
        let read = broker::read(&*self.broker.inner, &self.letters()).await;
        read.unwrap().into_values().collect()
    }

    /// As a consumer of something else makes it when it starts.
    async fn make_letters(&self) {
        let elsewhere = unique_name("elsewhere");
        place::prepare(&self.place, &elsewhere).await.unwrap();
        let client = place::connect(&self.place, &elsewhere, "maker").await;
        let mut request = SubscriptionRequest::new(unique_name("maker"), vec![elsewhere]);
        request.dead_letters = vec![self.letters()];
        request.topology = TopologyMode::Create;
        let made = client.unwrap().subscribe(request).await.unwrap();
        made.close(Duration::from_secs(10)).await.unwrap();
    }
}

/// Deletes a rung or a place of dead letters, as an operator would.
pub async fn delete(place: &Place, name: String) {
    let address = &place.address;
    match place.product {
        Product::Kafka => {
            let mut config = ClientConfig::new();
            config.set("bootstrap.servers", address);
            let admin: AdminClient<DefaultClientContext> = config.create().unwrap();
            let deleted = admin.delete_topics(&[&name], &AdminOptions::new()).await;
            deleted.unwrap().remove(0).unwrap();
        }
        Product::RabbitMq => {
            let channel = crate::rabbitmq::raw(address).await;
            let options = QueueDeleteOptions::default();
            channel.queue_delete(name.into(), options).await.unwrap();
        }
        Product::Nats => {
            let stream = name.replace('.', "~");
            let client = crate::nats::client(address).await;
            client.delete_stream(stream).await.unwrap();
        }
    }
}

impl Running {
    async fn stop(self) {
        self.stop.set();
        self.task.await.unwrap().unwrap();
    }

    async fn ready(&self) {
        eventually(DEADLINE, "the consumer is ready", || async {
            self.probe.readiness().is_ready()
        })
        .await;
    }
}

async fn no_dead_letter_is_lost_when_their_place_refuses_is_gone_or_its_confirmations_are_lost(
    product: Product,
) {
    let scene = Scene::new(product).await;
    let book = Arc::clone(&scene.broker.book);
    let consumer = scene.run(Ladder::none(), Word::Permanent);
    consumer.ready().await;

    // Gone, and made again.
    delete(&scene.place, scene.letters()).await;
    scene.send_numbered(0..34).await;
    eventually(DEADLINE, "the probe names the place", || async {
        let reasons = consumer.probe.readiness().reasons;
        reasons.iter().any(|reason| {
            matches!(reason, NotReady::CopiesRefused { place, .. } if *place == scene.letters())
        })
    })
    .await;
    assert_eq!(Book::count(&book.acknowledged), 0);
    scene.make_letters().await;
    let acknowledged = |count| {
        let book = Arc::clone(&book);
        eventually(DEADLINE, "all so far are acknowledged", move || {
            let acknowledged = Book::count(&book.acknowledged);
            async move { acknowledged == count }
        })
    };
    acknowledged(34).await;
    consumer.ready().await;

    // Refused.
    book.is(REFUSE);
    scene.send_numbered(34..67).await;
    eventually(DEADLINE, "each key's first was refused", || async {
        Book::count(&book.refused) >= 10
    })
    .await;
    assert_eq!(Book::count(&book.acknowledged), 34);
    book.is(THROUGH);
    acknowledged(67).await;

    // Stored, and the confirmation lost.
    book.is(LOSE_CONFIRM);
    scene.send_numbered(67..100).await;
    acknowledged(100).await;
    assert_eq!(Book::count(&book.lost), 33);
    consumer.ready().await;
    consumer.stop().await;

    assert_eq!(*book.too_early.lock().unwrap(), Vec::<String>::new());
    let letters = scene.read().await;
    let ids: BTreeSet<String> = letters
        .iter()
        .map(|letter| letter.message.id.to_string())
        .collect();
    assert_eq!(ids.len(), 100, "each is there: {ids:?}");
    let copies = letters.len() - ids.len();
    println!("{copies} copies of 33 whose confirmation was lost");
    // A stream recognises what it has; the others have one more of each.
    assert!(copies <= 33, "{copies}");
    for letter in &letters {
        assert_eq!(letter.story.reason.as_ref().unwrap().as_str(), "permanent");
        assert_eq!(letter.story.retry_count, 1);
    }
}

/// Each with something that a broker might spoil.
fn odd_messages(topic: &str) -> Vec<Message> {
    let new = |id: &str| Message::new(topic, "Odd").with_id(id);
    let mut null_header = new("null header").with_key("k").with_payload("p");
    null_header.headers.push_optional("nothing", None);
    null_header.headers.push("nothing", "");
    vec![
        new("null payload").with_key("k"),
        new("empty payload").with_key("k").with_payload(""),
        new("null key").with_payload("p"),
        new("empty key").with_key("").with_payload("p"),
        new("odd key").with_key(&b"\0\xff"[..]).with_payload("p"),
        null_header,
        new("repeated header")
            .with_payload("p")
            .with_header("a", "1")
            .with_header("b", &b"\xff\xc3\x28\0"[..])
            .with_header("a", "2")
            .with_header("A", " 3 ")
            .with_header("a", ""),
        new("all bytes")
            .with_key("k")
            .with_version(-7)
            .with_content_type("application/é")
            .with_trace("00-aa-bb-01", Some("v=1".into()))
            .with_payload((0..=u8::MAX).collect::<Vec<u8>>()),
    ]
}

async fn every_byte_survives_two_rungs_and_the_dead_letters(product: Product) {
    let scene = Scene::new(product).await;
    let sent = odd_messages(&scene.topic);
    scene.send(&sent).await;
    let consumer = scene.run(place::ladder(), Word::Retry(40));
    eventually(DEADLINE, "all are dead", || async {
        consumer.counts.dead.load(Ordering::SeqCst) == sent.len() as u64
    })
    .await;
    consumer.stop().await;
    let letters = scene.read().await;
    let by_id: BTreeMap<&str, &Incoming> = letters
        .iter()
        .map(|letter| (letter.message.id.as_str(), letter))
        .collect();
    for message in &sent {
        let letter = by_id[message.id.as_str()];
        let mut expected = message.clone();
        expected.destination.clone_from(&letter.message.destination);
        assert_eq!(letter.message, expected);
        assert_eq!(letter.story.retry_count, 3);
    }
}

/// A message of the largest size, and an error as large as a stack trace, ten times.
async fn the_largest_message_climbs_ten_rungs_and_its_story_stays_small(product: Product) {
    let scene = Scene::new(product).await;
    let limits = Publisher::capabilities(&scene.broker).limits;
    let new = |id: &str, bytes: usize| {
        let message = Message::new(&*scene.topic, "Large")
            .with_id(id)
            .with_key(id);
        let left = bytes - message.bytes();
        let payload: Vec<u8> = (0..left).map(|n| (n % 251) as u8).collect();
        message.with_payload(payload)
    };
    let largest = new("largest", limits.message_bytes_max);
    assert_eq!(largest.bytes(), limits.message_bytes_max);
    let sent = [new("large", 900_000.min(limits.message_bytes_max)), largest];
    scene.send(&sent).await;
    let ladder = Ladder::rungs((1..=10).map(|n| Duration::from_millis(10 * n)));
    let consumer = scene.run(ladder, Word::Retry(300_000));
    eventually(DEADLINE, "both are dead", || async {
        consumer.counts.dead.load(Ordering::SeqCst) == 2
    })
    .await;
    consumer.stop().await;
    let letters = scene.read().await;
    assert_eq!(letters.len(), 2);
    for letter in letters {
        let message = sent.iter().find(|sent| sent.id == letter.message.id);
        assert_eq!(letter.message.payload, message.unwrap().payload);
        assert_eq!(letter.story.retry_count, 11);
        // Cut where a character ends.
        assert_eq!(letter.story.last_error.as_ref().unwrap().len(), 1_023);
        let bare = Outgoing::from(letter.message.clone()).to_headers().bytes();
        let (message, story) = (letter.message, letter.story);
        let told = Outgoing { message, story }.to_headers().bytes();
        assert!(told - bare <= 4_096, "{}", told - bare);
    }
}

macro_rules! over {
    ($($module:ident $product:ident)+) => {
        $(
            mod $module {
                use crate::end_to_end::broker::Product;

                #[tokio::test(flavor = "multi_thread")]
                async fn no_dead_letter_is_lost_when_their_place_refuses_is_gone_or_its_confirmations_are_lost() {
                    super::no_dead_letter_is_lost_when_their_place_refuses_is_gone_or_its_confirmations_are_lost(
                        Product::$product,
                    )
                    .await;
                }

                #[tokio::test(flavor = "multi_thread")]
                async fn every_byte_survives_two_rungs_and_the_dead_letters() {
                    super::every_byte_survives_two_rungs_and_the_dead_letters(Product::$product).await;
                }

                #[tokio::test(flavor = "multi_thread")]
                async fn the_largest_message_climbs_ten_rungs_and_its_story_stays_small() {
                    super::the_largest_message_climbs_ten_rungs_and_its_story_stays_small(Product::$product)
                        .await;
                }
            }
        )+
    };
}

over!(kafka Kafka rabbitmq RabbitMq nats Nats);
