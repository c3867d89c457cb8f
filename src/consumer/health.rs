//! How a consumer is, for its probe.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::broker::Health;
use crate::error::Error;
use crate::readiness::{NotReady, Vitals};

/// What the tasks of a consumer met last.
pub(super) struct Condition {
    pub(super) vitals: Arc<Vitals>,
    database: Mutex<Option<String>>,
    room: Mutex<Option<String>>,
    subscription: Mutex<Option<String>>,
    /// Places that take no copies, what each said last, and how many messages wait for it.
    refusing: Mutex<BTreeMap<String, (String, usize)>>,
}

/// A message waits until a place takes its copy.
pub(super) struct WaitsFor {
    condition: Arc<Condition>,
    place: String,
}

impl Drop for WaitsFor {
    fn drop(&mut self) {
        let mut refusing = self.condition.refusing();
        if let Some((_, waiting)) = refusing.get_mut(&self.place) {
            *waiting -= 1;
            if *waiting == 0 {
                refusing.remove(&self.place);
            }
        }
    }
}

impl Default for Condition {
    fn default() -> Self {
        Self {
            vitals: Vitals::new(),
            database: Mutex::default(),
            room: Mutex::default(),
            subscription: Mutex::default(),
            refusing: Mutex::default(),
        }
    }
}

impl Condition {
    /// The last word from the database.
    pub(super) fn database(&self, trouble: Option<&Error>) {
        let trouble = trouble.map(ToString::to_string);
        *self.database.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// The last word from the waiting room.
    pub(super) fn room(&self, trouble: Option<&Error>) {
        let trouble = trouble.map(ToString::to_string);
        *self.room.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// How the subscription stands with its broker.
    pub(super) fn subscription(&self, health: &Health) {
        let mut known = self
            .subscription
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *known = health.trouble();
    }

    /// A place did not take a copy; told until what comes back is dropped.
    pub(super) fn waits_for(self: &Arc<Self>, place: String, error: &Error) -> WaitsFor {
        let mut refusing = self.refusing();
        let entry = refusing.entry(place.clone()).or_default();
        entry.0 = error.to_string();
        entry.1 += 1;
        drop(refusing);
        WaitsFor {
            condition: Arc::clone(self),
            place,
        }
    }

    fn refusing(&self) -> MutexGuard<'_, BTreeMap<String, (String, usize)>> {
        self.refusing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn troubles(&self, publisher: &Health) -> Vec<NotReady> {
        let known =
            |of: &Mutex<Option<String>>| of.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let database = known(&self.database).or_else(|| known(&self.room));
        let database = database.map(NotReady::DatabaseDown);
        let broker = known(&self.subscription).or_else(|| publisher.trouble());
        let broker = broker.map(NotReady::BrokerDown);
        let refusing = self.refusing();
        let copies = refusing.iter().map(|(place, (why, _))| {
            let (place, why) = (place.clone(), why.clone());
            NotReady::CopiesRefused { place, why }
        });
        database.into_iter().chain(broker).chain(copies).collect()
    }
}
