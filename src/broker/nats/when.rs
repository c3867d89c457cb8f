//! When something is to be done next, by the clock it goes by.

use std::time::Duration;

use time::OffsetDateTime;
use tokio::time::Instant;

/// When a message that is held may be delivered.
#[derive(Clone, Copy)]
pub(super) enum When {
    /// On a rung: by the system's clock, which its `x-due-at` goes by.
    Due(OffsetDateTime),
    /// Released with a delay, and here too early.
    After(Instant),
}

impl When {
    pub(super) fn left(self, now: Now) -> Duration {
        match self {
            Self::Due(at) => Duration::try_from(at - now.by_the_system).unwrap_or(Duration::ZERO),
            Self::After(at) => at.saturating_duration_since(now.steady),
        }
    }
}

/// One moment by both clocks, so that what is compared is compared at the same time.
#[derive(Clone, Copy)]
pub(super) struct Now {
    by_the_system: OffsetDateTime,
    pub(super) steady: Instant,
}

impl Now {
    pub(super) fn get() -> Self {
        Self {
            by_the_system: OffsetDateTime::now_utc(),
            steady: Instant::now(),
        }
    }
}

/// A pause that is over wakes nobody any more.
pub(super) fn still(pause: Option<Instant>, now: Instant) -> Option<Instant> {
    pause.filter(|pause| now < *pause)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_pause_that_is_over_wakes_nobody() {
        let now = Instant::now();
        assert_eq!(still(Some(now + SECOND), now), Some(now + SECOND));
        assert_eq!(still(Some(now), now), None);
        assert_eq!(still(Some(now), now + SECOND), None);
    }

    #[test]
    fn what_is_left_goes_by_the_moment_that_is_handed_in() {
        let now = Now::get();
        let due = When::Due(now.by_the_system + SECOND);
        let after = When::After(now.steady + SECOND);
        assert_eq!((due.left(now), after.left(now)), (SECOND, SECOND));
        let later = Now {
            by_the_system: now.by_the_system + 2 * SECOND,
            steady: now.steady + 2 * SECOND,
        };
        assert!(due.left(later).is_zero() && after.left(later).is_zero());
    }
}
