//! A publisher that fails on command.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::signal::Signal;
use crate::broker::{
    FailureScope, PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder, RejectionScope,
    Stored,
};
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind, Result};

/// What happens to one message.
#[derive(Clone)]
#[non_exhaustive]
pub enum Fault {
    /// Not passed on: [`Rejected`](PublishOutcome::Rejected) with this scope (kind `Rejected`, or `NotFound` for a
    /// destination).
    Reject(RejectionScope),
    /// Not passed on: [`Failed`](PublishOutcome::Failed) with this scope and not stored (kind `Unavailable`).
    Fail(FailureScope),
    /// Passed on, but a confirmation is lost: `Failed` with scope `Destination`, perhaps stored (kind `Timeout`).
    LoseConfirm,
    /// Passed on twice, side by side; the outcome is that of the first.
    Duplicate,
    /// Passed on only once `release` is set. `reached` is set when it comes to that. Its whole batch waits.
    Hang {
        /// Set by the publisher.
        reached: Signal,
        /// Set by the test.
        release: Signal,
    },
    /// Passed on and confirmed; then the callback runs and the publish never returns: a crash between publish and
    /// mark. Made by [`Fault::crash`]. A message that was not confirmed crashes nothing.
    Crash(Callback),
}

/// What runs at a crash point.
#[derive(Clone)]
pub struct Callback(Arc<dyn Fn() + Send + Sync>);

impl Callback {
    pub(super) fn new(callback: impl Fn() + Send + Sync + 'static) -> Self {
        Self(Arc::new(callback))
    }

    /// Runs it, and then nothing any more.
    pub(super) async fn crash<T>(&self) -> T {
        (self.0)();
        std::future::pending().await
    }
}

impl Fault {
    /// A crash point: `callback` may set a [`Signal`] on which the test aborts the publishing task, or end the process.
    pub fn crash(callback: impl Fn() + Send + Sync + 'static) -> Self {
        Self::Crash(Callback::new(callback))
    }
}

impl fmt::Debug for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reject(scope) => f.debug_tuple("Reject").field(scope).finish(),
            Self::Fail(scope) => f.debug_tuple("Fail").field(scope).finish(),
            Self::LoseConfirm => f.write_str("LoseConfirm"),
            Self::Duplicate => f.write_str("Duplicate"),
            Self::Hang { .. } => f.write_str("Hang"),
            Self::Crash(_) => f.write_str("Crash"),
        }
    }
}

/// Wraps a publisher, forwards everything, and lets planned messages go wrong.
///
/// Messages are counted from 1 over all calls, in the order they are handed in. The capabilities are the wrapped
/// publisher's, and its order is kept: behind a message that this wrapper did not confirm, later ones of its scope and
/// key in the batch are [`Withheld`](PublishOutcome::Withheld) if the wrapped publisher declares
/// [`Prefix`](PublisherOrder::Prefix). A withheld message keeps its number, and its fault does not happen.
///
/// `Hang` and `Crash` break the publish deadline on purpose.
pub struct FaultyPublisher<P> {
    inner: P,
    planned: BTreeMap<u64, Fault>,
    random: Option<Random>,
    /// Messages handed in so far.
    count: AtomicU64,
}

struct Random {
    dice: Mutex<fastrand::Rng>,
    percent: u32,
    fault: Fault,
}

impl<P: Publisher> FaultyPublisher<P> {
    /// Wraps `inner`; without a plan it changes nothing.
    #[must_use]
    pub const fn new(inner: P) -> Self {
        Self {
            inner,
            planned: BTreeMap::new(),
            random: None,
            count: AtomicU64::new(0),
        }
    }

    /// Plans a fault for the `nth` message, counted from 1. A second one for the same message replaces the first.
    #[must_use]
    pub fn with_fault(mut self, nth: u64, fault: Fault) -> Self {
        self.planned.insert(nth, fault);
        self
    }

    /// Lets `percent` (0 to 100) of the messages without a planned fault meet this one, chosen by a generator with
    /// this seed: the same messages in the same order meet the same.
    #[must_use]
    pub fn with_random_faults(mut self, seed: u64, percent: u32, fault: Fault) -> Self {
        self.random = Some(Random {
            dice: Mutex::new(fastrand::Rng::with_seed(seed)),
            percent,
            fault,
        });
        self
    }

    /// How many messages were handed in so far.
    pub fn published(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// One entry per message of the batch.
    fn faults(&self, messages: usize) -> Vec<Option<Fault>> {
        let messages = messages as u64;
        let before = self.count.fetch_add(messages, Ordering::SeqCst);
        let mut dice = self.random.as_ref().map(|random| {
            (
                random,
                random.dice.lock().unwrap_or_else(PoisonError::into_inner),
            )
        });
        (before + 1..=before + messages)
            .map(|number| {
                // The dice are thrown for every message, so that a planned fault does not shift the random ones.
                let random = dice.as_mut().and_then(|(random, dice)| {
                    (dice.u32(..100) < random.percent).then(|| random.fault.clone())
                });
                self.planned.get(&number).cloned().or(random)
            })
            .collect()
    }

    /// Decides what is passed on.
    fn plan(&self, batch: &[Outgoing], faults: Vec<Option<Fault>>) -> Vec<Step> {
        let prefix = self.inner.capabilities().order == PublisherOrder::Prefix;
        let mut held = BTreeSet::new();
        let mut steps = Vec::with_capacity(batch.len());
        for (outgoing, fault) in batch.iter().zip(faults) {
            let message = &outgoing.message;
            let run = message
                .key
                .as_ref()
                .map(|key| (self.inner.scope(&message.destination), key));
            if run.as_ref().is_some_and(|run| held.contains(run)) {
                steps.push(Step::Answer(PublishOutcome::Withheld));
                continue;
            }
            let step = match fault {
                Some(Fault::Reject(scope)) => Step::Answer(rejected(scope)),
                Some(Fault::Fail(scope)) => Step::Answer(failed(scope)),
                other => Step::Pass(other),
            };
            let unconfirmed =
                matches!(step, Step::Answer(_) | Step::Pass(Some(Fault::LoseConfirm)));
            if prefix && unconfirmed {
                held.extend(run);
            }
            steps.push(step);
        }
        steps
    }
}

enum Step {
    Answer(PublishOutcome),
    Pass(Option<Fault>),
}

impl<P: Publisher> Publisher for FaultyPublisher<P> {
    fn capabilities(&self) -> PublisherCapabilities {
        self.inner.capabilities()
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        let faults = self.faults(batch.len());
        if faults.iter().all(Option::is_none) {
            return self.inner.publish(batch);
        }
        let steps = self.plan(batch, faults);
        Box::pin(async move {
            let mut passed = Vec::with_capacity(batch.len());
            for (outgoing, step) in batch.iter().zip(&steps) {
                let Step::Pass(fault) = step else { continue };
                if let Some(Fault::Hang { reached, release }) = fault {
                    reached.set();
                    release.wait().await;
                }
                passed.push(outgoing.clone());
                if let Some(Fault::Duplicate) = fault {
                    passed.push(outgoing.clone());
                }
            }
            let mut answers = self.inner.publish(&passed).await.into_iter();
            let mut outcomes = Vec::with_capacity(batch.len());
            for step in steps {
                let fault = match step {
                    Step::Answer(outcome) => {
                        outcomes.push(outcome);
                        continue;
                    }
                    Step::Pass(fault) => fault,
                };
                // A publisher that answers too little breaks its contract; the gap stays visible to the caller.
                let Some(outcome) = answers.next() else { break };
                outcomes.push(match fault {
                    Some(Fault::LoseConfirm) if outcome.is_confirmed() => unknown(),
                    Some(Fault::Duplicate) => {
                        let _ = answers.next();
                        outcome
                    }
                    Some(Fault::Crash(callback)) if outcome.is_confirmed() => {
                        return callback.crash().await;
                    }
                    _ => outcome,
                });
            }
            outcomes
        })
    }

    fn scope<'a>(&'a self, destination: &'a str) -> &'a str {
        self.inner.scope(destination)
    }

    fn health(&self) -> crate::broker::Health {
        self.inner.health()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        self.inner.close(deadline)
    }
}

impl<P: fmt::Debug> fmt::Debug for FaultyPublisher<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyPublisher")
            .field("inner", &self.inner)
            .field("planned", &self.planned)
            .finish_non_exhaustive()
    }
}

fn fault(kind: ErrorKind, detail: &str) -> Error {
    Error::new(kind, "publish", format!("planned fault: {detail}"))
}

fn rejected(scope: RejectionScope) -> PublishOutcome {
    let kind = match scope {
        RejectionScope::Message => ErrorKind::Rejected,
        RejectionScope::Destination => ErrorKind::NotFound,
    };
    PublishOutcome::Rejected {
        scope,
        error: fault(kind, "rejected"),
    }
}

fn failed(scope: FailureScope) -> PublishOutcome {
    PublishOutcome::Failed {
        scope,
        stored: Stored::No,
        error: fault(ErrorKind::Unavailable, "failed"),
    }
}

fn unknown() -> PublishOutcome {
    PublishOutcome::Failed {
        scope: FailureScope::Destination,
        stored: Stored::Unknown,
        error: fault(ErrorKind::Timeout, "the confirmation was lost"),
    }
}
