//! Relays whose clocks are wrong: leases are the database's to judge.

use std::collections::BTreeSet;
use std::time::Instant;

use relaybox::testing::eventually;

use crate::postgres::Postgres;
use crate::relay_process::{
    DEADLINE, Entry, LEASE, RelayProcess, Sent, database_with_ledger, drained, entries, judge,
    numbered,
};
use crate::store_contract::enqueue;

const KEYS: u32 = 30;

/// A relay that lives `seconds` ahead of the others, or behind.
fn with_clock_off_by(url: &str, seconds: i64) -> RelayProcess {
    let installed = std::fs::read_dir("/usr/lib").unwrap().flatten();
    let library = installed
        .map(|entry| entry.path().join("faketime/libfaketimeMT.so.1"))
        .find(|path| path.exists())
        .expect("libfaketime; run testcontainers/install");
    RelayProcess::start(url, |command| {
        command
            .env("LD_PRELOAD", library)
            .env("FAKETIME", format!("{seconds:+}"))
            // Timers go by it, as they do where somebody sets the clock.
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("DONT_FAKE_MONOTONIC", "1");
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn relays_whose_clocks_are_minutes_apart_steal_no_lease() {
    let h = database_with_ledger().await;
    let skews = [600, -600];
    let mut relays = skews.map(|skew| with_clock_off_by(&h.url, skew));
    let shares = "SELECT count(*) FROM (SELECT count(*) FROM relaybox_outbox_lane \
        WHERE owner IS NOT NULL GROUP BY owner HAVING count(*) = 8) halves";
    eventually(DEADLINE, "each has half of the lanes", || async {
        h.number(shares).await == 2
    })
    .await;
    let taken = "SELECT sum(token)::bigint FROM relaybox_outbox_lane";
    let before = h.number(taken).await;

    let (started, mut count) = (Instant::now(), 0);
    while started.elapsed() < 3 * LEASE {
        enqueue::<Postgres>(&h.store, &numbered("orders", KEYS, count..count + 1)).await;
        count += 1;
        drained(&h.store).await;
    }
    assert_eq!(h.number(taken).await, before, "a lane changed hands");
    for relay in &mut relays {
        relay.terminate();
        assert!(relay.ended().await.success());
    }

    let all = entries(h.pool()).await;
    let skew = |entry: &Entry| (entry.wall - entry.sent_at).as_seconds_f64() / 60.0;
    let seen: BTreeSet<i64> = all.iter().map(|e| skew(e).round() as i64).collect();
    assert_eq!(seen, skews.map(|skew| skew / 60).into(), "in minutes");
    let all: Vec<Sent> = all.into_iter().map(|entry| entry.sent).collect();
    assert!(judge("clocks", &all, KEYS, count).is_empty(), "sent twice");
}
