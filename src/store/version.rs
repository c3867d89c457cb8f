//! The version contract: per consumer and aggregate the last version applied, in the transaction of the work.

use std::future::Future;

use crate::error::{Error, Result};

/// Longest aggregate in bytes: what fits into an index of every database.
pub const AGGREGATE_BYTES_MAX: usize = 1_024;

/// Whether a version may be applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advanced {
    /// No later one was: apply it. From the commit on it is the last one. An equal version is applied too, because an
    /// aggregate may tell several facts in one.
    Newest,
    /// A later one was applied in a committed transaction, or earlier in this one.
    Older,
}

/// Remembers versions on a connection of the caller's choosing.
pub trait VersionStore: Send + Sync + 'static {
    /// The database's connection, inside the transaction of the work.
    type Connection: Send;

    /// Makes `version` the last one of the consumer's aggregate unless a later one is there, in one statement.
    ///
    /// Rules: it counts if and only if the caller's transaction commits. While another open transaction has advanced the
    /// same aggregate it waits for its end, and judges by what that one left: of two versions at the same moment the
    /// lower one is never applied after the higher. Databases that take versions of a snapshot (REPEATABLE READ) fail
    /// with a conflict instead of waiting.
    ///
    /// A cleaned-up aggregate counts as new: see [`InboxStore::clean_up`](super::InboxStore::clean_up).
    ///
    /// # Errors
    /// [`Invalid`](crate::ErrorKind::Invalid) before any statement for an aggregate longer than [`AGGREGATE_BYTES_MAX`].
    fn advance(
        &self,
        connection: &mut Self::Connection,
        consumer: &str,
        aggregate: &[u8],
        version: i64,
    ) -> impl Future<Output = Result<Advanced>> + Send;
}

/// Refuses what an index may not hold.
#[cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    allow(dead_code, reason = "only adapters ask")
)]
pub(crate) fn check_aggregate(aggregate: &[u8]) -> Result<()> {
    if aggregate.len() <= AGGREGATE_BYTES_MAX {
        return Ok(());
    }
    Err(Error::invalid(
        "aggregate",
        format!("at most {AGGREGATE_BYTES_MAX} bytes"),
        format!("{} bytes", aggregate.len()),
    ))
}
