//! A broker with moods, which remembers what it stored.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::broker::{
    FailureScope, PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder, RejectionScope,
    Stored,
};
use relaybox::envelope::Outgoing;
use relaybox::testing::Signal;
use relaybox::{Error, ErrorKind, Result};
use tokio::sync::Notify;

/// How a destination answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    Fine,
    Failing,
    Missing,
    /// Stores and does not say so.
    LosesConfirms,
    /// Stores when it is released, whether or not somebody still waits for it.
    Hanging,
    /// Any of these, message by message, and now and then the whole broker.
    Moody,
}

#[derive(Clone)]
pub struct Broker {
    shared: Arc<Shared>,
}

struct Shared {
    order: PublisherOrder,
    state: Mutex<State>,
    changed: Notify,
}

struct State {
    random: fastrand::Rng,
    stored: Vec<Landed>,
    moods: HashMap<String, Mood>,
    /// Ids that it refuses for good.
    refused: HashSet<String>,
    release: Signal,
}

/// What was stored, in order.
#[derive(Debug, Clone)]
pub struct Landed {
    pub scope: String,
    pub key: Option<Vec<u8>>,
    pub id: String,
}

/// Destinations order together up to the dot.
pub fn scope_of(destination: &str) -> &str {
    destination.split('.').next().unwrap_or(destination)
}

impl Broker {
    pub fn new(seed: u64, order: PublisherOrder) -> Self {
        let state = State {
            random: fastrand::Rng::with_seed(seed),
            stored: Vec::new(),
            moods: HashMap::new(),
            refused: HashSet::new(),
            release: Signal::new(),
        };
        Self {
            shared: Arc::new(Shared {
                order,
                state: Mutex::new(state),
                changed: Notify::new(),
            }),
        }
    }

    pub fn set_mood(&self, destination: &str, mood: Mood) {
        self.state().moods.insert(destination.to_owned(), mood);
    }

    pub fn refuse(&self, id: &str) {
        self.state().refused.insert(id.to_owned());
    }

    pub fn absolve(&self, id: &str) {
        self.state().refused.remove(id);
    }

    /// Lets everything land that hangs now.
    pub fn release(&self) {
        std::mem::take(&mut self.state().release).set();
    }

    /// From now on everything is taken.
    pub fn heal(&self) {
        let mut state = self.state();
        state.moods.clear();
        state.refused.clear();
        drop(state);
        self.release();
    }

    pub fn stored(&self) -> Vec<Landed> {
        self.state().stored.clone()
    }

    /// Completes when a publish has ended.
    pub async fn changed(&self) {
        self.shared.changed.notified().await;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap()
    }

    fn land(&self, batch: &[Outgoing]) -> Vec<PublishOutcome> {
        let mut stopped = HashSet::new();
        let mut state = self.state();
        let outcomes = batch.iter().map(|outgoing| {
            let message = &outgoing.message;
            let key = message.key.as_deref().map(<[u8]>::to_vec);
            if key.as_ref().is_some_and(|key| stopped.contains(key)) {
                return PublishOutcome::Withheld;
            }
            let outcome = state.answer(&message.destination, message.id.as_str());
            if stores(&outcome) {
                state.stored.push(Landed {
                    scope: scope_of(&message.destination).to_owned(),
                    key: key.clone(),
                    id: message.id.to_string(),
                });
            }
            if !outcome.is_confirmed() && self.shared.order == PublisherOrder::Prefix {
                stopped.extend(key);
            }
            outcome
        });
        let outcomes = outcomes.collect();
        drop(state);
        self.shared.changed.notify_waiters();
        outcomes
    }
}

impl State {
    fn answer(&mut self, destination: &str, id: &str) -> PublishOutcome {
        let mut mood = self.moods.get(destination).copied().unwrap_or(Mood::Fine);
        if mood == Mood::Moody {
            let moods = [
                Mood::Fine,
                Mood::Failing,
                Mood::Missing,
                Mood::LosesConfirms,
            ];
            if self.random.u32(..20) == 0 {
                return failed(FailureScope::Broker, Stored::No);
            }
            mood = moods[self.random.usize(..moods.len())];
        }
        match mood {
            Mood::Failing => failed(FailureScope::Destination, Stored::No),
            Mood::Missing => rejected(RejectionScope::Destination, ErrorKind::NotFound),
            _ if self.refused.contains(id) => {
                rejected(RejectionScope::Message, ErrorKind::Rejected)
            }
            Mood::LosesConfirms => failed(FailureScope::Destination, Stored::Unknown),
            Mood::Fine | Mood::Hanging | Mood::Moody => PublishOutcome::Confirmed,
        }
    }
}

fn stores(outcome: &PublishOutcome) -> bool {
    matches!(
        outcome,
        PublishOutcome::Confirmed
            | PublishOutcome::Failed {
                stored: Stored::Unknown,
                ..
            }
    )
}

fn failed(scope: FailureScope, stored: Stored) -> PublishOutcome {
    PublishOutcome::Failed {
        scope,
        stored,
        error: Error::new(ErrorKind::Unavailable, "publish", "a mood"),
    }
}

fn rejected(scope: RejectionScope, kind: ErrorKind) -> PublishOutcome {
    PublishOutcome::Rejected {
        scope,
        error: Error::new(kind, "publish", "a mood"),
    }
}

impl Publisher for Broker {
    fn capabilities(&self) -> PublisherCapabilities {
        let mut capabilities = PublisherCapabilities::new("moody");
        capabilities.order = self.shared.order;
        capabilities.publish_deadline = Duration::from_millis(60);
        capabilities
    }

    fn scope<'a>(&'a self, destination: &'a str) -> &'a str {
        scope_of(destination)
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            let release = {
                let state = self.state();
                let mut moods = batch
                    .iter()
                    .filter_map(|sent| state.moods.get(&sent.message.destination));
                moods
                    .any(|mood| *mood == Mood::Hanging)
                    .then(|| state.release.clone())
            };
            let Some(release) = release else {
                return self.land(batch);
            };
            // Lands whether or not the caller still waits.
            let (broker, batch) = (self.clone(), batch.to_vec());
            let landing = tokio::spawn(async move {
                release.wait().await;
                broker.land(&batch)
            });
            landing.await.unwrap()
        })
    }

    fn health(&self) -> relaybox::broker::Health {
        relaybox::broker::Health::up()
    }

    fn check<'a>(&'a self, _destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn close(&self, _deadline: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}
