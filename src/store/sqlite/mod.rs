//! SQLite 3.42 or later, through sqlx.
//!
//! One writer at a time: our transactions begin IMMEDIATE and wait for the write lock up to the connection's
//! `busy_timeout`. A transaction of the caller's that reads first and enqueues later may be refused at once with a
//! [`Busy`](crate::ErrorKind::Busy) error when another one wrote in between: begin it with `BEGIN IMMEDIATE`, or run
//! it again.

mod admin;
mod dead_letters;
mod error;
mod history;
mod inbox;
mod outbox;
mod reader;
mod redrive;
mod sql;
mod versions;
mod waiting;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteRow,
    SqliteSynchronous,
};
use sqlx::{Row, Sqlite};
use time::OffsetDateTime;

use self::sql::Sql;
use super::{Prefix, StoreTransaction, header_codec};
use crate::clock::from_unix_micros;
use crate::error::{Error, ErrorKind, Result};
use crate::message::Message;

/// Outbox, inbox and dead letters in one SQLite file. A clone is cheap and shares the pool.
#[derive(Clone)]
pub struct SqliteStore {
    pool: SqlitePool,
    prefix: Prefix,
    sql: Arc<Sql>,
    kept: Option<Duration>,
}

impl SqliteStore {
    /// A store over the service's pool, with the tables' default prefix.
    ///
    /// Not for in-memory databases: each belongs to one connection and ends with it, and a transaction that is dropped
    /// or fails closes its connection.
    #[must_use]
    pub fn new(pool: SqlitePool) -> Self {
        let prefix = Prefix::default();
        Self {
            pool,
            sql: Arc::new(Sql::new(&prefix)),
            prefix,
            kept: None,
        }
    }

    /// Opens or creates the file: WAL journal, foreign keys on, 5 seconds of waiting for the write lock or for a
    /// connection, and `synchronous = FULL`, because with NORMAL a power cut may take back committed transactions.
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable) when the file cannot be opened, [`Corrupt`](ErrorKind::Corrupt) when it
    /// is no database.
    pub async fn connect(path: impl AsRef<Path>) -> Result<Self> {
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(Duration::from_secs(5));
        let pool = SqlitePoolOptions::new()
            .acquire_timeout(Duration::from_secs(5))
            .connect_lazy_with(options);
        let connected = pool.acquire().await.map(drop);
        connected.map_err(|e| error::of_pool("connect", &pool, e))?;
        Ok(Self::new(pool))
    }

    /// Sets what the tables' names begin with. A schema is the name of an attached database, or `main`.
    #[must_use]
    pub fn with_prefix(mut self, prefix: Prefix) -> Self {
        self.sql = Arc::new(Sql::new(&prefix));
        self.prefix = prefix;
        self
    }

    /// Keeps what was published in the history for `duration` (default off: a row is deleted once the broker has confirmed
    /// it, and nothing more is written). [`OutboxAdmin::find_published`](crate::store::OutboxAdmin::find_published) shows
    /// it.
    ///
    /// The settling transaction copies the row, so that it is in the history if and only if it has left the outbox. Relays
    /// over the store delete what is older, in bounded steps.
    ///
    /// Each relay takes the setting for itself: what one without it settles is not kept, and the shortest duration counts.
    /// Once it is off everywhere, what was kept stays.
    #[must_use]
    pub const fn with_keep_published(mut self, duration: Duration) -> Self {
        self.kept = Some(duration);
        self
    }

    /// The service's pool.
    #[must_use]
    pub const fn pool(&self) -> &SqlitePool {
        &self.pool
    }

    /// Creates or upgrades the tables. Applied migrations are counted in `{prefix}migrations`. Repeating it is
    /// harmless, also from several processes at once.
    ///
    /// # Errors
    /// As the database's.
    pub async fn migrate(&self) -> Result<()> {
        // Inside our transaction, because sqlx's migrator takes no lock of its own on SQLite.
        let mut transaction = self.begin_immediate("migrate").await?;
        sql::migrator(&self.prefix)
            .run(transaction.connection())
            .await
            .map_err(|e| error::of_migration(&self.pool, e))?;
        transaction
            .commit()
            .await
            .map_err(self.pool_error("migrate"))
    }

    async fn begin_immediate(&self, operation: &'static str) -> Result<StoreTransaction<Sqlite>> {
        let failed = self.pool_error(operation);
        let connection = self.pool.acquire().await.map_err(&failed)?;
        StoreTransaction::begin(connection, Some(sql::BEGIN))
            .await
            .map_err(&failed)
    }

    fn pool_error(&self, operation: &'static str) -> impl Fn(sqlx::Error) -> Error {
        move |error| error::of_pool(operation, &self.pool, error)
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore")
            .field("target", &error::target(&self.pool))
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

/// Reads the columns of `sql::MESSAGE`, of which the first has number `first`.
fn read_message(row: &SqliteRow, first: usize) -> Result<Message> {
    let unreadable = |e| error::of_statement("read message", e);
    let occurred_at = instant(row.try_get(first + 8).map_err(unreadable)?)?;
    let read = || -> Result<Message, sqlx::Error> {
        let destination: String = row.try_get(first + 1)?;
        let event_type: String = row.try_get(first + 3)?;
        let id: String = row.try_get(first)?;
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
    let mut message = read().map_err(unreadable)?;
    let headers: Option<&str> = row.try_get(first + 5).map_err(unreadable)?;
    header_codec::decode(headers, &mut message)?;
    Ok(message)
}

fn instant(micros: i64) -> Result<OffsetDateTime> {
    from_unix_micros(micros).ok_or_else(|| {
        let detail = format!("{micros} microseconds since 1970 is no instant in the years ±9999");
        Error::new(ErrorKind::Corrupt, "read instant", detail)
    })
}

/// The stored size, as the column counts it.
fn size(message: &Message) -> i32 {
    i32::try_from(message.bytes()).unwrap_or(i32::MAX)
}

/// A duration as whole microseconds, held at about a century.
fn micros(duration: Duration) -> i64 {
    const CENTURY: i64 = 100 * 365 * 24 * 60 * 60 * 1_000_000;
    i64::try_from(duration.as_micros()).map_or(CENTURY, |micros| micros.min(CENTURY))
}

/// A JSON array, which is how a list of rows is bound.
fn json(rows: impl Iterator<Item = Value>) -> String {
    Value::Array(rows.collect()).to_string()
}
