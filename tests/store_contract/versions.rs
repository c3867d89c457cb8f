//! Last versions of aggregates.

use relaybox::ErrorKind;
use relaybox::store::{AGGREGATE_BYTES_MAX, Advanced, InboxStore, VersionStore};

use super::*;

/// Advances in a transaction of its own and commits.
async fn advanced<S>(store: &S, consumer: &str, aggregate: &[u8], version: i64) -> Advanced
where
    S: InboxStore + VersionStore<Connection = <S as InboxStore>::Connection>,
{
    let mut transaction = store.begin().await.unwrap();
    let connection = S::connection(&mut transaction);
    let advanced = store.advance(connection, consumer, aggregate, version);
    let advanced = advanced.await.unwrap();
    store.commit(transaction).await.unwrap();
    advanced
}

pub async fn an_older_version_is_told_per_consumer_and_aggregate<H: Harness>() {
    use Advanced::{Newest, Older};
    let h = H::start().await;
    let store = h.store();
    for (consumer, aggregate, version, expected) in [
        ("c", &b"k"[..], 5, Newest),
        ("c", b"k", 4, Older),
        ("c", b"k", 5, Newest),
        ("c", b"k", 6, Newest),
        ("c", b"k", 5, Older),
        ("d", b"k", 1, Newest),
        ("c", b"K", 1, Newest),
        ("c", b"", 1, Newest),
        ("c", b"\0\xff", i64::MIN, Newest),
        ("c", b"\0\xff", i64::MAX, Newest),
        ("c", b"\0\xff", 0, Older),
        ("c", &[b'x'; AGGREGATE_BYTES_MAX], 1, Newest),
        ("c", &[b'x'; AGGREGATE_BYTES_MAX], 0, Older),
    ] {
        let told = advanced(&store, consumer, aggregate, version).await;
        assert_eq!(told, expected, "{consumer} {aggregate:?} {version}");
    }
}

pub async fn a_version_counts_only_if_its_transaction_commits<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    let told = store.advance(connection, "c", b"k", 9).await.unwrap();
    assert_eq!(told, Advanced::Newest);
    let told = store.advance(connection, "c", b"k", 8).await.unwrap();
    assert_eq!(told, Advanced::Older);
    store.rollback(transaction).await.unwrap();
    assert_eq!(advanced(&store, "c", b"k", 1).await, Advanced::Newest);
}

pub async fn of_two_versions_at_once_the_lower_is_never_applied_last<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    for (number, (first, second, commits, expected)) in [
        (6, 5, true, Advanced::Older),
        (6, 5, false, Advanced::Newest),
        (5, 6, true, Advanced::Newest),
        (5, 6, false, Advanced::Newest),
    ]
    .into_iter()
    .enumerate()
    {
        // Also for an aggregate that is there already.
        for seen in [false, true] {
            let aggregate = format!("{number}-{seen}").into_bytes();
            if seen {
                advanced(&store, "c", &aggregate, 1).await;
            }
            let mut earlier = store.begin().await.unwrap();
            let connection = H::Store::connection(&mut earlier);
            let told = store.advance(connection, "c", &aggregate, first).await;
            assert_eq!(told.unwrap(), Advanced::Newest);
            let end = async {
                h.blocked().await;
                if commits {
                    store.commit(earlier).await.unwrap();
                } else {
                    store.rollback(earlier).await.unwrap();
                }
            };
            let (told, ()) = tokio::join!(advanced(&store, "c", &aggregate, second), end);
            assert_eq!(
                told, expected,
                "{first} {second} commits: {commits} seen: {seen}"
            );
        }
    }
}

pub async fn an_overlong_aggregate_is_refused_and_leaves_the_transaction_usable<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    let long = [b'x'; AGGREGATE_BYTES_MAX + 1];
    let error = store.advance(connection, "c", &long, 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let told = store.advance(connection, "c", b"k", 1).await.unwrap();
    assert_eq!(told, Advanced::Newest);
    store.commit(transaction).await.unwrap();
}

pub async fn clean_up_forgets_quiet_aggregates_of_the_consumer_in_bounded_steps<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    for n in 0..15 {
        advanced(&store, "c", n.to_string().as_bytes(), 5).await;
    }
    advanced(&store, "d", b"0", 5).await;
    assert_eq!(store.clean_up("c", MINUTE, 100).await.unwrap(), 0);
    let mut transaction = store.begin().await.unwrap();
    let keys = ["1", "2", "3", "4", "5"];
    store.record(&mut transaction, "c", &keys).await.unwrap();
    store.commit(transaction).await.unwrap();
    // An instant long ago, in the database's own form.
    H::autocommit(
        &store,
        "UPDATE relaybox_aggregate_version \
         SET updated_at = (SELECT expires_at FROM relaybox_outbox_lane WHERE lane = 0)",
    )
    .await;
    H::autocommit(
        &store,
        "UPDATE relaybox_inbox \
         SET recorded_at = (SELECT expires_at FROM relaybox_outbox_lane WHERE lane = 0)",
    )
    .await;
    // One that is seen again stays.
    advanced(&store, "c", b"0", 6).await;
    // All 5 of the messages are gone with the first 8 of 14.
    for deleted in [8, 6, 0] {
        assert_eq!(store.clean_up("c", MINUTE, 8).await.unwrap(), deleted);
    }
    assert_eq!(advanced(&store, "c", b"0", 5).await, Advanced::Older);
    assert_eq!(advanced(&store, "c", b"1", 4).await, Advanced::Newest);
    assert_eq!(advanced(&store, "d", b"0", 4).await, Advanced::Older);
}
