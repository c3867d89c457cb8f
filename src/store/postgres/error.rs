//! Driver errors, mapped in one place.

use std::error::Error as StdError;
use std::time::Duration;

use sqlx::PgPool;
use sqlx::error::DatabaseError;
use sqlx::migrate::MigrateError;
use sqlx::postgres::PgConnectOptions;

use crate::error::{Error, ErrorKind};

/// An error of a call that may have had to connect: names what was tried, never with the password.
pub(super) fn of_pool(operation: &'static str, pool: &PgPool, error: sqlx::Error) -> Error {
    let target = target(&pool.connect_options());
    if matches!(error, sqlx::Error::PoolTimedOut) {
        let waited = pool.options().get_acquire_timeout().as_secs_f32();
        let most = pool.options().get_max_connections();
        let in_use = usize::try_from(pool.size())
            .unwrap_or(0)
            .saturating_sub(pool.num_idle());
        return if u32::try_from(in_use).is_ok_and(|in_use| in_use >= most) {
            Error::new(
                ErrorKind::Timeout,
                operation,
                format!(
                    "no connection to {target} became free within {waited} s: all {most} are in use \
                     (does a handler take a second one?)"
                ),
            )
        } else {
            Error::new(
                ErrorKind::Unavailable,
                operation,
                format!("no connection to {target} within {waited} s"),
            )
        }
        .with_source(error);
    }
    with_target(operation, &target, error)
}

/// A statement that was not answered in time.
pub(super) fn of_silence(operation: &'static str, pool: &PgPool, waited: Duration) -> Error {
    let target = target(&pool.connect_options());
    let detail = format!("no answer from {target} within {} s", waited.as_secs_f32());
    Error::new(ErrorKind::Unavailable, operation, detail)
}

/// An error of a statement on a connection that was there.
pub(super) fn of_statement(operation: &'static str, error: sqlx::Error) -> Error {
    with_target(operation, "the database", error)
}

pub(super) fn of_migration(pool: &PgPool, error: MigrateError) -> Error {
    match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => {
            of_pool("migrate", pool, error)
        }
        other => Error::new(ErrorKind::Rejected, "migrate", other.to_string()).with_source(other),
    }
}

/// `host:port/database`, or the socket's directory in place of the host.
pub(super) fn target(options: &PgConnectOptions) -> String {
    let socket = options.get_socket().map(|path| path.display().to_string());
    format!(
        "PostgreSQL at {}:{}/{}",
        socket.as_deref().unwrap_or_else(|| options.get_host()),
        options.get_port(),
        options
            .get_database()
            .unwrap_or_else(|| options.get_username()),
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
        sqlx::Error::Database(refusal) => of_code(refusal.as_ref()),
        sqlx::Error::Io(e) => (
            ErrorKind::Unavailable,
            format!("connection to {target}: {e}"),
        ),
        sqlx::Error::Tls(e) => (ErrorKind::Unavailable, format!("TLS to {target}: {e}")),
        // What a torn connection leaves behind reads as nonsense.
        sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed | sqlx::Error::BeginFailed => (
            ErrorKind::Unavailable,
            format!("connection to {target} is unusable: {error}"),
        ),
        sqlx::Error::PoolTimedOut => (ErrorKind::Unavailable, format!("no connection to {target}")),
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

fn of_code(refusal: &(dyn DatabaseError + 'static)) -> (ErrorKind, String) {
    let code = refusal.code().unwrap_or_default();
    let said = format!("{} ({code})", refusal.message());
    let kind = match &*code {
        "40001" | "40P01" => ErrorKind::Conflict,
        "55P03" => ErrorKind::Busy,
        "57014" => ErrorKind::Timeout,
        "42P01" | "3F000" => {
            return (
                ErrorKind::NotFound,
                format!("{said}: run `migrate()` or copy the migrations"),
            );
        }
        "3D000" => ErrorKind::NotFound,
        "42703" => {
            return (
                ErrorKind::Configuration,
                format!("{said}: the tables are not those of this version's migrations"),
            );
        }
        // A standby, or a primary that has just become one: a reconnect may find the primary.
        "25006" => ErrorKind::Unavailable,
        "25P02" => {
            return (
                ErrorKind::Handler,
                "an earlier statement failed inside the transaction and was not reported: \
                 nothing can be committed (25P02)"
                    .to_owned(),
            );
        }
        "25P01" => {
            return (
                ErrorKind::Handler,
                "the transaction was ended by a statement inside it (25P01)".to_owned(),
            );
        }
        // Connection trouble, out of memory, disk or connections, and shutdown: the server's state, not our request.
        code if ["08", "53", "57", "58"]
            .iter()
            .any(|class| code.starts_with(class)) =>
        {
            ErrorKind::Unavailable
        }
        _ => ErrorKind::Rejected,
    };
    (kind, said)
}
