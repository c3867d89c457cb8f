//! What the commits of a partition tell a successor beside the offset: which deliveries may have been in work.
//!
//! Other brokers say of a delivery that it was made before. Kafka knows a committed offset and a short text with it, so
//! the text says it: a *mark*. `clean` means that the last owner went in order. `open` names the offset up to which
//! deliveries may have been handed over; everything from the committed offset up to there is redelivered.
//!
//! A delivery is handed over only when the broker has confirmed a mark that covers it. So that nobody waits for that, a
//! mark runs ahead, by an *allowance*, and a new one is committed when half of it is used up.

use std::ops::Range;
use std::time::{Duration, Instant};

/// What comes first in the text, with the version of what follows. Other texts are not ours and mean nothing.
const PREFIX: &str = "relaybox/1 ";
/// Fewest offsets that a mark runs ahead.
const ALLOWANCE_MIN: i64 = 16;
/// Most offsets that a mark runs ahead, at a speed at which that is little time.
const ALLOWANCE_MAX: i64 = 65_536;
/// An allowance of which half is used up sooner is doubled.
const SOON: Duration = Duration::from_millis(100);
/// One that lasts longer goes back to the least.
const LONG: Duration = Duration::from_secs(1);
/// Most offsets behind a commit that a mark is believed about: whoever else writes our text cannot make everything
/// suspect for ever.
const SUSPECTS_MAX: i64 = 1 << 20;

/// How the owner of a partition stands at a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    /// Nothing was in work.
    Clean,
    /// Deliveries below this offset may have been handed over.
    Open { until: i64 },
}

impl Mark {
    /// A text that is not ours, as after an upgrade or a reset by a tool, counts as clean.
    pub(super) fn read(text: &str) -> Self {
        let until = text
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.strip_prefix("open "));
        match until.and_then(|until| until.parse().ok()) {
            Some(until) => Self::Open { until },
            None => Self::Clean,
        }
    }

    pub(super) fn write(self) -> String {
        match self {
            Self::Clean => format!("{PREFIX}clean"),
            Self::Open { until } => format!("{PREFIX}open {until}"),
        }
    }
}

/// What is committed of a partition: the offset to go on at, and the mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Commit {
    pub(super) point: i64,
    pub(super) mark: Mark,
}

/// The commits of one assignment of one partition. Decides, and asks nobody.
#[derive(Debug)]
pub(super) struct Commits {
    /// Whether it was read what the last owner left.
    known: bool,
    /// What the broker has, as far as it has confirmed.
    told: Option<Commit>,
    /// Whether it may have another one: something was sent and not confirmed.
    in_doubt: bool,
    /// What a last owner may have had in work.
    suspects: Range<i64>,
    allowance: i64,
    /// When the mark was moved on last.
    moved: Option<Instant>,
}

impl Commits {
    pub(super) const fn new() -> Self {
        Self {
            known: false,
            told: None,
            in_doubt: false,
            suspects: 0..0,
            allowance: ALLOWANCE_MIN,
            moved: None,
        }
    }

    /// The same for a log that was cut or made anew: what is committed is about another.
    pub(super) const fn anew() -> Self {
        let mut commits = Self::new();
        commits.known = true;
        commits
    }

    pub(super) const fn is_known(&self) -> bool {
        self.known
    }

    /// Takes note of what the last owner left.
    pub(super) fn found(&mut self, committed: Option<Commit>) {
        self.known = true;
        self.told = committed;
        if let Some(Commit {
            point,
            mark: Mark::Open { until },
        }) = committed
        {
            let until = until.min(point.saturating_add(SUSPECTS_MAX));
            let mark = Mark::Open { until };
            self.told = Some(Commit { point, mark });
            self.suspects = point..until;
        }
    }

    /// Takes note of an offset that was received. One before the commit shows that the log was cut or made anew.
    pub(super) fn received(&mut self, offset: i64) {
        if self.told.is_some_and(|told| offset < told.point) {
            *self = Self::anew();
        }
    }

    /// Whether a last owner may have had it in work.
    pub(super) fn is_suspect(&self, offset: i64) -> bool {
        self.suspects.contains(&offset)
    }

    /// Up to where deliveries may be handed over.
    fn covered(&self) -> Option<i64> {
        match self.told?.mark {
            Mark::Open { until } => Some(until),
            Mark::Clean => None,
        }
    }

    pub(super) fn covers(&self, offset: i64) -> bool {
        self.known && self.covered().is_some_and(|until| offset < until)
    }

    /// Whether the mark should move on. `reach` is the next offset to hand over.
    pub(super) fn is_short(&self, reach: i64) -> bool {
        self.known
            && self
                .covered()
                .is_none_or(|until| until.saturating_sub(reach) < self.allowance / 2)
    }

    pub(super) fn told_point(&self) -> Option<i64> {
        self.told.map(|told| told.point)
    }

    /// What to commit while deliveries go on: `point` is where a successor would go on, `reach` the next offset to hand
    /// over. A mark never goes back, as deliveries are handed over by the last one meanwhile.
    pub(super) fn under_way(&mut self, point: i64, reach: i64, now: Instant) -> Commit {
        if self.is_short(reach) {
            let lasted = self.moved.replace(now).map(|moved| now - moved);
            self.allowance = match lasted {
                Some(lasted) if lasted < SOON => (self.allowance * 2).min(ALLOWANCE_MAX),
                Some(lasted) if lasted < LONG => self.allowance,
                _ => ALLOWANCE_MIN,
            };
        }
        let ahead = reach.saturating_add(self.allowance);
        let until = self.covered().map_or(ahead, |until| until.max(ahead));
        self.in_doubt = true;
        let mark = Mark::Open { until };
        Commit { point, mark }
    }

    /// What to commit at the end, if anything. `in_work` is one past the last offset that was handed over, if any of
    /// them may still be in work.
    pub(super) fn at_end(&self, point: Option<i64>, in_work: Option<i64>) -> Option<Commit> {
        if self.told.is_none() && !self.in_doubt {
            // Nothing was ever handed over.
            return None;
        }
        let point = point.or(self.told_point())?;
        // Suspects that nobody got to stay suspect, however orderly this owner goes.
        let until = self.suspects.end.max(in_work.unwrap_or(0));
        let mark = if until > point {
            Mark::Open { until }
        } else {
            Mark::Clean
        };
        let commit = Commit { point, mark };
        (self.in_doubt || self.told != Some(commit)).then_some(commit)
    }

    pub(super) fn confirmed(&mut self, commit: Commit) {
        self.told = Some(commit);
        self.in_doubt = false;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn open(point: i64, until: i64) -> Commit {
        let mark = Mark::Open { until };
        Commit { point, mark }
    }

    fn clean(point: i64) -> Commit {
        let mark = Mark::Clean;
        Commit { point, mark }
    }

    fn after(committed: Option<Commit>) -> Commits {
        let mut commits = Commits::new();
        commits.found(committed);
        commits
    }

    #[test]
    fn a_mark_is_read_as_it_was_written_and_other_texts_are_clean() {
        for mark in [
            Mark::Clean,
            Mark::Open { until: 0 },
            Mark::Open { until: i64::MAX },
        ] {
            assert_eq!(Mark::read(&mark.write()), mark);
            assert!(mark.write().len() < 64);
        }
        let foreign = [
            "",
            "open 7",
            "relaybox/1 open",
            "relaybox/1 open x",
            "relaybox/2 open 7",
        ];
        assert!(foreign.iter().all(|text| Mark::read(text) == Mark::Clean));
    }

    #[test]
    fn nothing_is_covered_before_a_mark_is_confirmed() {
        let mut commits = Commits::new();
        assert!(!commits.covers(0) && !commits.is_short(0), "not read yet");
        commits.found(None);
        assert!(!commits.covers(0) && commits.is_short(0));
        let first = commits.under_way(0, 0, Instant::now());
        assert_eq!(first, open(0, 16));
        assert!(!commits.covers(0), "not confirmed yet");
        commits.confirmed(first);
        assert!(commits.covers(15) && !commits.covers(16));
        assert!(!commits.is_short(8) && commits.is_short(9));
        assert!(!after(Some(clean(7))).covers(7));
    }

    #[test]
    fn exactly_what_an_open_mark_names_is_suspect() {
        let commits = after(Some(open(10, 13)));
        let suspects: Vec<i64> = (0..20).filter(|o| commits.is_suspect(*o)).collect();
        assert_eq!(suspects, [10, 11, 12]);
        assert!(commits.covers(12), "the mark that is there covers as well");
        assert!((0..20).all(|o| !after(Some(clean(10))).is_suspect(o)));
        assert!((0..20).all(|o| !after(None).is_suspect(o)));
        assert!(!after(Some(open(0, i64::MAX))).is_suspect(SUSPECTS_MAX));
    }

    #[test]
    fn an_orderly_end_is_clean_and_another_names_what_was_handed_over() {
        let mut commits = after(Some(clean(10)));
        assert_eq!(commits.at_end(Some(10), None), None, "nothing to say");
        let begun = commits.under_way(10, 10, Instant::now());
        assert_eq!(
            commits.at_end(None, None),
            Some(clean(10)),
            "it may be there"
        );
        commits.confirmed(begun);
        assert_eq!(commits.at_end(Some(15), None), Some(clean(15)));
        assert_eq!(commits.at_end(Some(15), Some(18)), Some(open(15, 18)));
        assert_eq!(after(None).at_end(Some(3), None), None);
    }

    #[test]
    fn suspects_that_nobody_got_to_stay_suspect() {
        let commits = after(Some(open(10, 20)));
        assert_eq!(commits.at_end(Some(15), None), Some(open(15, 20)));
        assert_eq!(commits.at_end(Some(20), None), Some(clean(20)));
    }

    #[test]
    fn a_log_made_anew_has_no_suspects_and_needs_a_mark() {
        let mut commits = after(Some(open(10, 20)));
        commits.received(10);
        assert!(commits.covers(10));
        commits.received(0);
        assert!(!commits.covers(0) && !commits.is_suspect(10) && commits.is_known());
        assert_eq!(commits.under_way(0, 0, Instant::now()), open(0, 16));
    }

    #[test]
    fn the_allowance_follows_the_speed_within_bounds() {
        let mut commits = after(None);
        let mut now = Instant::now();
        let mut reach = 0;
        let mut step = |commits: &mut Commits, pause: Duration| {
            now += pause;
            let commit = commits.under_way(0, reach, now);
            commits.confirmed(commit);
            let Mark::Open { until } = commit.mark else {
                return 0;
            };
            let ahead = until - reach;
            reach = until;
            ahead
        };
        assert_eq!(step(&mut commits, SOON), 16);
        assert_eq!(step(&mut commits, SOON), 16);
        assert_eq!(step(&mut commits, SOON / 2), 32);
        assert_eq!(step(&mut commits, SOON / 2), 64);
        for _ in 0..20 {
            step(&mut commits, Duration::ZERO);
        }
        assert_eq!(step(&mut commits, Duration::ZERO), ALLOWANCE_MAX);
        assert_eq!(step(&mut commits, LONG), 16);
    }

    /// What an owner of a partition does between two deaths or orderly ends.
    #[derive(Debug, Clone)]
    enum Step {
        HandOver,
        Finish,
        Send,
        /// Whether the broker took what was sent last, and whether that was heard.
        Answer {
            taken: bool,
            heard: bool,
        },
        Die,
        End,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => Just(Step::HandOver),
            6 => Just(Step::Finish),
            4 => Just(Step::Send),
            4 => (any::<bool>(), any::<bool>())
                .prop_map(|(taken, heard)| Step::Answer { taken, heard }),
            1 => Just(Step::Die),
            1 => Just(Step::End),
        ]
    }

    proptest! {
        /// Whatever dies when: what was in work at a death is suspect for every owner until it is finished.
        #[test]
        fn what_was_in_work_at_a_death_is_suspect(steps in prop::collection::vec(step(), 1..200)) {
            let mut broker: Option<Commit> = None;
            let mut must_be_suspect = std::collections::BTreeSet::new();
            let mut commits = Commits::new();
            commits.found(broker);
            let (mut point, mut reach) = (0, 0);
            let mut sent: Option<Commit> = None;
            let now = Instant::now();
            for step in steps {
                match step {
                    Step::HandOver if commits.covers(reach) => {
                        let suspect = commits.is_suspect(reach);
                        prop_assert!(suspect || !must_be_suspect.contains(&reach), "{reach}");
                        reach += 1;
                    }
                    Step::Finish if point < reach => {
                        must_be_suspect.remove(&point);
                        point += 1;
                    }
                    Step::Send if sent.is_none() => {
                        sent = Some(commits.under_way(point, reach, now));
                    }
                    Step::Answer { taken, heard } => {
                        if let Some(commit) = sent.take().filter(|_| taken) {
                            broker = Some(commit);
                            if heard {
                                commits.confirmed(commit);
                            }
                        }
                    }
                    Step::Die | Step::End => {
                        if matches!(step, Step::Die) {
                            must_be_suspect.extend(point..reach);
                        } else if let Some(commit) = commits.at_end(Some(point), None) {
                            broker = Some(commit);
                        }
                        commits = Commits::new();
                        commits.found(broker);
                        sent = None;
                        point = broker.map_or(0, |commit| commit.point);
                        reach = point;
                    }
                    _ => {}
                }
            }
        }
    }
}
