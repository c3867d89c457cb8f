//! Whole relays under random trouble, and what has to be true when it is over: every message is at the broker, but for
//! what operators discarded, and the first appearances of each scope and key are in the order of enqueueing.

mod broker;
mod lossy;

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::time::Duration;

use futures_util::StreamExt;
use relaybox::Message;
use relaybox::backoff::DelayPolicy;
use relaybox::broker::PublisherOrder;
use relaybox::lane::lane_of;
use relaybox::relay::{DeadHead, Relay, RelayConfig};
use relaybox::store::{AsideFilter, Enqueue, InboxStore, Mode, OutboxAdmin, OutboxStore};
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout};

use broker::{Broker, Landed, Mood, scope_of};
use lossy::{Losses, Lossy};

/// A fresh, migrated database.
pub trait World {
    type Connection: Send;
    type Store: Enqueue<Connection = Self::Connection>
        + InboxStore<Connection = Self::Connection>
        + OutboxStore
        + OutboxAdmin
        + Clone;

    fn store(&self) -> Self::Store;
    /// Ends leases and registration of a relay that was killed, as time would.
    fn bury(&self, relay: &str) -> impl Future<Output = ()>;
    /// What is left, for people.
    fn dump(&self) -> impl Future<Output = String>;
}

/// `ev` orders together with both that follow it.
const DESTINATIONS: [&str; 5] = ["ev", "ev.a", "ev.b", "mail", "shop"];
/// Longest wait for everything to go out once all is well; only a failing case waits that long.
const DEADLINE: Duration = Duration::from_secs(180);

/// Runs so many cases, some side by side. `RELAYBOX_SEED` names the first one, `RELAYBOX_CASES` another number of them.
pub async fn cases<W, F>(count: u64, side_by_side: usize, start: impl Fn(u64) -> F)
where
    W: World,
    F: Future<Output = W>,
{
    let number = |name| std::env::var(name).ok().map(|text| text.parse().unwrap());
    let first = number("RELAYBOX_SEED").unwrap_or_else(|| u64::from(fastrand::u32(..)));
    let count = number("RELAYBOX_CASES").unwrap_or(count);
    println!("seeds from {first}");
    let case = async |seed| {
        let told = Case::new(start(seed).await, seed).run().await;
        told.map(|told| format!("seed {seed}: {told}"))
    };
    let cases = futures_util::stream::iter((first..first + count).map(case));
    let mut told = cases.buffer_unordered(side_by_side);
    let mut broken = Vec::new();
    while let Some(told) = told.next().await {
        broken.extend(told);
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

struct Case<W> {
    world: W,
    random: fastrand::Rng,
    keys: Vec<String>,
    dead_head: DeadHead,
    broker: Broker,
    losses: Losses,
    relays: Vec<(String, oneshot::Sender<()>, JoinHandle<()>)>,
    stopping: JoinSet<()>,
    started: usize,
    /// All ids in order of enqueueing, with scope and key.
    enqueued: Vec<Landed>,
    /// What may be anywhere in the order: delayed, dead under `Skip`, or discarded.
    loose: HashSet<String>,
    discarded: HashSet<String>,
    refused: Vec<String>,
}

impl<W: World> Case<W> {
    fn new(world: W, seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let order = match random.bool() {
            true => PublisherOrder::Gap,
            false => PublisherOrder::Prefix,
        };
        let dead_heads = [DeadHead::Skip, DeadHead::Hold, DeadHead::Park];
        // Several keys of one lane.
        let in_lanes = |lanes: &[i32], count| {
            let keys = (0..).map(|n: u32| n.to_string());
            let keys = keys.filter(|key| lanes.contains(&lane_of(key.as_bytes())));
            keys.take(count).collect::<Vec<_>>()
        };
        Self {
            keys: [in_lanes(&[3], 3), in_lanes(&[7, 8], 2)].concat(),
            dead_head: dead_heads[random.usize(..3)],
            broker: Broker::new(random.u64(..), order),
            losses: Losses::new(random.u64(..)),
            random,
            world,
            relays: Vec::new(),
            stopping: JoinSet::new(),
            started: 0,
            enqueued: Vec::new(),
            loose: HashSet::new(),
            discarded: HashSet::new(),
            refused: Vec::new(),
        }
    }

    /// What went wrong.
    async fn run(mut self) -> Option<String> {
        self.start_relay();
        for _ in 0..self.random.usize(20..70) {
            self.step().await;
            let pause = Duration::from_millis(self.random.u64(0..10));
            let _ = timeout(pause, self.broker.changed()).await;
        }
        let stuck = self.heal().await;
        for (_, stop, task) in self.relays.drain(..) {
            let _ = stop.send(());
            task.await.unwrap();
        }
        while let Some(ended) = self.stopping.join_next().await {
            ended.unwrap();
        }
        match stuck {
            Some(stuck) => Some(format!("{:?}: stuck: {stuck}", self.dead_head)),
            None => self.check(),
        }
    }

    async fn step(&mut self) {
        let store = self.world.store();
        let destination = DESTINATIONS[self.random.usize(..DESTINATIONS.len())];
        match self.random.u32(..100) {
            0..40 => self.enqueue().await,
            40..55 => {
                let moods = [
                    Mood::Fine,
                    Mood::Failing,
                    Mood::Missing,
                    Mood::LosesConfirms,
                    Mood::Hanging,
                    Mood::Moody,
                ];
                let mood = moods[self.random.usize(..moods.len())];
                self.broker.set_mood(destination, mood);
            }
            55..62 => self.broker.release(),
            62..70 => {
                let filter = self.filter(destination);
                store.requeue(&filter, Mode::Apply).await.unwrap();
            }
            70..74 => self.discard().await,
            74..77 => store.pause(destination, "a test").await.unwrap(),
            77..81 => store.resume(destination).await.unwrap(),
            81..84 => {
                let rate = [None, Some(16), Some(1_000)][self.random.usize(..3)];
                store.limit(destination, rate, "a test").await.unwrap();
            }
            84..87 if self.relays.len() < 3 => self.start_relay(),
            87..89 if !self.relays.is_empty() => {
                let (_, stop, task) = self.relays.remove(0);
                let _ = stop.send(());
                self.stopping.spawn(async { task.await.unwrap() });
            }
            89..92 if !self.relays.is_empty() => {
                let (name, _stop, task) = self.relays.remove(0);
                task.abort();
                let _ = task.await;
                self.world.bury(&name).await;
            }
            92..96 => {
                if let Some(id) = self.refused.pop() {
                    self.broker.absolve(&id);
                }
            }
            _ => self.losses.set([0, 10, 60][self.random.usize(..3)]),
        }
    }

    fn filter(&mut self, destination: &str) -> AsideFilter {
        match self.random.u32(..4) {
            0 => AsideFilter::all().with_key(&self.keys[self.random.usize(..self.keys.len())]),
            1 => AsideFilter::all().with_destination(destination),
            _ => AsideFilter::all(),
        }
    }

    async fn enqueue(&mut self) {
        let store = self.world.store();
        let delayed = self.random.u32(..12) == 0;
        let mut messages = Vec::new();
        for _ in 0..self.random.usize(1..7) {
            let destination = DESTINATIONS[self.random.usize(..DESTINATIONS.len())];
            let id = format!("m{}", self.enqueued.len());
            let payload = "x".repeat(self.random.usize(0..200) * self.random.usize(0..2));
            let mut message = Message::new(destination, "T")
                .with_id(id.as_str())
                .with_payload(payload);
            if self.random.u32(..8) > 0 {
                message = message.with_key(&self.keys[self.random.usize(..self.keys.len())]);
            }
            if self.random.u32(..12) == 0 {
                self.broker.refuse(&id);
                self.refused.push(id.clone());
                if self.dead_head == DeadHead::Skip {
                    self.loose.insert(id.clone());
                }
            }
            if delayed {
                self.loose.insert(id.clone());
            }
            self.enqueued.push(Landed {
                scope: scope_of(destination).to_owned(),
                key: message.key.as_deref().map(<[u8]>::to_vec),
                id,
            });
            messages.push(message);
        }
        let mut transaction = store.begin().await.unwrap();
        let connection = W::Store::connection(&mut transaction);
        let enqueued = match delayed {
            true => {
                let delay = Duration::from_millis(self.random.u64(0..60));
                store.insert_delayed(connection, &messages, delay).await
            }
            false => store.insert(connection, &messages).await,
        };
        enqueued.unwrap();
        store.commit(transaction).await.unwrap();
    }

    async fn discard(&mut self) {
        let store = self.world.store();
        let listed = store.list_aside(&AsideFilter::all(), 0, 100).await.unwrap();
        if listed.is_empty() {
            return;
        }
        let entry = &listed[self.random.usize(..listed.len())];
        let filter = AsideFilter::all().with_position(entry.position);
        let discarded = store.discard(&filter, "a test", Mode::Apply).await.unwrap();
        if discarded > 0 {
            self.discarded.insert(entry.message_id.to_string());
        }
    }

    fn start_relay(&mut self) {
        let name = format!("relay {}", self.started);
        self.started += 1;
        let random = &mut self.random;
        let config = RelayConfig::default()
            .with_name(&name)
            .with_workers(random.usize(1..4))
            .with_batch_rows_max([16, 17, 40, 100, 1_000][random.usize(..5)])
            .with_batch_bytes_max([100, 2_000, 1 << 20][random.usize(..3)])
            .with_lease(Duration::from_millis(2_200))
            .with_patience(Duration::from_millis(random.u64(10..30)))
            .with_idle_poll_max(Duration::from_millis(20))
            .with_backoff(DelayPolicy::fixed(Duration::from_millis(random.u64(0..10))))
            .with_dead_head(self.dead_head);
        let store = Lossy {
            inner: self.world.store(),
            losses: self.losses.clone(),
        };
        let relay = Relay::new(store, self.broker.clone()).with_config(config);
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            let stopped = async {
                let _ = stopped.await;
            };
            relay.run_until(stopped).await.unwrap();
        });
        self.relays.push((name, stop, task));
    }

    /// Ends all trouble and waits until everything is out; tells what is not.
    async fn heal(&mut self) -> Option<String> {
        self.broker.heal();
        self.losses.set(0);
        let store = self.world.store();
        for destination in DESTINATIONS {
            store.resume(destination).await.unwrap();
            store.limit(destination, None, "a test").await.unwrap();
        }
        if self.relays.is_empty() {
            self.start_relay();
        }
        let healed = Instant::now();
        while healed.elapsed() < DEADLINE {
            let all = AsideFilter::all();
            store.requeue(&all, Mode::Apply).await.unwrap();
            // Twice, for a row on its way from one table to the other.
            let mut left = 0;
            for _ in 0..2 {
                left += store.pending(1).await.unwrap() + store.aside(1).await.unwrap();
            }
            if left == 0 {
                return None;
            }
            let _ = timeout(Duration::from_millis(20), self.broker.changed()).await;
        }
        Some(self.world.dump().await)
    }

    fn check(&self) -> Option<String> {
        let stored = self.broker.stored();
        let ids: HashSet<&str> = stored.iter().map(|landed| landed.id.as_str()).collect();
        let lost = self.enqueued.iter().map(|sent| sent.id.as_str());
        let lost: Vec<_> = lost
            .filter(|id| !ids.contains(id) && !self.discarded.contains(*id))
            .collect();
        if !lost.is_empty() {
            return Some(format!("{:?}: lost: {lost:?}", self.dead_head));
        }
        let mut seen = HashSet::new();
        let mut last: HashMap<(&str, &[u8]), usize> = HashMap::new();
        for Landed { scope, key, id } in &stored {
            let loose = self.loose.contains(id) || self.discarded.contains(id);
            let (Some(key), true, false) = (key, seen.insert(id), loose) else {
                continue;
            };
            let number: usize = id[1..].parse().unwrap();
            let before = last.insert((scope, key), number);
            if before.is_some_and(|before| before > number) {
                let line = stored
                    .iter()
                    .filter(|landed| landed.scope == *scope && landed.key.as_ref() == Some(key));
                let line: Vec<_> = line.map(|landed| &*landed.id).collect();
                return Some(format!(
                    "{:?}: {id} came after m{} in {scope}: {line:?}",
                    self.dead_head,
                    before.unwrap_or(0)
                ));
            }
        }
        None
    }
}
