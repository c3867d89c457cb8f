//! The history of what was published: cleaned up beside the workers, so also under constant load.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::{info, warn};

use crate::error::ErrorKind;
use crate::store::OutboxStore;

/// The pause once there is nothing to remove.
const PAUSE: Duration = Duration::from_secs(60);

/// Removes what was kept for long enough until told to stop. Any number of relays may do it at once.
pub(super) async fn clean_up(store: Arc<dyn OutboxStore>, mut stop: watch::Receiver<bool>) {
    while !*stop.borrow() {
        let started = Instant::now();
        let pause = match store.clean_up_history().await {
            // Half of the time is left to others.
            Ok(true) => started.elapsed(),
            // Relays that were started together take turns.
            Ok(false) => PAUSE.mul_f64(0.8 + 0.2 * fastrand::f64()),
            Err(error) if error.kind() == ErrorKind::Busy => {
                info!(%error, "somebody reads what is old in the history: it goes later");
                PAUSE
            }
            Err(error) => {
                warn!(%error, "the history could not be cleaned up");
                PAUSE
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
    }
}
