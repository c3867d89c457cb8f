//! Delay policy: how long to wait before attempt `n`. Pure, seedable, and without overflow for any input.

use std::time::Duration;

/// How the delay grows with the attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Growth {
    Immediate,
    Fixed(Duration),
    Exponential { base: Duration, factor: u32 },
}

/// How chance spreads a delay, so that many clients do not return in the same instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Jitter {
    /// The delay as computed.
    #[default]
    None,
    /// Anything from zero to the delay.
    Full,
    /// Half of the delay, plus anything up to the other half.
    Equal,
    /// Anything from the base to three times the previous delay; forgets the attempt's number.
    Decorrelated,
}

/// A rule for delays. The cap is applied after jitter, so no delay is ever longer.
///
/// ```
/// use std::time::Duration;
/// use relaybox::backoff::{DelayPolicy, Jitter};
///
/// let policy = DelayPolicy::exponential(Duration::from_millis(100))
///     .with_jitter(Jitter::Equal)
///     .with_cap(Duration::from_secs(30));
/// let delays: Vec<Duration> = policy.delays(7).take(3).collect();
/// assert!(delays[2] >= Duration::from_millis(200) && delays[2] <= Duration::from_millis(400));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DelayPolicy {
    growth: Growth,
    jitter: Jitter,
    cap: Duration,
}

/// One day: the default cap of every policy.
const CAP_DEFAULT: Duration = Duration::from_secs(24 * 60 * 60);

impl DelayPolicy {
    /// No delay at all.
    #[must_use]
    pub const fn immediate() -> Self {
        Self::new(Growth::Immediate)
    }

    /// The same delay each time.
    #[must_use]
    pub const fn fixed(delay: Duration) -> Self {
        Self::new(Growth::Fixed(delay))
    }

    /// `base`, then twice as long each time; see [`with_factor`](Self::with_factor).
    #[must_use]
    pub const fn exponential(base: Duration) -> Self {
        Self::new(Growth::Exponential { base, factor: 2 })
    }

    const fn new(growth: Growth) -> Self {
        Self {
            growth,
            jitter: Jitter::None,
            cap: CAP_DEFAULT,
        }
    }

    /// Growth of an exponential policy per attempt (default 2); no effect on the others.
    #[must_use]
    pub const fn with_factor(mut self, factor: u32) -> Self {
        if let Growth::Exponential { base, .. } = self.growth {
            self.growth = Growth::Exponential { base, factor };
        }
        self
    }

    /// How chance spreads the delay (default none).
    #[must_use]
    pub const fn with_jitter(mut self, jitter: Jitter) -> Self {
        self.jitter = jitter;
        self
    }

    /// The longest delay ever returned, after jitter (default one day).
    #[must_use]
    pub const fn with_cap(mut self, cap: Duration) -> Self {
        self.cap = cap;
        self
    }

    /// The delay before attempt `attempt` (the first retry is 1), given the delay before it, if there was one.
    ///
    /// Never panics and never exceeds the cap, up to `u32::MAX` attempts and `Duration::MAX` settings.
    pub fn delay(
        &self,
        attempt: u32,
        previous: Option<Duration>,
        random: &mut fastrand::Rng,
    ) -> Duration {
        let cap = self.cap.as_nanos();
        let grown = self.grown(attempt).min(cap);
        let nanos = match self.jitter {
            Jitter::None => grown,
            Jitter::Full => random.u128(0..=grown),
            Jitter::Equal => grown / 2 + random.u128(0..=grown - grown / 2),
            Jitter::Decorrelated => {
                let base = self.grown(1);
                let before = previous.map_or(base, |d| d.as_nanos());
                random.u128(base..=before.saturating_mul(3).max(base))
            }
        };
        from_nanos(nanos.min(cap))
    }

    /// The longest that [`delay`](Self::delay) may give for attempt `attempt`, whatever chance and the delays before it.
    #[must_use]
    pub fn delay_max(&self, attempt: u32) -> Duration {
        let nanos = match self.jitter {
            Jitter::None | Jitter::Full | Jitter::Equal => self.grown(attempt),
            Jitter::Decorrelated => {
                let base = self.grown(1);
                base.saturating_mul(3_u128.saturating_pow(attempt.max(1)))
            }
        };
        from_nanos(nanos.min(self.cap.as_nanos()))
    }

    /// The delays before attempt 1, 2, 3, ...: the same for the same seed. Never ends.
    #[must_use]
    pub fn delays(&self, seed: u64) -> Delays {
        Delays {
            policy: *self,
            attempt: 0,
            previous: None,
            random: fastrand::Rng::with_seed(seed),
        }
    }

    /// Nanoseconds before jitter and cap.
    fn grown(&self, attempt: u32) -> u128 {
        match self.growth {
            Growth::Immediate => 0,
            Growth::Fixed(delay) => delay.as_nanos(),
            Growth::Exponential { base, factor } => {
                let power = u128::from(factor).saturating_pow(attempt.saturating_sub(1));
                base.as_nanos().saturating_mul(power)
            }
        }
    }
}

/// Iterator of [`DelayPolicy::delays`]: attempts, previous delay and chance carried along.
#[derive(Debug, Clone)]
pub struct Delays {
    policy: DelayPolicy,
    attempt: u32,
    previous: Option<Duration>,
    random: fastrand::Rng,
}

impl Delays {
    /// The next delay.
    pub fn next_delay(&mut self) -> Duration {
        self.attempt = self.attempt.saturating_add(1);
        let delay = self
            .policy
            .delay(self.attempt, self.previous, &mut self.random);
        self.previous = Some(delay);
        delay
    }

    /// Starts again at attempt 1, after a success.
    pub fn reset(&mut self) {
        self.attempt = 0;
        self.previous = None;
    }
}

impl Iterator for Delays {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(self.next_delay())
    }
}

/// `Duration::from_nanos` takes only 584 years; a cap may be longer.
fn from_nanos(nanos: u128) -> Duration {
    let seconds = u64::try_from(nanos / 1_000_000_000).unwrap_or(u64::MAX);
    let rest = u32::try_from(nanos % 1_000_000_000).unwrap_or(0);
    Duration::new(seconds, rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    fn first(policy: DelayPolicy, count: usize) -> Vec<Duration> {
        policy.delays(1).take(count).collect()
    }

    #[test]
    fn delays_without_jitter_are_exact() {
        assert_eq!(first(DelayPolicy::immediate(), 2), [Duration::ZERO; 2]);
        assert_eq!(first(DelayPolicy::fixed(5 * MS), 3), [5 * MS; 3]);
        let doubling = DelayPolicy::exponential(10 * MS).with_cap(50 * MS);
        assert_eq!(first(doubling, 4), [10 * MS, 20 * MS, 40 * MS, 50 * MS]);
        let tenfold = DelayPolicy::exponential(MS).with_factor(10);
        assert_eq!(first(tenfold, 3), [MS, 10 * MS, 100 * MS]);
    }

    #[test]
    fn the_last_attempt_there_can_be_is_capped_not_wrapped() {
        let mut random = fastrand::Rng::with_seed(1);
        let policy = DelayPolicy::exponential(Duration::MAX)
            .with_factor(u32::MAX)
            .with_cap(Duration::MAX);
        assert_eq!(policy.delay(u32::MAX, None, &mut random), Duration::MAX);
        let decorrelated = policy.with_jitter(Jitter::Decorrelated);
        assert_eq!(
            decorrelated.delay(u32::MAX, Some(Duration::MAX), &mut random),
            Duration::MAX
        );
    }

    #[test]
    fn a_reset_starts_again() {
        let mut delays = DelayPolicy::exponential(MS).delays(3);
        assert_eq!((delays.next_delay(), delays.next_delay()), (MS, 2 * MS));
        delays.reset();
        assert_eq!(delays.next_delay(), MS);
    }

    fn any_jitter() -> impl Strategy<Value = Jitter> {
        prop_oneof![
            Just(Jitter::None),
            Just(Jitter::Full),
            Just(Jitter::Equal),
            Just(Jitter::Decorrelated),
        ]
    }

    proptest! {
        #[test]
        fn never_beyond_the_cap_and_the_same_for_the_same_seed(
            base in any::<Duration>(), cap in any::<Duration>(), factor in any::<u32>(),
            attempt in any::<u32>(), previous in any::<Option<Duration>>(),
            jitter in any_jitter(), seed in any::<u64>(),
        ) {
            let policy = DelayPolicy::exponential(base).with_factor(factor).with_jitter(jitter).with_cap(cap);
            let delay = policy.delay(attempt, previous, &mut fastrand::Rng::with_seed(seed));
            prop_assert!(delay <= cap);
            prop_assert_eq!(delay, policy.delay(attempt, previous, &mut fastrand::Rng::with_seed(seed)));
        }

        #[test]
        fn no_delay_is_longer_than_the_longest(
            base_ms in 0u64..10_000, cap_ms in 0u64..1_000_000, factor in 0u32..5, jitter in any_jitter(), seed in any::<u64>(),
        ) {
            let policy = DelayPolicy::exponential(Duration::from_millis(base_ms))
                .with_factor(factor).with_jitter(jitter).with_cap(Duration::from_millis(cap_ms));
            for (attempt, delay) in (1..).zip(policy.delays(seed).take(50)) {
                prop_assert!(delay <= policy.delay_max(attempt));
            }
        }

        #[test]
        fn equal_jitter_keeps_half(base_ms in 1u64..10_000, attempt in 1u32..10, seed in any::<u64>()) {
            let plain = DelayPolicy::exponential(Duration::from_millis(base_ms));
            let mut random = fastrand::Rng::with_seed(seed);
            let whole = plain.delay(attempt, None, &mut random);
            let jittered = plain.with_jitter(Jitter::Equal).delay(attempt, None, &mut random);
            prop_assert!(jittered >= whole / 2 && jittered <= whole);
        }

        #[test]
        fn decorrelated_stays_between_base_and_three_times_the_last(
            base_ms in 1u64..10_000, previous_ms in 1u64..100_000, seed in any::<u64>(),
        ) {
            let base = Duration::from_millis(base_ms);
            let previous = Duration::from_millis(previous_ms);
            let policy = DelayPolicy::exponential(base).with_jitter(Jitter::Decorrelated);
            let delay = policy.delay(9, Some(previous), &mut fastrand::Rng::with_seed(seed));
            prop_assert!(delay >= base && delay <= (previous * 3).max(base));
        }
    }
}
