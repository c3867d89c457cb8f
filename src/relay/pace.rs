//! Pace: how long a worker waits between batches, and which destinations it leaves alone for a while.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::backoff::{DelayPolicy, Delays};

/// The first pause after an empty poll.
pub(super) const IDLE_POLL_MIN: Duration = Duration::from_millis(10);

/// Destinations left alone at one time at most; a failure beyond that counts as the broker's.
const CLOSED_MAX: usize = 256;

/// How long a destination is remembered after its last pause.
const FORGET_AFTER: Duration = Duration::from_secs(3_600);

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

/// Destinations in trouble, each with its own growing pause. In memory: a new owner of the lane finds out anew.
#[derive(Debug)]
pub(super) struct Destinations {
    policy: DelayPolicy,
    closed: HashMap<String, Closed>,
    seed: u64,
}

/// What a failure of a destination is news of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    New,
    Known,
    /// As many are in trouble as are remembered: it is rather the broker's.
    TooMany,
}

#[derive(Debug)]
struct Closed {
    until: Instant,
    delays: Delays,
}

impl Destinations {
    pub(super) fn new(policy: DelayPolicy) -> Self {
        Self {
            policy,
            closed: HashMap::new(),
            seed: fastrand::u64(..),
        }
    }

    /// The destination failed: leave it alone, longer each time.
    pub(super) fn failed(&mut self, destination: &str, now: Instant) -> Trouble {
        if self.closed.len() >= CLOSED_MAX {
            // One that nothing was sent to for an hour has no messages left, or is found out anew.
            self.closed
                .retain(|_, closed| closed.until + FORGET_AFTER > now);
        }
        let new = !self.closed.contains_key(destination);
        if new && self.closed.len() >= CLOSED_MAX {
            return Trouble::TooMany;
        }
        self.seed = self.seed.wrapping_add(1);
        let closed = self
            .closed
            .entry(destination.to_owned())
            .or_insert_with(|| Closed {
                until: now,
                delays: self.policy.delays(self.seed),
            });
        // Several failures of one batch are one failure.
        if closed.until <= now {
            closed.until = now + closed.delays.next_delay();
        }
        if new { Trouble::New } else { Trouble::Known }
    }

    /// The destination took a message: its pauses start again. Whether it was in trouble.
    pub(super) fn confirmed(&mut self, destination: &str) -> bool {
        // Asked of every message, and there is nearly never one.
        !self.closed.is_empty() && self.closed.remove(destination).is_some()
    }

    /// Those to pass over now.
    pub(super) fn closed(&self, now: Instant) -> Vec<String> {
        let mut names: Vec<String> = self
            .closed
            .iter()
            .filter(|(_, closed)| closed.until > now)
            .map(|(name, _)| name.clone())
            .collect();
        names.sort_unstable();
        names
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

    #[test]
    fn a_failing_destination_is_left_alone_longer_each_time_until_it_takes_a_message() {
        let policy = DelayPolicy::exponential(Duration::from_secs(1));
        let mut destinations = Destinations::new(policy);
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(destinations.failed("a", start), Trouble::New);
        assert_eq!(destinations.failed("a", start), Trouble::Known);
        assert_eq!(destinations.closed(start), ["a"]);
        assert!(destinations.closed(after(1)).is_empty());
        destinations.failed("a", after(1));
        assert_eq!(destinations.closed(after(2)), ["a"]);
        assert!(destinations.closed(after(3)).is_empty());
        assert!(destinations.confirmed("a"));
        assert!(!destinations.confirmed("a"));
        destinations.failed("a", after(3));
        assert!(destinations.closed(after(4)).is_empty());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut destinations = Destinations::new(DelayPolicy::fixed(Duration::from_secs(1)));
        let now = Instant::now();
        for n in 0..CLOSED_MAX {
            assert_eq!(destinations.failed(&n.to_string(), now), Trouble::New);
        }
        assert_eq!(destinations.failed("one more", now), Trouble::TooMany);
        assert_eq!(destinations.failed("0", now), Trouble::Known);
        let much_later = now + FORGET_AFTER + Duration::from_secs(2);
        assert_eq!(destinations.failed("one more", much_later), Trouble::New);
    }
}
