//! The registry of running relays.

use std::time::Duration;

use relaybox::store::{InboxStore, OutboxStore, Standing};

use super::*;

fn standing(live: usize, place: usize) -> Standing {
    Standing { live, place }
}

async fn registered<H: Harness>(store: &H::Store) -> i64 {
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    let registered = H::number(connection, "SELECT count(*) FROM relaybox_relay").await;
    store.rollback(transaction).await.unwrap();
    registered
}

pub async fn relays_see_each_other_and_agree_on_their_places<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let beat = |id| store.heartbeat(id, "the same name", MINUTE);
    assert_eq!(store.standing("m").await.unwrap(), standing(1, 0));
    assert_eq!(beat("m").await.unwrap(), standing(1, 0));
    assert_eq!(beat("z").await.unwrap(), standing(2, 1));
    assert_eq!(beat("a").await.unwrap(), standing(3, 0));
    assert_eq!(beat("m").await.unwrap(), standing(3, 1), "it counts once");
    assert_eq!(store.standing("z").await.unwrap(), standing(3, 2));
    store.leave("a").await.unwrap();
    store.leave("a").await.unwrap();
    assert_eq!(store.standing("z").await.unwrap(), standing(2, 1));
    assert_eq!(store.standing("m").await.unwrap(), standing(2, 0));
}

pub async fn relays_that_come_in_the_same_instant_get_different_places<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let ids: Vec<String> = (0..6).map(|n| format!("relay-{n}")).collect();
    for _ in 0..3 {
        let beats = ids.clone().into_iter().map(|id| {
            let store = store.clone();
            tokio::spawn(async move { store.heartbeat(&id, "relay", 60 * MINUTE).await.unwrap() })
        });
        for beat in beats.collect::<Vec<_>>() {
            let stands = beat.await.unwrap();
            assert!(stands.place < stands.live && stands.live <= 6);
        }
        for (place, id) in ids.iter().enumerate() {
            assert_eq!(store.standing(id).await.unwrap(), standing(6, place));
        }
        for id in &ids {
            store.leave(id).await.unwrap();
        }
    }
    // All have ended at any time, so that each removes the others while it registers: nobody waits for nobody.
    let beats = ids.into_iter().map(|id| {
        let store = store.clone();
        tokio::spawn(async move {
            for _ in 0..10 {
                let beat = store.heartbeat(&id, "relay", Duration::ZERO);
                beat.await.unwrap();
            }
        })
    });
    for beat in beats.collect::<Vec<_>>() {
        beat.await.unwrap();
    }
}

pub async fn a_registration_ends_by_the_databases_clock_and_can_begin_again<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    store.heartbeat("b", "b", MINUTE).await.unwrap();
    let short = Duration::from_millis(300);
    store.heartbeat("a", "a", short).await.unwrap();
    let ended = async {
        while store.standing("b").await.unwrap() != standing(1, 0) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(MINUTE, ended).await.unwrap();
    assert_eq!(store.standing("a").await.unwrap(), standing(2, 0));
    let again = store.heartbeat("a", "a", Duration::MAX).await.unwrap();
    assert_eq!(again, standing(2, 0));
    assert_eq!(store.standing("b").await.unwrap(), standing(2, 1));
}

pub async fn ended_registrations_are_removed_in_bounded_steps<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let ended = if OutboxStore::name(&store) == "sqlite" {
        "INSERT INTO relaybox_relay WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 150) \
         SELECT 'ended-' || n, 'ended', 0 FROM n"
    } else {
        "INSERT INTO relaybox_relay SELECT 'ended-' || n, 'ended', '1970-01-01 00:00:00+00' \
         FROM generate_series(1, 150) n"
    };
    H::autocommit(&store, ended).await;
    let live = store.heartbeat("live", "live", MINUTE).await.unwrap();
    assert_eq!(live, standing(1, 0));
    assert_eq!(registered::<H>(&store).await, 51);
    store.heartbeat("live", "live", MINUTE).await.unwrap();
    assert_eq!(registered::<H>(&store).await, 1);
    // Its own row stays, though it has ended by now.
    store
        .heartbeat("live", "live", Duration::ZERO)
        .await
        .unwrap();
    store
        .heartbeat("live", "live", Duration::ZERO)
        .await
        .unwrap();
    assert_eq!(registered::<H>(&store).await, 1);
}

/// A lane's own expiry decides, whoever is registered under whatever name.
pub async fn no_lease_depends_on_a_registration<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    store.heartbeat("1", "relay", MINUTE).await.unwrap();
    let held = store.lease("relay", 4, MINUTE).await.unwrap();
    store.leave("1").await.unwrap();
    assert_eq!(store.renew(&held, Duration::ZERO).await.unwrap(), held);
    store.heartbeat("1", "relay", MINUTE).await.unwrap();
    store.heartbeat("2", "relay", MINUTE).await.unwrap();
    assert_eq!(store.lease("relay", 16, MINUTE).await.unwrap().len(), 16);
}
