//! Pauses in front of work that is done again and counts as no attempt.

use std::time::Duration;

use crate::backoff::{DelayPolicy, Delays, Jitter};

use crate::store::InboxStore;

use super::config::ConsumerConfig;
use super::process::{Leave, Processor};

/// Local re-runs of one attempt after conflicts and broken connections; beyond that it counts as failed.
const RERUNS_MAX: u32 = 10;
/// However the pauses are set, nobody asks a database that is away without one.
pub(super) const PAUSE_MIN: Duration = Duration::from_millis(10);
/// How long nobody sees that a message which waits went to another member: its hand-over waits for that.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// How long to wait before a transaction is run again, and while the database is away.
pub(super) struct Pauses {
    pub(super) reruns: u32,
    quick: Delays,
    patient: Delays,
}

impl Pauses {
    pub(super) fn new(config: &ConsumerConfig) -> Self {
        let quick = DelayPolicy::exponential(Duration::from_millis(10))
            .with_jitter(Jitter::Equal)
            .with_cap(Duration::from_secs(1));
        Self {
            reruns: 0,
            quick: quick.delays(fastrand::u64(..)),
            patient: config.backoff.delays(fastrand::u64(..)),
        }
    }

    /// Before the transaction is run again; `None` when that was often enough.
    pub(super) fn quick(&mut self) -> Option<Duration> {
        self.reruns += 1;
        (self.reruns <= RERUNS_MAX).then(|| self.quick.next_delay())
    }

    /// Before the database is asked again.
    pub(super) fn patient(&mut self) -> Duration {
        self.patient.next_delay().max(PAUSE_MIN)
    }
}

impl<S: InboxStore, F> Processor<S, F> {
    /// Waits; `true` when the consumer is told to stop meanwhile.
    pub(super) async fn wait(&self, pause: Duration, leave: &mut Leave<S::Transaction>) -> bool {
        tokio::select! {
            () = self.clock.sleep(pause) => false,
            _ = leave.stop.wait_for(|stop| *stop) => true,
        }
    }

    /// The same, and no longer than something holds.
    pub(super) async fn wait_while(
        &self,
        holds: impl Fn() -> bool,
        pause: Duration,
        leave: &mut Leave<S::Transaction>,
    ) -> bool {
        let lost = async {
            while holds() {
                tokio::time::sleep(LOOK_MAX).await;
            }
        };
        tokio::select! {
            stops = self.wait(pause, leave) => stops,
            () = lost => false,
        }
    }
}
