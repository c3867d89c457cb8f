//! Relays that are woken by notifications, and what they do without.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use relaybox::broker::memory::MemoryBroker;
use relaybox::relay::{Relay, RelayConfig, RelayStatus};
use relaybox::store::postgres::PostgresStore;
use relaybox::store::{Enqueue, OutboxStore, WakeUp, WakeUps};
use relaybox::testing::eventually;
use relaybox_testcontainers::PostgresOptions;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tracing_subscriber::util::SubscriberInitExt;

use crate::store_contract::{Harness, enqueue, keyed};

use super::proxy::Proxy;
use super::*;

/// Longest wait for what must happen at once; polling alone would take longer.
const SOON: Duration = Duration::from_secs(6);
/// Longest wait for anything else.
const DEADLINE: Duration = Duration::from_secs(180);
const IDLE_POLL_MAX: Duration = Duration::from_secs(30);

const LISTENERS: &str = "SELECT count(*) FROM pg_stat_activity \
    WHERE datname = current_database() AND query LIKE 'LISTEN%'";

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
