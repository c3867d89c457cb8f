//! Notifications beside what is enqueued: which are sent, and which are saved.

use std::slice::from_ref;
use std::time::Duration;

use relaybox::store::postgres::PostgresStore;
use relaybox::store::{Enqueue, InboxStore, OutboxStore, Prefix};
use relaybox_testcontainers::PostgresOptions;
use sqlx::postgres::PgListener;
use sqlx::{Connection, PgConnection};

use crate::store_contract::{Harness, enqueue, keyed, pending};

use super::*;

const DEADLINE: Duration = Duration::from_secs(180);
/// A pause that no test outlasts.
const HOUR: Duration = Duration::from_secs(3_600);

#[tokio::test]
async fn without_the_setting_nobody_notifies_and_nobody_listens() {
    let h = Postgres::start().await;
    let mut ear = Ear::new(&h.url, &h.store()).await;
    enqueue::<Postgres>(&h.store(), &[keyed("k", "1")]).await;
    assert_eq!(ear.heard().await, 0);
    assert!(h.store().wake_ups().is_none());
    assert!(h.store().with_wake_up().wake_ups().is_some());
}

#[tokio::test]
async fn only_what_commits_notifies_and_a_rollback_silences_nothing_later() {
    let h = Postgres::start().await;
    let store = h.store().with_wake_up().with_wake_up_pause(HOUR);
    let mut ear = Ear::new(&h.url, &store).await;
    let mut transaction = store.begin().await.unwrap();
    let connection = PostgresStore::connection(&mut transaction);
    let undone = keyed("k", "undone");
    store.insert(connection, from_ref(&undone)).await.unwrap();
    store.rollback(transaction).await.unwrap();
    assert_eq!(ear.heard().await, 0);
    enqueue::<Postgres>(&store, &[keyed("k", "1")]).await;
    assert_eq!(ear.heard().await, 1);
    assert_eq!(pending(&store).await.rows.len(), 1);
}

#[tokio::test]
async fn a_savepoint_that_was_rolled_back_silences_nothing_later() {
    let h = Postgres::start().await;
    let store = h.store().with_wake_up().with_wake_up_pause(HOUR);
    let mut ear = Ear::new(&h.url, &store).await;
    // With the one of the savepoint there would be two that are open.
    let mut other = store.begin().await.unwrap();
    let connection = PostgresStore::connection(&mut other);
    let undone = keyed("other", "undone");
    store.insert(connection, from_ref(&undone)).await.unwrap();
    let mut transaction = store.begin().await.unwrap();
    let connection = PostgresStore::connection(&mut transaction);
    let mut savepoint = connection.begin().await.unwrap();
    let undone = keyed("k", "undone");
    store
        .insert(&mut savepoint, from_ref(&undone))
        .await
        .unwrap();
    savepoint.rollback().await.unwrap();
    let message = keyed("k", "1");
    store.insert(connection, from_ref(&message)).await.unwrap();
    store.commit(transaction).await.unwrap();
    store.rollback(other).await.unwrap();
    assert_eq!(ear.heard().await, 1);
    assert_eq!(pending(&store).await.rows.len(), 1);
}

#[tokio::test]
async fn an_enqueue_is_silent_after_one_that_has_committed_or_beside_two_that_may() {
    let h = Postgres::start().await;
    let store = h.store().with_wake_up().with_wake_up_pause(HOUR);
    let mut ear = Ear::new(&h.url, &store).await;
    let mut open = Vec::new();
    for key in ["a", "b"] {
        let mut transaction = store.begin().await.unwrap();
        let connection = PostgresStore::connection(&mut transaction);
        let message = keyed(key, "1");
        store.insert(connection, from_ref(&message)).await.unwrap();
        open.push(transaction);
    }
    enqueue::<Postgres>(&store, &[keyed("c", "1")]).await;
    assert_eq!(ear.heard().await, 0, "two others will tell");
    store.rollback(open.remove(0)).await.unwrap();
    enqueue::<Postgres>(&store, &[keyed("c", "2")]).await;
    assert_eq!(ear.heard().await, 1, "one may be rolled back too");
    enqueue::<Postgres>(&store, &[keyed("c", "3")]).await;
    assert_eq!(ear.heard().await, 0);
    store.commit(open.remove(0)).await.unwrap();
    assert_eq!(ear.heard().await, 1);
    // Clones share it, those for other tables do not.
    enqueue::<Postgres>(&store.clone(), &[keyed("b", "2")]).await;
    assert_eq!(ear.heard().await, 0);
    let other = store.with_prefix(Prefix::new("other_").unwrap());
    other.migrate().await.unwrap();
    let mut ear = Ear::new(&h.url, &other).await;
    enqueue::<Postgres>(&other, &[keyed("b", "3")]).await;
    assert_eq!(ear.heard().await, 1);
}

/// An error here would abort the business transaction.
#[tokio::test]
async fn a_transaction_that_the_server_has_not_seen_yet_refuses_no_enqueue() {
    let h = Postgres::start().await;
    // What was restored from an older copy counts its transactions from there; a fresh server does too.
    let options = PostgresOptions::default().with_local_process();
    let younger = relaybox_testcontainers::Postgres::start_with(options)
        .await
        .unwrap();
    let url = younger.create_database("store").await.unwrap();
    let restored = PostgresStore::connect(&url).await.unwrap();
    restored.migrate().await.unwrap();
    let xid = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint";
    let mut there = restored.pool().acquire().await.unwrap();
    while h.number(xid).await <= <Postgres as Harness>::number(&mut there, xid).await + 100 {
        enqueue::<Postgres>(&h.store(), &[keyed("k", "x")]).await;
    }
    let store = h.store().with_wake_up().with_wake_up_pause(HOUR);
    enqueue::<Postgres>(&store, &[keyed("k", "1")]).await;
    store.insert(&mut there, &[keyed("k", "2")]).await.unwrap();
}

#[tokio::test]
async fn a_large_payload_and_a_long_name_notify_like_any_other() {
    let h = Postgres::start().await;
    for length in [40, 10] {
        let prefix = format!("{}.{}_", "s".repeat(40), "p".repeat(length - 1));
        let store = h.store().with_prefix(Prefix::new(&prefix).unwrap());
        let store = store.with_wake_up();
        assert!((58..=63).contains(&store.wake_up_channel().len()));
        store.migrate().await.unwrap();
        let mut ear = Ear::new(&h.url, &store).await;
        enqueue::<Postgres>(&store, &[keyed("k", &"x".repeat(20_000))]).await;
        assert_eq!(ear.heard().await, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_writers_notify_seldom() {
    const WRITERS: u64 = 8;
    let h = Postgres::start().await;
    let store = h.store().with_wake_up().with_wake_up_pause(HOUR);
    let mut ear = Ear::new(&h.url, &store).await;
    let writers = (0..WRITERS).map(|writer| {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 0..25 {
                let message = keyed(&writer.to_string(), &n.to_string());
                enqueue::<Postgres>(&store, &[message]).await;
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    // Those that began before the first one had committed.
    let heard = ear.heard().await;
    assert!((1..=WRITERS).contains(&heard), "{heard} of 200");
}
/// The contracts of writing, by the statement that notifies too.
struct Waking(Postgres);

impl Harness for Waking {
    type Connection = PgConnection;
    type Store = PostgresStore;

    async fn start() -> Self {
        Self(Postgres::start().await)
    }

    fn store(&self) -> PostgresStore {
        let store = self.0.store().with_wake_up();
        store.with_wake_up_pause(Duration::ZERO)
    }

    async fn impatient(&self) -> PostgresStore {
        self.0.impatient().await.with_wake_up()
    }

    async fn single(&self) -> PostgresStore {
        self.0.single().await.with_wake_up()
    }

    async fn execute(connection: &mut PgConnection, sql: &str) -> bool {
        Postgres::execute(connection, sql).await
    }

    async fn number(connection: &mut PgConnection, sql: &str) -> i64 {
        <Postgres as Harness>::number(connection, sql).await
    }

    async fn nested(connection: &mut PgConnection, sql: &str) {
        Postgres::nested(connection, sql).await;
    }

    async fn autocommit(store: &PostgresStore, sql: &'static str) {
        Postgres::autocommit(store, sql).await;
    }

    async fn blocked(&self) {
        self.0.blocked().await;
    }
}

mod contract {
    use super::Waking;
    use crate::store_contract;

    store_contract!(
        Waking: rolled_back_and_savepoint_rolled_back_messages_do_not_exist,
        rows_come_in_order_of_position_within_a_lane_and_key,
        payload_key_and_headers_keep_every_byte,
        a_refused_message_leaves_the_business_transaction_usable,
    );
}

/// Hears what is notified on a store's channel.
struct Ear {
    listener: PgListener,
    sender: PgPool,
    channel: String,
}

impl Ear {
    async fn new(url: &str, store: &PostgresStore) -> Self {
        let channel = store.wake_up_channel();
        let mut listener = PgListener::connect(url).await.unwrap();
        listener.listen(&channel).await.unwrap();
        Self {
            listener,
            sender: store.pool().clone(),
            channel,
        }
    }

    /// How many notifications were committed since it was last asked. They arrive in the order of the commits.
    async fn heard(&mut self) -> u64 {
        let end = sqlx::query("SELECT pg_notify($1, 'end')").bind(&self.channel);
        end.execute(&self.sender).await.unwrap();
        let mut heard = 0;
        loop {
            let received = tokio::time::timeout(DEADLINE, self.listener.recv());
            match received.await.unwrap().unwrap().payload() {
                "end" => return heard,
                payload => assert_eq!(payload, ""),
            }
            heard += 1;
        }
    }
}
