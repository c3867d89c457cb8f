//! Destinations: which of them take messages now, and how many.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::backoff::{DelayPolicy, Delays};
use crate::clock::at_most_a_day;
use crate::store::DestinationControl;

/// Destinations left alone at one time at most; a failure beyond that counts as the broker's.
const TROUBLED_MAX: usize = 256;

/// How long a destination is remembered after its last pause.
const FORGET_AFTER: Duration = Duration::from_secs(3_600);

/// Why a row does not go out now: reason codes of rows set aside.
pub(super) mod reason {
    /// An operator paused the destination.
    pub(crate) const PAUSED: &str = "paused";
    /// The destination failed and is left alone for a while.
    pub(crate) const CLOSED: &str = "closed";
    /// The destination has not answered yet.
    pub(crate) const SLOW: &str = "slow";
    /// The operator's rate is used up.
    pub(crate) const LIMITED: &str = "limited";
    /// An earlier message of its key has to go first.
    pub(crate) const BEHIND: &str = "behind";
}

/// What a worker knows of destinations. In memory: a new owner of the lane finds out anew.
#[derive(Debug)]
pub(super) struct Destinations {
    policy: DelayPolicy,
    troubled: HashMap<String, Troubled>,
    /// Scopes with a publish that is not finished, and the destinations in it.
    late: HashMap<String, HashSet<String>>,
    buckets: HashMap<String, Bucket>,
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
struct Troubled {
    until: Instant,
    delays: Delays,
}

/// Messages that may still be sent under a rate: what one second brings, at most.
#[derive(Debug)]
struct Bucket {
    /// A second.
    rate: f64,
    tokens: f64,
    at: Instant,
}

impl Bucket {
    fn fill(&mut self, rate: f64, now: Instant) {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.tokens = (self.tokens + passed * rate).min(rate.max(1.0));
        self.rate = rate;
        self.at = now;
    }
}

impl Destinations {
    pub(super) fn new(policy: DelayPolicy) -> Self {
        Self {
            policy,
            troubled: HashMap::new(),
            late: HashMap::new(),
            buckets: HashMap::new(),
            seed: fastrand::u64(..),
        }
    }

    /// The destination failed: leave it alone, longer each time.
    pub(super) fn failed(&mut self, destination: &str, now: Instant) -> Trouble {
        if self.troubled.len() >= TROUBLED_MAX {
            // One that nothing was sent to for an hour has no messages left, or is found out anew.
            self.troubled
                .retain(|_, troubled| troubled.until + FORGET_AFTER > now);
        }
        let new = !self.troubled.contains_key(destination);
        if new && self.troubled.len() >= TROUBLED_MAX {
            return Trouble::TooMany;
        }
        self.seed = self.seed.wrapping_add(1);
        let troubled = self
            .troubled
            .entry(destination.to_owned())
            .or_insert_with(|| Troubled {
                until: now,
                delays: self.policy.delays(self.seed),
            });
        // Several failures of one batch are one failure.
        if troubled.until <= now {
            troubled.until = now + at_most_a_day(troubled.delays.next_delay());
        }
        if new { Trouble::New } else { Trouble::Known }
    }

    /// The destination took a message: its pauses start again. Whether it was in trouble.
    pub(super) fn confirmed(&mut self, destination: &str) -> bool {
        !self.troubled.is_empty() && self.troubled.remove(destination).is_some()
    }

    /// Without lanes nothing would show that trouble is over: it is found out anew.
    pub(super) fn forget(&mut self) {
        self.troubled.clear();
    }

    /// A publish to the scope goes on while the worker does other things.
    pub(super) fn departed<'a>(
        &mut self,
        scope: &str,
        destinations: impl Iterator<Item = &'a String>,
    ) {
        self.late
            .insert(scope.to_owned(), destinations.cloned().collect());
    }

    /// ... and has come to its end.
    pub(super) fn landed(&mut self, scope: &str) {
        self.late.remove(scope);
    }

    /// What a page may send, under an operator's words. `share`: the part of each rate that is this worker's.
    pub(super) fn gate<'a>(
        &'a mut self,
        controls: &'a [DestinationControl],
        share: f64,
        now: Instant,
    ) -> Gate<'a> {
        for control in controls {
            let Some(rate) = control.rate_max else {
                continue;
            };
            let rate = f64::from(rate) * share;
            let new = || Bucket {
                rate,
                tokens: rate.max(1.0),
                at: now,
            };
            self.buckets
                .entry(control.destination.clone())
                .or_insert_with(new)
                .fill(rate, now);
        }
        self.buckets
            .retain(|name, _| control_of(controls, name).is_some_and(|c| c.rate_max.is_some()));
        Gate {
            destinations: self,
            controls,
            now,
            probed: HashSet::new(),
        }
    }
}

fn control_of<'a>(
    controls: &'a [DestinationControl],
    destination: &str,
) -> Option<&'a DestinationControl> {
    // Sorted, as the store returns them.
    let at = controls.binary_search_by(|control| control.destination.as_str().cmp(destination));
    at.ok().map(|at| &controls[at])
}

/// Lets the messages of one page through, or says why not.
pub(super) struct Gate<'a> {
    destinations: &'a mut Destinations,
    controls: &'a [DestinationControl],
    now: Instant,
    /// Destinations whose pause is over, and which get one message to show that they take it.
    probed: HashSet<String>,
}

impl Gate<'_> {
    /// Whether everything is let through.
    pub(super) fn is_open(&self) -> bool {
        self.controls.is_empty()
            && self.destinations.troubled.is_empty()
            && self.destinations.late.is_empty()
    }

    /// Destinations that would let nothing through now.
    pub(super) fn closed(&self) -> Vec<String> {
        let mut names: HashSet<&String> = HashSet::new();
        let troubled = self.destinations.troubled.iter();
        names.extend(
            troubled
                .filter(|(_, troubled)| troubled.until > self.now)
                .map(|(name, _)| name),
        );
        names.extend(self.destinations.late.values().flatten());
        // A tenth of a second's messages at a time, so that what is over the rate is not read again for each of them.
        let spent = |name| {
            let bucket = self.destinations.buckets.get(name);
            bucket.is_some_and(|bucket| bucket.tokens < (bucket.rate / 10.0).max(1.0))
        };
        names.extend(
            self.controls
                .iter()
                .filter(|control| control.paused || spent(&control.destination))
                .map(|control| &control.destination),
        );
        let mut names: Vec<String> = names.into_iter().cloned().collect();
        names.sort_unstable();
        names
    }

    /// Lets one message through, or tells the reason code why not. `wanted`: it goes if it may; otherwise this only looks.
    pub(super) fn admit(
        &mut self,
        destination: &str,
        scope: &str,
        wanted: bool,
    ) -> Result<(), &'static str> {
        if self.destinations.late.contains_key(scope) {
            return Err(reason::SLOW);
        }
        if control_of(self.controls, destination).is_some_and(|control| control.paused) {
            return Err(reason::PAUSED);
        }
        if let Some(troubled) = self.destinations.troubled.get(destination)
            && (troubled.until > self.now
                || self.probed.contains(destination)
                || wanted && !self.probed.insert(destination.to_owned()))
        {
            return Err(reason::CLOSED);
        }
        if let Some(bucket) = self.destinations.buckets.get_mut(destination) {
            if bucket.tokens < 1.0 {
                return Err(reason::LIMITED);
            }
            if wanted {
                bucket.tokens -= 1.0;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(destination: &str, paused: bool, rate_max: Option<u32>) -> DestinationControl {
        DestinationControl {
            destination: destination.into(),
            paused,
            rate_max,
            because: "test".into(),
            changed_at: time::OffsetDateTime::UNIX_EPOCH,
        }
    }

    fn closed(destinations: &mut Destinations, now: Instant) -> Vec<String> {
        destinations.gate(&[], 1.0, now).closed()
    }

    #[test]
    fn a_failing_destination_is_left_alone_longer_each_time_until_it_takes_a_message() {
        let policy = DelayPolicy::exponential(Duration::from_secs(1));
        let mut destinations = Destinations::new(policy);
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(destinations.failed("a", start), Trouble::New);
        assert_eq!(destinations.failed("a", start), Trouble::Known);
        assert_eq!(closed(&mut destinations, start), ["a"]);
        assert!(closed(&mut destinations, after(1)).is_empty());
        destinations.failed("a", after(1));
        assert_eq!(closed(&mut destinations, after(2)), ["a"]);
        assert!(closed(&mut destinations, after(3)).is_empty());
        assert!(destinations.confirmed("a"));
        assert!(!destinations.confirmed("a"));
        destinations.failed("a", after(3));
        assert!(closed(&mut destinations, after(4)).is_empty());
    }

    #[test]
    fn a_destination_whose_pause_is_over_gets_one_message_to_try() {
        let policy = DelayPolicy::fixed(Duration::from_secs(1));
        let mut destinations = Destinations::new(policy);
        let now = Instant::now();
        assert!(destinations.gate(&[], 1.0, now).is_open());
        destinations.failed("a", now);
        let mut gate = destinations.gate(&[], 1.0, now);
        assert!(!gate.is_open());
        assert_eq!(gate.admit("a", "a", true), Err(reason::CLOSED));
        assert_eq!(gate.admit("b", "b", true), Ok(()));
        let mut gate = destinations.gate(&[], 1.0, now + Duration::from_secs(1));
        assert_eq!(gate.admit("a", "a", true), Ok(()));
        assert_eq!(gate.admit("a", "a", true), Err(reason::CLOSED));
        destinations.confirmed("a");
        let mut gate = destinations.gate(&[], 1.0, now);
        assert_eq!(
            [gate.admit("a", "a", true), gate.admit("a", "a", true)],
            [Ok(()); 2]
        );
    }

    #[test]
    fn a_pause_may_be_longer_than_a_clock_can_tell() {
        let policy = DelayPolicy::fixed(Duration::MAX).with_cap(Duration::MAX);
        let mut destinations = Destinations::new(policy);
        let now = Instant::now();
        destinations.failed("a", now);
        let later = now + Duration::from_secs(3_600);
        let mut gate = destinations.gate(&[], 1.0, later);
        assert_eq!(gate.admit("a", "a", true), Err(reason::CLOSED));
    }

    #[test]
    fn a_scope_with_a_publish_under_way_takes_no_second_one() {
        let mut destinations = Destinations::new(DelayPolicy::fixed(Duration::from_secs(1)));
        let now = Instant::now();
        destinations.departed("ev", [&"ev.a".to_owned()].into_iter());
        let mut gate = destinations.gate(&[], 1.0, now);
        assert_eq!(gate.closed(), ["ev.a"]);
        assert_eq!(gate.admit("ev.b", "ev", true), Err(reason::SLOW));
        assert_eq!(gate.admit("other", "other", true), Ok(()));
        destinations.landed("ev");
        assert!(destinations.gate(&[], 1.0, now).is_open());
    }

    #[test]
    fn an_operator_pauses_and_limits() {
        let mut destinations = Destinations::new(DelayPolicy::fixed(Duration::from_secs(1)));
        let start = Instant::now();
        let controls = [control("p", true, None), control("r", false, Some(4))];
        // Half of the lanes are ours: two a second.
        let mut gate = destinations.gate(&controls, 0.5, start);
        assert_eq!(gate.closed(), ["p"]);
        assert_eq!(gate.admit("p", "p", true), Err(reason::PAUSED));
        let sent = (0..9)
            .filter(|_| gate.admit("r", "r", true).is_ok())
            .count();
        assert_eq!(sent, 2);
        assert_eq!(gate.admit("r", "r", true), Err(reason::LIMITED));
        assert_eq!(gate.closed(), ["p", "r"]);
        let later = start + Duration::from_millis(500);
        let mut gate = destinations.gate(&controls, 0.5, later);
        assert_eq!(gate.admit("r", "r", true), Ok(()));
        assert_eq!(gate.admit("r", "r", true), Err(reason::LIMITED));
        // An hour without messages saves nothing up.
        let mut gate = destinations.gate(&controls, 0.5, later + Duration::from_secs(3_600));
        let sent = (0..9)
            .filter(|_| gate.admit("r", "r", true).is_ok())
            .count();
        assert_eq!(sent, 2);
        assert!(destinations.gate(&[], 0.5, later).is_open());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut destinations = Destinations::new(DelayPolicy::fixed(Duration::from_secs(1)));
        let now = Instant::now();
        for n in 0..TROUBLED_MAX {
            assert_eq!(destinations.failed(&n.to_string(), now), Trouble::New);
        }
        assert_eq!(destinations.failed("one more", now), Trouble::TooMany);
        assert_eq!(destinations.failed("0", now), Trouble::Known);
        let much_later = now + FORGET_AFTER + Duration::from_secs(2);
        assert_eq!(destinations.failed("one more", much_later), Trouble::New);
    }
}
