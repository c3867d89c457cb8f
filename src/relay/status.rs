//! What a relay is suffering from, as data for health checks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;

use crate::broker::Health;
use crate::error::Error;
use crate::readiness::NotReady;

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

/// What keeps the relay from being ready: what its tasks met, and what the publisher knows without being asked to publish.
pub(super) fn troubles(status: &RelayStatus, publisher: &Health) -> Vec<NotReady> {
    let database = status.database_down.clone().map(NotReady::DatabaseDown);
    let broker = status.broker_down.clone().or_else(|| publisher.trouble());
    database
        .into_iter()
        .chain(broker.map(NotReady::BrokerDown))
        .collect()
}

/// Where keeper and workers report, and what is made of it: somebody's trouble is trouble until it is over for all.
#[derive(Debug)]
pub(super) struct StatusBoard {
    shown: watch::Sender<RelayStatus>,
    reports: Mutex<Reports>,
}

/// What each reporter suffers from.
#[derive(Debug, Default)]
struct Reports {
    broker: BTreeMap<usize, String>,
    database: BTreeMap<usize, String>,
    destinations: BTreeMap<String, BTreeMap<usize, String>>,
}

/// One who reports.
#[derive(Debug, Clone)]
pub(super) struct Reporter {
    board: Arc<StatusBoard>,
    number: usize,
}

impl StatusBoard {
    pub(super) fn new() -> Self {
        Self {
            shown: watch::Sender::new(RelayStatus::default()),
            reports: Mutex::default(),
        }
    }

    pub(super) fn watch(&self) -> watch::Receiver<RelayStatus> {
        self.shown.subscribe()
    }

    pub(super) fn wake_ups(&self, live: bool) {
        self.shown.send_if_modified(|status| {
            let changed = status.wake_ups_live != live;
            status.wake_ups_live = live;
            changed
        });
    }

    fn report(&self, change: impl FnOnce(&mut Reports)) {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut reports);
        let first = |reports: &BTreeMap<usize, String>| reports.values().next().cloned();
        let destinations = reports.destinations.iter();
        let destinations = destinations.filter_map(|(name, by)| Some((name.clone(), first(by)?)));
        let (broker, database) = (first(&reports.broker), first(&reports.database));
        let destinations: BTreeMap<_, _> = destinations.collect();
        self.shown.send_if_modified(|status| {
            let before = (
                std::mem::replace(&mut status.broker_down, broker),
                std::mem::replace(&mut status.database_down, database),
                std::mem::replace(&mut status.destinations_down, destinations),
            );
            let now = (
                &status.broker_down,
                &status.database_down,
                &status.destinations_down,
            );
            (&before.0, &before.1, &before.2) != now
        });
    }
}

impl Reporter {
    /// The keeper, beside workers that are numbered from 0.
    pub(super) const KEEPER: usize = usize::MAX;

    pub(super) fn new(board: &Arc<StatusBoard>, number: usize) -> Self {
        Self {
            board: board.clone(),
            number,
        }
    }

    pub(super) fn broker(&self, trouble: Option<&Error>) {
        self.board
            .report(|reports| self.note(&mut reports.broker, trouble));
    }

    pub(super) fn database(&self, trouble: Option<&Error>) {
        self.board
            .report(|reports| self.note(&mut reports.database, trouble));
    }

    pub(super) fn destination(&self, name: &str, trouble: Option<&Error>) {
        self.board.report(|reports| {
            let by = reports.destinations.entry(name.to_owned()).or_default();
            self.note(by, trouble);
            reports.destinations.retain(|_, by| !by.is_empty());
        });
    }

    /// Without lanes there is nothing to suffer from, and nothing that would show that it is over.
    pub(super) fn at_rest(&self) {
        self.board.report(|reports| {
            reports.broker.remove(&self.number);
            reports.destinations.retain(|_, by| {
                by.remove(&self.number);
                !by.is_empty()
            });
        });
    }

    fn note(&self, reports: &mut BTreeMap<usize, String>, trouble: Option<&Error>) {
        match trouble {
            Some(error) => reports.insert(self.number, error.to_string()),
            None => reports.remove(&self.number),
        };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn trouble_is_over_when_it_is_over_for_all() {
        let board = Arc::new(StatusBoard::new());
        let [one, two] = [0, 1].map(|number| Reporter::new(&board, number));
        let keeper = Reporter::new(&board, Reporter::KEEPER);
        let mut shown = board.watch();
        let error = Error::new(ErrorKind::Unavailable, "test", "away");
        for reporter in [&one, &two] {
            reporter.database(Some(&error));
            reporter.broker(Some(&error));
            reporter.destination("orders", Some(&error));
        }
        one.database(None);
        one.broker(None);
        one.destination("orders", None);
        keeper.database(None);
        let status = shown.borrow_and_update().clone();
        assert!(status.database_down.is_some() && status.broker_down.is_some());
        assert!(status.destinations_down["orders"].contains("away"));
        two.database(None);
        two.at_rest();
        assert!(shown.has_changed().unwrap());
        assert_eq!(*shown.borrow_and_update(), RelayStatus::default());
        two.at_rest();
        assert!(!shown.has_changed().unwrap(), "no news");
    }
}
