//! The guard: when most messages fail, the fault is not theirs, and the rest must not follow them up the ladder.

use std::collections::VecDeque;
use std::time::Duration;

use crate::backoff::{DelayPolicy, Delays, Jitter};
use crate::error::{Result, within};

/// However the pauses are set, they are pauses.
const PAUSE_MIN: Duration = Duration::from_millis(10);

/// When a consumer pauses because most of its attempts fail. By default after 90 of the last 100.
///
/// It then starts nothing for a while, and after that one message alone. If its attempt fails too, that message goes its way
/// (rung or dead letter) and the pause is longer; if it succeeds, all goes on as before. So neither a broken dependency nor a
/// broken release pours a source into the dead letters, and nothing stands still for good.
#[derive(Debug, Clone, PartialEq)]
pub struct FailureGuard {
    window: usize,
    percent: usize,
    pause: DelayPolicy,
}

impl Default for FailureGuard {
    fn default() -> Self {
        Self {
            window: 100,
            percent: 90,
            pause: DelayPolicy::exponential(Duration::from_secs(1))
                .with_jitter(Jitter::Equal)
                .with_cap(Duration::from_secs(60)),
        }
    }
}

impl FailureGuard {
    /// How many attempts are looked at, the last ones (default 100; 2 to 10,000).
    #[must_use]
    pub fn with_window(mut self, attempts: usize) -> Self {
        self.window = attempts;
        self
    }

    /// How many of 100 of them must have failed (default 90; 1 to 100).
    #[must_use]
    pub fn with_percent(mut self, percent: usize) -> Self {
        self.percent = percent;
        self
    }

    /// How long it pauses before the first probe, the second, and so on (default 1 s doubling to 60 s).
    #[must_use]
    pub fn with_pause(mut self, pause: DelayPolicy) -> Self {
        self.pause = pause;
        self
    }

    pub(super) fn validate(&self) -> Result<()> {
        within("failure_guard window", self.window, 2, 10_000)?;
        within("failure_guard percent", self.percent, 1, 100)
    }
}

/// What the guard lets through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gate {
    /// Everything.
    Open,
    /// Nothing until the pause is over.
    Paused,
    /// One message.
    Probe,
    /// Nothing until that one has ended; its number.
    Probing(u64),
}

/// The guard at work. Pure: somebody else waits.
#[derive(Debug)]
pub(super) struct Watch {
    settings: Option<FailureGuard>,
    /// The last attempts, and whether each failed.
    last: VecDeque<bool>,
    failed: usize,
    gate: Gate,
    probes: u64,
    pauses: Option<Delays>,
}

impl Watch {
    pub(super) fn new(settings: Option<FailureGuard>) -> Self {
        Self {
            settings,
            last: VecDeque::new(),
            failed: 0,
            gate: Gate::Open,
            probes: 0,
            pauses: None,
        }
    }

    pub(super) const fn gate(&self) -> Gate {
        self.gate
    }

    /// Something is started; its number, if it is the probe.
    pub(super) fn started(&mut self) -> Option<u64> {
        (self.gate == Gate::Probe).then(|| {
            self.probes += 1;
            self.gate = Gate::Probing(self.probes);
            self.probes
        })
    }

    /// An attempt has ended, and failed or not. Returns how long to pause, if that is what follows.
    pub(super) fn ended(&mut self, probe: Option<u64>, failed: bool) -> Option<Duration> {
        let settings = self.settings.as_ref()?;
        match self.gate {
            Gate::Open => {
                self.last.push_back(failed);
                self.failed += usize::from(failed);
                if self.last.len() > settings.window {
                    self.failed -= usize::from(self.last.pop_front() == Some(true));
                }
                let full = self.last.len() == settings.window;
                let most = self.failed * 100 >= settings.percent * settings.window;
                (full && most).then(|| self.pause())
            }
            Gate::Probing(number) if probe == Some(number) && failed => Some(self.pause()),
            Gate::Probing(number) if probe == Some(number) => {
                self.gate = Gate::Open;
                self.pauses = None;
                None
            }
            // Started before the pause: it says nothing about now.
            Gate::Paused | Gate::Probe | Gate::Probing(_) => None,
        }
    }

    /// What was started has ended; if it was the probe and no attempt came of it (a duplicate), the next one is.
    pub(super) fn finished(&mut self, probe: Option<u64>) {
        if probe.is_some_and(|number| self.gate == Gate::Probing(number)) {
            self.gate = Gate::Probe;
        }
    }

    /// The pause is over.
    pub(super) fn resume(&mut self) {
        if self.gate == Gate::Paused {
            self.gate = Gate::Probe;
        }
    }

    fn pause(&mut self) -> Duration {
        self.last.clear();
        self.failed = 0;
        self.gate = Gate::Paused;
        let Some(settings) = &self.settings else {
            return Duration::ZERO;
        };
        let pauses = self
            .pauses
            .get_or_insert_with(|| settings.pause.delays(fastrand::u64(..)));
        pauses.next_delay().max(PAUSE_MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch() -> Watch {
        let pause = DelayPolicy::exponential(Duration::from_secs(1));
        let guard = FailureGuard::default().with_window(10).with_percent(80);
        Watch::new(Some(guard.with_pause(pause)))
    }

    #[test]
    fn it_pauses_when_most_of_a_full_window_failed_and_not_before() {
        let mut watch = watch();
        assert!((0..9).all(|_| watch.ended(None, true).is_none()));
        assert_eq!(watch.ended(None, true), Some(Duration::from_secs(1)));
        assert_eq!(watch.gate(), Gate::Paused);
        let mut watch = self::watch();
        for n in 0..200 {
            assert_eq!(watch.ended(None, n % 3 != 0), None, "two of three fail");
        }
        assert_eq!(watch.gate(), Gate::Open);
    }

    #[test]
    fn a_probe_that_fails_makes_the_pause_longer_and_one_that_succeeds_ends_it() {
        let mut watch = watch();
        assert!((0..10).filter_map(|_| watch.ended(None, true)).count() == 1);
        watch.resume();
        assert_eq!(watch.gate(), Gate::Probe);
        let first = watch.started();
        assert_eq!(watch.gate(), Gate::Probing(1));
        assert_eq!(watch.ended(None, false), None, "it began before the pause");
        assert_eq!(watch.ended(first, true), Some(Duration::from_secs(2)));
        assert_eq!(watch.gate(), Gate::Paused);
        watch.resume();
        let second = watch.started();
        watch.finished(first);
        assert_eq!(watch.gate(), Gate::Probing(2), "the first one lingered");
        watch.finished(second);
        assert_eq!(watch.gate(), Gate::Probe, "a duplicate proves nothing");
        let third = watch.started();
        assert_eq!(watch.ended(second, false), None);
        assert_eq!(watch.ended(third, false), None);
        assert_eq!(watch.gate(), Gate::Open);
        assert!((0..9).all(|_| watch.ended(None, true).is_none()));
        assert_eq!(
            watch.ended(None, true),
            Some(Duration::from_secs(1)),
            "anew"
        );
    }

    #[test]
    fn without_a_guard_nothing_pauses() {
        let mut watch = Watch::new(None);
        assert!((0..1_000).all(|_| watch.ended(None, true).is_none()));
        assert_eq!(watch.gate(), Gate::Open);
    }

    #[test]
    fn settings_are_bounded() {
        let guard = FailureGuard::default;
        assert!(guard().validate().is_ok());
        assert!(guard().with_window(1).validate().is_err());
        assert!(guard().with_percent(0).validate().is_err());
        assert!(guard().with_percent(101).validate().is_err());
    }
}
