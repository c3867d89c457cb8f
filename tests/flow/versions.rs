//! Older versions of an aggregate change nothing.

use std::sync::atomic::{AtomicU64, Ordering};

use relaybox::consumer::{Outcome, Unversioned, VersionGuard, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::testing::eventually;
use relaybox::{Failure, Message};

use super::handling::{Db, handled, raw, reasons, sent};
use super::support::{DEADLINE, House, loaded, write_effect};

fn versioned(id: &str, version: i64) -> Message {
    sent(id, "Moved").with_version(version)
}

async fn fail_once(
    failed: &AtomicU64,
    db: &mut Db,
    incoming: &Incoming,
) -> Result<Outcome, Failure> {
    write_effect(db, "billing", incoming).await;
    if incoming.message.id.as_str() == "v5" && failed.fetch_add(1, Ordering::SeqCst) == 0 {
        return Err(Failure::new("the first time"));
    }
    Ok(Outcome::Done)
}

#[tokio::test]
async fn an_older_version_that_comes_back_from_a_rung_changes_nothing() {
    let house = House::new().await;
    let other = versioned("other", 1).with_key("order-18");
    house
        .publish(&[versioned("v4", 4), versioned("v5", 5), versioned("v6", 6)])
        .await;
    house.publish(&[other, versioned("again", 6)]).await;
    let handler = handler_fn(AtomicU64::new(0), fail_once);
    let guard = VersionGuard::new(
        "billing",
        house.store.clone(),
        Unversioned::DeadLetter,
        handler,
    );
    let older = guard.older();
    let running = house.consume("billing", guard);
    house.consumed("billing", "orders").await;
    house.consumed("billing", "orders.billing.retry.50ms").await;
    eventually(DEADLINE, "the older one is skipped", || async {
        loaded(&older) == 1
    })
    .await;
    running.stop().await.unwrap();
    let mut effects = house.effects("billing").await;
    effects.retain(|id| id != "other");
    // The failed attempt of 5 advanced nothing, and one of an equal version is handled.
    assert_eq!(effects, ["v4", "v6", "again"]);
    assert_eq!(house.effects("billing").await.len(), 4);
    assert!(house.dead("billing").is_empty());
}

#[tokio::test]
async fn what_has_no_version_or_aggregate_follows_the_rule() {
    let house = House::new().await;
    let keyless = Message::new("orders", "Moved")
        .with_id("keyless")
        .with_version(1);
    let messages = [sent("unversioned", "Moved"), keyless, versioned("v", 1)];
    house.publish(&messages).await;
    for (consumer, rule) in [
        ("billing", Unversioned::DeadLetter),
        ("mail", Unversioned::Handle),
    ] {
        let handler = handler_fn(consumer, raw);
        let guard = VersionGuard::new(consumer, house.store.clone(), rule, handler);
        let running = house.consume(consumer, guard);
        house.consumed(consumer, "orders").await;
        running.stop().await.unwrap();
    }
    let dead = house.dead("billing");
    let mut dead = reasons(&dead);
    dead.sort_unstable();
    assert_eq!(
        dead,
        [("keyless", "unversioned"), ("unversioned", "unversioned")]
    );
    assert_eq!(house.effects("billing").await, ["v"]);
    assert_eq!(house.effects("mail").await.len(), 3);
}

#[tokio::test]
async fn an_aggregate_can_be_named_by_more_than_the_key() {
    let house = House::new().await;
    let customer = Message::new("orders", "CustomerMoved")
        .with_id("customer")
        .with_key("order-17");
    house
        .publish(&[versioned("order", 5), customer.with_version(1)])
        .await;
    let handler = handler_fn("billing", raw);
    let store = house.store.clone();
    let guard = VersionGuard::new("billing", store, Unversioned::DeadLetter, handler)
        .with_aggregate(|incoming| {
            let message = &incoming.message;
            Some(format!("{}/{}", message.event_type, message.key_str()?).into())
        });
    handled(&house, guard).await;
    assert_eq!(house.effects("billing").await, ["order", "customer"]);
}
