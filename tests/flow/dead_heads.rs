//! A message that can never be sent, and what becomes of its key.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use relaybox::broker::{Publisher, RejectionScope};
use relaybox::relay::DeadHead;
use relaybox::store::{AsideFilter, Mode, OutboxAdmin, OutboxStore};
use relaybox::testing::eventually;

use super::support::{Altered, DEADLINE, House, impatient, names, numbered, refused};

/// Refuses `m-1` while told to.
fn refusing(house: &House, refuses: &Arc<AtomicBool>) -> impl Publisher + use<> {
    let refuses = refuses.clone();
    Altered::gap(Altered::answering(house.broker.clone(), move |sending| {
        let refused_now = sending.message.id.as_str() == "m-1" && refuses.load(Ordering::SeqCst);
        refused_now.then(|| refused(RejectionScope::Message))
    }))
}

#[tokio::test]
async fn a_held_key_waits_behind_its_dead_head_and_then_goes_in_order() {
    let house = House::new().await;
    let refuses = Arc::new(AtomicBool::new(true));
    let config = || {
        impatient()
            .with_dead_head(DeadHead::Hold)
            .with_batch_rows_max(32)
    };
    house.enqueue(&numbered("k", "m", 5)).await;
    house.enqueue(&numbered("j", "j", 5)).await;
    let relay = house.relay(refusing(&house, &refuses), config());
    eventually(DEADLINE, "the key is held", || async {
        house.pending().await == 0 && house.aside("held").await == 3
    })
    .await;
    assert_eq!(house.aside("blocking").await, 1);
    // Over a restart, and for messages that come later.
    relay.stop().await.unwrap();
    let relay = house.relay(refusing(&house, &refuses), config());
    let later = numbered("k", "m", 8).split_off(5);
    house.enqueue(&later).await;
    eventually(DEADLINE, "later ones are held too", || async {
        house.pending().await == 0 && house.aside("held").await == 6
    })
    .await;
    assert_eq!(house.ids_of("k"), names("m", 0..1));
    assert_eq!(house.ids_of("j"), names("j", 0..5));
    // Requeued too early it only blocks again.
    let all = AsideFilter::all();
    assert_eq!(house.store.requeue(&all, Mode::Apply).await.unwrap(), 1);
    eventually(DEADLINE, "it was refused again", || async {
        let listed = house.store.list_aside(&all, 0, 1).await.unwrap();
        listed[0].state == "blocking" && listed[0].attempts == 1
    })
    .await;
    refuses.store(false, Ordering::SeqCst);
    assert_eq!(house.store.requeue(&all, Mode::Apply).await.unwrap(), 1);
    eventually(DEADLINE, "the whole key is out", || async {
        house.store.aside(1).await.unwrap() == 0 && house.pending().await == 0
    })
    .await;
    relay.stop().await.unwrap();
    assert_eq!(house.ids_of("k"), names("m", 0..8));
}

#[tokio::test]
async fn a_held_key_goes_on_without_its_head_when_that_is_discarded() {
    let house = House::new().await;
    let refuses = Arc::new(AtomicBool::new(true));
    house.enqueue(&numbered("k", "m", 5)).await;
    let config = impatient().with_dead_head(DeadHead::Hold);
    let relay = house.relay(refusing(&house, &refuses), config);
    eventually(DEADLINE, "the key is held", || async {
        house.pending().await == 0 && house.aside("held").await == 3
    })
    .await;
    let all = AsideFilter::all();
    let gone = house.store.discard(&all, "not wanted", Mode::Apply);
    assert_eq!(gone.await.unwrap(), 1);
    eventually(DEADLINE, "the rest is out", || async {
        house.store.aside(1).await.unwrap() == 0
    })
    .await;
    relay.stop().await.unwrap();
    assert_eq!(house.ids_of("k"), names("m", [0, 2, 3, 4]));
}

#[tokio::test]
async fn successors_are_parked_with_their_head_and_requeued_in_their_order() {
    let house = House::new().await;
    let refuses = Arc::new(AtomicBool::new(true));
    house.enqueue(&numbered("k", "m", 4)).await;
    let config = impatient().with_dead_head(DeadHead::Park);
    let relay = house.relay(refusing(&house, &refuses), config);
    eventually(DEADLINE, "the key is parked", || async {
        house.pending().await == 0 && house.aside("blocking").await == 3
    })
    .await;
    let later = numbered("k", "m", 6).split_off(4);
    house.enqueue(&later).await;
    eventually(DEADLINE, "later ones are parked too", || async {
        house.pending().await == 0 && house.aside("blocking").await == 5
    })
    .await;
    refuses.store(false, Ordering::SeqCst);
    let listed = house
        .store
        .list_aside(&AsideFilter::all(), 0, 9)
        .await
        .unwrap();
    assert_eq!(listed[1].reason.as_str(), "behind");
    // The last one first: it still waits for the others.
    let last = AsideFilter::all().with_message_id("m-5");
    assert_eq!(house.store.requeue(&last, Mode::Apply).await.unwrap(), 1);
    assert_eq!(
        house
            .store
            .requeue(&AsideFilter::all(), Mode::Apply)
            .await
            .unwrap(),
        4
    );
    house.drained().await;
    relay.stop().await.unwrap();
    assert_eq!(house.ids_of("k"), names("m", 0..6));
}
