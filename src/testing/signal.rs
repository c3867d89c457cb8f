//! A flag that tasks can wait for.

use std::sync::Arc;

use tokio::sync::watch;

/// Something that happens once: tasks wait for it, another sets it. A clone is the same signal.
#[derive(Debug, Clone)]
pub struct Signal {
    set: Arc<watch::Sender<bool>>,
}

impl Signal {
    /// A signal that has not happened.
    #[must_use]
    pub fn new() -> Self {
        Self {
            set: Arc::new(watch::Sender::new(false)),
        }
    }

    /// Lets it happen; wakes everyone who waits, and nobody will wait for it again.
    pub fn set(&self) {
        self.set.send_replace(true);
    }

    /// Whether it has happened.
    #[must_use]
    pub fn is_set(&self) -> bool {
        *self.set.borrow()
    }

    /// Completes once it has happened. Dropping the future is harmless.
    pub async fn wait(&self) {
        // An error would mean that no sender is left; `self` holds one.
        let _ = self.set.subscribe().wait_for(|set| *set).await;
    }
}

impl Default for Signal {
    fn default() -> Self {
        Self::new()
    }
}
