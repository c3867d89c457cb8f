//! The ladder: what comes after a failed attempt. Pure decisions; the consumer carries them out.

mod mode;
mod read;

use std::time::Duration;

use time::OffsetDateTime;

use crate::broker::Rung;
use crate::clock;
use crate::error::{Error, Result};
use crate::story::{Origin, Reason, Story};

pub use self::mode::DeadHead;
use self::mode::{Grown, Mode};

/// Rungs of growing delay between attempts. A message climbs one rung per failure; after the last it is a dead letter.
///
/// While a message waits on a rung, later messages of its key go on: order per key ends at the first failure, unless the
/// ladder is [`by_key`](Self::by_key) or [`in_place`](Self::in_place).
///
/// ```
/// use std::time::Duration;
/// use relaybox::ladder::Ladder;
///
/// let ladder = Ladder::rungs([5, 60, 600].map(Duration::from_secs));
/// let names: Vec<String> = ladder.rungs_of("orders", "billing").into_iter().map(|r| r.destination).collect();
/// assert_eq!(names, ["orders.billing.retry.5s", "orders.billing.retry.1m", "orders.billing.retry.10m"]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ladder {
    delays: Vec<Duration>,
    template: String,
    attempts_max: Option<u32>,
    age_max: Option<Duration>,
    grown: Option<Grown>,
    mode: Mode,
}

/// Most rungs a ladder has.
const RUNGS_MAX: usize = 32;

/// Longest delay of a rung.
const DELAY_MAX: Duration = Duration::from_secs(7 * 86_400);
/// Most attempts a ladder allows.
const ATTEMPTS_MAX: u32 = 1_000;

/// What to do with a failed message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    /// Wait on this rung; the story holds the due time.
    Climb { destination: String, story: Story },
    /// Wait in the waiting room.
    Wait { delay: Duration, story: Story },
    /// Wait in its place.
    Stay { delay: Duration, story: Story },
    /// End as a dead letter; the story holds the reason.
    Bury { story: Story },
}

/// How a failed attempt asked to go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ask {
    /// The next rung.
    Next,
    /// The first rung that waits at least this long, else the longest.
    After(Duration),
    /// No further attempt; the reason, if the failure gave one.
    Never(Option<Reason>),
}

impl Ladder {
    /// Name of a rung unless another template is set.
    pub const TEMPLATE_DEFAULT: &str = "{topic}.{consumer}.retry.{delay}";

    /// A rung per delay, climbed in this order.
    pub fn rungs(delays: impl IntoIterator<Item = Duration>) -> Self {
        Self {
            delays: delays.into_iter().collect(),
            template: Self::TEMPLATE_DEFAULT.to_owned(),
            attempts_max: None,
            age_max: None,
            grown: None,
            mode: Mode::Rungs,
        }
    }

    /// No second attempt: the first failure makes a dead letter.
    #[must_use]
    pub fn none() -> Self {
        Self::rungs([])
    }

    /// Names rungs otherwise. `{topic}`, `{consumer}` and `{delay}` are filled in; `{delay}` must be there.
    ///
    /// Without `{consumer}` several consumers share a rung: each reads all copies there and leaves the others' alone.
    #[must_use]
    pub fn with_template(mut self, template: impl Into<String>) -> Self {
        self.template = template.into();
        self
    }

    /// How many attempts there are in all, the first included (default one more than rungs; 1 to 1,000). With fewer the last rungs are
    /// not climbed, with more the last one is climbed again. Whatever the failures ask for, the attempt after that is not made: the
    /// message is a dead letter, [`retries-exhausted`](Reason::RETRIES_EXHAUSTED).
    #[must_use]
    pub const fn with_attempts_max(mut self, attempts: u32) -> Self {
        self.attempts_max = Some(attempts);
        self
    }

    /// How long after its first failure a message may still be due for another attempt (default: as long as there are attempts). One
    /// that would be due later is a dead letter at once, [`too-old`](Reason::TOO_OLD). By the consumer's clock.
    #[must_use]
    pub const fn with_age_max(mut self, age: Duration) -> Self {
        self.age_max = Some(age);
        self
    }

    /// The rungs for failures of `consumer` on `topic`; none where messages wait elsewhere.
    #[must_use]
    pub fn rungs_of(&self, topic: &str, consumer: &str) -> Vec<Rung> {
        if self.needs_room() {
            return Vec::new();
        }
        self.delays
            .iter()
            .map(|&delay| Rung {
                destination: self.destination(topic, consumer, delay),
                delay,
                source: topic.to_owned(),
            })
            .collect()
    }

    /// How long a message that fails every time spends on rungs, or waiting elsewhere, at most.
    #[must_use]
    pub fn duration(&self) -> Duration {
        if let Some(grown) = &self.grown {
            let delays = grown.delays_max().collect();
            let grown = None;
            return Self {
                delays,
                grown,
                ..self.clone()
            }
            .duration();
        }
        let failures = self.attempts().saturating_sub(1);
        let climbed = (1..=failures).filter_map(|failures| self.climb(failures));
        let climbed = climbed.fold(Duration::ZERO, Duration::saturating_add);
        // No rung is climbed that would be left later.
        self.age_max.map_or(climbed, |age| climbed.min(age))
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.delays.is_empty() && self.grown.is_none()
    }

    /// Attempts in all.
    fn attempts(&self) -> usize {
        let rungs = self.delays.len();
        match self.attempts_max.map(usize::try_from) {
            // There is nowhere to wait for another one.
            _ if rungs == 0 => 1,
            Some(most) => most.unwrap_or(usize::MAX),
            None => rungs + 1,
        }
    }

    /// The delay after so many failures.
    fn climb(&self, failures: usize) -> Option<Duration> {
        let rung = self.delays.get(failures.saturating_sub(1));
        rung.or(self.delays.last()).copied()
    }

    pub(crate) fn validate(&self) -> Result<()> {
        self.validate_mode()?;
        if self.delays.len() > RUNGS_MAX {
            return Err(Error::configuration(
                "ladder rungs",
                format!("at most {RUNGS_MAX}"),
                self.delays.len().to_string(),
            ));
        }
        for (at, delay) in self.delays.iter().enumerate() {
            if !is_delay(delay) {
                return Err(Error::configuration(
                    "ladder delay",
                    "more than zero and at most 7 days",
                    format!("{delay:?}"),
                ));
            }
            if delay.subsec_nanos() % 1_000_000 != 0 || self.delays[..at].contains(delay) {
                return Err(Error::configuration(
                    "ladder delay",
                    "whole milliseconds, each delay once",
                    format!("{delay:?}"),
                ));
            }
        }
        if let Some(attempts) = self.attempts_max
            && !(1..=ATTEMPTS_MAX).contains(&attempts)
        {
            let limit = format!("1 to {ATTEMPTS_MAX}");
            let field = "ladder attempts_max";
            return Err(Error::configuration(field, limit, attempts.to_string()));
        }
        if self.is_empty() && self.attempts_max.is_some_and(|attempts| attempts > 1) {
            let (field, limit) = ("ladder attempts_max", "1 on a ladder without rungs");
            let value = self.attempts_max.unwrap_or_default();
            return Err(Error::configuration(field, limit, value.to_string()));
        }
        if self.age_max == Some(Duration::ZERO) {
            let (field, limit) = ("ladder age_max", "more than zero");
            return Err(Error::configuration(field, limit, "0s"));
        }
        if !self.delays.is_empty() && !self.template.contains("{delay}") {
            return Err(Error::configuration(
                "ladder template",
                "a name with {delay} in it",
                &self.template,
            ));
        }
        Ok(())
    }

    /// Decides the next step of a message whose failure `story` already tells (so its count is at least 1).
    pub(crate) fn step(
        &self,
        topic: &str,
        consumer: &str,
        story: Story,
        ask: Ask,
        now: OffsetDateTime,
    ) -> Step {
        let failures = usize::try_from(story.retry_count).unwrap_or(usize::MAX);
        let delay = match ask {
            Ask::Never(reason) => {
                let reason = reason.unwrap_or_else(|| Reason::new(Reason::PERMANENT));
                let story = story.dead(reason);
                return Step::Bury { story };
            }
            // The number of attempts is the same whatever delays were asked for.
            _ if failures >= self.attempts() => None,
            Ask::Next => self.climb(failures),
            Ask::After(least) => {
                let enough = self.delays.iter().filter(|delay| **delay >= least).min();
                enough.or(self.delays.iter().max()).copied()
            }
        };
        let Some(delay) = delay else {
            let story = story.dead(Reason::new(Reason::RETRIES_EXHAUSTED));
            return Step::Bury { story };
        };
        let due = clock::add(now, delay);
        if self.is_too_old(&story, due) {
            let story = story.dead(Reason::new(Reason::TOO_OLD));
            return Step::Bury { story };
        }
        Step::Climb {
            destination: self.destination(topic, consumer, delay),
            story: story.due(due),
        }
    }

    fn is_too_old(&self, story: &Story, due: OffsetDateTime) -> bool {
        let last =
            (self.age_max.zip(story.first_failed_at)).map(|(age, first)| clock::add(first, age));
        last.is_some_and(|last| due > last)
    }

    fn destination(&self, topic: &str, consumer: &str, delay: Duration) -> String {
        fill(&self.template, topic, consumer).replace("{delay}", &spoken(delay))
    }
}

/// Which of its consumer's sources a copy tells that it first came from: a topic or exchange, or a queue or stream.
pub(crate) fn told_source<'a>(sources: &'a [String], origin: &Origin) -> Option<&'a String> {
    let told = [Some(&origin.topic), origin.partition.as_ref()];
    let mut told = told.into_iter().flatten();
    told.find_map(|name| sources.iter().find(|source| *source == name))
}

fn is_delay(delay: &Duration) -> bool {
    !delay.is_zero() && *delay <= DELAY_MAX
}

/// Fills `{topic}` and `{consumer}` of a name template.
pub(crate) fn fill(template: &str, topic: &str, consumer: &str) -> String {
    template
        .replace("{consumer}", consumer)
        .replace("{topic}", topic)
}

/// A delay as people write it: `250ms`, `5s`, `1m`, `10m`, `2h`, `1d`; the largest unit that divides it.
fn spoken(delay: Duration) -> String {
    let ms = delay.as_millis();
    let units = [
        (86_400_000, "d"),
        (3_600_000, "h"),
        (60_000, "m"),
        (1_000, "s"),
    ];
    units
        .iter()
        .find(|(unit, _)| ms >= *unit && ms.is_multiple_of(*unit))
        .map_or_else(
            || format!("{ms}ms"),
            |(unit, name)| format!("{}{name}", ms / unit),
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    const NOW: OffsetDateTime = datetime!(2026-01-05 10:00 UTC);

    fn ladder() -> Ladder {
        Ladder::rungs([5, 60, 600].map(Duration::from_secs))
    }

    fn failed(times: u32) -> Story {
        let origin = Origin {
            topic: "orders".into(),
            partition: None,
            offset: None,
        };
        (0..times).fold(Story::default(), |story, _| {
            story.failed("billing", &origin, "e", "t", NOW)
        })
    }

    fn rung(times: u32, ask: Ask) -> Option<String> {
        match ladder().step("orders", "billing", failed(times), ask, NOW) {
            Step::Climb { destination, .. } => Some(destination),
            _ => None,
        }
    }

    #[test]
    fn each_failure_is_one_rung_and_then_the_end() {
        assert_eq!(
            rung(1, Ask::Next).as_deref(),
            Some("orders.billing.retry.5s")
        );
        assert_eq!(
            rung(2, Ask::Next).as_deref(),
            Some("orders.billing.retry.1m")
        );
        assert_eq!(
            rung(3, Ask::Next).as_deref(),
            Some("orders.billing.retry.10m")
        );
        assert_eq!(rung(4, Ask::Next), None);
        assert_eq!(rung(1, Ask::Never(None)), None);
    }

    #[test]
    fn an_asked_delay_is_rounded_up_to_a_rung_and_uses_up_an_attempt() {
        let after = |seconds| Ask::After(Duration::from_secs(seconds));
        assert_eq!(
            rung(1, after(6)).as_deref(),
            Some("orders.billing.retry.1m")
        );
        assert_eq!(
            rung(3, after(0)).as_deref(),
            Some("orders.billing.retry.5s")
        );
        assert_eq!(
            rung(2, after(9_999)).as_deref(),
            Some("orders.billing.retry.10m")
        );
        assert_eq!(rung(4, after(1)), None);
    }

    #[test]
    fn attempts_are_limited_and_the_last_rung_is_climbed_again_where_there_are_more() {
        let reason =
            |ladder: &Ladder, times, ask| match ladder.step("t", "c", failed(times), ask, NOW) {
                Step::Climb { destination, .. } => destination,
                Step::Bury { story } => story
                    .reason
                    .map(|r| r.as_str().to_owned())
                    .unwrap_or_default(),
                other => unreachable!("{other:?}"),
            };
        let after = || Ask::After(Duration::from_secs(1));
        let fewer = ladder().with_attempts_max(2);
        assert_eq!(reason(&fewer, 1, Ask::Next), "t.c.retry.5s");
        assert_eq!(reason(&fewer, 2, Ask::Next), "retries-exhausted");
        assert_eq!(reason(&fewer, 2, after()), "retries-exhausted");
        assert_eq!(fewer.duration(), Duration::from_secs(5));
        let more = ladder().with_attempts_max(6);
        assert_eq!(reason(&more, 5, Ask::Next), "t.c.retry.10m");
        assert_eq!(reason(&more, 6, Ask::Next), "retries-exhausted");
        assert_eq!(reason(&more, 6, after()), "retries-exhausted");
        assert_eq!(more.duration(), Duration::from_secs(5 + 60 + 3 * 600));
        let one = Ladder::none().with_attempts_max(1);
        assert_eq!(reason(&one, 1, Ask::Next), "retries-exhausted");
    }

    #[test]
    fn no_attempt_is_due_later_than_the_age_allows_whatever_was_asked() {
        let aged = |age: u64, failed_ago: u64, ask| {
            let mut story = failed(2);
            story.first_failed_at = Some(NOW - Duration::from_secs(failed_ago));
            let ladder = ladder().with_age_max(Duration::from_secs(age));
            match ladder.step("t", "c", story, ask, NOW) {
                Step::Climb { .. } => String::new(),
                Step::Bury { story } => story
                    .reason
                    .map(|r| r.as_str().to_owned())
                    .unwrap_or_default(),
                other => unreachable!("{other:?}"),
            }
        };
        assert_eq!(aged(100, 40, Ask::Next), "", "due in its last second");
        assert_eq!(aged(100, 41, Ask::Next), "too-old");
        let hour = Ask::After(Duration::from_secs(3_600));
        assert_eq!(aged(100, 0, hour), "too-old");
        assert_eq!(aged(100, 1_000, Ask::Never(None)), "permanent");
        let short = ladder().with_age_max(Duration::from_secs(7));
        assert_eq!(short.duration(), Duration::from_secs(7));
        // A story that had no room for its beginning has no age: its attempts are counted all the same.
        let mut shrunk = failed(1);
        shrunk.first_failed_at = None;
        assert!(matches!(
            short.step("t", "c", shrunk, Ask::Next, NOW),
            Step::Climb { .. }
        ));
    }

    #[test]
    fn the_story_says_when_it_is_due_or_why_it_is_dead() {
        let Step::Climb { story, .. } = ladder().step("t", "c", failed(2), Ask::Next, NOW) else {
            unreachable!()
        };
        assert_eq!(story.due_at, Some(datetime!(2026-01-05 10:01 UTC)));
        let Step::Bury { story } = ladder().step("t", "c", failed(4), Ask::Next, NOW) else {
            unreachable!()
        };
        assert_eq!(
            story.reason.as_ref().map(Reason::as_str),
            Some("retries-exhausted")
        );
        assert_eq!(story.due_at, None);
        for (told, reason) in [(None, "permanent"), (Some("undecodable"), "undecodable")] {
            let ask = Ask::Never(told.map(Reason::new));
            let Step::Bury { story } = ladder().step("t", "c", failed(1), ask, NOW) else {
                unreachable!()
            };
            assert_eq!(story.reason.as_ref().map(Reason::as_str), Some(reason));
        }
    }

    #[test]
    fn delays_are_spoken_in_their_largest_unit() {
        let names: Vec<String> = [250, 5_000, 60_000, 90_000, 7_200_000, 86_400_000]
            .map(Duration::from_millis)
            .map(spoken)
            .into();
        assert_eq!(names, ["250ms", "5s", "1m", "90s", "2h", "1d"]);
    }

    #[test]
    fn a_template_is_one_setting() {
        let ladder = ladder().with_template("{topic}.retry.{delay}");
        assert_eq!(
            ladder.rungs_of("orders", "billing")[0].destination,
            "orders.retry.5s"
        );
    }

    #[test]
    fn settings_that_make_no_ladder_are_refused() {
        let bad = [
            Ladder::rungs([Duration::ZERO]),
            Ladder::rungs([Duration::from_micros(1500)]),
            Ladder::rungs([Duration::from_secs(5), Duration::from_secs(5)]),
            Ladder::rungs([Duration::MAX]),
            Ladder::rungs((1..40).map(Duration::from_secs)),
            ladder().with_template("{topic}.retry"),
            ladder().with_attempts_max(0),
            ladder().with_attempts_max(1_001),
            Ladder::none().with_attempts_max(2),
            ladder().with_age_max(Duration::ZERO),
        ];
        for ladder in bad {
            assert!(ladder.validate().is_err(), "{ladder:?}");
        }
        assert!(ladder().validate().is_ok());
        assert!(Ladder::none().validate().is_ok());
    }
}
