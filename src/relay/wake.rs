//! Wake-ups: news from the store that cuts idle pauses short.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::store::{WakeUp, WakeUps};

use super::status::StatusBoard;

/// Shortest time between two wake-ups. News that comes faster is told together, so that a storm of it costs an idle
/// relay no more than twice the polls of its own quickest pace.
const WAKE_UP_PAUSE: Duration = Duration::from_millis(5);

/// Tells the workers of news until told to stop.
///
/// A worker that is busy finds it when it comes to rest; one that backs off from trouble is not disturbed.
pub(super) async fn pass_on(
    mut news: Box<dyn WakeUps>,
    workers: watch::Sender<()>,
    status: Arc<StatusBoard>,
    mut stop: watch::Receiver<bool>,
) {
    let passing = async {
        loop {
            let WakeUp { live } = news.next().await;
            status.wake_ups(live);
            workers.send_replace(());
            tokio::time::sleep(WAKE_UP_PAUSE).await;
        }
    };
    tokio::select! {
        () = passing => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
    status.wake_ups(false);
}
