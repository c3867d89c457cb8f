//! How a consumer is, for its probe.

use std::sync::{Arc, Mutex, PoisonError};

use crate::broker::Health;
use crate::error::Error;
use crate::readiness::{NotReady, Vitals};

/// What the tasks of a consumer met last.
pub(super) struct Condition {
    pub(super) vitals: Arc<Vitals>,
    database: Mutex<Option<String>>,
    subscription: Mutex<Option<String>>,
}

impl Default for Condition {
    fn default() -> Self {
        Self {
            vitals: Vitals::new(),
            database: Mutex::default(),
            subscription: Mutex::default(),
        }
    }
}

impl Condition {
    /// The last word from the database.
    pub(super) fn database(&self, trouble: Option<&Error>) {
        let trouble = trouble.map(ToString::to_string);
        *self.database.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// How the subscription stands with its broker.
    pub(super) fn subscription(&self, health: &Health) {
        let mut known = self
            .subscription
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *known = health.trouble();
    }

    pub(super) fn troubles(&self, publisher: &Health) -> Vec<NotReady> {
        let known =
            |of: &Mutex<Option<String>>| of.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let database = known(&self.database).map(NotReady::DatabaseDown);
        let broker = known(&self.subscription).or_else(|| publisher.trouble());
        let broker = broker.map(NotReady::BrokerDown);
        database.into_iter().chain(broker).collect()
    }
}
