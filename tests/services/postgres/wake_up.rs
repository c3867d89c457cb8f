//! Relays woken by notifications: what writers send, and what a relay does with it and without it.

use std::io;
use std::slice::from_ref;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use relaybox::broker::memory::MemoryBroker;
use relaybox::relay::{Relay, RelayConfig, RelayStatus};
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{Enqueue, InboxStore, OutboxStore, Prefix, WakeUp, WakeUps};
use relaybox::testing::eventually;
use relaybox_testcontainers::PostgresOptions;
use sqlx::Connection;
use sqlx::postgres::PgListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tracing_subscriber::util::SubscriberInitExt;

use crate::store_contract::{Harness, enqueue, keyed, pending};

use super::proxy::Proxy;
use super::*;

/// Longest wait for what must happen at once; polling alone would take longer.
const SOON: Duration = Duration::from_secs(6);
/// Longest wait for anything else.
const DEADLINE: Duration = Duration::from_secs(60);
const IDLE_POLL_MAX: Duration = Duration::from_secs(30);
const HOUR: Duration = Duration::from_secs(3_600);

const LISTENERS: &str = "SELECT count(*) FROM pg_stat_activity \
    WHERE datname = current_database() AND query LIKE 'LISTEN%'";

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
    assert_eq!(ear.heard().await, 1);
    assert_eq!(pending(&store).await.rows.len(), 1);
}

#[tokio::test]
async fn an_enqueue_is_silent_only_after_the_one_that_notified_has_committed() {
    let h = Postgres::start().await;
    let store = h.store().with_wake_up().with_wake_up_pause(HOUR);
    let mut ear = Ear::new(&h.url, &store).await;
    let mut open = store.begin().await.unwrap();
    let connection = PostgresStore::connection(&mut open);
    let first = keyed("a", "1");
    store.insert(connection, from_ref(&first)).await.unwrap();
    // Another transaction, so that snapshots know the open one.
    enqueue::<Postgres>(&h.store(), &[keyed("c", "1")]).await;
    enqueue::<Postgres>(&store, &[keyed("b", "1")]).await;
    assert_eq!(ear.heard().await, 1, "the open one has told nobody yet");
    store.commit(open).await.unwrap();
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

#[tokio::test]
async fn an_idle_relay_is_woken_and_its_listener_ends_with_it() {
    let h = Postgres::start().await;
    let mut relay = Running::start(h.store().with_wake_up(), IDLE_POLL_MAX);
    relay.is_live().await;
    assert_eq!(h.number(LISTENERS).await, 1);
    relay.rests().await;
    enqueue::<Postgres>(&h.store().with_wake_up(), &[keyed("k", "1")]).await;
    relay.published(1, SOON).await;
    relay.stop().await;
    eventually(DEADLINE, "the listener is gone", || async {
        h.number(LISTENERS).await == 0
    })
    .await;
}

#[tokio::test]
async fn the_documented_notification_wakes_relays() {
    let readme = include_str!("../../../migrations/README.md");
    let begin = readme.find("SELECT pg_notify(").unwrap();
    let length = readme[begin..].find('\n').unwrap();
    let h = Postgres::start().await;
    let wake_ups = live(&h.store().with_wake_up()).await;
    let mut connection = h.pool().acquire().await.unwrap();
    assert!(Postgres::execute(&mut connection, &readme[begin..begin + length]).await);
    let (told, _) = next(wake_ups).await;
    assert!(told.live);
}

#[tokio::test]
async fn a_relay_whose_listener_was_ended_loses_no_time() {
    let h = Postgres::start().await;
    let mut relay = Running::start(h.store().with_wake_up(), IDLE_POLL_MAX);
    relay.is_live().await;
    relay.rests().await;
    // The writer's connection stays.
    let kill = LISTENERS.replace("count(*)", "count(pg_terminate_backend(pid))");
    let mut connection = h.pool().acquire().await.unwrap();
    assert_eq!(
        <Postgres as Harness>::number(&mut connection, &kill).await,
        1
    );
    let message = keyed("k", "1");
    let store = h.store().with_wake_up();
    store.insert(&mut connection, &[message]).await.unwrap();
    relay.published(1, SOON).await;
    relay.is_live().await;
    relay.stop().await;
}

#[tokio::test]
async fn what_is_committed_while_nobody_listens_is_told_afterwards_and_trouble_once() {
    let (log, _guard) = Log::capture();
    let h = Postgres::start().await;
    let proxy = Proxy::start(&h).await;
    let store = proxy.store().await.with_wake_up();
    let wake_ups = live(&store).await;
    proxy.cut();
    let (told, wake_ups) = next(wake_ups).await;
    assert!(!told.live);
    let waiting = tokio::spawn(next(wake_ups));
    let before = proxy.connections();
    eventually(DEADLINE, "some tries failed", || async {
        proxy.connections() >= before + 4
    })
    .await;
    enqueue::<Postgres>(&h.store().with_wake_up(), &[keyed("k", "1")]).await;
    assert!(!waiting.is_finished(), "nothing to tell yet");
    proxy.mend();
    let (told, wake_ups) = waiting.await.unwrap();
    assert!(!told.live, "told before it is proven");
    assert!(next(wake_ups).await.0.live);
    assert_eq!(log.count("relays are not woken"), 1, "{log:?}");
}

#[tokio::test]
async fn a_connection_that_went_silent_is_noticed_and_replaced() {
    let h = Postgres::start().await;
    let proxy = Proxy::start(&h).await;
    let store = proxy.store().await.with_wake_up();
    let wake_ups = live(&store).await;
    let started = Instant::now();
    proxy.freeze();
    let (told, wake_ups) = next(wake_ups).await;
    assert!(!told.live);
    assert!(started.elapsed() < Duration::from_secs(30));
    let again = until_live(wake_ups);
    tokio::time::timeout(DEADLINE, again).await.unwrap();
}

#[tokio::test]
async fn a_restarted_server_is_listened_to_again() {
    let options = PostgresOptions::default().with_local_process();
    let server = relaybox_testcontainers::Postgres::start_with(options)
        .await
        .unwrap();
    let url = server.create_database("store").await.unwrap();
    let store = PostgresStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    let store = store.with_wake_up();
    for crash in [false, true] {
        let wake_ups = live(&store).await;
        if crash {
            server.kill().await.unwrap();
            server.start_again().await.unwrap();
        } else {
            server.restart().await.unwrap();
        }
        let (told, wake_ups) = next(wake_ups).await;
        assert!(!told.live);
        let again = until_live(wake_ups);
        tokio::time::timeout(DEADLINE, again).await.unwrap();
    }
}

#[tokio::test]
async fn where_notifications_are_swallowed_one_warning_names_the_cause_and_polls_go_on() {
    let (log, _guard) = Log::capture();
    let h = Postgres::start().await;
    let proxy = Proxy::start(&h).await;
    proxy.swallow_notifications();
    let store = proxy.store().await.with_wake_up();
    let relay = Running::start(store, Duration::from_millis(200));
    eventually(DEADLINE, "the cause is named", || async {
        log.count("transaction pooler") > 0
    })
    .await;
    enqueue::<Postgres>(&h.store().with_wake_up(), &[keyed("k", "1")]).await;
    relay.published(1, SOON).await;
    assert!(!relay.status.borrow().wake_ups_live);
    assert_eq!(log.count("relays are not woken"), 1, "{log:?}");
    relay.stop().await;
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

async fn next(mut wake_ups: Box<dyn WakeUps>) -> (WakeUp, Box<dyn WakeUps>) {
    let told = tokio::time::timeout(DEADLINE, wake_ups.next()).await;
    (told.unwrap(), wake_ups)
}

async fn until_live(mut wake_ups: Box<dyn WakeUps>) -> Box<dyn WakeUps> {
    while !wake_ups.next().await.live {}
    wake_ups
}

async fn live(store: &PostgresStore) -> Box<dyn WakeUps> {
    let (told, wake_ups) = next(store.wake_ups().unwrap()).await;
    assert!(!told.live, "not proven yet");
    let (told, wake_ups) = next(wake_ups).await;
    assert!(told.live);
    wake_ups
}

/// A relay to a broker in memory.
struct Running {
    broker: MemoryBroker,
    status: watch::Receiver<RelayStatus>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<relaybox::Result<()>>,
}

impl Running {
    fn start(store: PostgresStore, idle_poll_max: Duration) -> Self {
        let broker = MemoryBroker::new();
        broker.create_topic("orders", 1).unwrap();
        let config = RelayConfig::default().with_idle_poll_max(idle_poll_max);
        let relay = Relay::new(store, broker.clone()).with_config(config);
        let (stop, stopped) = oneshot::channel::<()>();
        Self {
            broker,
            status: relay.status(),
            stop,
            task: tokio::spawn(relay.run_until(async {
                let _ = stopped.await;
            })),
        }
    }

    async fn is_live(&mut self) {
        let live = self.status.wait_for(|status| status.wake_ups_live);
        tokio::time::timeout(DEADLINE, live).await.unwrap().unwrap();
    }

    /// Waits until it pauses for ten seconds: pauses double from 10 ms on since it was last woken.
    async fn rests(&self) {
        let started = Instant::now();
        eventually(DEADLINE, "the relay rests", || async {
            started.elapsed() > Duration::from_secs(11)
        })
        .await;
    }

    async fn published(&self, count: usize, within: Duration) {
        eventually(within, "the message is published", || async {
            self.broker.log("orders").len() == count
        })
        .await;
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        let ended = tokio::time::timeout(DEADLINE, self.task).await;
        ended.unwrap().unwrap().unwrap();
    }
}

/// Warnings of this thread.
#[derive(Clone, Debug, Default)]
struct Log(Arc<Mutex<String>>);

impl Log {
    fn capture() -> (Self, impl Drop) {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        (log, subscriber.set_default())
    }

    fn count(&self, text: &str) -> usize {
        let log = self.0.lock().unwrap();
        log.lines().filter(|line| line.contains(text)).count()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        self.0.lock().unwrap().push_str(&text);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
