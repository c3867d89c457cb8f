//! What cuts a relay's idle pause short.

use futures_util::future::BoxFuture;

/// News of committed messages, for one relay.
///
/// A relay polls all the same: news that is lost costs at most one idle poll, never a message.
pub trait WakeUps: Send {
    /// Completes when committed messages may be waiting: once for all the news since the last call.
    ///
    /// Rules: never fails. What it stands on it mends by itself, with growing pauses, and is silent meanwhile. Whenever
    /// it has begun to listen, first or again, it tells once, because nothing was heard before.
    ///
    /// Cancel safety: a dropped future may take with it what it was about to tell.
    fn next(&mut self) -> BoxFuture<'_, WakeUp>;
}

/// Committed messages may be waiting, or may not: a hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WakeUp {
    /// Whether news is known to come through at the moment. Without it messages are found by polling alone.
    pub live: bool,
}
