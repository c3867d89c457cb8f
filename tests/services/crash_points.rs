//! A relay's process dies at each point of its circle, and another relay takes over.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use futures_util::future::join_all;
use relaybox::broker::Publisher;
use relaybox::broker::kafka::{Kafka, KafkaConfig};
use relaybox::lane::lane_of;
use relaybox::relay::Relay;
use relaybox::testing::eventually;
use relaybox_testcontainers::shared_kafka;
use sqlx::postgres::PgTransaction;
use sqlx::{AssertSqlSafe, Executor};
use time::OffsetDateTime;

use crate::kafka;
use crate::ledger::Ledger;
use crate::postgres::Postgres;
use crate::relay_process::{
    DEADLINE, LEASE, RelayProcess, Running, SETTLING, Sent, brisk, database_with_ledger, drained,
    entries, judge, numbered, pending_ids,
};
use crate::store_contract::{Harness, enqueue};

const KEYS: u32 = 12;
/// Numbers of a key enqueued before the death, and in all.
const BEFORE: u32 = 5;
const ALL: u32 = 6;
/// Rows in a batch of the process.
const BATCH: usize = 20;
const SIGABRT: i32 = 6;
const SIGKILL: i32 = 9;

/// How the process comes to its end.
#[derive(Debug, Clone, Copy)]
enum Death {
    /// By itself at a point of `tests/relay_process/crash.rs`.
    At(&'static str),
    /// By itself at such a point after it was told to stop.
    Stopping(&'static str),
    /// Killed while its settlement waits for rows of messages that somebody locked before this.
    Settling(Then),
    /// Killed while its settlement waits for rows of lanes that somebody locked before this.
    AboutToSettle(Then),
}

/// What becomes of a settlement whose process is gone.
#[derive(Debug, Clone, Copy)]
enum Then {
    /// It gets its lock.
    CarriedOut,
    /// Its session ends with it.
    Undone,
    /// The lanes changed hands while it waited.
    Fenced,
}

/// What may be there twice in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Copies {
    None,
    /// What was published and not settled: at most the one batch.
    OfTheBatch,
}

const DEATHS: [(Death, Copies); 13] = [
    (Death::At("leased"), Copies::None),
    (Death::At("claimed"), Copies::None),
    (Death::At("fetched"), Copies::None),
    (Death::At("half-published"), Copies::OfTheBatch),
    (Death::At("published"), Copies::OfTheBatch),
    (Death::At("confirmed"), Copies::OfTheBatch),
    (Death::AboutToSettle(Then::CarriedOut), Copies::None),
    (Death::AboutToSettle(Then::Fenced), Copies::OfTheBatch),
    (Death::Settling(Then::CarriedOut), Copies::None),
    (Death::Settling(Then::Undone), Copies::OfTheBatch),
    (Death::At("settled"), Copies::None),
    (Death::Stopping("releasing"), Copies::None),
    (Death::Stopping("released"), Copies::None),
];

/// What the process left behind.
struct Remains {
    pending: BTreeSet<String>,
    /// When each lane's lease ends; the epoch where it was given back.
    leased_until: BTreeMap<i32, OffsetDateTime>,
}

impl Death {
    fn point(self) -> Option<&'static str> {
        match self {
            Self::At(point) | Self::Stopping(point) => Some(point),
            Self::Settling(_) | Self::AboutToSettle(_) => None,
        }
    }

    /// Enqueues what is to be sent before, and lets a process die over it.
    async fn happen(self, h: &Postgres, destination: &str, brokers: Option<&str>) -> Remains {
        let messages = numbered(destination, KEYS, 0..BEFORE);
        let start = || {
            RelayProcess::start(&h.url, |command| {
                command.args(self.point());
                command.envs(brokers.map(|brokers| ("RELAYBOX_KAFKA_BROKERS", brokers)));
            })
        };
        let mut process = match self {
            Self::At(_) => {
                enqueue::<Postgres>(&h.store, &messages).await;
                start()
            }
            Self::Stopping(_) => {
                enqueue::<Postgres>(&h.store, &messages).await;
                let process = start();
                drained(&h.store).await;
                process.terminate();
                process
            }
            // Rows are read without locks, so that only the settlement waits.
            Self::Settling(then) => {
                enqueue::<Postgres>(&h.store, &messages).await;
                let mut locker = h.pool().begin().await.unwrap();
                let lock = "SELECT FROM relaybox_outbox FOR UPDATE";
                locker.execute(lock).await.unwrap();
                kill_waiting(h, start(), locker, then).await
            }
            Self::AboutToSettle(then) => {
                let process = start();
                let owned = "SELECT count(*) FROM relaybox_outbox_lane WHERE owner IS NOT NULL";
                eventually(DEADLINE, "it has all lanes", || async {
                    h.number(owned).await == 16
                })
                .await;
                let mut locker = h.pool().begin().await.unwrap();
                let lock = "SELECT FROM relaybox_outbox_lane FOR UPDATE";
                locker.execute(lock).await.unwrap();
                enqueue::<Postgres>(&h.store, &messages).await;
                kill_waiting(h, process, locker, then).await
            }
        };
        let signal = process.ended().await.signal();
        let expected = self.point().map_or(SIGKILL, |_| SIGABRT);
        assert_eq!(signal, Some(expected), "{self:?}");
        // What its sessions were doing comes to its end.
        let others = "SELECT count(*) FROM pg_stat_activity \
            WHERE datname = current_database() AND application_name = 'process'";
        eventually(
            DEADLINE,
            "the sessions of the process have ended",
            || async { h.number(others).await == 0 },
        )
        .await;
        let lanes = "SELECT lane, expires_at FROM relaybox_outbox_lane";
        let lanes: Vec<_> = sqlx::query_as(lanes).fetch_all(h.pool()).await.unwrap();
        Remains {
            pending: pending_ids(h.pool()).await,
            leased_until: lanes.into_iter().collect(),
        }
    }

    /// The ids that the process had published and not settled: exactly these are to be there twice.
    fn copies(self, remains: &Remains, sent: &[Sent], copies: Copies) -> BTreeSet<String> {
        let sent = sent.iter().map(|sent| sent.id.clone()).collect();
        let unsettled: BTreeSet<_> = remains.pending.intersection(&sent).cloned().collect();
        match copies {
            Copies::None => assert!(unsettled.is_empty(), "{self:?}: {unsettled:?}"),
            Copies::OfTheBatch => {
                let count = unsettled.len();
                assert!((1..=BATCH).contains(&count), "{self:?}: {count}");
            }
        }
        unsettled
    }
}

/// Kills a process whose settlement waits for the lock of `locker`, and lets go of it.
async fn kill_waiting(
    h: &Postgres,
    mut process: RelayProcess,
    mut locker: PgTransaction<'_>,
    then: Then,
) -> RelayProcess {
    let waiting = format!(
        "FROM pg_stat_activity WHERE datname = current_database() \
         AND wait_event_type = 'Lock' AND query LIKE '{SETTLING}'"
    );
    let count = format!("SELECT count(*) {waiting}");
    eventually(DEADLINE, "its settlement waits", || async {
        h.number(&count).await == 1
    })
    .await;
    process.kill();
    let act = match then {
        Then::CarriedOut => None,
        Then::Undone => Some(format!("SELECT pg_terminate_backend(pid, 10000) {waiting}")),
        Then::Fenced => Some("UPDATE relaybox_outbox_lane SET token = token + 1".to_owned()),
    };
    if let Some(act) = act {
        locker.execute(AssertSqlSafe(act)).await.unwrap();
    }
    locker.commit().await.unwrap();
    process
}

/// More of each key, and a relay in this process that takes over.
async fn take_over(h: &Postgres, destination: &str, publisher: impl Publisher, lease: Duration) {
    enqueue::<Postgres>(&h.store, &numbered(destination, KEYS, BEFORE..ALL)).await;
    let relay = Relay::new(h.store(), publisher).with_config(brisk().with_lease(lease));
    let relay = Running::start(relay);
    drained(&h.store).await;
    relay.stop().await;
}

async fn over_a_table(death: Death, copies: Copies) {
    let h = database_with_ledger().await;
    let remains = death.happen(&h, "orders", None).await;
    let before = entries(h.pool()).await;
    let before: Vec<_> = before.into_iter().map(|entry| entry.sent).collect();
    let copies = death.copies(&remains, &before, copies);
    take_over(&h, "orders", Ledger::new(h.pool().clone()), LEASE).await;

    let all = entries(h.pool()).await;
    for entry in &all[before.len()..] {
        let lane = lane_of(entry.sent.key.as_bytes());
        let until = remains.leased_until[&lane];
        assert!(entry.sent_at >= until, "{death:?}: taken over too early");
    }
    let all: Vec<_> = all.into_iter().map(|entry| entry.sent).collect();
    assert_eq!(judge(&format!("{death:?}"), &all, KEYS, ALL), copies);
    let given_back = |until: &OffsetDateTime| *until == OffsetDateTime::UNIX_EPOCH;
    let free = remains
        .leased_until
        .values()
        .filter(|until| given_back(until));
    let expected = match death {
        Death::Stopping("released") => 16,
        _ => 0,
    };
    assert_eq!(free.count(), expected, "{death:?}");
}

/// All at the same time, because each waits for a lease to end.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_dies_at_any_point_loses_nothing_and_repeats_at_most_its_batch() {
    let trials = DEATHS.map(|(death, copies)| over_a_table(death, copies));
    join_all(trials).await;
}

async fn over_kafka(point: &'static str) {
    let h = Postgres::start().await;
    let death = Death::At(point);
    let topic = kafka::topic("crash", 3).await;
    let brokers = shared_kafka().await.brokers();
    let log = || async {
        let log = kafka::log(brokers.clone(), topic.clone()).await;
        let records = log.into_values().flatten();
        records
            .map(|(key, payload, id)| Sent::new(id, key, &payload))
            .collect::<Vec<_>>()
    };
    let remains = death.happen(&h, &topic, Some(&brokers)).await;
    let copies = death.copies(&remains, &log().await, Copies::OfTheBatch);
    // What is not confirmed in time is sent twice, and the machine may be busy.
    let config = KafkaConfig::new(&brokers).with_publish_deadline(Duration::from_secs(4));
    let publisher = Kafka::connect(config).await.unwrap();
    take_over(&h, &topic, publisher, Duration::from_secs(10)).await;
    assert_eq!(judge(point, &log().await, KEYS, ALL), copies, "{point}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_dies_around_the_confirm_of_kafka_repeats_at_most_its_batch() {
    join_all(["half-published", "published", "confirmed"].map(over_kafka)).await;
}
