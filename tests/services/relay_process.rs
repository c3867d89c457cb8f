//! Relays as processes of their own, and what must hold of everything they sent.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use relaybox::Message;
use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::postgres::PostgresStore;
use relaybox::testing::eventually;
use sqlx::Executor;
use sqlx::postgres::PgPool;
use time::OffsetDateTime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::postgres::Postgres;
use crate::store_contract::Harness;

/// Longest wait for anything that must happen; only a failing test waits that long.
pub const DEADLINE: Duration = Duration::from_secs(180);
/// Of every relay here: as short as the ledger's publish deadline allows.
pub const LEASE: Duration = Duration::from_secs(6);

/// `sent_at` is the database's time, `wall` that of the process which sent.
pub const CREATE_LEDGER: &str = "CREATE TABLE sent (n bigserial PRIMARY KEY, message_id text NOT NULL, key text NOT NULL, \
     payload text NOT NULL, wall timestamptz NOT NULL, sent_at timestamptz NOT NULL DEFAULT clock_timestamp())";

/// What a session of a relay is doing, as patterns for its statement.
pub const FETCHING: &str = "%pg_current_snapshot()%";
pub const SETTLING: &str = "WITH held %";
pub const RENEWING: &str = "UPDATE relaybox_outbox_lane z SET expires_at%";
pub const REGISTERING: &str = "%FROM relaybox_relay%";

/// The program `tests/relay_process`; killed when a test ends early.
pub struct RelayProcess(Child);

impl RelayProcess {
    pub fn start(url: &str, change: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_relay_process"));
        command
            .env("RELAYBOX_POSTGRES_URL", url)
            .env_remove("RELAYBOX_KAFKA_BROKERS")
            .env("PGAPPNAME", "process")
            .env("RUST_LOG", "error")
            .stdin(Stdio::piped());
        change(&mut command);
        Self(command.spawn().unwrap())
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// SIGTERM.
    pub fn terminate(&self) {
        let pid = self.0.id().to_string();
        let status = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(status.unwrap().success());
    }

    pub async fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        eventually(DEADLINE, "the process ends", || {
            status = self.0.try_wait().unwrap();
            let ended = status.is_some();
            async move { ended }
        })
        .await;
        status.unwrap()
    }
}

impl Drop for RelayProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A relay in this process.
pub struct Running {
    stop: oneshot::Sender<()>,
    task: JoinHandle<relaybox::Result<()>>,
}

impl Running {
    pub fn start(relay: Relay) -> Self {
        let (stop, stopped) = oneshot::channel();
        let run = relay.run_until(async {
            let _ = stopped.await;
        });
        let task = tokio::spawn(run);
        Self { stop, task }
    }

    pub fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    pub async fn stop(self) {
        let _ = self.stop.send(());
        let ended = tokio::time::timeout(DEADLINE, self.task).await;
        ended.expect("it stops").unwrap().unwrap();
    }
}

pub fn brisk() -> RelayConfig {
    RelayConfig::default().with_lease(LEASE)
}

/// A migrated database with the table that relays of the ledger publish to.
pub async fn database_with_ledger() -> Postgres {
    let h = Postgres::start().await;
    h.pool().execute(CREATE_LEDGER).await.unwrap();
    h
}

/// Messages `from..to` of each of so many keys; the number is the payload.
pub fn numbered(destination: &str, keys: u32, numbers: std::ops::Range<u32>) -> Vec<Message> {
    let message = |key: u32, n: u32| {
        Message::new(destination, "Numbered")
            .with_id(format!("k{key}-{n}"))
            .with_key(format!("k{key}"))
            .with_payload(n.to_string())
    };
    let of = |n| (0..keys).map(move |key| message(key, n));
    numbers.flat_map(of).collect()
}

pub async fn pending_ids(pool: &PgPool) -> BTreeSet<String> {
    let ids: Vec<String> = sqlx::query_scalar("SELECT message_id FROM relaybox_outbox")
        .fetch_all(pool)
        .await
        .unwrap();
    ids.into_iter().collect()
}

pub async fn drained(store: &PostgresStore) {
    const LEFT: &str = "SELECT (SELECT count(*) FROM relaybox_outbox) + (SELECT count(*) FROM relaybox_outbox_aside \
        WHERE state IN ('waiting', 'delayed'))";
    eventually(DEADLINE, "all is sent", || async {
        let left = sqlx::query_scalar::<_, i64>(LEFT);
        left.fetch_one(store.pool())
            .await
            .is_ok_and(|left| left == 0)
    })
    .await;
}

/// One message as it reached the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    pub id: String,
    pub key: String,
    pub number: u32,
}

impl Sent {
    pub fn new(id: String, key: String, payload: &str) -> Self {
        let number = payload.parse().unwrap();
        Self { id, key, number }
    }
}

/// An entry of the ledger.
#[derive(Debug)]
pub struct Entry {
    pub sent: Sent,
    /// By the clock of the process that sent it.
    pub wall: OffsetDateTime,
    /// By the clock of the database.
    pub sent_at: OffsetDateTime,
}

pub async fn entries(pool: &PgPool) -> Vec<Entry> {
    type Row = (String, String, String, OffsetDateTime, OffsetDateTime);
    let sql = "SELECT message_id, key, payload, wall, sent_at FROM sent ORDER BY n";
    let rows: Vec<Row> = sqlx::query_as(sql).fetch_all(pool).await.unwrap();
    rows.into_iter()
        .map(|(id, key, payload, wall, sent_at)| Entry {
            sent: Sent::new(id, key, &payload),
            wall,
            sent_at,
        })
        .collect()
}

/// Holds what was sent against what was enqueued by [`numbered`]: every id is there, the first appearances of each key
/// are in order. Returns the ids that are there twice; none is there more often.
pub fn judge(what: &str, sent: &[Sent], keys: u32, count: u32) -> BTreeSet<String> {
    let mut copies: BTreeMap<&str, u32> = BTreeMap::new();
    let mut next: BTreeMap<&str, u32> = BTreeMap::new();
    for Sent { id, key, number } in sent {
        let copies = copies.entry(id).or_default();
        *copies += 1;
        if *copies == 1 {
            let next = next.entry(key).or_default();
            assert_eq!(number, next, "{what}: {key} is out of order");
            *next += 1;
        }
    }
    let whole = next.values().filter(|next| **next == count).count();
    assert_eq!(whole, keys as usize, "{what}: something is lost: {next:?}");
    assert!(
        copies.values().all(|copies| *copies <= 2),
        "{what}: {copies:?}"
    );
    let twice = copies.into_iter().filter(|(_, copies)| *copies == 2);
    twice.map(|(id, _)| id.to_owned()).collect()
}
