//! Each rule of the checker, seen failing on a history made up for it, and passing beside it.

use super::*;
use crate::bank::{TOPIC, id_of};
use crate::history::{Applied, Attempt, Dead, Disturbed, Left};

const SEED: u64 = 7;
const OPENING: i64 = 100;

/// A number of a transfer whose message about account 1 has the wanted fate.
fn transfer_that(ends: impl Fn(End) -> bool) -> i64 {
    (1..)
        .find(|n| ends(Fate::of(&id_of(SEED, *n, 1)).end()))
        .unwrap_or_default()
}

fn applied_after(wanted: u32) -> impl Fn(End) -> bool {
    move |end| end == End::Applied { retries: wanted }
}

/// Account 1 gets 5 three times: plainly, after one failure, and by a message that dies. Account 2 pays without telling.
fn good() -> Facts {
    let plain = transfer_that(applied_after(0));
    let retried = transfer_that(applied_after(1));
    let dead = transfer_that(|end| matches!(end, End::Dead { retries: 3, .. }));
    let committed: Vec<Committed> = [plain, retried, dead]
        .into_iter()
        .zip(1..)
        .map(|(transfer, version)| Committed {
            message_id: id_of(SEED, transfer, 1),
            transfer,
            account: 1,
            version,
            delta: 5,
            balance: OPENING + 5 * version,
            digest: version,
        })
        .collect();
    let id = |at: usize| committed[at].message_id.clone();
    let attempt = |at, retries| Attempt {
        message_id: id(at),
        retries,
    };
    let account = |id, balance, count| Account { id, balance, count };
    Facts {
        seed: SEED,
        // Two accounts would need a change each; one that starts lower keeps the sum.
        key_affinity: true,
        opening: OPENING,
        bank: vec![account(1, 115, 3)],
        replica: vec![account(1, 110, 2)],
        wire: (0..3)
            .map(|at| Record {
                partition: 0,
                offset: at,
                message_id: id(usize::try_from(at).unwrap_or_default()),
                digest: at + 1,
            })
            .collect(),
        attempts: vec![
            attempt(0, 0),
            attempt(1, 0),
            attempt(2, 0),
            attempt(1, 1),
            attempt(2, 1),
            attempt(2, 2),
        ],
        applied: [(0, 0, 1), (1, 1, 2)]
            .map(|(at, retries, digest)| Applied {
                message_id: id(at),
                retries,
                digest,
            })
            .into(),
        dead: vec![Dead {
            message_id: id(2),
            reason: Some("retries-exhausted".into()),
            retries: 3,
            consumer: Some(CONSUMER.into()),
            error: Some("handler: closed".into()),
            origin: Some(TOPIC.into()),
            digest: 3,
        }],
        committed,
        left: Left::default(),
        disturbed: Disturbed::default(),
        faults: Vec::new(),
    }
    .balanced()
}

impl Facts {
    /// Adds the account that paid: three changes that are applied at once.
    fn balanced(mut self) -> Self {
        let payer = 2;
        let mut number = 1;
        for version in 1..=3 {
            while !applied_after(0)(Fate::of(&id_of(SEED, number, payer)).end()) {
                number += 1;
            }
            let message_id = id_of(SEED, number, payer);
            number += 1;
            self.committed.push(Committed {
                message_id: message_id.clone(),
                transfer: number,
                account: payer,
                version,
                delta: -5,
                balance: OPENING - 5 * version,
                digest: -version,
            });
            self.wire.push(Record {
                partition: 1,
                offset: version,
                message_id: message_id.clone(),
                digest: -version,
            });
            self.attempts.push(Attempt {
                message_id: message_id.clone(),
                retries: 0,
            });
            self.applied.push(Applied {
                message_id,
                retries: 0,
                digest: -version,
            });
        }
        let account = |balance| Account {
            id: payer,
            balance,
            count: 3,
        };
        self.bank.push(account(OPENING - 15));
        self.replica.push(account(OPENING - 15));
        self
    }
}

/// The rules that a history breaks after one change to a good one.
#[track_caller]
fn broken(change: impl Fn(&mut Facts)) -> Vec<Rule> {
    let mut facts = good();
    assert_eq!(check(&facts).violations, [], "the history is good before");
    change(&mut facts);
    let verdict = check(&facts);
    let mut rules: Vec<Rule> = verdict.violations.iter().map(|v| v.rule).collect();
    rules.sort();
    rules.dedup();
    rules
}

#[test]
fn a_good_history_has_a_plain_line() {
    let line = check(&good()).to_string();
    assert_eq!(
        line,
        "seed=7 transfers=6 committed=6 published=6 duplicates=0/0 bursts=0/0 applied=5 dead=1 retried=2 overtaken=0 lost=0 \
         invented=0 doubled=0 disordered=0 repeated=0 changed=0 misjudged=0 left=0 faults=0 total=ok"
    );
}

#[test]
fn loss_is_seen() {
    assert_eq!(broken(|facts| drop(facts.wire.pop())), [Rule::Lost]);
    // An effect that is gone also shows in the balance.
    assert_eq!(
        broken(|facts| drop(facts.applied.pop())),
        [Rule::Lost, Rule::Total]
    );
    assert_eq!(
        broken(|facts| facts.dead.clear()),
        [Rule::Lost, Rule::Total]
    );
}

#[test]
fn invention_is_seen_wherever_it_appears() {
    let phantom = || "phantom-1".to_owned();
    assert_eq!(
        broken(|facts| {
            let mut record = facts.wire[0].clone();
            (record.message_id, record.offset) = (phantom(), 9);
            facts.wire.push(record);
        }),
        [Rule::Invented]
    );
    assert_eq!(
        broken(|facts| facts.attempts.push(Attempt {
            message_id: phantom(),
            retries: 0
        })),
        [Rule::Invented]
    );
    assert!(
        broken(|facts| {
            let mut effect = facts.applied[0].clone();
            effect.message_id = phantom();
            facts.applied.push(effect);
        })
        .contains(&Rule::Invented)
    );
    assert!(
        broken(|facts| {
            let mut letter = facts.dead[0].clone();
            letter.message_id = phantom();
            facts.dead.push(letter);
        })
        .contains(&Rule::Invented)
    );
}

#[test]
fn a_doubled_effect_is_seen() {
    let twice = |facts: &mut Facts| facts.applied.push(facts.applied[0].clone());
    assert_eq!(broken(twice), [Rule::Doubled, Rule::Total]);
    let also_dead = |facts: &mut Facts| {
        let id = facts.dead[0].message_id.clone();
        facts.applied[1].message_id = id;
    };
    assert!(broken(also_dead).contains(&Rule::Doubled));
}

#[test]
fn a_second_copy_of_a_letter_is_none() {
    let copy = |facts: &mut Facts| facts.dead.push(facts.dead[0].clone());
    assert_eq!(broken(copy), []);
}

#[test]
fn disorder_is_seen_on_the_topic_and_at_the_consumer() {
    let swap = |facts: &mut Facts| {
        facts.wire[0].offset = 1;
        facts.wire[1].offset = 0;
    };
    assert_eq!(broken(swap), [Rule::Disordered]);
    assert_eq!(
        broken(|facts| facts.attempts.swap(0, 1)),
        [Rule::Disordered]
    );
    assert_eq!(
        broken(|facts| facts.wire[2].partition = 1),
        [Rule::Disordered]
    );
    // Only first appearances count.
    assert_eq!(
        broken(|facts| facts.attempts.push(facts.attempts[0].clone())),
        []
    );
}

#[test]
fn an_effect_that_came_too_late_is_counted() {
    let mut facts = good();
    let last = facts.applied.len() - 1;
    facts.applied.swap(last, last - 1);
    let verdict = check(&facts);
    assert_eq!((verdict.overtaken, verdict.violations), (1, Vec::new()));
}

#[test]
fn a_wrong_balance_is_seen_on_either_side() {
    assert_eq!(broken(|facts| facts.bank[0].balance += 1), [Rule::Total]);
    assert_eq!(broken(|facts| facts.bank[0].count += 1), [Rule::Total]);
    assert_eq!(broken(|facts| facts.replica[0].balance += 1), [Rule::Total]);
    assert_eq!(broken(|facts| facts.replica[0].count += 1), [Rule::Total]);
    assert_eq!(
        broken(|facts| facts.committed[0].balance += 1),
        [Rule::Total]
    );
    // Both sides wrong in the same way: the sum of the bank tells.
    let both = |facts: &mut Facts| {
        facts.bank[1].balance += 1;
        facts.replica[1].balance += 1;
    };
    assert_eq!(broken(both), [Rule::Total]);
}

#[test]
fn copies_are_bounded_by_what_was_disturbed() {
    let copy = |facts: &mut Facts| {
        let mut record = facts.wire[0].clone();
        record.offset = 9;
        facts.wire.push(record);
    };
    assert_eq!(broken(copy), [Rule::Repeated]);
    let disturbed = Disturbed {
        relays: 2,
        servers: 1,
        relay_count: 3,
        batch: 10,
    };
    assert_eq!(disturbed.duplicates_max(), 50);
    let explained = |facts: &mut Facts| {
        copy(facts);
        facts.disturbed = disturbed;
    };
    assert_eq!(broken(explained), []);
    // One batch of a hundred may come again, but not in a hundred blocks.
    let scattered = |facts: &mut Facts| {
        facts.disturbed = Disturbed {
            relays: 1,
            servers: 0,
            relay_count: 1,
            batch: 100,
        };
        let records = facts.wire.clone();
        for (record, offset) in records.iter().cycle().zip(0..40) {
            let mut copy = record.clone();
            (copy.partition, copy.offset) = (record.partition, 10 + offset * 2);
            facts.wire.push(copy);
        }
        for offset in 0..40 {
            let message_id = format!("filler-{offset}");
            let mut fresh = facts.committed[0].clone();
            (fresh.message_id, fresh.account) = (message_id.clone(), 100 + offset);
            facts.committed.push(fresh);
            facts.wire.push(Record {
                partition: i32::from(offset % 6 >= 3),
                offset: 11 + offset * 2,
                message_id,
                digest: 1,
            });
        }
    };
    assert!(broken(scattered).contains(&Rule::Repeated));
}

#[test]
fn changed_bytes_are_seen_in_every_place() {
    assert_eq!(broken(|facts| facts.wire[0].digest = 9), [Rule::Changed]);
    assert_eq!(broken(|facts| facts.applied[0].digest = 9), [Rule::Changed]);
    assert_eq!(broken(|facts| facts.dead[0].digest = 9), [Rule::Changed]);
}

#[test]
fn a_wrong_count_or_letter_is_seen() {
    let wrong = |change: fn(&mut Facts)| assert_eq!(broken(change), [Rule::Misjudged]);
    wrong(|facts| facts.applied[0].retries = 1);
    wrong(|facts| facts.dead[0].retries = 4);
    wrong(|facts| facts.dead[0].reason = None);
    wrong(|facts| facts.dead[0].consumer = None);
    wrong(|facts| facts.dead[0].origin = None);
    wrong(|facts| facts.dead[0].error = Some(String::new()));
    // A letter of a message that should have been applied.
    assert!(
        broken(|facts| {
            let effect = facts.applied.remove(0);
            facts.dead[0].message_id = effect.message_id;
        })
        .contains(&Rule::Misjudged)
    );
}

#[test]
fn what_is_left_and_what_failed_is_seen() {
    assert_eq!(broken(|facts| facts.left.outbox = 1), [Rule::Left]);
    assert_eq!(broken(|facts| facts.left.aside = 1), [Rule::Left]);
    assert_eq!(broken(|facts| facts.left.lag = 1), [Rule::Left]);
    assert_eq!(
        broken(|facts| facts.faults.push("gone".into())),
        [Rule::Fault]
    );
}
