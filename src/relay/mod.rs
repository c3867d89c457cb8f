//! The relay: moves committed rows to the broker, many instances side by side.
//!
//! A relay leases its fair share of the lanes of the outbox, reads them in position order without locking rows, publishes, and settles the
//! whole batch under the fencing token of its leases. A relay that dies leaves its lanes to the others when the lease
//! ends; one that only seemed dead finds its writes fenced off.

mod config;
mod delayed;
mod destinations;
mod held;
mod history;
mod judge;
mod late;
mod leases;
mod pace;
mod plan;
mod publish;
#[cfg(feature = "metrics")]
mod sample;
mod share;
mod status;
mod triage;
mod wake;
mod worker;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::info;

use crate::broker::Publisher;
use crate::error::{Error, ErrorKind, Result};
use crate::readiness::{Probe, Vitals};
use crate::store::{DestinationControl, OutboxStore};

pub use config::{DeadHead, OrderMode, RelayConfig, Unroutable};
pub use status::RelayStatus;

use destinations::Destinations;
use held::Held;
use late::Late;
use leases::Keeper;
use status::{Reporter, StatusBoard};
use worker::Worker;

/// How long giving back the leases may take at a stop; unreturned ones simply run out.
const GIVE_BACK_DEADLINE: Duration = Duration::from_secs(5);

/// Moves messages from an outbox to a publisher until stopped.
///
/// Any number of relays may run over one outbox, in one process or many. They share its 16 lanes evenly; beyond 16 they
/// wait for their turn.
pub struct Relay {
    store: Arc<dyn OutboxStore>,
    publisher: Arc<dyn Publisher>,
    config: RelayConfig,
    status: Arc<StatusBoard>,
    vitals: Arc<Vitals>,
}

impl Relay {
    /// A relay with default settings.
    pub fn new(store: impl OutboxStore, publisher: impl Publisher) -> Self {
        Self {
            store: Arc::new(store),
            publisher: Arc::new(publisher),
            config: RelayConfig::default(),
            status: Arc::new(StatusBoard::new()),
            vitals: Vitals::new(),
        }
    }

    /// Takes other settings.
    #[must_use]
    pub fn with_config(mut self, config: RelayConfig) -> Self {
        self.config = config;
        self
    }

    /// Follows the state of broker and database as this relay sees them.
    #[must_use]
    pub fn status(&self) -> watch::Receiver<RelayStatus> {
        self.status.watch()
    }

    /// A handle for health checks, to be taken before the relay runs.
    ///
    /// It is ready while it runs, database and broker answer, and keeper, workers and the release of delayed messages make
    /// their turns ([`RelayConfig::with_silence_max`]). A destination in trouble does not make it unready: the others go on.
    #[must_use]
    pub fn probe(&self) -> Probe {
        let (status, publisher) = (self.status.watch(), self.publisher.clone());
        Probe::new(&self.vitals, move || {
            status::troubles(&status.borrow(), &publisher.health())
        })
    }

    /// Runs until `shutdown` completes, then stops taking rows, waits for the confirms of what is on its way (at most
    /// the shutdown deadline), settles them and gives its lanes back to the others. The publisher stays open: close it afterwards.
    ///
    /// Outages of the database or broker after the start do not end it: it backs off and goes on.
    ///
    /// Cancel safety: dropping the future stops the tasks where they are. What was published and not settled is sent
    /// again by the next holder of the lanes, once the leases have run out.
    ///
    /// # Errors
    /// At start: [`Configuration`](ErrorKind::Configuration), or the store's error when it is not reachable or not
    /// migrated. Later: [`Other`](ErrorKind::Other) when a task of the relay ended by itself.
    pub async fn run_until(self, shutdown: impl Future<Output = ()> + Send) -> Result<()> {
        self.config.validate(&self.publisher.capabilities())?;
        self.store.check().await?;
        // Before anything is sent: what is paused stays so over a restart.
        let controls: Arc<[DestinationControl]> = self.store.controls().await?.into();
        let id = uuid::Uuid::now_v7().to_string();
        #[cfg(feature = "metrics")]
        crate::event::describe();
        let (stop, stopped) = watch::channel(false);
        let held = Arc::new(Held::default());
        let mut tasks = self.start(&id, &held, controls, &stopped);
        let running = self.vitals.start();
        info!(
            relay = self.config.name,
            workers = self.config.workers,
            "relay started"
        );

        let broken = tokio::select! {
            () = shutdown => None,
            ended = tasks.join_next() => Some(ended_early(ended)),
        };
        drop(running);
        stop.send_replace(true);
        let drained = tokio::time::timeout(self.config.shutdown_deadline, async {
            while tasks.join_next().await.is_some() {}
        })
        .await;
        tasks.shutdown().await;
        let giving_back = Keeper::give_back(&*self.store, &id, &held);
        let returned = tokio::time::timeout(GIVE_BACK_DEADLINE, giving_back).await;
        info!(
            relay = self.config.name,
            drained = drained.is_ok(),
            leases_returned = matches!(returned, Ok(Ok(()))),
            "relay stopped"
        );
        broken.map_or(Ok(()), Err)
    }

    fn start(
        &self,
        id: &str,
        held: &Arc<Held>,
        controls: Arc<[DestinationControl]>,
        stop: &watch::Receiver<bool>,
    ) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        let pulse = |task: String| self.vitals.pulse(task, self.config.silence_max);
        let (controls, controlled) = watch::channel(controls);
        let keeper = Keeper {
            store: self.store.clone(),
            id: id.to_owned(),
            name: self.config.name.clone(),
            duration: self.config.lease,
            held: held.clone(),
            controls,
            status: Reporter::new(&self.status, Reporter::KEEPER),
            pulse: pulse("keeper".to_owned()),
        };
        tasks.spawn(keeper.run(stop.clone()));
        let release = pulse("release of delayed messages".to_owned());
        tasks.spawn(delayed::release(self.store.clone(), release, stop.clone()));
        tasks.spawn(history::clean_up(self.store.clone(), stop.clone()));
        #[cfg(feature = "metrics")]
        if let (Some(_), Some(interval)) = (self.store.admin(), self.config.sample_interval) {
            tasks.spawn(sample::run(self.store.clone(), interval, stop.clone()));
        }
        let (waking, woken) = watch::channel(());
        if let Some(news) = self.store.wake_ups() {
            let status = self.status.clone();
            tasks.spawn(wake::pass_on(news, waking, status, stop.clone()));
        }
        for index in 0..self.config.workers {
            let worker = Worker {
                index,
                config: self.config.clone(),
                publisher: self.publisher.clone(),
                reader: self.store.reader(),
                held: held.clone(),
                woken: woken.clone(),
                status: Reporter::new(&self.status, index),
                pulse: pulse(format!("worker {index}")),
                controls: controlled.clone(),
                destinations: Destinations::new(self.config.backoff),
                late: Late::default(),
            };
            tasks.spawn(worker.run(stop.clone()));
        }
        tasks
    }
}

fn ended_early(ended: Option<std::result::Result<(), tokio::task::JoinError>>) -> Error {
    let error = Error::new(
        ErrorKind::Other,
        "relay",
        "a task of the relay ended by itself",
    );
    match ended {
        Some(Err(join)) => error.with_source(join),
        _ => error,
    }
}
