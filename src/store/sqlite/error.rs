//! Driver errors, mapped in one place.

use std::error::Error as StdError;

use sqlx::SqlitePool;
use sqlx::error::DatabaseError;
use sqlx::migrate::MigrateError;

use crate::error::{Error, ErrorKind};

/// An error of a call that may have had to open the file: names it.
pub(super) fn of_pool(operation: &'static str, pool: &SqlitePool, error: sqlx::Error) -> Error {
    let target = target(pool);
    if matches!(error, sqlx::Error::PoolTimedOut) {
        let waited = pool.options().get_acquire_timeout().as_secs_f32();
        let most = pool.options().get_max_connections();
        return Error::new(
            ErrorKind::Timeout,
            operation,
            format!(
                "no connection to {target} became free within {waited} s: at most {most} are open \
                 (does a handler take a second one?)"
            ),
        )
        .with_source(error);
    }
    with_target(operation, &target, error)
}

/// An error of a statement on a connection that was there.
pub(super) fn of_statement(operation: &'static str, error: sqlx::Error) -> Error {
    with_target(operation, "the database", error)
}

pub(super) fn of_migration(pool: &SqlitePool, error: MigrateError) -> Error {
    match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
            of_pool("migrate", pool, error)
        }
        other => Error::new(ErrorKind::Rejected, "migrate", other.to_string()).with_source(other),
    }
}

/// The file's name.
pub(super) fn target(pool: &SqlitePool) -> String {
    format!(
        "SQLite file {}",
        pool.connect_options().get_filename().display()
    )
}

/// What an error in the chain of sources means.
pub(super) fn kind_of(error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
    crate::store::kind_in_chain(error, |e| classify("the database", e).0)
}

fn with_target(operation: &'static str, target: &str, error: sqlx::Error) -> Error {
    let (kind, detail) = classify(target, &error);
    Error::new(kind, operation, detail).with_source(error)
}

fn classify(target: &str, error: &sqlx::Error) -> (ErrorKind, String) {
    match error {
        sqlx::Error::Database(refusal) => of_code(target, refusal.as_ref()),
        sqlx::Error::Io(e) => (ErrorKind::Unavailable, format!("{target}: {e}")),
        sqlx::Error::WorkerCrashed | sqlx::Error::BeginFailed => (
            ErrorKind::Unavailable,
            format!("connection to {target} is unusable: {error}"),
        ),
        sqlx::Error::PoolTimedOut => (ErrorKind::Timeout, format!("no connection to {target}")),
        sqlx::Error::PoolClosed => (
            ErrorKind::Closed,
            "the connection pool is closed".to_owned(),
        ),
        sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) => {
            (ErrorKind::Corrupt, error.to_string())
        }
        sqlx::Error::Configuration(_) | sqlx::Error::InvalidArgument(_) => {
            (ErrorKind::Configuration, error.to_string())
        }
        _ => (ErrorKind::Other, error.to_string()),
    }
}

fn of_code(target: &str, refusal: &(dyn DatabaseError + 'static)) -> (ErrorKind, String) {
    let code: u32 = refusal
        .code()
        .and_then(|code| code.parse().ok())
        .unwrap_or(0);
    let message = refusal.message();
    let said = format!("{message} ({code}) in {target}");
    // The low byte is the code proper, the rest tells its variety.
    let kind = match code & 0xff {
        // BUSY, also as BUSY_SNAPSHOT: a transaction that read before it wrote must run again; LOCKED.
        5 | 6 => ErrorKind::Busy,
        // INTERRUPT
        9 => ErrorKind::Timeout,
        // NOMEM, IOERR, FULL, CANTOPEN
        7 | 10 | 13 | 14 => ErrorKind::Unavailable,
        // CORRUPT, NOTADB
        11 | 26 => ErrorKind::Corrupt,
        1 if message.starts_with("no such table") || message.starts_with("unknown database") => {
            return (
                ErrorKind::NotFound,
                format!("{said}: run `migrate()` or copy the migrations"),
            );
        }
        1 if message.starts_with("no such column") => {
            return (
                ErrorKind::Configuration,
                format!("{said}: the tables are not those of this version's migrations"),
            );
        }
        1 if message.contains("no transaction is active") => {
            return (
                ErrorKind::Handler,
                format!("{said}: the transaction had ended before its COMMIT"),
            );
        }
        _ => ErrorKind::Rejected,
    };
    (kind, said)
}
