//! PostgreSQL 13 or later, through sqlx.
//!
//! A [`PostgresStore`] stands on the service's own pool. The relay's statements (leases, fetch, settle) run on a small
//! pool of their own, opened at their first use with the same connect options and planner settings that keep them on
//! index plans: each is one statement and one round trip, on a connection that no handler can exhaust. These
//! connections do not run the service pool's `after_connect` hook, and a proxy in between must let start-up `options`
//! pass.
//!
//! Instants are compared by the database's clock only, and travel in binary: the session's `TimeZone` has no effect.

mod admin;
mod answer;
mod dead_letters;
mod error;
mod floor;
mod history;
mod horizon;
mod inbox;
mod lines;
mod listener;
mod outbox;
mod reader;
mod redrive;
mod settle;
mod shares;
mod sql;
mod statement;
mod versions;
mod waiting;
mod wake_up;

use std::fmt;
use std::future::Future;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions, PgRow};
use sqlx::{PgConnection, Postgres, Row};
use time::OffsetDateTime;

pub use self::horizon::{HolderKind, Horizon, HorizonHolder, TableRows};
use self::sql::Sql;
pub use self::statement::Statement;
use self::wake_up::Window;
use super::{Prefix, StoreTransaction, header_codec};
use crate::error::{Error, ErrorKind, Result};
use crate::message::Message;

/// Longest wait for a connection of the relay's pool or of a pool made by [`PostgresStore::connect`], and for each step
/// of a check at start.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest wait for the answer to a statement of ours.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);

/// Time between two looks at a lane from its first row.
const SWEEP_PAUSE: Duration = Duration::from_secs(30);

/// How long an enqueue that notified speaks for others.
const WAKE_UP_PAUSE: Duration = Duration::from_millis(10);

/// How many messages in a row use a connection of the service's pool.
const IN_A_ROW_MAX: u32 = 100;

/// Most connections of the relay's pool: workers beyond that many wait for each other.
const RELAY_CONNECTIONS_MAX: u32 = 8;

/// Outbox, inbox and dead letters in one PostgreSQL database. A clone is cheap and shares the pools.
#[derive(Clone)]
pub struct PostgresStore {
    pool: PgPool,
    relay: Arc<RelaySide>,
    prefix: Prefix,
    sql: Arc<Sql>,
    lock_wait: Duration,
    in_a_row_max: u32,
    sweep_pause: Duration,
    kept: Option<Duration>,
    /// Shared by all clones that write to the same tables.
    wake_up: Option<Arc<Window>>,
    wake_up_pause: Duration,
}

/// What the readers of a store share.
#[derive(Default)]
struct RelaySide {
    /// Opened at first use: a service that only enqueues has none.
    pool: OnceLock<PgPool>,
    /// Connections made so far: a new one may lead to a server whose transaction ids or positions went back.
    connections: Arc<AtomicU64>,
    /// Rows found where none can be: see [`PostgresStore::floor_alarms`].
    floor_alarms: AtomicU64,
}

impl PostgresStore {
    /// A store over the service's pool, with the tables' default prefix.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        let prefix = Prefix::default();
        Self {
            pool,
            relay: Arc::default(),
            sql: Arc::new(Sql::new(&prefix)),
            prefix,
            lock_wait: Duration::from_secs(5),
            in_a_row_max: IN_A_ROW_MAX,
            sweep_pause: SWEEP_PAUSE,
            kept: None,
            wake_up: None,
            wake_up_pause: WAKE_UP_PAUSE,
        }
    }

    /// Connects to `url` with a pool of sqlx's defaults, but at most 5 seconds of waiting for a connection.
    ///
    /// # Errors
    /// [`Configuration`](ErrorKind::Configuration) for an unusable URL, otherwise why the database cannot be used,
    /// within seconds, naming host, port and database.
    pub async fn connect(url: &str) -> Result<Self> {
        let options = PgConnectOptions::from_str(url).map_err(|e| {
            Error::new(
                ErrorKind::Configuration,
                "connect",
                "the URL is not one of PostgreSQL",
            )
            .with_source(e)
        })?;
        let pool = PgPoolOptions::new()
            .acquire_timeout(ACQUIRE_TIMEOUT)
            .connect_lazy_with(options);
        let connected = pool.acquire().await.map(drop);
        connected.map_err(|e| error::of_pool("connect", &pool, e))?;
        Ok(Self::new(pool))
    }

    /// Sets what the tables' names begin with.
    #[must_use]
    pub fn with_prefix(mut self, prefix: Prefix) -> Self {
        self.sql = Arc::new(Sql::new(&prefix));
        self.prefix = prefix;
        // The channel is another one.
        self.wake_up = self.wake_up.map(|_| Arc::default());
        self
    }

    /// Sets how long recording an id waits for another transaction that holds the same one (default 5 s).
    #[must_use]
    pub const fn with_lock_wait(mut self, lock_wait: Duration) -> Self {
        self.lock_wait = lock_wait;
        self
    }

    /// Sets how many transactions of a consumer may use a connection one after the other before it goes back to the pool
    /// (default 100; 0 and 1: each takes one from the pool). That spares round trips; it is only done while messages are
    /// waiting and the pool has another connection to give.
    ///
    /// The pool's hooks (`before_acquire`, `after_release`) do not run in between. Set 1 where they have to, for example
    /// because a handler changes its session and `after_release` resets it.
    #[must_use]
    pub const fn with_in_a_row_max(mut self, transactions: u32) -> Self {
        self.in_a_row_max = transactions;
        self
    }

    /// Sets how often a relay's worker looks at its lanes from their first row at most (default every 30 s), whatever
    /// its scan floor says; see [`floor_alarms`](Self::floor_alarms). It looks less often where that takes long.
    #[must_use]
    pub const fn with_sweep_pause(mut self, pause: Duration) -> Self {
        self.sweep_pause = pause;
        self
    }

    /// Keeps what was published in the history for at least `duration` (default off: a row is deleted once the broker has
    /// confirmed it, and nothing more is written). [`OutboxAdmin::find_published`](crate::store::OutboxAdmin::find_published)
    /// shows it.
    ///
    /// The settling statement copies the row, so that it is in the history if and only if it has left the outbox. Relays
    /// over the store empty the history by whole days of UTC, by the database's clock: a row stays up to a day longer.
    /// Beyond 30 days it is deleted row by row instead, which costs more.
    ///
    /// Each relay takes the setting for itself: what one without it settles is not kept, and the shortest duration counts.
    /// Once it is off everywhere, what was kept stays.
    #[must_use]
    pub const fn with_keep_published(mut self, duration: Duration) -> Self {
        self.kept = Some(duration);
        self
    }

    /// Wakes relays when messages are committed (default off: no notification is ever issued, and relays poll).
    ///
    /// An enqueue then also notifies [`wake_up_channel`](Self::wake_up_channel), in its own statement and the caller's
    /// transaction, though not each one: see [`with_wake_up_pause`](Self::with_wake_up_pause). A relay over the store
    /// listens on one more connection, outside its pool, and still polls: a message whose wake-up is lost waits for
    /// [`idle_poll_max`](crate::relay::RelayConfig::with_idle_poll_max) at most.
    ///
    /// Writers and relays take the setting each for themselves; [`Statement`] never notifies. A transaction that
    /// notified cannot be prepared (`PREPARE TRANSACTION`). Behind a pooler that gives sessions away by the transaction
    /// nothing is heard; a relay finds out at its start, warns and polls.
    #[must_use]
    pub fn with_wake_up(mut self) -> Self {
        self.wake_up = Some(Arc::default());
        self
    }

    /// Sets for how long an enqueue that notified, of this store or a clone of it, speaks for others too (default 10 ms;
    /// zero: each one notifies). It does once its transaction has committed; two do while theirs are open; one that was
    /// rolled back does not. Notifying commits wait for each other in the server: the longer the pause, the fewer.
    ///
    /// A message that relies on an earlier notification and commits later is found by the polls that follow the wake-up,
    /// which begin at 10 ms and double. One that relies on open transactions, which then all stay open or are rolled
    /// back, waits for the next poll.
    #[must_use]
    pub const fn with_wake_up_pause(mut self, pause: Duration) -> Self {
        self.wake_up_pause = pause;
        self
    }

    /// The channel of [`with_wake_up`](Self::with_wake_up), for writers other than this store: `NOTIFY` it, in double
    /// quotes and without a payload, in the transaction that writes. `relaybox_wake_up` for the default prefix; at most
    /// 63 bytes for any.
    #[must_use]
    pub fn wake_up_channel(&self) -> String {
        wake_up::channel(&self.prefix)
    }

    /// The service's pool.
    #[must_use]
    pub const fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// Creates or upgrades the tables, and the schema if the prefix names one that is missing. Applied migrations are
    /// counted in `{prefix}migrations`. Repeating it is harmless, also from several processes at once.
    ///
    /// # Errors
    /// As the database's.
    pub async fn migrate(&self) -> Result<()> {
        let failed = |e| error::of_pool("migrate", &self.pool, e);
        let mut connection = self.pool.acquire().await.map_err(failed)?;
        let mut migrator = sql::migrator(&self.prefix);
        if let Some((schema, _)) = self.prefix.as_str().split_once('.') {
            // Asked first, because even CREATE SCHEMA IF NOT EXISTS needs a right that a service may not have.
            let missing: bool = sqlx::query_scalar(sql::SCHEMA_IS_MISSING)
                .bind(schema)
                .fetch_one(&mut *connection)
                .await
                .map_err(failed)?;
            if missing {
                migrator.create_schema(schema.to_owned());
            }
        }
        let migrated = migrator.run(&mut *connection).await;
        if migrated.is_err() {
            // The migrator leaves its advisory lock on the session; it must not go back to the pool with it.
            connection.close_on_drop();
        }
        migrated.map_err(|e| error::of_migration(&self.pool, e))
    }

    /// Rows that a relay's slow sweep found below the floor of its scan, where only a writer that gives positions or
    /// transaction ids itself can have put them. They were sent, late; from then on this store's readers read every
    /// lane from its first row.
    #[must_use]
    pub fn floor_alarms(&self) -> u64 {
        self.relay.floor_alarms.load(Ordering::SeqCst)
    }

    fn relay_pool(&self) -> &PgPool {
        self.relay.pool.get_or_init(|| {
            let options = PgConnectOptions::clone(&self.pool.connect_options());
            let connections = self.relay.connections.clone();
            PgPoolOptions::new()
                .after_connect(move |_, _| {
                    connections.fetch_add(1, Ordering::SeqCst);
                    Box::pin(async { Ok(()) })
                })
                .max_connections(RELAY_CONNECTIONS_MAX)
                .acquire_timeout(ACQUIRE_TIMEOUT)
                // A ping before each statement would double the round trips; a broken connection fails once.
                .test_before_acquire(false)
                .connect_lazy_with(options.options(sql::RELAY_SETTINGS))
        })
    }

    /// Runs one statement of the relay, on its pool.
    async fn relayed<T>(
        &self,
        operation: &'static str,
        statement: impl for<'c> FnOnce(&'c mut PgConnection) -> BoxFuture<'c, Result<T, sqlx::Error>>,
    ) -> Result<T> {
        bounded(self.relay_pool(), operation, STATEMENT_TIMEOUT, statement).await
    }

    /// Runs several statements of one piece of work on the relay's pool, together at most for as long as one may take.
    async fn relayed_together<T>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, sqlx::Error>> + Send,
    ) -> Result<T> {
        let answer = tokio::time::timeout(STATEMENT_TIMEOUT, work).await;
        let pool = self.relay_pool();
        let answer = answer.map_err(|_| error::of_silence(operation, pool, STATEMENT_TIMEOUT))?;
        answer.map_err(|e| error::of_pool(operation, pool, e))
    }

    async fn relay_transaction(&self) -> Result<StoreTransaction<Postgres>, sqlx::Error> {
        StoreTransaction::begin(self.relay_pool().acquire().await?, None).await
    }

    fn pool_error(&self, operation: &'static str) -> impl Fn(sqlx::Error) -> Error {
        move |error| error::of_pool(operation, &self.pool, error)
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("target", &error::target(&self.pool.connect_options()))
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

/// Runs one statement, and waits at most so long for a connection and again for the answer. A connection whose server
/// went silent is closed: returned to the pool, it would hold its place there for as long as nobody answers.
async fn bounded<T>(
    pool: &PgPool,
    operation: &'static str,
    wait: Duration,
    statement: impl for<'c> FnOnce(&'c mut PgConnection) -> BoxFuture<'c, Result<T, sqlx::Error>>,
) -> Result<T> {
    let silent = || error::of_silence(operation, pool, wait);
    let failed = |e| error::of_pool(operation, pool, e);
    let acquired = tokio::time::timeout(wait, pool.acquire()).await;
    let mut connection = acquired.map_err(|_| silent())?.map_err(failed)?;
    let answer = tokio::time::timeout(wait, statement(&mut connection)).await;
    answer.map_or_else(
        |_| {
            connection.close_on_drop();
            Err(silent())
        },
        |answered| answered.map_err(failed),
    )
}

/// Reads the columns of `sql::MESSAGE`, of which the first has number `first`.
fn read_message(row: &PgRow, first: usize) -> Result<Message> {
    let read = || -> Result<Message, sqlx::Error> {
        let destination: String = row.try_get(first + 1)?;
        let event_type: String = row.try_get(first + 3)?;
        let id: String = row.try_get(first)?;
        let occurred_at: OffsetDateTime = row.try_get(first + 8)?;
        let mut message = Message::existing(id.into(), destination, event_type, occurred_at);
        message.key = row
            .try_get::<Option<Vec<u8>>, _>(first + 2)?
            .map(Into::into);
        message.content_type = row.try_get(first + 4)?;
        message.payload = row
            .try_get::<Option<Vec<u8>>, _>(first + 6)?
            .map(Into::into);
        message.version = row.try_get(first + 7)?;
        Ok(message)
    };
    let unreadable = |e| error::of_statement("read message", e);
    let mut message = read().map_err(unreadable)?;
    let headers: Option<&str> = row.try_get(first + 5).map_err(unreadable)?;
    header_codec::decode(headers, &mut message)?;
    Ok(message)
}

/// The stored size, as the column counts it.
fn size(message: &Message) -> i32 {
    i32::try_from(message.bytes()).unwrap_or(i32::MAX)
}

/// A duration as whole microseconds, held at about a century: PostgreSQL's interval arithmetic has an end.
fn micros(duration: Duration) -> i64 {
    const CENTURY: i64 = 100 * 365 * 24 * 60 * 60 * 1_000_000;
    i64::try_from(duration.as_micros()).map_or(CENTURY, |micros| micros.min(CENTURY))
}
