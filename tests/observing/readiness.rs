//! Readiness of a relay, as a health check would ask for it.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::broker::{Health, PublishOutcome, Publisher, PublisherCapabilities};
use relaybox::envelope::Outgoing;
use relaybox::readiness::{NotReady, Probe};
use relaybox::relay::{Relay, RelayConfig};
use relaybox::testing::eventually;
use relaybox::{Message, Result};

use crate::gated::{Gate, Gated};
use crate::house;
use crate::support::{DEADLINE, Running, brisk, impatient, numbered};

fn watchful() -> RelayConfig {
    brisk().with_silence_max(Duration::from_millis(500))
}

pub async fn ready(probe: &Probe) {
    eventually(DEADLINE, "it is ready", || async {
        probe.readiness().is_ready()
    })
    .await;
}

/// Waits until this loop is called stalled, and only this one. On a thread of its own: where a thread of the runtime is
/// blocked, its timers may stand still too.
pub async fn stalled(probe: &Probe, loop_: &str) {
    let (probe, wanted) = (probe.clone(), loop_.to_owned());
    let asking = tokio::task::spawn_blocking(move || {
        let started = std::time::Instant::now();
        loop {
            let readiness = probe.readiness();
            if matches!(&readiness.reasons[..], [NotReady::Stalled { task, .. }] if *task == wanted)
            {
                return assert!(readiness.is_stalled());
            }
            assert!(
                started.elapsed() < DEADLINE,
                "{wanted} is stalled: {readiness}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    asking.await.unwrap();
}

#[tokio::test]
async fn a_relay_is_ready_from_its_start_to_its_stop() {
    let house = house().await;
    let relay = Relay::new(house.store.clone(), house.broker.clone()).with_config(brisk());
    let probe = relay.probe();
    assert_eq!(probe.readiness().reasons, [NotReady::NotStarted]);
    let running = Running::start(|stop| relay.run_until(stop));
    ready(&probe).await;
    running.stop().await.unwrap();
    assert_eq!(probe.readiness().reasons, [NotReady::Stopped]);
}

#[tokio::test]
async fn a_relay_whose_future_was_dropped_has_stopped() {
    let house = house().await;
    let relay = Relay::new(house.store.clone(), house.broker.clone()).with_config(brisk());
    let probe = relay.probe();
    let running = Running::start(|stop| relay.run_until(stop));
    ready(&probe).await;
    running.kill().await;
    assert_eq!(probe.readiness().reasons, [NotReady::Stopped]);
}

#[tokio::test]
async fn a_database_that_gives_no_answer_stalls_the_loop_that_asked() {
    let house = house().await;
    let (fetches, keeper) = (Gate::open(), Gate::open());
    let store = Gated {
        inner: house.store.clone(),
        fetches: fetches.clone(),
        keeper: keeper.clone(),
    };
    let relay = Relay::new(store, house.broker.clone()).with_config(watchful());
    let probe = relay.probe();
    let running = Running::start(|stop| relay.run_until(stop));
    for (gate, task) in [(fetches, "worker 0"), (keeper, "keeper")] {
        ready(&probe).await;
        gate.set(false);
        stalled(&probe, task).await;
        gate.set(true);
    }
    ready(&probe).await;
    running.stop().await.unwrap();
}

/// A publisher whose calls block the thread that they run on while it is shut.
struct Blocking<P> {
    inner: P,
    shut: Arc<(Mutex<bool>, Condvar)>,
}

impl<P: Publisher> Publisher for Blocking<P> {
    fn capabilities(&self) -> PublisherCapabilities {
        self.inner.capabilities()
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        let (shut, opened) = &*self.shut;
        // Not for ever: a test that fails has to end.
        drop(opened.wait_timeout_while(shut.lock().unwrap(), 2 * DEADLINE, |shut| *shut));
        self.inner.publish(batch)
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        self.inner.close(deadline)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_publisher_that_blocks_its_thread_stalls_the_worker() {
    let house = house().await;
    let shut = Arc::new((Mutex::new(true), Condvar::new()));
    let publisher = Blocking {
        inner: house.broker.clone(),
        shut: shut.clone(),
    };
    let relay = Relay::new(house.store.clone(), publisher).with_config(watchful());
    let probe = relay.probe();
    let running = Running::start(|stop| relay.run_until(stop));
    ready(&probe).await;
    house.enqueue(&numbered("k", "m", 1)).await;
    stalled(&probe, "worker 0").await;
    *shut.0.lock().unwrap() = false;
    shut.1.notify_all();
    ready(&probe).await;
    house.drained().await;
    running.stop().await.unwrap();
}

#[tokio::test]
async fn a_broker_that_is_away_makes_unready_until_it_is_back() {
    let house = house().await;
    let relay = Relay::new(house.store.clone(), house.broker.clone()).with_config(impatient());
    let probe = relay.probe();
    let running = Running::start(|stop| relay.run_until(stop));
    ready(&probe).await;
    house.broker.set_available(false);
    let down = || async {
        let reasons = probe.readiness().reasons;
        matches!(&reasons[..], [NotReady::BrokerDown(_)])
    };
    // The publisher knows it without being asked to publish.
    eventually(DEADLINE, "the broker is missed", down).await;
    house.enqueue(&numbered("k", "m", 1)).await;
    house.broker.set_available(true);
    house.drained().await;
    ready(&probe).await;
    running.stop().await.unwrap();
}

#[tokio::test]
async fn a_database_that_is_away_makes_unready() {
    let house = house().await;
    let relay = Relay::new(house.store.clone(), house.broker.clone()).with_config(impatient());
    let probe = relay.probe();
    let running = Running::start(|stop| relay.run_until(stop));
    ready(&probe).await;
    house.store.pool().close().await;
    eventually(DEADLINE, "the database is missed", || async {
        let reasons = probe.readiness().reasons;
        matches!(&reasons[..], [NotReady::DatabaseDown(_)])
    })
    .await;
    running.stop().await.unwrap();
}

#[tokio::test]
async fn a_destination_in_trouble_leaves_the_relay_ready() {
    let house = house().await;
    let relay = Relay::new(house.store.clone(), house.broker.clone()).with_config(impatient());
    let (probe, status) = (relay.probe(), relay.status());
    let running = Running::start(|stop| relay.run_until(stop));
    ready(&probe).await;
    house.enqueue(&[Message::new("nowhere", "T")]).await;
    eventually(DEADLINE, "the destination is missed", || async {
        status.borrow().destinations_down.contains_key("nowhere")
    })
    .await;
    assert!(probe.readiness().is_ready(), "{probe:?}");
    running.stop().await.unwrap();
}
