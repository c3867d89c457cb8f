//! Members of a consumer that come, die, freeze and restart, as processes of their own, and what must hold meanwhile.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::process::{ChildStdin, Command, Stdio};

use relaybox::broker::Subscriber;
use relaybox::store::postgres::PostgresStore;
use relaybox::testing::eventually;
use relaybox_testcontainers::{shared_postgres, unique_name};
use sqlx::Executor;
use sqlx::postgres::PgPool;

use super::*;
use crate::end_to_end::{Process, signal};

const DEADLINE: Duration = Duration::from_secs(180);
const KEYS: usize = 40;
const EACH: usize = 30;
const PARTITIONS: i32 = 6;

const CREATE_EFFECT: &str = "CREATE TABLE effect (message_id text NOT NULL, member text NOT NULL, \
     at timestamptz NOT NULL DEFAULT clock_timestamp())";

struct Group {
    brokers: String,
    topic: String,
    consumer: String,
    assignor: &'static str,
    is_static: bool,
    url: String,
    pool: PgPool,
    /// The ids of each partition, in the order of their offsets.
    log: BTreeMap<i32, Vec<String>>,
    /// With the pipe that ends the process when this one ends: to wait for a process closes its own.
    members: HashMap<&'static str, (Process, Option<ChildStdin>)>,
}

impl Group {
    async fn new(assignor: &'static str, is_static: bool) -> Self {
        let brokers = shared_kafka().await.brokers();
        let postgres = shared_postgres().await;
        let url = postgres.create_database("rebalancing").await.unwrap();
        let store = PostgresStore::connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        let pool = store.pool().clone();
        pool.execute(CREATE_EFFECT).await.unwrap();
        let topic = topic("rebalancing", PARTITIONS).await;
        let kafka = connect().await;
        for n in 0..EACH {
            let batch: Vec<_> = (0..KEYS)
                .map(|key| message(&topic, &format!("k{key}"), n.to_string()))
                .collect();
            publish_all(&kafka, &batch).await;
        }
        let log = log(brokers.clone(), topic.clone()).await;
        let ids = |records: Vec<(String, String, String)>| records.into_iter().map(|r| r.2);
        Self {
            log: log
                .into_iter()
                .map(|(p, r)| (p, ids(r).collect()))
                .collect(),
            consumer: unique_name("rebalancing"),
            members: HashMap::new(),
            brokers,
            topic,
            assignor,
            is_static,
            url,
            pool,
        }
    }

    fn start(&mut self, member: &'static str) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_consumer_process"));
        command
            .args([&self.topic, &self.consumer, self.assignor, member])
            .args(self.is_static.then_some("static"))
            .env("RELAYBOX_POSTGRES_URL", &self.url)
            .env("RELAYBOX_KAFKA_BROKERS", &self.brokers)
            .env("RUST_LOG", "error")
            .stdin(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let pipe = child.stdin.take();
        self.members.insert(member, (Process(child), pipe));
    }

    fn kill(&mut self, member: &'static str) {
        self.members.remove(member).unwrap().0.kill();
    }

    async fn stop(&mut self, member: &'static str) {
        let (process, pipe) = self.members.remove(member).unwrap();
        let stop = move || {
            process.stop();
            drop(pipe);
        };
        tokio::task::spawn_blocking(stop).await.unwrap();
    }

    fn signal(&self, name: &str, member: &'static str) {
        signal(name, &self.members[member].0);
    }

    async fn effects(&self) -> Vec<(String, String)> {
        sqlx::query_as("SELECT message_id, member FROM effect ORDER BY at")
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    /// Waits for so many more effects, holding the commits against the effects all the while.
    async fn progress(&self, more: usize) {
        let target = (self.effects().await.len() + more).min(KEYS * EACH);
        self.until("progress", || async {
            self.effects().await.len() >= target
        })
        .await;
    }

    async fn until<Answer: Future<Output = bool>>(
        &self,
        what: &str,
        mut condition: impl FnMut() -> Answer,
    ) {
        eventually(DEADLINE, what, || {
            let condition = condition();
            async {
                self.assert_only_finished_work_is_committed().await;
                condition.await
            }
        })
        .await;
    }

    async fn committed(&self) -> BTreeMap<i32, i64> {
        let (brokers, consumer, topic) = (
            self.brokers.clone(),
            self.consumer.clone(),
            self.topic.clone(),
        );
        tokio::task::spawn_blocking(move || {
            (0..PARTITIONS)
                .filter_map(|p| Some((p, committed(&brokers, &consumer, &topic, p)?)))
                .collect()
        })
        .await
        .unwrap()
    }

    /// The commits are read first, so what they cover was done before it is looked for.
    async fn assert_only_finished_work_is_committed(&self) {
        let committed = self.committed().await;
        let effects: HashSet<String> = self.effects().await.into_iter().map(|e| e.0).collect();
        for (partition, offset) in committed {
            let covered = self.log[&partition].iter().take(offset as usize);
            for (at, id) in covered.enumerate() {
                let done = effects.contains(id);
                assert!(
                    done,
                    "{partition}/{at} has no effect, {offset} is committed"
                );
            }
        }
    }

    /// Waits until others work on what this member had.
    async fn taken_over(&self, member: &'static str) {
        let effects = self.effects().await;
        let partition_of: HashMap<&str, i32> = self
            .log
            .iter()
            .flat_map(|(partition, ids)| ids.iter().map(|id| (id.as_str(), *partition)))
            .collect();
        let theirs = |effects: &[(String, String)], of_member: bool| -> Vec<i32> {
            effects
                .iter()
                .filter(|(_, m)| (m == member) == of_member)
                .map(|(id, _)| partition_of[id.as_str()])
                .collect()
        };
        let had: HashSet<i32> = theirs(&effects, true).into_iter().rev().take(20).collect();
        let before = effects.len();
        self.until("others take over", || async {
            let now = self.effects().await;
            now.len() == KEYS * EACH
                || theirs(&now[before..], false)
                    .iter()
                    .any(|p| had.contains(p))
        })
        .await;
    }

    async fn finish(mut self) {
        self.until("all is done and committed", || async {
            let ends = self.log.iter().filter(|(_, ids)| !ids.is_empty());
            let ends: BTreeMap<i32, i64> = ends.map(|(p, ids)| (*p, ids.len() as i64)).collect();
            self.committed().await == ends
        })
        .await;
        let members: Vec<_> = self.members.keys().copied().collect();
        for member in members {
            self.stop(member).await;
        }
        let effects = self.effects().await;
        let distinct: HashSet<&String> = effects.iter().map(|(id, _)| id).collect();
        assert_eq!(distinct.len(), KEYS * EACH, "nothing is lost");
        assert_eq!(effects.len(), KEYS * EACH, "each has its effect once");
        let history = commits(&self.brokers, &self.consumer, &self.topic).await;
        assert!(!history.is_empty());
        for (partition, offsets) in &history {
            let ascends = offsets.is_sorted();
            assert!(ascends, "a commit went back in {partition}: {offsets:?}");
        }
        let share = |member: &str| effects.iter().filter(|(_, m)| m == member).count();
        let shares: BTreeMap<&str, usize> = effects
            .iter()
            .map(|(_, m)| (m.as_str(), share(m)))
            .collect();
        println!(
            "{shares:?}, {} commits",
            history.values().map(Vec::len).sum::<usize>()
        );
    }
}

/// Every commit that the group made, by partition and in order, as the broker logged them.
async fn commits(brokers: &str, group: &str, topic: &str) -> BTreeMap<i32, Vec<i64>> {
    let (brokers, group, topic) = (brokers.to_owned(), group.to_owned(), topic.to_owned());
    tokio::task::spawn_blocking(move || {
        let mut out: BTreeMap<i32, Vec<i64>> = BTreeMap::new();
        each_record(&brokers, "__consumer_offsets", |record| {
            let key = record.key().and_then(commit_key);
            // A version of two bytes stands before the offset.
            let offset = record.payload().and_then(|value| value.get(2..10));
            if let Some((by, of, partition)) = key
                && let Some(offset) = offset
                && (by, of) == (group.as_str(), topic.as_str())
            {
                let offset = i64::from_be_bytes(offset.try_into().unwrap());
                out.entry(partition).or_default().push(offset);
            }
        });
        out
    })
    .await
    .unwrap()
}

/// Group, topic and partition; nothing for records about something else.
fn commit_key(mut key: &[u8]) -> Option<(&str, &str, i32)> {
    let mut take = |count: usize| key.split_off(..count);
    let version = i16::from_be_bytes(take(2)?.try_into().ok()?);
    if version > 1 {
        return None;
    }
    let mut text = || {
        let length = i16::from_be_bytes(take(2)?.try_into().ok()?);
        std::str::from_utf8(take(usize::try_from(length).ok()?)?).ok()
    };
    let (group, topic) = (text()?, text()?);
    Some((group, topic, i32::from_be_bytes(take(4)?.try_into().ok()?)))
}

/// Killed, frozen beyond its session, joined late, restarted one after the other.
async fn members_come_and_go(assignor: &'static str) {
    let mut group = Group::new(assignor, false).await;
    for member in ["a", "b", "c"] {
        group.start(member);
    }
    group.progress(150).await;
    group.kill("b");
    group.start("d");
    group.progress(100).await;
    group.signal("STOP", "a");
    group.taken_over("a").await;
    group.signal("CONT", "a");
    group.progress(150).await;
    for member in ["c", "d"] {
        group.stop(member).await;
        group.progress(50).await;
        group.start(member);
        group.progress(50).await;
    }
    group.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_that_share_by_cooperation_lose_double_and_rewind_nothing() {
    members_come_and_go("cooperative-sticky").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_that_share_by_range_lose_double_and_rewind_nothing() {
    members_come_and_go("range").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_that_the_broker_assigns_lose_double_and_rewind_nothing() {
    members_come_and_go("broker").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn static_members_restarted_one_by_one_lose_double_and_rewind_nothing() {
    let mut group = Group::new("range", true).await;
    for member in ["a", "b", "c"] {
        group.start(member);
    }
    group.progress(150).await;
    for member in ["a", "b", "c"] {
        group.stop(member).await;
        group.start(member);
        group.progress(100).await;
    }
    group.kill("b");
    group.start("b");
    group.finish().await;
}

/// What a killed process had in its hands nobody knows but the broker, by what was committed before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_killed_process_exactly_what_it_may_have_had_in_work_is_redelivered() {
    let mut group = Group::new("cooperative-sticky", false).await;
    group.start("a");
    group.progress(100).await;
    group.kill("a");
    let mut marks = BTreeMap::new();
    for partition in group.log.keys() {
        let found = marks::mark(&group.consumer, &group.topic, *partition).await;
        let (point, until) = found.unwrap_or((0, None));
        marks.insert(*partition, point..until.unwrap_or(point));
    }
    let mut asked = request(&group.consumer, &group.topic);
    asked.in_flight_max = KEYS * EACH;
    let mut next = connect().await.subscribe(asked).await.unwrap();
    let done: usize = marks.values().map(|mark| mark.start as usize).sum();
    let mut redelivered = HashSet::new();
    for delivery in receive(&mut next, KEYS * EACH - done).await {
        let partition = delivery.coordinates.partition.as_deref().unwrap();
        let partition: i32 = partition.parse().unwrap();
        let offset = marks::offset(&delivery);
        let expected = marks[&partition].contains(&offset);
        assert_eq!(delivery.redelivered, expected, "{partition}/{offset}");
        if expected {
            redelivered.insert(delivery.incoming.message.id.as_str().to_owned());
        }
        acknowledge(delivery).await;
    }
    // Whatever it is known to have had is among them, but for what it had committed.
    let committed = |id: &String| {
        let mut logs = group.log.iter();
        logs.any(|(p, ids)| ids[..marks[p].start as usize].contains(id))
    };
    let effects = group.effects().await;
    let uncommitted = effects.into_iter().map(|e| e.0).filter(|id| !committed(id));
    assert!(!redelivered.is_empty());
    for id in uncommitted {
        assert!(redelivered.contains(&id), "{id} was in work");
    }
    next.close(10 * SECOND).await.unwrap();
}
