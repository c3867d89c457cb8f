//! What both stories end with: counts taken from databases and broker, one last line, and a verdict.

use std::collections::{HashMap, HashSet};
use std::fmt;

/// Counts of a run, none of them kept by the program under test.
#[derive(Debug, Default)]
pub struct Tally {
    /// Messages committed to the outbox.
    pub committed: u64,
    /// Distinct ids the broker has.
    pub published: u64,
    /// Deliveries to the consumer, as the broker counts them or as the handler noted them.
    pub delivered: u64,
    /// Copies that the inbox must suppress: deliveries that did not reach the handler, or records sent again.
    pub duplicates: u64,
    /// Handler effects in the consumer's database.
    pub effects: u64,
    /// Distinct ids that took a rung.
    pub retried: u64,
    /// Distinct ids among the dead letters.
    pub dead: u64,
    /// Effects of a message that had one already.
    pub doubled: u64,
    /// First attempts that came before an earlier one of their key.
    pub out_of_order: u64,
}

impl Tally {
    /// Messages with neither an effect nor a dead letter.
    pub fn lost(&self) -> i128 {
        i128::from(self.committed) - i128::from(self.effects) - i128::from(self.dead)
    }

    /// Whether all went well.
    pub fn is_good(&self) -> bool {
        self.lost() == 0
            && self.doubled == 0
            && self.out_of_order == 0
            && self.published == self.committed
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "committed={} published={} delivered={} duplicates={} effects={} retried={} dead={} lost={}",
            self.committed,
            self.published,
            self.delivered,
            self.duplicates,
            self.effects,
            self.retried,
            self.dead,
            self.lost()
        )
    }
}

/// How many first attempts, given as (key, number in the order of commits) in the order they were made, came before
/// an earlier one of their key. Repeated attempts count nothing.
pub fn out_of_order(attempts: impl IntoIterator<Item = (String, i64)>) -> u64 {
    let mut seen: HashSet<(String, i64)> = HashSet::new();
    let mut last: HashMap<String, i64> = HashMap::new();
    let mut wrong = 0;
    for (key, number) in attempts {
        if !seen.insert((key.clone(), number)) {
            continue;
        }
        let last = last.entry(key).or_insert(i64::MIN);
        if number < *last {
            wrong += 1;
        }
        *last = number.max(*last);
    }
    wrong
}
