//! What lies in a topic: records that nobody can read, offsets without any, their ages, a log made anew.

use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};
use relaybox::broker::{Backlog, Rung, Subscriber};
use relaybox::consumer::{Consumer, Failure, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::ladder::Ladder;
use relaybox::store::sqlite::SqliteStore;
use relaybox::testing::eventually;
use relaybox_testcontainers::{shared_kafka, unique_name};
use sqlx::SqliteConnection;

use super::*;

async fn odd(topic: &str, header: (&'static [u8], &'static [u8]), text: &str, age: Duration) {
    let broker = shared_kafka().await.brokers();
    let (topic, text) = (topic.to_owned(), text.to_owned());
    let produce = move || raw::produce(&broker, &topic, header, text.as_bytes(), age);
    tokio::task::spawn_blocking(produce).await.unwrap();
}

/// The name of a header in bytes that are no UTF-8: the client panics over it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_header_name_that_is_no_text_stops_nobody() {
    let kafka = connect().await;
    let topic = topic("no_text", 1).await;
    odd(&topic, (&[0xff, 0xfe], b"v"), "odd", Duration::ZERO).await;
    publish_all(&kafka, &numbered(&topic, "k", 0..1)).await;
    let mut subscription = kafka.subscribe(request("no_text", &topic)).await.unwrap();
    let received = receive(&mut subscription, 2).await;
    assert_eq!(text(&received[0]), "odd");
    assert_eq!(text(&received[1]), "0");
    let odd = &received[0].incoming;
    let names: Vec<&str> = odd.message.headers.iter().map(|h| &*h.name).collect();
    assert_eq!(names, ["\u{fffd}"]);
    assert!(odd.id_missing);
    for delivery in received {
        acknowledge(delivery).await;
    }
    subscription.close(10 * SECOND).await.unwrap();
}

/// Markers of transactions have offsets, and what was rolled back is nobody's message.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offsets_without_a_message_hold_nothing_up() {
    let topic = topic("markers", 1).await;
    let brokers = shared_kafka().await.brokers();
    let named = topic.clone();
    let transactions = move || {
        let producer: ThreadedProducer<DefaultProducerContext> = ClientConfig::new()
            .set("bootstrap.servers", &brokers)
            .set("transactional.id", unique_name("markers"))
            .create()
            .unwrap();
        producer.init_transactions(30 * SECOND).unwrap();
        for n in 0..6 {
            producer.begin_transaction().unwrap();
            let payload = n.to_string();
            let record = BaseRecord::to(&named).key("k").payload(&payload);
            producer.send(record).map_err(|(error, _)| error).unwrap();
            producer.flush(30 * SECOND).unwrap();
            match n % 2 {
                0 => producer.commit_transaction(30 * SECOND).unwrap(),
                _ => producer.abort_transaction(30 * SECOND).unwrap(),
            }
        }
    };
    tokio::task::spawn_blocking(transactions).await.unwrap();
    let kafka = connect().await;
    let consumer = unique_name("markers");
    let depth = kafka.depth(&topic).await.unwrap();
    assert_eq!(depth.messages, 12, "counted in offsets");
    assert!(depth.oldest.is_some());
    let mut subscription = kafka.subscribe(request(&consumer, &topic)).await.unwrap();
    let mut numbers = Vec::new();
    for delivery in receive(&mut subscription, 3).await {
        numbers.push(text(&delivery));
        acknowledge(delivery).await;
    }
    assert_eq!(numbers, ["0", "2", "4"]);
    subscription.close(10 * SECOND).await.unwrap();
    // Behind the last message are its marker, a message that was rolled back, and a marker.
    let lag = kafka.lag(&consumer, &topic).await.unwrap();
    assert_eq!((lag.messages, lag.oldest), (0, None));
    let mut again = kafka.subscribe(request(&consumer, &topic)).await.unwrap();
    publish_all(&kafka, &numbered(&topic, "k", 6..7)).await;
    assert_eq!(text(&receive(&mut again, 1).await[0]), "6");
    again.close(10 * SECOND).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_has_the_age_of_its_oldest_record() {
    let hour = 3_600 * SECOND;
    let kafka = connect().await;
    let (topic, consumer) = (topic("age", 3).await, unique_name("age"));
    for (payload, age) in [("older", 5 * hour), ("old", 3 * hour)] {
        odd(&topic, (b"x-message-id", b"m"), payload, age).await;
    }
    let keys = (0..20).map(|n| message(&topic, &format!("k{n}"), "new"));
    publish_all(&kafka, &keys.collect::<Vec<_>>()).await;
    let hours = |backlog: Backlog| backlog.oldest.unwrap().as_secs() / 3_600;
    let depth = kafka.depth(&topic).await.unwrap();
    assert_eq!((depth.messages, hours(depth)), (22, 5));
    let mut subscription = kafka.subscribe(request(&consumer, &topic)).await.unwrap();
    let mut all = receive(&mut subscription, 22).await;
    let oldest = all.iter().position(|delivery| text(delivery) == "older");
    acknowledge(all.remove(oldest.unwrap())).await;
    subscription.close(10 * SECOND).await.unwrap();
    drop(all);
    let lag = kafka.lag(&consumer, &topic).await.unwrap();
    assert_eq!((lag.messages, hours(lag)), (21, 3));
}

/// The log begins anew under a member that has read further than it is long now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_topic_that_is_made_anew_is_read_from_its_beginning() {
    // Soon, or the client learns of it only after minutes.
    let kafka = with(|c| c.with_property("topic.metadata.refresh.interval.ms", "500")).await;
    let (topic, consumer) = (topic("anew", 1).await, unique_name("anew"));
    publish_all(&kafka, &numbered(&topic, "k", 0..20)).await;
    let mut subscription = kafka.subscribe(request(&consumer, &topic)).await.unwrap();
    let mut held = receive(&mut subscription, 20).await;
    let late = held.split_off(10);
    for delivery in held {
        acknowledge(delivery).await;
    }
    let brokers = shared_kafka().await.brokers();
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", &brokers)
        .create()
        .unwrap();
    let deleted = admin.delete_topics(&[&topic], &AdminOptions::new()).await;
    deleted.unwrap().remove(0).unwrap();
    let server = shared_kafka().await;
    eventually(60 * SECOND, "it can be made anew", || async {
        server.create_topic_named(&topic, 1, &[]).await.is_ok()
    })
    .await;
    eventually(60 * SECOND, "stored", || async {
        let outcomes = kafka.publish(&numbered(&topic, "k", 100..105)).await;
        outcomes
            .iter()
            .all(relaybox::broker::PublishOutcome::is_confirmed)
    })
    .await;
    let again = receive(&mut subscription, 5).await;
    let numbers: Vec<String> = again.iter().map(text).collect();
    assert_eq!(numbers, ["100", "101", "102", "103", "104"]);
    // What is told of the old log says nothing about the new one.
    for delivery in late {
        assert!(!delivery.receipt.is_current());
        acknowledge(delivery).await;
    }
    for delivery in again.into_iter().take(2) {
        acknowledge(delivery).await;
    }
    subscription.close(10 * SECOND).await.unwrap();
    let found = tokio::task::spawn_blocking(move || committed(&brokers, &consumer, &topic, 0));
    assert_eq!(found.await.unwrap(), Some(2));
}

/// A rung is idle for days, and a broker forgets what a group committed there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waited_on_a_rung_before_the_group_knew_it_is_delivered() {
    let kafka = connect().await;
    let source = topic("quiet", 1).await;
    let rung = topic("quiet_retry", 3).await;
    let batch: Vec<_> = (0..3)
        .map(|n| message(&rung, &format!("k{n}"), n.to_string()))
        .collect();
    publish_all(&kafka, &batch).await;
    let mut asked = request(&unique_name("quiet"), &source);
    asked.rungs = vec![Rung {
        destination: rung.clone(),
        delay: SECOND,
        source: source.clone(),
    }];
    let mut subscription = kafka.subscribe(asked).await.unwrap();
    let deliveries = receive(&mut subscription, 3).await;
    let mut numbers: Vec<String> = deliveries.iter().map(text).collect();
    numbers.sort();
    assert_eq!(numbers, ["0", "1", "2"]);
    assert!(deliveries.iter().all(|delivery| delivery.source == rung));
    drop(deliveries);
    subscription.close(10 * SECOND).await.unwrap();
}

async fn fail(_: &(), _: &mut SqliteConnection, _: &Incoming) -> Outcome {
    Outcome::Permanent(Failure::new("never"))
}

/// A dead letter goes where its key belongs, whatever partition it came from.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_of_many_partitions_fit_into_one() {
    const LETTERS: i64 = 100;
    let kafka = connect().await;
    let server = shared_kafka().await;
    let (source, consumer) = (topic("many", 12).await, unique_name("few"));
    let dead = format!("{source}.{consumer}.DLQ");
    let settings = [("max.message.bytes", "2000000")];
    server
        .create_topic_named(&dead, 1, &settings)
        .await
        .unwrap();
    let batch: Vec<_> = (0..LETTERS)
        .map(|n| message(&source, &format!("k{n}"), "x"))
        .collect();
    publish_all(&kafka, &batch).await;
    let places: BTreeMap<String, (i32, usize)> = log(server.brokers(), source.clone())
        .await
        .into_iter()
        .flat_map(|(partition, records)| {
            let at = records.into_iter().enumerate();
            at.map(move |(offset, (_, _, id))| (id, (partition, offset)))
        })
        .collect();
    assert!(places.values().any(|(partition, _)| *partition == 11));
    let directory = tempfile::tempdir().unwrap();
    let store = SqliteStore::connect(directory.path().join("few.db"))
        .await
        .unwrap();
    store.migrate().await.unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = Consumer::new(&consumer, &source, kafka.clone(), store)
        .with_ladder(Ladder::none())
        .run_until(handler_fn((), fail), async {
            let _ = stopped.await;
        });
    let running = tokio::spawn(running);
    eventually(60 * SECOND, "all are dead", || async {
        server.topic_end_offsets(&dead).await.unwrap() == [LETTERS]
    })
    .await;
    stop.send(()).unwrap();
    running.await.unwrap().unwrap();
    let mut letters = kafka
        .subscribe(request(&unique_name("letters"), &dead))
        .await
        .unwrap();
    for delivery in receive(&mut letters, LETTERS as usize).await {
        let incoming = &delivery.incoming;
        let (partition, offset) = places[incoming.message.id.as_str()];
        let origin = incoming.story.origin.clone().unwrap();
        assert_eq!(origin.topic, source);
        assert_eq!(origin.partition, Some(partition.to_string()));
        assert_eq!(origin.offset, Some(offset.to_string()));
        acknowledge(delivery).await;
    }
    letters.close(10 * SECOND).await.unwrap();
}
