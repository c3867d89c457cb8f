//! Leases: taking lanes, keeping them while we work, and giving them back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tracing::{info, warn};

use crate::error::Result;
use crate::lane::{LANES, Lane};
use crate::store::{Lease, OutboxStore};

use super::status::StatusBoard;

/// The lanes a relay holds, shared by its keeper and its workers.
#[derive(Debug, Default)]
pub(super) struct Held {
    lanes: Mutex<BTreeMap<Lane, (Lease, Instant)>>,
    /// Woken when lanes were gained.
    pub(super) gained: Notify,
}

impl Held {
    /// Leases of `worker` out of `workers` that are certain to last `needed` longer.
    ///
    /// Judged by this process's monotonic clock from before the request was sent, so never later than the database's
    /// own expiry: a process that was stopped for a while finds none.
    pub(super) fn of_worker(&self, worker: usize, workers: usize, needed: Duration) -> Vec<Lease> {
        let now = Instant::now();
        let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes
            .values()
            .filter(|(lease, until)| {
                let lane = usize::try_from(lease.lane).unwrap_or(0);
                lane % workers == worker && *until > now + needed
            })
            .map(|(lease, _)| *lease)
            .collect()
    }

    fn all(&self) -> Vec<Lease> {
        let lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.values().map(|(lease, _)| *lease).collect()
    }

    /// Replaces what is held by `leases`, good until `until`.
    fn replace(&self, leases: Vec<Lease>, until: Instant) {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        *lanes = leases
            .into_iter()
            .map(|lease| (lease.lane, (lease, until)))
            .collect();
    }

    fn add(&self, leases: &[Lease], until: Instant) {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        lanes.extend(leases.iter().map(|lease| (lease.lane, (*lease, until))));
    }
}

/// Renews and takes leases until told to stop, then gives all back.
pub(super) struct Keeper {
    pub(super) store: Arc<dyn OutboxStore>,
    pub(super) name: String,
    pub(super) duration: Duration,
    pub(super) held: Arc<Held>,
    pub(super) status: Arc<StatusBoard>,
}

impl Keeper {
    /// Runs beside the workers, so that a long publish never costs a lease.
    pub(super) async fn run(self, mut stop: watch::Receiver<bool>) {
        // Renewed after a third of the lease and looked at six times in it, so at least half is left at any time.
        // A relay without lanes looks at least every second for some that fell free.
        let pause = (self.duration / 6).min(Duration::from_secs(1));
        let mut renewed = Instant::now();
        loop {
            let round = self.round(&mut renewed).await;
            self.status.database(round.as_ref().err());
            if let Err(error) = round {
                warn!(relay = self.name, %error, "leases could not be renewed");
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    }

    async fn round(&self, renewed: &mut Instant) -> Result<()> {
        let held = self.held.all();
        if !held.is_empty() && renewed.elapsed() >= self.duration / 3 {
            let asked = Instant::now();
            let kept = self.store.renew(&held, self.duration).await?;
            if kept.len() < held.len() {
                warn!(
                    relay = self.name,
                    lost = held.len() - kept.len(),
                    "lanes were taken by another relay"
                );
            }
            self.held.replace(kept, asked + self.duration);
            *renewed = asked;
        }
        let missing = usize::try_from(LANES).unwrap_or(0) - self.held.all().len();
        if missing > 0 {
            let asked = Instant::now();
            let gained = self.store.lease(&self.name, missing, self.duration).await?;
            if !gained.is_empty() {
                info!(relay = self.name, lanes = gained.len(), "lanes leased");
                self.held.add(&gained, asked + self.duration);
                self.held.gained.notify_waiters();
            }
        }
        Ok(())
    }

    /// Ends all leases, so that another relay need not wait for them to run out.
    pub(super) async fn give_back(store: &dyn OutboxStore, held: &Held) -> Result<()> {
        let leases = held.all();
        held.replace(Vec::new(), Instant::now());
        if leases.is_empty() {
            return Ok(());
        }
        store.release(&leases).await
    }
}
