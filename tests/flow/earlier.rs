//! Rungs of an earlier ladder.

use std::time::Duration;

use relaybox::broker::{Publisher, TopologyMode};
use relaybox::consumer::{Failure, Outcome, handler_fn};
use relaybox::envelope::{Incoming, Outgoing};
use relaybox::ladder::Ladder;
use relaybox::story::{Origin, Story};
use relaybox::testing::eventually;
use relaybox::{ErrorKind, Message};
use sqlx::sqlite::SqliteConnection;
use time::OffsetDateTime;

use super::support::{DEADLINE, House, numbered, quick, run, to, write_effect};

/// Fails on the first attempt.
async fn fail_once(_: &(), db: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    if incoming.story.retry_count == 0 {
        return Outcome::Retry(Failure::new("not yet"));
    }
    write_effect(db, "billing", incoming).await;
    Outcome::Done
}

/// Copies of `name` on a rung that an earlier ladder of it made, due after `delay`. Returns the rung's name.
async fn strand(house: &House, name: &str, delay: Duration, prefix: &str, count: usize) -> String {
    let rung = Ladder::rungs([delay])
        .rungs_of("orders", name)
        .remove(0)
        .destination;
    house.broker.create_topic(&*rung, 3).unwrap();
    let origin = Origin {
        topic: "orders".into(),
        partition: Some("0".into()),
        offset: Some("7".into()),
    };
    let now = OffsetDateTime::now_utc();
    let copy = |message| {
        let story = Story::default().failed(name, &origin, "handler", "not yet", now);
        let story = story.due(now + delay);
        Outgoing { message, story }
    };
    let copies: Vec<_> = to(&rung, numbered("k", prefix, count))
        .into_iter()
        .map(copy)
        .collect();
    for outcome in house.broker.publish(&copies).await {
        assert!(outcome.is_confirmed(), "{outcome:?}");
    }
    rung
}

#[tokio::test]
async fn a_ladder_with_other_delays_strands_no_message_and_deletes_nothing() {
    for ladder in [Ladder::none(), Ladder::rungs([Duration::from_secs(60)])] {
        let house = House::new().await;
        let delay = Duration::from_millis(300);
        let name = strand(&house, "billing", delay, "m", 3).await;
        let consumer = house.consumer("billing").with_ladder(ladder);
        let found = consumer.earlier_rungs().await.unwrap();
        let told: Vec<_> = found
            .iter()
            .map(|found| {
                (
                    &*found.rung.destination,
                    found.rung.delay,
                    found.backlog.messages,
                )
            })
            .collect();
        assert_eq!(told, [(&*name, delay, 3)]);
        assert_eq!(found[0].rung.source, "orders");
        let consumer = run(consumer, handler_fn((), fail_once));
        house.consumed("billing", &name).await;
        consumer.stop().await.unwrap();
        assert_eq!(house.effects("billing").await, ["m-0", "m-1", "m-2"]);
        assert!(house.broker.topics().contains(&name));
        let found = house.consumer("billing").earlier_rungs().await.unwrap();
        let found = found.iter().find(|found| found.rung.destination == name);
        assert_eq!(found.unwrap().backlog.messages, 0);
    }
}

#[tokio::test]
async fn what_fails_again_from_an_earlier_rung_goes_on_on_the_present_ladder() {
    async fn fail(_: &(), _: &mut SqliteConnection, _: &Incoming) -> Outcome {
        Outcome::Retry(Failure::new("not yet"))
    }
    let house = House::new().await;
    strand(&house, "billing", Duration::from_millis(20), "m", 1).await;
    let ladder = Ladder::rungs([10, 30].map(Duration::from_millis));
    let consumer = run(
        house.consumer("billing").with_ladder(ladder),
        handler_fn((), fail),
    );
    eventually(DEADLINE, "it is dead", || async {
        house.dead("billing").len() == 1
    })
    .await;
    consumer.stop().await.unwrap();
    let letter = &house.dead("billing")[0];
    assert_eq!(letter.story.retry_count, 3);
    assert_eq!(letter.story.origin.as_ref().unwrap().topic, "orders");
    assert_eq!(house.broker.log("orders.billing.retry.30ms").len(), 1);
}

#[tokio::test]
async fn rungs_that_are_not_its_own_or_whose_owner_nobody_knows_are_left_alone() {
    let house = House::new().await;
    strand(&house, "billing.eu", Duration::from_millis(20), "m", 2).await;
    for name in ["orders.billing.retry.soon", "orders.billing.retry.60s"] {
        house.broker.create_topic(name, 1).unwrap();
        house.publish(&to(name, numbered("k", "odd", 1))).await;
    }
    let consumer = house.consumer("billing").with_ladder(Ladder::none());
    assert_eq!(consumer.earlier_rungs().await.unwrap(), []);
    // A name that several consumers may have tells nothing.
    let shared = |delay| Ladder::rungs([delay]).with_template("{topic}.retry.{delay}");
    let shared = shared(Duration::from_secs(60));
    house.broker.create_topic("orders.retry.20ms", 1).unwrap();
    let consumer = house.consumer("billing").with_ladder(shared);
    assert_eq!(consumer.earlier_rungs().await.unwrap(), []);
}

#[tokio::test]
async fn with_topology_unchecked_nothing_is_asked_and_nothing_found() {
    let house = House::new().await;
    strand(&house, "billing", Duration::from_millis(20), "m", 1).await;
    house.broker.create_topic("orders.billing.DLQ", 1).unwrap();
    let config = quick().with_topology(TopologyMode::Unchecked);
    let consumer = house.consumer("billing").with_ladder(Ladder::none());
    let consumer = run(consumer.with_config(config), handler_fn((), fail_once));
    house
        .publish(&[Message::new("orders", "T").with_id("m-1")])
        .await;
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    let read: u64 = house
        .broker
        .committed("billing", "orders.billing.retry.20ms")
        .iter()
        .sum();
    assert_eq!(read, 0);
    // Asked for by hand it is found, and a broker that is away says so.
    let consumer = house.consumer("billing").with_ladder(Ladder::none());
    assert_eq!(consumer.earlier_rungs().await.unwrap().len(), 1);
    house.broker.set_available(false);
    let error = consumer.earlier_rungs().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}
