//! What the checker says: counts, and everything that is wrong.

use std::fmt;

use super::history::Disturbed;

/// What can be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Committed and not published, or neither applied nor dead.
    Lost,
    /// Published, attempted, applied or dead, and never committed.
    Invented,
    /// An effect twice, or an effect and a dead letter.
    Doubled,
    /// First appearances on the topic, or first attempts, against the order of an account's versions.
    Disordered,
    /// Balances that the recorded changes do not explain.
    Total,
    /// More copies on the topic than the disturbances explain.
    Repeated,
    /// Other bytes than were committed.
    Changed,
    /// Another end than the message's own: failures counted that were an outage's, a wrong reason, a letter without its
    /// story.
    Misjudged,
    /// Something is still on its way.
    Left,
    /// A process ended by itself or did not end when told to.
    Fault,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub rule: Rule,
    pub text: String,
}

/// The counts of a run and everything that is wrong with it.
#[derive(Debug)]
pub struct Verdict {
    pub seed: u64,
    pub transfers: usize,
    pub committed: usize,
    pub published: usize,
    pub duplicates: usize,
    /// Blocks of copies.
    pub bursts: usize,
    pub disturbed: Disturbed,
    pub applied: usize,
    pub dead: usize,
    pub retried: usize,
    /// Effects that came after a later one of their account though neither message ever failed. Not promised: a
    /// consumer that stalls with its transaction open may let it happen.
    pub overtaken: usize,
    pub violations: Vec<Violation>,
}

impl Verdict {
    fn count(&self, rule: Rule) -> usize {
        let of_rule = self.violations.iter().filter(|v| v.rule == rule);
        of_rule.count()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = match self.count(Rule::Total) {
            0 => "ok",
            _ => "wrong",
        };
        write!(
            f,
            "seed={} transfers={} committed={} published={} duplicates={}/{} bursts={}/{} applied={} dead={} retried={} overtaken={} \
             lost={} invented={} doubled={} disordered={} repeated={} changed={} misjudged={} left={} faults={} total={total}",
            self.seed,
            self.transfers,
            self.committed,
            self.published,
            self.duplicates,
            self.disturbed.duplicates_max(),
            self.bursts,
            self.disturbed.bursts_max(),
            self.applied,
            self.dead,
            self.retried,
            self.overtaken,
            self.count(Rule::Lost),
            self.count(Rule::Invented),
            self.count(Rule::Doubled),
            self.count(Rule::Disordered),
            self.count(Rule::Repeated),
            self.count(Rule::Changed),
            self.count(Rule::Misjudged),
            self.count(Rule::Left),
            self.count(Rule::Fault),
        )
    }
}
