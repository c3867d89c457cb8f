//! Rungs and dead letters that are there already, made by somebody else.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use relaybox::broker::Publisher;
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
