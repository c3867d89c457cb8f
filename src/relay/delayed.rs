//! Delayed messages: put into the outbox when their time has come.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tracing::warn;

use crate::readiness::Pulse;
use crate::store::OutboxStore;

/// Messages released by one statement at most.
const RELEASED_MAX: usize = 500;
/// The longest pause between two looks: how late a message may be that was enqueued with a short delay.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The shortest.
const PAUSE_MIN: Duration = Duration::from_millis(10);

/// Releases what is due until told to stop. Any number of relays may do it at once.
pub(super) async fn release(
    store: Arc<dyn OutboxStore>,
    pulse: Pulse,
    mut stop: watch::Receiver<bool>,
) {
    while !*stop.borrow() {
        pulse.beat();
        let pause = match store.release_due(RELEASED_MAX).await {
            Ok(due) if due.released > 0 => continue,
            Ok(due) => due.next.unwrap_or(PAUSE_MAX).clamp(PAUSE_MIN, PAUSE_MAX),
            Err(error) => {
                warn!(%error, "delayed messages could not be released");
                PAUSE_MAX
            }
        };
        pulse.rest(pause);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
    }
}
