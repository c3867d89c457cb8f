//! What a relay is suffering from, as data for health checks.

use std::collections::BTreeMap;

use tokio::sync::watch;

use crate::error::Error;

/// State of a relay. Healthy when nothing is down.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RelayStatus {
    /// Why the broker takes nothing at the moment.
    pub broker_down: Option<String>,
    /// Why the database does not answer at the moment.
    pub database_down: Option<String>,
    /// Destinations that take nothing at the moment, and why: their messages wait. At most 256 per worker.
    pub destinations_down: BTreeMap<String, String>,
    /// Whether the store is known to wake this relay when messages are committed. Without it, also while the store
    /// mends it, they are found by polling: no trouble, only slower.
    pub wake_ups_live: bool,
}

/// Where keeper and workers write the state.
#[derive(Debug)]
pub(super) struct StatusBoard(watch::Sender<RelayStatus>);

impl StatusBoard {
    pub(super) fn new() -> Self {
        Self(watch::Sender::new(RelayStatus::default()))
    }

    pub(super) fn watch(&self) -> watch::Receiver<RelayStatus> {
        self.0.subscribe()
    }

    pub(super) fn broker(&self, trouble: Option<&Error>) {
        self.set(trouble, |status| &mut status.broker_down);
    }

    pub(super) fn database(&self, trouble: Option<&Error>) {
        self.set(trouble, |status| &mut status.database_down);
    }

    pub(super) fn destination(&self, name: &str, trouble: Option<&Error>) {
        self.0.send_if_modified(|status| match trouble {
            Some(error) => {
                let known = status
                    .destinations_down
                    .insert(name.to_owned(), error.to_string());
                known.is_none()
            }
            None => status.destinations_down.remove(name).is_some(),
        });
    }

    pub(super) fn wake_ups(&self, live: bool) {
        self.0.send_if_modified(|status| {
            let changed = status.wake_ups_live != live;
            status.wake_ups_live = live;
            changed
        });
    }

    fn set(
        &self,
        trouble: Option<&Error>,
        slot: impl FnOnce(&mut RelayStatus) -> &mut Option<String>,
    ) {
        let trouble = trouble.map(ToString::to_string);
        self.0.send_if_modified(|status| {
            let slot = slot(status);
            let changed = *slot != trouble;
            *slot = trouble;
            changed
        });
    }
}
