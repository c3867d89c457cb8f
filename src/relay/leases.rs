//! Leases: taking a fair share of the lanes, keeping them while we work, and giving them back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::{info, warn};

use crate::error::Result;
use crate::event;
use crate::readiness::Pulse;
use crate::store::{DestinationControl, OutboxStore, Standing};

use super::held::Held;
use super::share::decide;
use super::status::Reporter;

/// Renews and takes leases until told to stop, and gives up what is above this relay's share.
pub(super) struct Keeper {
    pub(super) store: Arc<dyn OutboxStore>,
    /// Of this run: a relay that comes back under the same name is another one.
    pub(super) id: String,
    pub(super) name: String,
    pub(super) duration: Duration,
    pub(super) held: Arc<Held>,
    /// What operators say about destinations, for the workers.
    pub(super) controls: watch::Sender<Arc<[DestinationControl]>>,
    pub(super) status: Reporter,
    pub(super) pulse: Pulse,
}

impl Keeper {
    /// Runs beside the workers, so that a long publish never costs a lease.
    pub(super) async fn run(self, mut stop: watch::Receiver<bool>) {
        // Renewed after a third of the lease and looked at six times in it, so at least half is left at any time.
        // At least every second, for relays that came or went.
        let pause_max = (self.duration / 6).min(Duration::from_secs(1));
        let mut beat = None;
        loop {
            self.pulse.beat();
            let round = self.round(&mut beat).await;
            self.status.database(round.as_ref().err());
            let short = match round {
                Ok(short) => short,
                Err(error) => {
                    warn!(relay = self.name, %error, "leases could not be kept");
                    false
                }
            };
            // Lanes are on their way to a relay that is short of some: while they are nobody's, nothing moves on them.
            let pause = if short { pause_max / 5 } else { pause_max };
            self.pulse.rest(pause);
            tokio::select! {
                () = tokio::time::sleep(pause.mul_f64(0.8 + 0.2 * fastrand::f64())) => {}
                () = self.held.at_rest.notified() => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    }

    /// Whether this relay found fewer free lanes than its share allows.
    async fn round(&self, beat: &mut Option<Instant>) -> Result<bool> {
        let standing = self.stand(beat).await?;
        let controls = self.store.controls().await?;
        self.controls.send_if_modified(|known| {
            let changed = **known != *controls;
            *known = controls.into();
            changed
        });
        let (working, leaving) = self.held.counts();
        let decision = decide(standing, working, leaving);
        self.held.give_up(decision.give);
        // First the worker's batch is settled, then the lane is released: the next holder finds nothing on its way.
        let drained = self.held.drained();
        if !drained.is_empty() {
            self.store.release(&drained).await?;
            self.held.remove(&drained);
            info!(
                relay = self.name,
                lanes = drained.len(),
                relays = standing.live,
                "lanes handed over"
            );
        }
        if decision.take == 0 {
            return Ok(false);
        }
        let asked = Instant::now();
        let gained = self
            .store
            .lease(&self.name, decision.take, self.duration)
            .await?;
        if !gained.is_empty() {
            info!(
                relay = self.name,
                lanes = gained.len(),
                relays = standing.live,
                "lanes leased"
            );
            self.held.add(&gained, asked + self.duration);
        }
        Ok(gained.len() < decision.take)
    }

    /// Where this relay stands; the leases and the registration are renewed when it is time.
    async fn stand(&self, beat: &mut Option<Instant>) -> Result<Standing> {
        if beat.is_some_and(|beat| beat.elapsed() < self.duration / 3) {
            return self.store.standing(&self.id).await;
        }
        let asked = Instant::now();
        let held = self.held.all();
        if !held.is_empty() {
            let kept = self.store.renew(&held, self.duration).await?;
            if kept.len() < held.len() {
                let lost = held.len() - kept.len();
                event::count(&event::RELAY_LEASES_LOST, &[], lost as u64);
                warn!(relay = self.name, lost, "lanes were taken by another relay");
            }
            self.held.renewed(&held, &kept, asked + self.duration);
        }
        let standing = self
            .store
            .heartbeat(&self.id, &self.name, self.duration)
            .await?;
        *beat = Some(asked);
        Ok(standing)
    }

    /// Ends all leases and the registration, so that the others need not wait for them to run out.
    pub(super) async fn give_back(store: &dyn OutboxStore, id: &str, held: &Held) -> Result<()> {
        let leases = held.all();
        held.remove(&leases);
        let released = if leases.is_empty() {
            Ok(())
        } else {
            store.release(&leases).await
        };
        store.leave(id).await.and(released)
    }
}
