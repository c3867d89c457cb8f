//! Where a failed message waits, and what waits with it.

use std::time::Duration;

use md5::{Digest, Md5};
use time::OffsetDateTime;

use super::{Ask, DELAY_MAX, Ladder, Step};
use crate::backoff::DelayPolicy;
use crate::clock::unix_micros;
use crate::error::{Error, Result, within};
use crate::story::Story;

/// What becomes of the later messages of a key that wait behind one that is a dead letter now ([`Ladder::by_key`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeadHead {
    /// They go on.
    #[default]
    Skip,
    /// They wait, and those that come later too, until an operator
    /// [releases](crate::store::WaitingStore::release) the key.
    Hold,
    /// Those that wait at that moment become dead letters too, without an attempt, for reason
    /// [`parked`](crate::story::Reason::PARKED). Those that come later go on.
    Park,
}

/// Where failed messages wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Mode {
    /// On rungs at the broker.
    #[default]
    Rungs,
    /// In the waiting room.
    Stored,
    /// In the waiting room, and what follows of their key behind them.
    ByKey(DeadHead),
    /// In their place: the whole partition or queue waits.
    InPlace,
}

/// Delays by a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Grown {
    policy: DelayPolicy,
    attempts: u32,
}

/// Most attempts of a ladder that follows a policy.
const ATTEMPTS_MAX: u32 = 1_000;
/// The longest wait in place: a third of the shortest time after which a broker takes a delivery back by default.
const IN_PLACE_MAX: Duration = Duration::from_secs(600);

impl Grown {
    /// The delays of one message, the same whenever they are asked for: chance goes by its first failure.
    fn delays(&self, consumer: &str, story: &Story) -> Vec<Duration> {
        let mut hash = Md5::new();
        hash.update(consumer);
        if let Some(origin) = &story.origin {
            hash.update(origin.to_string());
        }
        // As databases keep it.
        let first = story.first_failed_at.map(unix_micros).unwrap_or_default();
        hash.update(first.to_be_bytes());
        let hash: [u8; 16] = hash.finalize().into();
        let seed = hash.iter().fold(0_u64, |seed, byte| {
            seed.wrapping_mul(257).wrapping_add(u64::from(*byte))
        });
        let count = self.attempts.min(ATTEMPTS_MAX).saturating_sub(1) as usize;
        self.policy.delays(seed).take(count).collect()
    }

    /// The longest that each of its delays can be.
    pub(super) fn delays_max(&self) -> impl Iterator<Item = Duration> {
        let attempts = self.attempts.min(ATTEMPTS_MAX);
        (1..attempts).map(|attempt| self.policy.delay_max(attempt))
    }
}

impl Ladder {
    /// Delays by a policy, which no rungs at a broker can give: messages wait in the consumer's
    /// [waiting room](crate::Consumer::with_waiting_room). `attempts` counts all, the first included (1 to 1,000).
    ///
    /// A handler that asks for a delay of its own gets that one, up to 7 days, and has used up an attempt.
    ///
    /// ```
    /// use std::time::Duration;
    /// use relaybox::backoff::{DelayPolicy, Jitter};
    /// use relaybox::ladder::{DeadHead, Ladder};
    ///
    /// let policy = DelayPolicy::exponential(Duration::from_secs(1))
    ///     .with_jitter(Jitter::Full)
    ///     .with_cap(Duration::from_secs(600));
    /// let ladder = Ladder::backoff(policy, 10).by_key(DeadHead::Hold);
    /// assert!(ladder.rungs_of("orders", "billing").is_empty());
    /// ```
    #[must_use]
    pub fn backoff(policy: DelayPolicy, attempts: u32) -> Self {
        Self {
            grown: Some(Grown { policy, attempts }),
            mode: Mode::Stored,
            ..Self::rungs([])
        }
    }

    /// Keeps failed messages in the consumer's [waiting room](crate::Consumer::with_waiting_room) instead of rungs at the
    /// broker. Later messages of their key go on.
    #[must_use]
    pub fn stored(mut self) -> Self {
        self.mode = Mode::Stored;
        self
    }

    /// Keeps the order of each key: a failed message waits in the consumer's
    /// [waiting room](crate::Consumer::with_waiting_room), and what follows of its key waits behind it. Other keys go on.
    /// Messages without a key have no order.
    ///
    /// Refused at start where the broker hands messages of one key to several members at a time
    /// ([`key_affinity`](crate::broker::Subscriber::key_affinity)).
    #[must_use]
    pub fn by_key(mut self, dead_head: DeadHead) -> Self {
        self.mode = Mode::ByKey(dead_head);
        self
    }

    /// Keeps the order of each partition (or queue): it waits while its first message waits for its next attempt. Others go
    /// on, as long as what waits leaves room (`in_flight_max`). How often a message failed is noted in the consumer's
    /// [waiting room](crate::Consumer::with_waiting_room), so that a restart does not begin anew.
    ///
    /// No delay may be longer than 10 minutes, because a broker takes back what a member keeps for long. On RabbitMQ that counts
    /// for the message as a whole: keep all delays together below its `consumer_timeout` (30 minutes). Refused at start as
    /// [`by_key`](Self::by_key) is.
    #[must_use]
    pub fn in_place(mut self) -> Self {
        self.mode = Mode::InPlace;
        self
    }

    pub(crate) const fn needs_room(&self) -> bool {
        !matches!(self.mode, Mode::Rungs)
    }

    pub(crate) const fn needs_affinity(&self) -> bool {
        matches!(self.mode, Mode::ByKey(_) | Mode::InPlace)
    }

    pub(crate) const fn is_in_place(&self) -> bool {
        matches!(self.mode, Mode::InPlace)
    }

    /// What a dead head does to its key, where keys wait.
    pub(crate) const fn dead_head(&self) -> Option<DeadHead> {
        match self.mode {
            Mode::ByKey(dead_head) => Some(dead_head),
            Mode::Rungs | Mode::Stored | Mode::InPlace => None,
        }
    }

    pub(super) fn validate_mode(&self) -> Result<()> {
        let mut longest = self.delays.iter().max().copied().unwrap_or_default();
        if let Some(grown) = &self.grown {
            let attempts = usize::try_from(grown.attempts).unwrap_or(usize::MAX);
            within("ladder attempts", attempts, 1, ATTEMPTS_MAX as usize)?;
            longest = grown.delays_max().max().unwrap_or_default();
        }
        let limit = match self.mode {
            Mode::InPlace => IN_PLACE_MAX,
            Mode::Rungs | Mode::Stored | Mode::ByKey(_) => DELAY_MAX,
        };
        if longest > limit {
            return Err(Error::configuration(
                "ladder delay",
                match self.mode {
                    Mode::InPlace => "at most 10 minutes where a message waits in its place",
                    _ => "at most 7 days",
                },
                format!("{longest:?}"),
            ));
        }
        Ok(())
    }

    /// Decides the next step as [`step`](Self::step) does, where the message waits as this ladder says. `ours` is whether it
    /// came out of the waiting room, where it keeps its place.
    pub(crate) fn next(
        &self,
        (topic, consumer): (&str, &str),
        story: Story,
        ask: Ask,
        now: OffsetDateTime,
        ours: bool,
    ) -> Step {
        let step = match &self.grown {
            None => self.step(topic, consumer, story, ask, now),
            Some(grown) => {
                let delays = grown.delays(consumer, &story);
                // What was asked for is what it gets: there are no rungs to choose from.
                let (delays, ask) = match ask {
                    Ask::After(least) => (vec![least.min(DELAY_MAX); delays.len()], Ask::Next),
                    ask => (delays, ask),
                };
                let ladder = Self {
                    delays,
                    ..self.clone()
                };
                ladder.step(topic, consumer, story, ask, now)
            }
        };
        let Step::Climb { story, .. } = &step else {
            return step;
        };
        let left = story.due_at.map(|due| due - now);
        let delay = left.and_then(|left| Duration::try_from(left).ok());
        let (delay, story) = (delay.unwrap_or_default(), story.clone());
        match self.mode {
            Mode::Rungs => step,
            Mode::InPlace if !ours => Step::Stay {
                delay: delay.min(IN_PLACE_MAX),
                story,
            },
            Mode::Stored | Mode::ByKey(_) | Mode::InPlace => Step::Wait { delay, story },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backoff::Jitter;
    use crate::story::{Origin, Reason};
    use time::macros::datetime;

    const NOW: OffsetDateTime = datetime!(2026-01-05 10:00 UTC);
    const SECOND: Duration = Duration::from_secs(1);

    fn failed(times: u32, offset: &str) -> Story {
        let origin = Origin {
            topic: "orders".into(),
            partition: Some("0".into()),
            offset: Some(offset.into()),
        };
        (0..times).fold(Story::default(), |story, _| {
            story.failed("billing", &origin, "e", "t", NOW)
        })
    }

    fn delay(ladder: &Ladder, story: Story, ask: Ask) -> Option<Duration> {
        match ladder.next(("orders", "billing"), story, ask, NOW, false) {
            Step::Wait { delay, story } | Step::Stay { delay, story } => {
                assert_eq!(story.due_at, Some(NOW + delay));
                Some(delay)
            }
            Step::Climb { .. } => unreachable!("no rung is climbed"),
            Step::Bury { story } => {
                let reason = story.reason.as_ref().map(Reason::as_str);
                assert_eq!(reason, Some("retries-exhausted"));
                None
            }
        }
    }

    #[test]
    fn a_policys_delays_are_taken_in_turn_and_end_with_the_attempts() {
        let policy = DelayPolicy::exponential(SECOND).with_cap(3 * SECOND);
        let ladder = Ladder::backoff(policy, 4);
        let delays = (1..=4).map(|times| delay(&ladder, failed(times, "1"), Ask::Next));
        let seconds = [Some(1), Some(2), Some(3), None].map(|s| s.map(Duration::from_secs));
        assert_eq!(delays.collect::<Vec<_>>(), seconds);
        assert_eq!(ladder.duration(), 6 * SECOND);
        assert_eq!(
            delay(&Ladder::backoff(policy, 1), failed(1, "1"), Ask::Next),
            None
        );
    }

    #[test]
    fn a_delay_that_was_asked_for_is_given_and_uses_up_an_attempt() {
        let ladder = Ladder::backoff(DelayPolicy::fixed(SECOND), 3);
        let after = |seconds| Ask::After(Duration::from_secs(seconds));
        assert_eq!(delay(&ladder, failed(2, "1"), after(90)), Some(90 * SECOND));
        assert_eq!(
            delay(&ladder, failed(2, "1"), after(u64::MAX)),
            Some(DELAY_MAX)
        );
        assert_eq!(delay(&ladder, failed(3, "1"), after(0)), None);
        let in_place = ladder.in_place();
        assert_eq!(
            in_place.next(("t", "c"), failed(1, "1"), after(0), NOW, false),
            Step::Stay {
                delay: Duration::ZERO,
                story: failed(1, "1").due(NOW)
            }
        );
    }

    #[test]
    fn chance_is_the_same_for_one_message_and_another_for_the_next() {
        let policy = DelayPolicy::exponential(SECOND)
            .with_jitter(Jitter::Decorrelated)
            .with_cap(600 * SECOND);
        let ladder = Ladder::backoff(policy, 20).by_key(DeadHead::Skip);
        let of = |offset: &str, times| delay(&ladder, failed(times, offset), Ask::Next);
        assert_eq!(of("1", 5), of("1", 5));
        let different: std::collections::BTreeSet<_> =
            (0..20).map(|n| of(&n.to_string(), 5)).collect();
        assert!(different.len() > 10);
        // Each may be up to three times the one before it, and no less than the base.
        for times in 2..20 {
            let (before, now) = (of("7", times - 1), of("7", times));
            assert!(now.is_some_and(|now| now >= SECOND), "{now:?}");
            assert!(now <= before.map(|before| 3 * before), "{before:?} {now:?}");
        }
    }

    #[test]
    fn what_came_out_of_the_room_goes_back_there() {
        let ladder = Ladder::rungs([SECOND]).in_place();
        let next = |ours| ladder.next(("t", "c"), failed(1, "1"), Ask::Next, NOW, ours);
        assert!(matches!(next(false), Step::Stay { .. }));
        assert!(matches!(next(true), Step::Wait { .. }));
        let rungs = Ladder::rungs([SECOND]);
        let next = rungs.next(("t", "c"), failed(1, "1"), Ask::Next, NOW, true);
        assert!(matches!(next, Step::Climb { .. }));
    }

    #[test]
    fn modes_that_cannot_be_are_refused() {
        let fixed = |seconds| DelayPolicy::fixed(Duration::from_secs(seconds));
        for ladder in [
            Ladder::backoff(fixed(1), 0),
            Ladder::backoff(fixed(1), 1_001),
            Ladder::backoff(fixed(8 * 86_400).with_cap(Duration::MAX), 2),
            Ladder::backoff(fixed(601), 2).in_place(),
            Ladder::rungs([601 * SECOND]).in_place(),
        ] {
            let error = ladder.validate().err();
            let field = error.as_ref().and_then(Error::violation).map(|v| v.field);
            assert!(
                field.is_some_and(|field| field.starts_with("ladder")),
                "{ladder:?}"
            );
        }
        assert!(
            Ladder::backoff(fixed(600), 1_000)
                .in_place()
                .validate()
                .is_ok()
        );
        assert!(
            Ladder::rungs([86_400 * SECOND])
                .by_key(DeadHead::Park)
                .validate()
                .is_ok()
        );
    }
}
