//! A clock that stands still until a test moves it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use time::OffsetDateTime;
use time::macros::datetime;
use tokio::sync::watch;

use crate::clock::{Clock, add};

/// A [`Clock`] whose time passes only in [`advance`](Self::advance): no real timer runs.
///
/// A clone is the same clock. A sleep ends when the clock reaches the instant it was asked for, counted from the call
/// of [`sleep`](Clock::sleep).
#[derive(Debug, Clone)]
pub struct ManualClock {
    now: Arc<watch::Sender<OffsetDateTime>>,
}

impl ManualClock {
    /// A clock that shows `start`.
    #[must_use]
    pub fn new(start: OffsetDateTime) -> Self {
        Self {
            now: Arc::new(watch::Sender::new(start)),
        }
    }

    /// Moves the clock on and wakes every sleeper whose time has come. It stops at the end of the year 9999.
    pub fn advance(&self, duration: Duration) {
        self.now.send_modify(|now| *now = add(*now, duration));
    }

    /// How many sleeps were begun and have neither ended nor been dropped: tells a test that code has come to wait.
    #[must_use]
    pub fn sleepers(&self) -> usize {
        self.now.receiver_count()
    }
}

impl Default for ManualClock {
    /// Shows 2026-01-01 00:00 UTC.
    fn default() -> Self {
        Self::new(datetime!(2026-01-01 0:00 UTC))
    }
}

impl Clock for ManualClock {
    fn now(&self) -> OffsetDateTime {
        *self.now.borrow()
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        let until = add(self.now(), duration);
        let mut now = self.now.subscribe();
        // The sleep keeps the clock alive: one nobody can move any more never ends a sleep.
        let clock = Arc::clone(&self.now);
        Box::pin(async move {
            let _ = now.wait_for(|now| *now >= until).await;
            drop(clock);
        })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_sleep_ends_when_the_clock_reaches_it_and_not_before() {
        let clock = ManualClock::default();
        let start = clock.now();
        let mut short = clock.sleep(Duration::from_secs(5));
        let mut long = clock.sleep(Duration::from_secs(60));
        assert_eq!(clock.sleepers(), 2);
        assert!((&mut short).now_or_never().is_none());
        clock.advance(Duration::from_secs(4));
        assert!((&mut short).now_or_never().is_none());
        clock.advance(Duration::from_secs(1));
        assert!((&mut short).now_or_never().is_some());
        assert!((&mut long).now_or_never().is_none());
        drop((short, long));
        assert_eq!(clock.sleepers(), 0);
        assert_eq!(clock.now() - start, time::Duration::seconds(5));
        assert!(clock.sleep(Duration::ZERO).now_or_never().is_some());
    }

    #[test]
    fn a_sleep_outlives_its_clock_and_never_ends_by_that() {
        let clock = ManualClock::default();
        let mut sleep = clock.sleep(Duration::from_secs(1));
        drop(clock);
        assert!((&mut sleep).now_or_never().is_none());
    }
}
