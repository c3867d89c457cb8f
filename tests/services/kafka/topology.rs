//! Rungs and dead letters that are there already, made by somebody else.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use relaybox::broker::{Publisher, Rung, Subscriber, SubscriptionRequest};
use relaybox::consumer::{Consumer, Failure, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::store::NoInbox;
use relaybox::testing::{Signal, eventually};
use relaybox::{Ladder, Message};
use relaybox_testcontainers::{shared_kafka, unique_name};

use super::{SECOND, connect, topic};
use crate::end_to_end::broker;

async fn fail(_: &(), _: &Incoming) -> Outcome {
    Outcome::Retry(Failure::new("not today"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rung_and_dead_letters_with_fewer_partitions_take_what_comes_from_any() {
    let kafka = Arc::new(connect().await);
    let (source, name) = (topic("wide", 12).await, unique_name("c"));
    let server = shared_kafka().await;
    let (rung, letters) = (
        format!("{source}.{name}.retry.50ms"),
        format!("{source}.{name}.DLQ"),
    );
    for made in [&rung, &letters] {
        server.create_topic_named(made, 1, &[]).await.unwrap();
    }
    let message = |n: usize| {
        Message::new(&*source, "T")
            .with_key(format!("k-{n}"))
            .into()
    };
    let sent: Vec<_> = (0..40).map(message).collect();
    assert!(
        kafka
            .publish(&sent)
            .await
            .iter()
            .all(|outcome| outcome.is_confirmed())
    );
    let consumer = Consumer::new(&*name, &*source, kafka.clone(), NoInbox)
        .with_ladder(Ladder::rungs([Duration::from_millis(50)]));
    let (counts, stop) = (consumer.counts(), Signal::new());
    let stopped = stop.clone();
    let task = tokio::spawn(async move {
        let stopped = async move { stopped.wait().await };
        consumer
            .run_outside_until(handler_fn((), fail), stopped)
            .await
    });
    eventually(90 * SECOND, "all are dead", || async {
        counts.dead.load(Ordering::SeqCst) >= 40
    })
    .await;
    stop.set();
    task.await.unwrap().unwrap();
    let read = broker::read(&*kafka, &letters).await.unwrap();
    let from: std::collections::BTreeSet<String> = read
        .values()
        .filter_map(|letter| letter.story.origin.as_ref()?.partition.clone())
        .collect();
    assert!(from.len() > 1, "each tells its own partition: {from:?}");
    assert_eq!(read.len(), 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rung_that_forgets_before_it_is_read_is_refused_with_both_values() {
    let kafka = connect().await;
    let source = topic("short", 1).await;
    let rung = format!("{source}.c.retry.5s");
    let server = shared_kafka().await;
    for (setting, value) in [("retention.ms", "60000"), ("retention.bytes", "1000")] {
        let name = format!("{rung}.{setting}");
        let settings = [(setting, value)];
        server
            .create_topic_named(&name, 1, &settings)
            .await
            .unwrap();
        let mut asked = SubscriptionRequest::new("c", vec![source.clone()]);
        asked.rungs = vec![Rung {
            destination: name.clone(),
            delay: 5 * SECOND,
            source: source.clone(),
        }];
        let error = kafka.subscribe(asked).await.map(drop).unwrap_err();
        let violation = error.violation().unwrap();
        assert_eq!((violation.field, &*violation.value), (setting, value));
        assert!(violation.limit.contains(&name), "{error}");
    }
}
