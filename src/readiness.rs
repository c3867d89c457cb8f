//! Readiness: whether what runs does its work, as data for a health check.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Whether a relay or consumer does its work at the moment of the answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Readiness {
    /// What is in the way; nothing when it is ready.
    pub reasons: Vec<NotReady>,
}

impl Readiness {
    /// Whether nothing is in the way.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        self.reasons.is_empty()
    }

    /// Whether a loop makes no turns. Unlike trouble of a database or broker, which ends by itself, this may need a restart.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        let stalled = |reason: &NotReady| matches!(reason, NotReady::Stalled { .. });
        self.reasons.iter().any(stalled)
    }
}

/// `ready`, or all reasons.
impl fmt::Display for Readiness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_ready() {
            return f.write_str("ready");
        }
        f.write_str("not ready: ")?;
        for (at, reason) in self.reasons.iter().enumerate() {
            let separator = if at == 0 { "" } else { "; " };
            write!(f, "{separator}{reason}")?;
        }
        Ok(())
    }
}

/// Why something is not ready.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotReady {
    /// It was not started, or is still checking what it needs.
    NotStarted,
    /// It was told to stop, or ended.
    Stopped,
    /// The database does not answer, and what it said last. For people.
    DatabaseDown(String),
    /// The broker takes or gives nothing, and what it said last. For people.
    BrokerDown(String),
    /// A rung or a place of dead letters takes no copies, and messages wait for it.
    CopiesRefused {
        /// Its name: of the destination, the custom sink, or the table.
        place: String,
        /// What it said last. For people.
        why: String,
    },
    /// A loop made no turn when it should have.
    Stalled {
        /// Which one: `keeper`, `worker 0`, ...
        task: String,
        /// For how long it made none, its planned pause not counted.
        silent: Duration,
    },
}

impl fmt::Display for NotReady {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotStarted => f.write_str("not started"),
            Self::Stopped => f.write_str("stopped"),
            Self::DatabaseDown(why) => write!(f, "database down: {why}"),
            Self::BrokerDown(why) => write!(f, "broker down: {why}"),
            Self::CopiesRefused { place, why } => write!(f, "{place} takes no copies: {why}"),
            Self::Stalled { task, silent } => {
                write!(f, "{task} stalled for {} s", silent.as_secs())
            }
        }
    }
}

/// A handle that tells how a relay or consumer is, from outside and while it runs. Cheap to clone and to ask: it asks
/// neither database nor broker.
#[derive(Clone)]
pub struct Probe {
    vitals: Arc<Vitals>,
    troubles: Arc<dyn Fn() -> Vec<NotReady> + Send + Sync>,
}

impl Probe {
    /// `troubles` tells what database and broker suffer from.
    pub(crate) fn new(
        vitals: &Arc<Vitals>,
        troubles: impl Fn() -> Vec<NotReady> + Send + Sync + 'static,
    ) -> Self {
        Self {
            vitals: vitals.clone(),
            troubles: Arc::new(troubles),
        }
    }

    /// Whether it does its work now, or what is in the way.
    #[must_use]
    pub fn readiness(&self) -> Readiness {
        let mut reasons = self.vitals.judge(Instant::now());
        if self.vitals.is_running() {
            reasons.splice(0..0, (self.troubles)());
        }
        Readiness { reasons }
    }
}

impl fmt::Debug for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Probe").field(&self.readiness()).finish()
    }
}

/// Whether something runs, and when its loops last made a turn.
#[derive(Debug)]
pub(crate) struct Vitals {
    began: Instant,
    life: Mutex<Life>,
}

#[derive(Debug, Default)]
struct Life {
    phase: Phase,
    loops: Vec<(String, Duration, Arc<AtomicU64>)>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    NotStarted,
    Running,
    Stopped,
}

impl Vitals {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            life: Mutex::default(),
        })
    }

    /// It runs until the guard is dropped.
    pub(crate) fn start(self: &Arc<Self>) -> Running {
        self.turn_to(Phase::Running);
        Running(self.clone())
    }

    /// A loop that is stalled when it makes no turn for longer than `silence_max`.
    pub(crate) fn pulse(&self, task: impl Into<String>, silence_max: Duration) -> Pulse {
        let expected = Arc::new(AtomicU64::new(0));
        let mut life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        life.loops
            .push((task.into(), silence_max, expected.clone()));
        drop(life);
        let pulse = Pulse {
            began: self.began,
            expected,
        };
        pulse.beat();
        pulse
    }

    fn turn_to(&self, phase: Phase) {
        let mut life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        life.phase = phase;
    }

    fn is_running(&self) -> bool {
        let life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        life.phase == Phase::Running
    }

    fn judge(&self, now: Instant) -> Vec<NotReady> {
        let life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        match life.phase {
            Phase::NotStarted => return vec![NotReady::NotStarted],
            Phase::Stopped => return vec![NotReady::Stopped],
            Phase::Running => {}
        }
        let elapsed = now.saturating_duration_since(self.began);
        let stalled = life
            .loops
            .iter()
            .filter_map(|(task, silence_max, expected)| {
                let expected = Duration::from_millis(expected.load(Ordering::Relaxed));
                let silent = elapsed.saturating_sub(expected);
                (silent > *silence_max).then(|| NotReady::Stalled {
                    task: task.clone(),
                    silent,
                })
            });
        stalled.collect()
    }
}

/// Something runs as long as this lives: also a future that is dropped has stopped.
pub(crate) struct Running(Arc<Vitals>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.turn_to(Phase::Stopped);
    }
}

/// The beat of one loop.
#[derive(Debug)]
pub(crate) struct Pulse {
    began: Instant,
    /// When the next turn is expected, in milliseconds since `began`.
    expected: Arc<AtomicU64>,
}

impl Pulse {
    /// A turn begins.
    pub(crate) fn beat(&self) {
        self.rest(Duration::ZERO);
    }

    /// A turn has ended, and the next begins after `pause` at the latest.
    pub(crate) fn rest(&self, pause: Duration) {
        let expected = self.began.elapsed().saturating_add(pause).as_millis();
        let expected = u64::try_from(expected).unwrap_or(u64::MAX);
        self.expected.store(expected, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn it_is_ready_between_start_and_end() {
        let vitals = Vitals::new();
        let probe = Probe::new(&vitals, Vec::new);
        assert_eq!(probe.readiness().reasons, [NotReady::NotStarted]);
        let running = vitals.start();
        assert!(probe.readiness().is_ready());
        drop(running);
        assert_eq!(probe.readiness().reasons, [NotReady::Stopped]);
    }

    #[test]
    fn a_loop_without_turns_is_stalled_and_a_planned_pause_is_none() {
        let vitals = Vitals::new();
        let _running = vitals.start();
        let keeper = vitals.pulse("keeper", SECOND);
        let worker = vitals.pulse("worker 0", 10 * SECOND);
        let stalled = |after: Duration| {
            let reasons = vitals.judge(Instant::now() + after);
            let tasks = reasons.into_iter().map(|reason| match reason {
                NotReady::Stalled { task, .. } => task,
                other => other.to_string(),
            });
            tasks.collect::<Vec<_>>()
        };
        let none: [&str; 0] = [];
        assert_eq!(stalled(Duration::ZERO), none);
        assert_eq!(stalled(5 * SECOND), ["keeper"]);
        keeper.rest(60 * SECOND);
        assert_eq!(stalled(50 * SECOND), ["worker 0"]);
        worker.rest(Duration::MAX);
        assert_eq!(stalled(50 * SECOND), none);
        assert_eq!(stalled(100 * SECOND), ["keeper"]);
        keeper.beat();
        assert_eq!(stalled(Duration::ZERO), none);
    }

    #[test]
    fn troubles_are_told_while_it_runs() {
        let vitals = Vitals::new();
        let probe = Probe::new(&vitals, || vec![NotReady::BrokerDown("away".into())]);
        assert_eq!(probe.readiness().reasons, [NotReady::NotStarted]);
        let _running = vitals.start();
        let _pulse = vitals.pulse("worker 0", SECOND);
        let readiness = probe.readiness();
        assert_eq!(readiness.to_string(), "not ready: broker down: away");
        assert!(!readiness.is_stalled());
    }
}
