//! Pace: how long a worker waits between batches.

use std::time::Duration;

use crate::backoff::{DelayPolicy, Delays};

/// The first pause after an empty poll.
pub(super) const IDLE_POLL_MIN: Duration = Duration::from_millis(10);

/// Pauses after empty polls: 10 ms, doubling up to a bound, starting again when something was there.
#[derive(Debug)]
pub(super) struct IdlePoll(Delays);

impl IdlePoll {
    pub(super) fn new(pause_max: Duration) -> Self {
        let policy = DelayPolicy::exponential(IDLE_POLL_MIN).with_cap(pause_max);
        Self(policy.delays(0))
    }

    pub(super) fn busy(&mut self) {
        self.0.reset();
    }

    pub(super) fn pause(&mut self) -> Duration {
        self.0.next_delay()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_pauses_double_to_the_bound_and_start_again() {
        let mut idle = IdlePoll::new(Duration::from_millis(50));
        let pauses: Vec<u128> = (0..4).map(|_| idle.pause().as_millis()).collect();
        assert_eq!(pauses, [10, 20, 40, 50]);
        idle.busy();
        assert_eq!(idle.pause().as_millis(), 10);
    }
}
