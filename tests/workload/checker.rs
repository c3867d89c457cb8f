//! Judges a history: a pure function from facts to a verdict. Each rule was seen failing in `proofs`.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::bank::{CONSUMER, End, Fate, TOPIC};
use super::history::{Account, Committed, Facts, Record};
use super::verdict::{Rule, Verdict, Violation};

pub fn check(facts: &Facts) -> Verdict {
    let mut checker = Checker {
        facts,
        committed: facts
            .committed
            .iter()
            .map(|c| (&*c.message_id, c))
            .collect(),
        violations: Vec::new(),
    };
    checker.identities();
    checker.ends();
    checker.order_on_topic();
    checker.order_of_attempts();
    checker.bytes();
    checker.totals();
    let (duplicates, bursts) = checker.copies();
    checker.rest();
    let overtaken = checker.overtaken();
    let violations = checker.violations;
    let published = ids(facts.wire.iter().map(|r| &r.message_id)).len();
    let retried = facts.attempts.iter().filter(|a| a.retries > 0);
    Verdict {
        seed: facts.seed,
        transfers: facts
            .committed
            .iter()
            .map(|c| c.transfer)
            .collect::<HashSet<_>>()
            .len(),
        committed: facts.committed.len(),
        published,
        duplicates,
        bursts,
        disturbed: facts.disturbed,
        applied: facts.applied.len(),
        dead: ids(facts.dead.iter().map(|d| &d.message_id)).len(),
        retried: ids(retried.map(|a| &a.message_id)).len(),
        overtaken,
        violations,
    }
}

/// The topic, or what it is sent to through an exchange of that name.
fn is_home(origin: &str) -> bool {
    origin.split('/').next() == Some(TOPIC)
}

fn ids<'a>(all: impl Iterator<Item = &'a String>) -> HashSet<&'a str> {
    all.map(String::as_str).collect()
}

struct Checker<'a> {
    facts: &'a Facts,
    committed: HashMap<&'a str, &'a Committed>,
    violations: Vec<Violation>,
}

impl<'a> Checker<'a> {
    fn complain(&mut self, rule: Rule, text: impl Into<String>) {
        let text = text.into();
        self.violations.push(Violation { rule, text });
    }

    /// Loss and invention, doubled effects.
    fn identities(&mut self) {
        let facts = self.facts;
        let published = ids(facts.wire.iter().map(|r| &r.message_id));
        let attempted = ids(facts.attempts.iter().map(|a| &a.message_id));
        let dead = ids(facts.dead.iter().map(|d| &d.message_id));
        let mut applied: HashMap<&str, usize> = HashMap::new();
        for effect in &facts.applied {
            *applied.entry(&effect.message_id).or_default() += 1;
        }
        for id in facts.committed.iter().map(|c| c.message_id.as_str()) {
            if !published.contains(id) {
                self.complain(
                    Rule::Lost,
                    format!("{id} was committed and never published"),
                );
            }
            if !applied.contains_key(id) && !dead.contains(id) {
                self.complain(Rule::Lost, format!("{id} is neither applied nor dead"));
            }
        }
        let effects: HashSet<&str> = applied.keys().copied().collect();
        let places = [
            ("published", &published),
            ("attempted", &attempted),
            ("applied", &effects),
            ("dead", &dead),
        ];
        for (what, ids) in places {
            for id in ids
                .iter()
                .filter(|id| !self.committed.contains_key(**id))
                .collect::<Vec<_>>()
            {
                self.complain(
                    Rule::Invented,
                    format!("{id} is {what} and was never committed"),
                );
            }
        }
        for (id, times) in applied {
            if times > 1 {
                self.complain(Rule::Doubled, format!("{id} was applied {times} times"));
            }
            if dead.contains(id) {
                self.complain(Rule::Doubled, format!("{id} was applied and is dead"));
            }
        }
    }

    /// Every message ends as its id says: no failure was counted that was not the handler's, and letters are complete.
    fn ends(&mut self) {
        for effect in &self.facts.applied {
            let id = &effect.message_id;
            let wanted = Fate::of(id).end();
            let found = effect.retries;
            if !matches!(wanted, End::Applied { retries } if i64::from(retries) == found) {
                self.complain(
                    Rule::Misjudged,
                    format!("{id} was applied after {found} failures, wanted {wanted:?}"),
                );
            }
        }
        for letter in &self.facts.dead {
            let is_good = match Fate::of(&letter.message_id).end() {
                End::Dead { reason, retries } => {
                    letter.reason.as_deref() == Some(reason)
                        && letter.retries == i64::from(retries)
                        && letter.consumer.as_deref() == Some(CONSUMER)
                        && letter.origin.as_deref().is_some_and(is_home)
                        && letter.error.as_ref().is_some_and(|error| !error.is_empty())
                }
                End::Applied { .. } => false,
            };
            if !is_good {
                self.complain(Rule::Misjudged, format!("a wrong letter: {letter:?}"));
            }
        }
    }

    fn order_on_topic(&mut self) {
        let records = self.on_topic();
        let mut home: HashMap<i64, i32> = HashMap::new();
        for record in &records {
            let Some(committed) = self.committed.get(record.message_id.as_str()) else {
                continue;
            };
            let first = *home.entry(committed.account).or_insert(record.partition);
            if first != record.partition {
                let text = format!("{} left its account's partition", record.message_id);
                self.complain(Rule::Disordered, text);
            }
        }
        self.order("on the topic", records.into_iter().map(|r| &*r.message_id));
    }

    fn order_of_attempts(&mut self) {
        let facts = self.facts;
        if !facts.key_affinity {
            return;
        }
        self.order("attempted", facts.attempts.iter().map(|a| &*a.message_id));
    }

    /// First appearances of each account's messages follow its versions, one by one.
    fn order(&mut self, place: &str, appearances: impl Iterator<Item = &'a str>) {
        let mut seen = HashSet::new();
        let mut last: HashMap<i64, i64> = HashMap::new();
        for id in appearances.filter(|id| seen.insert(*id)) {
            let Some(committed) = self.committed.get(id) else {
                continue;
            };
            let (account, version) = (committed.account, committed.version);
            let last = last.entry(account).or_default();
            let before = std::mem::replace(last, version.max(*last));
            if version < before {
                self.complain(
                    Rule::Disordered,
                    format!(
                        "account {account}: version {version} ({id}) first {place} after {before}"
                    ),
                );
            }
        }
    }

    fn overtaken(&self) -> usize {
        let mut last: HashMap<i64, i64> = HashMap::new();
        let smooth = self
            .facts
            .applied
            .iter()
            .filter(|effect| effect.retries == 0);
        let changes = smooth.filter_map(|effect| self.committed.get(effect.message_id.as_str()));
        let late = changes.filter(|change| {
            let last = last.entry(change.account).or_default();
            let before = std::mem::replace(last, change.version.max(*last));
            change.version < before
        });
        late.count()
    }

    fn bytes(&mut self) {
        let facts = self.facts;
        let wire = facts
            .wire
            .iter()
            .map(|r| ("published", &r.message_id, r.digest));
        let applied = facts
            .applied
            .iter()
            .map(|a| ("applied", &a.message_id, a.digest));
        let dead = facts.dead.iter().map(|d| ("dead", &d.message_id, d.digest));
        for (what, id, digest) in wire.chain(applied).chain(dead) {
            let committed = self.committed.get(id.as_str());
            if committed.is_some_and(|committed| committed.digest != digest) {
                self.complain(Rule::Changed, format!("{id} was {what} with other bytes"));
            }
        }
    }

    /// Money is neither made nor lost, and every balance is the sum of the recorded changes.
    fn totals(&mut self) {
        let facts = self.facts;
        let opening = facts.opening;
        let sum = |accounts: &[Account]| accounts.iter().map(|a| a.balance).sum::<i64>();
        let wanted = opening * i64::try_from(facts.bank.len()).unwrap_or(0);
        let bank = sum(&facts.bank);
        if bank != wanted {
            self.complain(
                Rule::Total,
                format!("the bank holds {bank}, wanted {wanted}"),
            );
        }
        // Per account: balance and version after the last recorded change.
        let mut told: BTreeMap<i64, (i64, i64)> = BTreeMap::new();
        let mut changes: Vec<_> = facts.committed.iter().collect();
        changes.sort_by_key(|change| (change.account, change.version));
        for change in changes {
            let (balance, version) = told.entry(change.account).or_insert((opening, 0));
            (*balance, *version) = (*balance + change.delta, *version + 1);
            if (*balance, *version) != (change.balance, change.version) {
                let text = format!("the history has a gap before {}", change.message_id);
                self.complain(Rule::Total, text);
            }
        }
        for account in &facts.bank {
            let told = told.get(&account.id).copied().unwrap_or((opening, 0));
            if told != (account.balance, account.count) {
                let text = format!("bank: {account:?}, the history says {told:?}");
                self.complain(Rule::Total, text);
            }
        }
        let mut replayed: HashMap<i64, (i64, i64)> = HashMap::new();
        for effect in &facts.applied {
            if let Some(change) = self.committed.get(effect.message_id.as_str()) {
                let (balance, count) = replayed.entry(change.account).or_insert((opening, 0));
                (*balance, *count) = (*balance + change.delta, *count + 1);
            }
        }
        for account in &facts.replica {
            let replayed = replayed.get(&account.id).copied().unwrap_or((opening, 0));
            if replayed != (account.balance, account.count) {
                let text = format!("replica: {account:?}, the effects say {replayed:?}");
                self.complain(Rule::Total, text);
            }
        }
        let dead = ids(facts.dead.iter().map(|d| &d.message_id));
        let missing = dead.iter().filter_map(|id| self.committed.get(id));
        let missing: i64 = missing.map(|change| change.delta).sum();
        let replica = sum(&facts.replica);
        if bank != replica + missing {
            let text = format!("bank {bank}, replica {replica}, dead letters {missing}");
            self.complain(Rule::Total, text);
        }
    }

    /// Copies on the topic are explained by what was disturbed: in number, and in the blocks they come in. Two relays
    /// that went on sending the same rows would leave many small blocks.
    fn copies(&mut self) -> (usize, usize) {
        let mut seen = HashSet::new();
        let mut before = None;
        let (mut copies, mut bursts) = (0, 0);
        for record in self.on_topic() {
            let is_copy = !seen.insert(record.message_id.as_str());
            if is_copy {
                copies += 1;
                bursts += usize::from(before != Some((record.partition, true)));
            }
            before = Some((record.partition, is_copy));
        }
        let disturbed = self.facts.disturbed;
        let bounds = [
            ("copies", copies, disturbed.duplicates_max()),
            ("blocks of copies", bursts, disturbed.bursts_max()),
        ];
        for (what, count, most) in bounds {
            if u64::try_from(count).is_ok_and(|count| count > most) {
                let text = format!("{count} {what} on the topic, at most {most}");
                self.complain(Rule::Repeated, text);
            }
        }
        (copies, bursts)
    }

    /// The topic's records, partition by partition.
    fn on_topic(&self) -> Vec<&'a Record> {
        let mut records: Vec<_> = self.facts.wire.iter().collect();
        records.sort_by_key(|record| (record.partition, record.offset));
        records
    }

    fn rest(&mut self) {
        let left = &self.facts.left;
        if !left.is_nothing() {
            self.complain(Rule::Left, format!("not drained: {left:?}"));
        }
        for fault in &self.facts.faults {
            self.complain(Rule::Fault, fault);
        }
    }
}

#[cfg(test)]
#[path = "proofs.rs"]
mod proofs;
