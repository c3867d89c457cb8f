//! A ladder with other delays, over each broker: what waits on the rungs of the earlier one is handled all the same.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use relaybox::broker::Broker;
use relaybox::consumer::{Consumer, ConsumerConfig, Failure, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::store::NoInbox;
use relaybox::testing::{Signal, eventually};
use relaybox::{Ladder, Message, Result};
use relaybox_testcontainers::{shared_kafka, shared_nats, shared_rabbitmq, unique_name};
use time::OffsetDateTime;
use tokio::task::JoinHandle;

use crate::end_to_end::broker::{Place, Product};
use crate::fragile::place;

/// Longest wait for anything that must happen; only a failing test waits that long.
const DEADLINE: Duration = Duration::from_secs(180);
const EARLIER: Duration = Duration::from_secs(8);

/// What was handled, and whether before its time.
type Seen = Arc<Mutex<Vec<(String, bool)>>>;

async fn fail(_: &Seen, _: &Incoming) -> Outcome {
    Outcome::Retry(Failure::new("not today"))
}

async fn note(seen: &Seen, incoming: &Incoming) -> Outcome {
    let early = incoming
        .story
        .due_at
        .is_some_and(|due| OffsetDateTime::now_utc() < due);
    let id = incoming.message.id.to_string();
    seen.lock().unwrap().push((id, early));
    Outcome::Done
}

struct Scene {
    broker: Arc<dyn Broker>,
    /// Of the members with the earlier ladder: others than those with the present one, so that no place in a group is inherited.
    earlier: Arc<dyn Broker>,
    place: Place,
    topic: String,
}

impl Scene {
    async fn new(product: Product) -> Self {
        let address = match product {
            Product::Kafka => shared_kafka().await.brokers(),
            Product::RabbitMq => shared_rabbitmq().await.url(),
            Product::Nats => shared_nats().await.url(),
        };
        let place = Place { product, address };
        let topic = unique_name("delays");
        place::prepare(&place, &topic).await.unwrap();
        let broker = place::connect(&place, &topic, "test").await.unwrap();
        Self {
            earlier: place::connect(&place, &topic, "earlier").await.unwrap(),
            broker,
            place,
            topic,
        }
    }

    async fn send(&self, id: &str) {
        let message = Message::new(&*self.topic, "T").with_id(id).with_key("k");
        let outcomes = self.broker.publish(&[message.into()]).await;
        assert!(outcomes[0].is_confirmed(), "{outcomes:?}");
    }

    fn consumer(&self, name: &str, delay: Duration) -> Consumer<NoInbox> {
        let broker = if delay == EARLIER {
            &self.earlier
        } else {
            &self.broker
        };
        let config = ConsumerConfig::default().with_shutdown_deadline(Duration::from_secs(5));
        Consumer::new(name, &*self.topic, broker.clone(), NoInbox)
            .with_ladder(Ladder::rungs([delay]))
            .with_config(config)
    }

    /// Lets `name` put a message on its rung of the earlier ladder.
    async fn strand(&self, name: &str, id: &str) {
        let stop = Signal::new();
        let consumer = self.consumer(name, EARLIER);
        let counts = consumer.counts();
        let stopped = stop.clone();
        let task: JoinHandle<Result<()>> = tokio::spawn(async move {
            let handler = handler_fn(Seen::default(), fail);
            consumer
                .run_outside_until(handler, async move { stopped.wait().await })
                .await
        });
        self.send(id).await;
        eventually(DEADLINE, "it is on the rung", || async {
            counts.retried.load(std::sync::atomic::Ordering::SeqCst) == 1
        })
        .await;
        stop.set();
        task.await.unwrap().unwrap();
    }
}

async fn what_waits_on_a_rung_of_an_earlier_ladder_is_handled_when_it_is_due(product: Product) {
    let scene = Scene::new(product).await;
    let name = unique_name("c");
    scene.strand(&name, "m-0").await;
    let consumer = scene.consumer(&name, Duration::from_secs(60));
    let found = consumer.earlier_rungs().await.unwrap();
    let told: Vec<(&str, Duration, u64)> = found
        .iter()
        .map(|found| {
            let rung = &found.rung;
            (&*rung.destination, rung.delay, found.backlog.messages)
        })
        .collect();
    let rung = format!("{}.{name}.retry.8s", scene.topic);
    match scene.place.product {
        // What is due goes back to the source's queue by itself.
        Product::RabbitMq => assert_eq!(told, []),
        Product::Kafka | Product::Nats => assert_eq!(told, [(&*rung, EARLIER, 1)]),
    }
    let seen = Seen::default();
    let (handler, stop) = (handler_fn(seen.clone(), note), Signal::new());
    let stopped = stop.clone();
    let counts = consumer.counts();
    let task = tokio::spawn(async move {
        consumer
            .run_outside_until(handler, async move { stopped.wait().await })
            .await
    });
    eventually(DEADLINE, "it is handled", || async {
        counts.handled.load(std::sync::atomic::Ordering::SeqCst) == 1
    })
    .await;
    assert_eq!(*seen.lock().unwrap(), [("m-0".to_owned(), false)]);
    eventually(DEADLINE, "the rung is empty, and still there", || async {
        let lag = scene.broker.lag(&name, &rung).await;
        lag.is_ok_and(|lag| lag.messages == 0)
    })
    .await;
    // Once nobody writes there any more it may go, also under those that read it.
    crate::losses::delete(&scene.place, rung).await;
    scene.send("m-1").await;
    eventually(DEADLINE, "others go on", || async {
        counts.handled.load(std::sync::atomic::Ordering::SeqCst) == 2
    })
    .await;
    stop.set();
    task.await.unwrap().unwrap();
}

/// Another consumer whose name begins like ours.
async fn a_rung_that_only_looks_like_ours_is_left_alone(product: Product) {
    let scene = Scene::new(product).await;
    let name = unique_name("c");
    let other = format!("{name}.eu");
    scene.strand(&other, "m-0").await;
    let consumer = scene.consumer(&name, Duration::from_secs(60));
    assert_eq!(consumer.earlier_rungs().await.unwrap(), []);
    let found = scene.consumer(&other, Duration::from_secs(60));
    let found = found.earlier_rungs().await.unwrap();
    assert_eq!(found.len(), usize::from(product != Product::RabbitMq));
}

macro_rules! over {
    ($($module:ident $product:ident)+) => {
        $(
            mod $module {
                use crate::end_to_end::broker::Product;

                #[tokio::test(flavor = "multi_thread")]
                async fn what_waits_on_a_rung_of_an_earlier_ladder_is_handled_when_it_is_due() {
                    super::what_waits_on_a_rung_of_an_earlier_ladder_is_handled_when_it_is_due(Product::$product)
                        .await;
                }

                #[tokio::test(flavor = "multi_thread")]
                async fn a_rung_that_only_looks_like_ours_is_left_alone() {
                    // A queue belongs to one consumer.
                    super::a_rung_that_only_looks_like_ours_is_left_alone(Product::$product).await;
                }
            }
        )+
    };
}

over!(kafka Kafka rabbitmq RabbitMq nats Nats);
