//! News of committed messages: what it cuts short, and what it must not.
//!
//! Store and broker are in memory and the clock is tokio's own, paused: a minute of idling passes at once, and every
//! pause is exact.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use relaybox::backoff::DelayPolicy;
use relaybox::broker::memory::MemoryBroker;
use relaybox::broker::{FailureScope, Publisher};
use relaybox::lane::{LANES, lane_of_message};
use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::{
    DestinationControl, Due, FetchRequest, Lease, OutboxReader, OutboxStore, Page, PendingMessage,
    Place, Settled, SettlementBatch, Standing, WakeUp, WakeUps,
};
use relaybox::testing::{Fault, FaultyPublisher};
use relaybox::{Message, Result};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::support::{Running, loaded};

const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn news_cuts_an_idle_pause_short() {
    let (store, broker) = (Told::new(), broker());
    let relay = store.relay(broker.clone(), idle());
    store.rests().await;
    let begun = Instant::now();
    store.add("a");
    store.tell(true);
    published(&broker, 1).await;
    assert!(begun.elapsed() < Duration::from_millis(100));
    // Without news it takes what is left of the pause.
    store.rests().await;
    let begun = Instant::now();
    store.add("b");
    published(&broker, 2).await;
    assert!(begun.elapsed() > MINUTE / 4);
    relay.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_commits_soon_after_the_news_is_found_soon() {
    let (store, broker) = (Told::new(), broker());
    let relay = store.relay(broker.clone(), idle());
    store.rests().await;
    let begun = Instant::now();
    store.tell(true);
    tokio::time::sleep(Duration::from_millis(50)).await; // of the paused clock
    store.add("a");
    published(&broker, 1).await;
    assert!(begun.elapsed() < Duration::from_millis(110));
    relay.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn news_that_comes_during_a_fetch_is_not_lost() {
    let (store, broker) = (Told::new(), broker());
    let relay = store.relay(broker.clone(), idle());
    store.rests().await;
    let begun = Instant::now();
    store.late.store(true, Ordering::SeqCst);
    store.tell(true);
    published(&broker, 1).await;
    assert!(begun.elapsed() < Duration::from_millis(8), "at once");
    relay.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_pause_after_trouble_is_not_cut_short() {
    let (store, broker) = (Told::new(), broker());
    let publisher =
        FaultyPublisher::new(broker.clone()).with_fault(1, Fault::Fail(FailureScope::Broker));
    let config = idle().with_backoff(DelayPolicy::fixed(MINUTE));
    store.add("a");
    let begun = Instant::now();
    let relay = store.relay(publisher, config);
    while begun.elapsed() < MINUTE - Duration::from_secs(1) {
        store.tell(true);
        tokio::time::sleep(Duration::from_secs(1)).await; // of the paused clock
    }
    assert_eq!(loaded(&store.fetched), 1);
    assert!(broker.log("orders").is_empty());
    published(&broker, 1).await;
    assert!(begun.elapsed() < MINUTE + Duration::from_secs(1));
    relay.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_storm_of_news_costs_few_polls() {
    let (store, broker) = (Told::new(), broker());
    let relay = store.relay(broker, idle());
    store.rests().await;
    let before = loaded(&store.fetched);
    for _ in 0..10_000 {
        store.tell(true);
        tokio::time::sleep(Duration::from_micros(100)).await; // of the paused clock, which counts in ms: 10 s in all
    }
    let polls = loaded(&store.fetched) - before;
    assert!((500..=2_100).contains(&polls), "{polls}");
    relay.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_status_says_whether_news_comes_through() {
    let store = Told::new();
    let relay = Relay::new(store.clone(), broker()).with_config(idle());
    let mut status = relay.status();
    let relay = Running::start(|stop| relay.run_until(stop));
    for live in [true, false, true] {
        store.tell(live);
        let said = status.wait_for(|status| status.wake_ups_live == live);
        tokio::time::timeout(MINUTE, said).await.unwrap().unwrap();
    }
    relay.stop().await.unwrap();
    assert!(!status.borrow().wake_ups_live);
}

fn idle() -> RelayConfig {
    RelayConfig::default().with_idle_poll_max(MINUTE)
}

fn broker() -> MemoryBroker {
    let broker = MemoryBroker::new();
    broker.create_topic("orders", 1).unwrap();
    broker
}

async fn published(broker: &MemoryBroker, count: usize) {
    let done = async {
        while broker.log("orders").len() < count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(3 * MINUTE, done).await.unwrap();
}

/// A store in memory whose news is what the test tells.
#[derive(Clone)]
struct Told {
    rows: Arc<Mutex<Vec<PendingMessage>>>,
    fetched: Arc<AtomicU64>,
    /// The next fetch misses a message that is committed while it runs.
    late: Arc<AtomicBool>,
    tell: mpsc::UnboundedSender<bool>,
    told: Arc<Mutex<Option<mpsc::UnboundedReceiver<bool>>>>,
}

impl Told {
    fn new() -> Self {
        let (tell, told) = mpsc::unbounded_channel();
        Self {
            rows: Arc::default(),
            fetched: Arc::default(),
            late: Arc::default(),
            tell,
            told: Arc::new(Mutex::new(Some(told))),
        }
    }

    fn relay(&self, publisher: impl Publisher, config: RelayConfig) -> Running {
        let relay = Relay::new(self.clone(), publisher).with_config(config);
        Running::start(|stop| relay.run_until(stop))
    }

    fn add(&self, key: &str) {
        let message = Message::new("orders", "Told").with_key(key);
        let mut rows = self.rows.lock().unwrap();
        let position = i64::try_from(rows.len()).unwrap() + 1;
        rows.push(PendingMessage {
            place: Place::pending(lane_of_message(&message), position),
            message,
            ahead: Vec::new(),
        });
    }

    fn tell(&self, live: bool) {
        self.tell.send(live).unwrap();
    }

    /// Lets time pass until the relay pauses for a minute, part of which is still to come.
    async fn rests(&self) {
        loop {
            let before = loaded(&self.fetched);
            tokio::time::sleep(MINUTE / 2).await; // of the paused clock
            if loaded(&self.fetched) == before {
                return;
            }
        }
    }
}

/// The store's reader: one lane's rows are as good as another's.
impl OutboxReader for Told {
    fn fetch<'a>(&'a mut self, _request: &'a FetchRequest) -> BoxFuture<'a, Result<Page>> {
        async {
            self.fetched.fetch_add(1, Ordering::SeqCst);
            let rows = self.rows.lock().unwrap().clone();
            if self.late.swap(false, Ordering::SeqCst) {
                self.add("late");
                self.tell(true);
                // The news passes while the fetch is still under way.
                tokio::time::sleep(Duration::from_millis(6)).await;
            }
            Ok(Page {
                rows,
                ..Page::default()
            })
        }
        .boxed()
    }

    fn settle<'a>(&'a mut self, batch: &'a SettlementBatch) -> BoxFuture<'a, Result<Settled>> {
        let settled = |row: &PendingMessage| {
            let mut verdicts = batch.verdicts.iter();
            verdicts.any(|(place, _)| *place == row.place)
        };
        self.rows.lock().unwrap().retain(|row| !settled(row));
        let applied = batch.verdicts.len();
        let settled = Settled { applied, fenced: 0 };
        async move { Ok(settled) }.boxed()
    }
}

struct News(mpsc::UnboundedReceiver<bool>);

impl WakeUps for News {
    fn next(&mut self) -> BoxFuture<'_, WakeUp> {
        async {
            let mut live = self.0.recv().await.unwrap();
            while let Ok(later) = self.0.try_recv() {
                live = later;
            }
            WakeUp { live }
        }
        .boxed()
    }
}

impl OutboxStore for Told {
    fn name(&self) -> &'static str {
        "told"
    }

    fn check(&self) -> BoxFuture<'_, Result<()>> {
        async { Ok(()) }.boxed()
    }

    fn heartbeat<'a>(
        &'a self,
        id: &'a str,
        _name: &'a str,
        _duration: Duration,
    ) -> BoxFuture<'a, Result<Standing>> {
        self.standing(id)
    }

    fn standing<'a>(&'a self, _id: &'a str) -> BoxFuture<'a, Result<Standing>> {
        async { Ok(Standing { live: 1, place: 0 }) }.boxed()
    }

    fn leave<'a>(&'a self, _id: &'a str) -> BoxFuture<'a, Result<()>> {
        async { Ok(()) }.boxed()
    }

    fn lease<'a>(
        &'a self,
        _relay: &'a str,
        _count_max: usize,
        _duration: Duration,
    ) -> BoxFuture<'a, Result<Vec<Lease>>> {
        async { Ok((0..LANES).map(|lane| Lease { lane, token: 1 }).collect()) }.boxed()
    }

    fn renew<'a>(
        &'a self,
        leases: &'a [Lease],
        _duration: Duration,
    ) -> BoxFuture<'a, Result<Vec<Lease>>> {
        async { Ok(leases.to_vec()) }.boxed()
    }

    fn release<'a>(&'a self, _leases: &'a [Lease]) -> BoxFuture<'a, Result<()>> {
        async { Ok(()) }.boxed()
    }

    fn reader(&self) -> Box<dyn OutboxReader> {
        Box::new(self.clone())
    }

    fn release_due(&self, _count_max: usize) -> BoxFuture<'_, Result<Due>> {
        async { Ok(Due::default()) }.boxed()
    }

    fn controls(&self) -> BoxFuture<'_, Result<Vec<DestinationControl>>> {
        async { Ok(Vec::new()) }.boxed()
    }

    fn wake_ups(&self) -> Option<Box<dyn WakeUps>> {
        let told = self.told.lock().unwrap().take();
        told.map(|told| Box::new(News(told)) as Box<dyn WakeUps>)
    }

    fn pending(&self, _count_max: u64) -> BoxFuture<'_, Result<u64>> {
        async { Ok(self.rows.lock().unwrap().len() as u64) }.boxed()
    }

    fn aside(&self, _count_max: u64) -> BoxFuture<'_, Result<u64>> {
        async { Ok(0) }.boxed()
    }
}
