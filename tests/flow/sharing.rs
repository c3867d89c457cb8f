//! Several relays over one outbox: fair shares, and hand-over while messages flow.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use relaybox::broker::memory::MemoryBroker;
use relaybox::broker::{PublishOutcome, Publisher, PublisherCapabilities};
use relaybox::envelope::Outgoing;
use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::sqlite::SqliteStore;
use relaybox::store::{
    DestinationControl, Due, Lease, OutboxAdmin, OutboxReader, OutboxStore, Standing,
};
use relaybox::testing::{Fault, FaultyPublisher, Signal, eventually};
use relaybox::{Message, Result};

use super::support::{DEADLINE, House, Running, brisk, loaded, numbered};

/// A lease far longer than any test: only lanes that were given back change hands.
fn patient() -> RelayConfig {
    RelayConfig::default().with_lease(Duration::from_secs(3_600))
}

/// How many lanes are held under each name.
async fn lanes(house: &House) -> BTreeMap<String, i64> {
    let held =
        "SELECT owner, count(*) FROM relaybox_outbox_lane WHERE owner IS NOT NULL GROUP BY owner";
    let held: Vec<(String, i64)> = sqlx::query_as(held)
        .fetch_all(house.store.pool())
        .await
        .unwrap();
    held.into_iter().collect()
}

async fn number(house: &House, sql: &'static str) -> i64 {
    let query = sqlx::query_scalar(sql);
    query.fetch_one(house.store.pool()).await.unwrap()
}

/// Waits until the numbers of lanes held are these, the largest first.
async fn shared(house: &House, wanted: &[i64]) {
    let awaited = format!("the lanes are shared as {wanted:?}");
    eventually(DEADLINE, &awaited, || async {
        let mut held: Vec<_> = lanes(house).await.into_values().collect();
        held.sort_by_key(|count| -count);
        held == wanted
    })
    .await;
}

fn start(house: &House, name: &str, config: RelayConfig) -> Running {
    house.relay(house.broker.clone(), config.with_name(name))
}

/// One message in each lane, at least.
fn one_a_lane() -> Vec<Message> {
    (0..200)
        .flat_map(|n| numbered(&format!("k{n}"), &format!("k{n}"), 1))
        .collect()
}

#[track_caller]
fn everything_once_and_in_order(house: &House, keys: usize, of_each: usize) {
    let mut seen: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let log = house.broker.log("orders");
    assert_eq!(log.len(), keys * of_each, "exactly one publish a message");
    for record in log {
        let key = String::from_utf8_lossy(record.message.key.as_deref().unwrap_or_default());
        let of_key = seen.entry(key.into_owned()).or_default();
        of_key.push(record.message.id.to_string());
    }
    assert_eq!(seen.len(), keys);
    for (key, ids) in seen {
        let expected: Vec<String> = (0..of_each).map(|n| format!("{key}-{n}")).collect();
        assert_eq!(ids, expected);
    }
}

#[tokio::test]
async fn lanes_are_shared_among_all_that_run_and_pass_on_without_waiting_for_a_lease() {
    let house = House::new().await;
    let first = start(&house, "a", patient());
    shared(&house, &[16]).await;
    let others = ["b", "c", "d"].map(|name| start(&house, name, patient()));
    shared(&house, &[4, 4, 4, 4]).await;
    first.stop().await.unwrap();
    shared(&house, &[6, 5, 5]).await;
    let [b, c, d] = others;
    b.stop().await.unwrap();
    c.stop().await.unwrap();
    shared(&house, &[16]).await;
    d.stop().await.unwrap();
    shared(&house, &[]).await;
    let registered = "SELECT count(*) FROM relaybox_relay";
    assert_eq!(number(&house, registered).await, 0);
}

#[tokio::test]
async fn a_killed_relays_lanes_wait_for_the_lease_and_then_find_another() {
    let house = House::new().await;
    // C28: it comes back under the same name, which is no claim to anything.
    let killed = start(&house, "a", brisk());
    let other = start(&house, "b", brisk());
    shared(&house, &[8, 8]).await;
    let killed_at = Instant::now();
    killed.kill().await;
    let back = start(&house, "a", brisk());
    house.enqueue(&one_a_lane()).await;
    house.drained().await;
    // A lease has half of it left at any time.
    assert!(killed_at.elapsed() > Duration::from_secs(2) * 9 / 10);
    assert_eq!(house.ids("orders").len(), 200);
    back.stop().await.unwrap();
    shared(&house, &[16]).await;
    other.stop().await.unwrap();
}

#[tokio::test]
async fn more_relays_than_lanes_wait_for_their_turn() {
    let house = House::new().await;
    let mut relays: Vec<_> = (0..18)
        .map(|n| start(&house, &format!("relay-{n:02}"), patient()))
        .collect();
    shared(&house, &[1; 16]).await;
    let idle = relays.split_off(16);
    let working = relays.remove(0);
    working.stop().await.unwrap();
    shared(&house, &[1; 16]).await;
    for relay in relays {
        relay.stop().await.unwrap();
    }
    shared(&house, &[8, 8]).await;
    for relay in idle {
        relay.stop().await.unwrap();
    }
}

#[tokio::test]
async fn once_shared_no_lane_changes_hands_any_more() {
    let house = House::new().await;
    let watched = Watched::new(&house.store);
    let relays = ["a", "b", "c"].map(|name| watched.start(&house, name));
    shared(&house, &[6, 5, 5]).await;
    let changes = "SELECT sum(token) FROM relaybox_outbox_lane";
    let before = number(&house, changes).await;
    watched.rounds(3 * 4).await;
    assert_eq!(number(&house, changes).await, before);
    for relay in relays {
        relay.stop().await.unwrap();
    }
}

#[tokio::test]
async fn a_lane_is_handed_over_only_after_its_batch_is_settled() {
    let house = House::new().await;
    house.enqueue(&one_a_lane()).await;
    let (reached, release) = (Signal::new(), Signal::new());
    let hang = Fault::Hang {
        reached: reached.clone(),
        release: release.clone(),
    };
    let hanging = FaultyPublisher::new(Unhurried::new(&house.broker)).with_fault(1, hang);
    let watched = Watched::new(&house.store);
    let relay = Relay::new(watched.clone(), hanging).with_config(patient().with_name("a"));
    let first = Running::start(|stop| relay.run_until(stop));
    reached.wait().await;
    let second = start(&house, "b", patient());
    let registered = "SELECT count(*) FROM relaybox_relay";
    eventually(DEADLINE, "the second relay is there", || async {
        number(&house, registered).await == 2
    })
    .await;
    // The first one has seen it by then, and wants to give up eight lanes that are all in its worker's hand.
    watched.rounds(3).await;
    assert_eq!(lanes(&house).await, BTreeMap::from([("a".into(), 16)]));
    assert!(house.ids("orders").is_empty());
    release.set();
    shared(&house, &[8, 8]).await;
    house.drained().await;
    first.stop().await.unwrap();
    second.stop().await.unwrap();
    everything_once_and_in_order(&house, 200, 1);
}

#[tokio::test]
async fn lanes_at_rest_do_not_wait_for_one_that_is_busy() {
    let house = House::new().await;
    house.enqueue(&numbered("k", "k", 3)).await;
    let (reached, release) = (Signal::new(), Signal::new());
    let hang = Fault::Hang {
        reached: reached.clone(),
        release: release.clone(),
    };
    let hanging = FaultyPublisher::new(Unhurried::new(&house.broker)).with_fault(1, hang);
    let first = house.relay(hanging, patient().with_name("a"));
    reached.wait().await;
    let second = start(&house, "b", patient());
    shared(&house, &[8, 8]).await;
    assert!(house.ids("orders").is_empty(), "the busy lane stayed");
    release.set();
    house.drained().await;
    first.stop().await.unwrap();
    second.stop().await.unwrap();
    everything_once_and_in_order(&house, 1, 3);
}

#[tokio::test]
async fn two_relays_started_at_the_same_instant_share_and_send_everything_once() {
    let house = House::new().await;
    for round in 0..10 {
        let one = |n| numbered(&format!("k{n}"), &format!("k{n}"), 10).remove(round);
        house.enqueue(&(0..100).map(one).collect::<Vec<_>>()).await;
    }
    let config = || patient().with_batch_rows_max(32).with_workers(2);
    let (publisher, other) = (Unhurried::new(&house.broker), Unhurried::new(&house.broker));
    let first = house.relay(publisher, config().with_name("a"));
    let second = house.relay(other, config().with_name("b"));
    shared(&house, &[8, 8]).await;
    house.drained().await;
    first.stop().await.unwrap();
    second.stop().await.unwrap();
    everything_once_and_in_order(&house, 100, 10);
}

/// C07: exactly as many publishes as messages, though lanes change hands all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relays_that_come_and_go_under_load_send_everything_once_and_in_order() {
    const KEYS: usize = 200;
    let house = Arc::new(House::new().await);
    let publisher = Unhurried::new(&house.broker);
    let enough = Signal::new();
    let writer = tokio::spawn({
        let (house, enough) = (house.clone(), enough.clone());
        async move {
            let mut rounds = 0;
            while !enough.is_set() || rounds < 50 {
                let one =
                    |n| numbered(&format!("k{n}"), &format!("k{n}"), rounds + 1).remove(rounds);
                house.enqueue(&(0..KEYS).map(one).collect::<Vec<_>>()).await;
                rounds += 1;
                eventually(DEADLINE, "the relays keep up", || async {
                    house.pending().await < 1_000
                })
                .await;
            }
            rounds
        }
    });
    let mut relays = std::collections::VecDeque::new();
    for step in 0..8 {
        let config = patient().with_batch_rows_max(40).with_workers(1 + step % 3);
        let name = format!("relay-{step}");
        relays.push_back(house.relay(publisher.clone(), config.with_name(&name)));
        // All lanes are held, so it gets some only from relays that are at work on them.
        eventually(DEADLINE, "the new relay has lanes", || async {
            lanes(&house).await.contains_key(&name)
        })
        .await;
        if relays.len() > 4 {
            relays.pop_front().unwrap().stop().await.unwrap();
        }
    }
    enough.set();
    let rounds = writer.await.unwrap();
    house.drained().await;
    for relay in relays {
        relay.stop().await.unwrap();
    }
    everything_once_and_in_order(&house, KEYS, rounds);
}

/// A publisher that takes a moment, as real ones do, so that batches are under way when lanes change hands.
#[derive(Clone)]
struct Unhurried {
    broker: MemoryBroker,
    calls: Arc<AtomicU64>,
}

impl Unhurried {
    fn new(broker: &MemoryBroker) -> Self {
        Self {
            broker: broker.clone(),
            calls: Arc::default(),
        }
    }
}

impl Publisher for Unhurried {
    fn capabilities(&self) -> PublisherCapabilities {
        let mut capabilities = self.broker.capabilities();
        // Longer than a test may hang.
        capabilities.publish_deadline = 2 * DEADLINE;
        capabilities
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            // Now and then longer than a relay that is short of lanes waits between two looks.
            let call = self.calls.fetch_add(1, Ordering::SeqCst);
            let pause = if call % 4 == 3 { 300 } else { 5 };
            tokio::time::sleep(Duration::from_millis(pause)).await;
            self.broker.publish(batch).await
        })
    }

    fn health(&self) -> relaybox::broker::Health {
        relaybox::broker::Health::up()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.broker.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        self.broker.close(deadline)
    }
}

/// A store that counts how often relays looked where they stand.
#[derive(Clone)]
struct Watched {
    inner: SqliteStore,
    looked: Arc<AtomicU64>,
}

impl Watched {
    fn new(store: &SqliteStore) -> Self {
        Self {
            inner: store.clone(),
            looked: Arc::default(),
        }
    }

    fn start(&self, house: &House, name: &str) -> Running {
        let config = patient().with_name(name);
        let relay = Relay::new(self.clone(), house.broker.clone()).with_config(config);
        Running::start(|stop| relay.run_until(stop))
    }

    /// Waits for so many more looks.
    async fn rounds(&self, more: u64) {
        let before = loaded(&self.looked);
        eventually(DEADLINE, "the relays looked around", || async {
            loaded(&self.looked) >= before + more
        })
        .await;
    }
}

impl OutboxStore for Watched {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn check(&self) -> BoxFuture<'_, Result<()>> {
        OutboxStore::check(&self.inner)
    }

    fn heartbeat<'a>(
        &'a self,
        id: &'a str,
        name: &'a str,
        duration: Duration,
    ) -> BoxFuture<'a, Result<Standing>> {
        self.looked.fetch_add(1, Ordering::SeqCst);
        self.inner.heartbeat(id, name, duration)
    }

    fn standing<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<Standing>> {
        self.looked.fetch_add(1, Ordering::SeqCst);
        self.inner.standing(id)
    }

    fn leave<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<()>> {
        self.inner.leave(id)
    }

    fn lease<'a>(
        &'a self,
        relay: &'a str,
        count_max: usize,
        duration: Duration,
    ) -> BoxFuture<'a, Result<Vec<Lease>>> {
        self.inner.lease(relay, count_max, duration)
    }

    fn renew<'a>(
        &'a self,
        leases: &'a [Lease],
        duration: Duration,
    ) -> BoxFuture<'a, Result<Vec<Lease>>> {
        self.inner.renew(leases, duration)
    }

    fn release<'a>(&'a self, leases: &'a [Lease]) -> BoxFuture<'a, Result<()>> {
        self.inner.release(leases)
    }

    fn reader(&self) -> Box<dyn OutboxReader> {
        self.inner.reader()
    }

    fn release_due(&self, count_max: usize) -> BoxFuture<'_, Result<Due>> {
        self.inner.release_due(count_max)
    }

    fn controls(&self) -> BoxFuture<'_, Result<Vec<DestinationControl>>> {
        self.inner.controls()
    }

    fn clean_up_history(&self) -> BoxFuture<'_, Result<bool>> {
        self.inner.clean_up_history()
    }

    fn admin(&self) -> Option<&dyn OutboxAdmin> {
        self.inner.admin()
    }

    fn pending(&self, count_max: u64) -> BoxFuture<'_, Result<u64>> {
        self.inner.pending(count_max)
    }

    fn aside(&self, count_max: u64) -> BoxFuture<'_, Result<u64>> {
        self.inner.aside(count_max)
    }
}
