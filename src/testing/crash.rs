//! Where a process dies.

use std::sync::Arc;

use tokio::sync::watch;

/// A place in a test's code, or in a planned fault, at which the consumer dies as a killed process would, each time that it
/// gets there. [`TestConsumer::crash_on`](super::TestConsumer::crash_on) carries it out. A clone is the same point.
#[derive(Debug, Clone)]
pub struct CrashPoint {
    reached: Arc<watch::Sender<u64>>,
}

impl CrashPoint {
    /// A point that nobody has reached.
    #[must_use]
    pub fn new() -> Self {
        Self {
            reached: Arc::new(watch::Sender::new(0)),
        }
    }

    /// Dies here. Never returns.
    pub async fn crash<T>(&self) -> T {
        self.reach();
        std::future::pending().await
    }

    /// Tells that the consumer is to die, for the callbacks of [`Fault::crash`](super::Fault::crash) and
    /// [`InboxFault::crash`](super::InboxFault::crash), which never return by themselves.
    pub fn reach(&self) {
        self.reached.send_modify(|times| *times += 1);
    }

    /// How often it was reached.
    #[must_use]
    pub fn reached(&self) -> u64 {
        *self.reached.borrow()
    }

    pub(super) fn watch(&self) -> watch::Receiver<u64> {
        self.reached.subscribe()
    }
}

impl Default for CrashPoint {
    fn default() -> Self {
        Self::new()
    }
}
