//! The waiting room against a simple model in memory.

use std::collections::BTreeMap;

use relaybox::store::{Claim, Finished, Line, ReleaseAs, WaitingStore};

use super::Harness;
use super::waiting::{HOUR, NOW, claim, states, waiting};

#[derive(Debug, Clone)]
struct Row {
    id: String,
    key: String,
    lined: bool,
    state: &'static str,
    /// Due, where its state says so.
    now: bool,
    claim: Option<Claim>,
    failures: u32,
    park_to: Option<usize>,
}

/// Rows by their order of arrival.
#[derive(Debug, Default)]
struct Model {
    rows: BTreeMap<usize, Row>,
    next: usize,
}

impl Model {
    fn line<'a>(&'a self, key: &'a str) -> impl DoubleEndedIterator<Item = usize> + 'a {
        let in_line = move |(_, row): &(&usize, &Row)| row.lined && row.key == key;
        self.rows.iter().filter(in_line).map(|(at, _)| *at)
    }

    fn find(&self, id: &str) -> Option<usize> {
        let found = self.rows.iter().find(|(_, row)| row.id == id);
        found.map(|(at, _)| *at)
    }

    fn add(
        &mut self,
        key: &str,
        id: &str,
        failures: u32,
        lined: bool,
        state: &'static str,
        now: bool,
    ) {
        let row = Row {
            id: id.into(),
            key: key.into(),
            lined,
            state,
            now,
            claim: None,
            failures,
            park_to: None,
        };
        self.rows.insert(self.next, row);
        self.next += 1;
    }

    fn put(&mut self, key: &str, id: &str, failures: u32, lined: bool, now: bool) {
        if let Some(at) = self.find(id) {
            let row = self.rows.get_mut(&at).unwrap();
            if row.failures < failures {
                row.failures = failures;
                row.claim = None;
                row.now = now;
            }
            return;
        }
        let behind = lined && self.line(key).next().is_some();
        let state = if behind { "behind" } else { "due" };
        self.add(key, id, failures, lined, state, now);
    }

    fn follow(&mut self, key: &str, id: &str) -> bool {
        let occupied = self.line(key).next().is_some();
        if occupied && self.find(id).is_none() {
            self.add(key, id, 0, true, "behind", true);
        }
        occupied
    }

    fn holder(&self, claim: Claim) -> Option<usize> {
        let held = |row: &Row| row.state == "due" && row.claim == Some(claim);
        let found = self.rows.iter().find(|(_, row)| held(row));
        found.map(|(at, _)| *at)
    }

    fn remove(&mut self, at: usize, from: usize, park_to: Option<usize>) -> bool {
        let row = self.rows.remove(&at).unwrap();
        if !row.lined {
            return false;
        }
        let next = self.line(&row.key).find(|next| *next >= from);
        let Some(next) = next.filter(|next| self.rows[next].state == "behind") else {
            return false;
        };
        let row = self.rows.get_mut(&next).unwrap();
        (row.state, row.now, row.claim) = ("due", true, None);
        row.park_to = park_to.filter(|last| *last >= next);
        true
    }
}

/// Random steps, the same in the room and in the model, which must agree after each.
pub async fn the_room_does_as_a_simple_model_says<H: Harness>()
where
    H::Store: WaitingStore,
{
    let seed = std::env::var("SEED").map_or_else(|_| fastrand::u64(..), |s| s.parse().unwrap());
    println!("SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let h = H::start().await;
    let store = h.store();
    let room: &dyn WaitingStore = &store;
    let mut model = Model::default();
    // Also those that are void by now.
    let mut claims: Vec<Claim> = Vec::new();
    for step in 0..400 {
        let key = ["k", "j", "i"][random.usize(0..3)];
        let id = format!("{key}-{}", random.u8(0..6));
        let failures = random.u32(0..4);
        let any = (!claims.is_empty()).then(|| claims[random.usize(0..claims.len())]);
        let did = match (random.u8(0..10), any) {
            (0..=2, _) => {
                // Only keys of one line: whether a row stands in one never changes.
                let (lined, now) = (key != "i", random.u8(0..4) > 0);
                let delay = if now { NOW } else { HOUR };
                let one = waiting(key, &id, failures);
                room.put("c", &one, lined, delay).await.unwrap();
                model.put(key, &id, failures, lined, now);
                format!("put {id} {failures} {now}")
            }
            (3..=4, _) => {
                let follows = room.follow("c", &waiting(key, &id, 0)).await.unwrap();
                assert_eq!(follows, model.follow(key, &id), "SEED={seed} step {step}");
                format!("follow {id}")
            }
            (5..=6, _) => {
                let claimed = claim(room).await;
                let mut wanted: Vec<(String, u32, bool)> = Vec::new();
                for (at, row) in &mut model.rows {
                    if row.state != "due" || !row.now || row.claim.is_some() {
                        continue;
                    }
                    let parked = row.park_to.is_some_and(|last| last >= *at);
                    wanted.push((row.id.clone(), row.failures, parked));
                    let found = claimed.rows.iter();
                    let mut found = found.filter(|c| c.letter.message.id.as_str() == row.id);
                    row.claim = found.next().map(|found| found.claim);
                }
                let told = claimed.rows.iter().map(|row| {
                    let id = row.letter.message.id.to_string();
                    (id, row.letter.story.retry_count, row.parked)
                });
                let mut told: Vec<_> = told.collect();
                told.sort();
                wanted.sort();
                assert_eq!(told, wanted, "SEED={seed} step {step}");
                claims.extend(claimed.rows.iter().map(|row| row.claim));
                "claim".to_owned()
            }
            (7, Some(claim)) => {
                let finished = room.finish(claim).await.unwrap();
                let holder = model.holder(claim);
                let promoted = holder.is_some_and(|at| {
                    let park_to = model.rows[&at].park_to;
                    model.remove(at, at, park_to)
                });
                let held = holder.is_some();
                assert_eq!(
                    finished,
                    Finished { held, promoted },
                    "SEED={seed} step {step}"
                );
                "finish".to_owned()
            }
            (8, Some(claim)) if random.bool() => {
                room.give_back(&[claim], NOW).await.unwrap();
                if let Some(at) = model.holder(claim) {
                    let row = model.rows.get_mut(&at).unwrap();
                    (row.claim, row.now) = (None, true);
                }
                "give back".to_owned()
            }
            (8, Some(claim)) => {
                let held = room.park(claim).await.unwrap();
                let holder = model.holder(claim);
                assert_eq!(held, holder.is_some(), "SEED={seed} step {step}");
                if let Some(at) = holder {
                    let key = model.rows[&at].key.clone();
                    let last = model.line(&key).next_back();
                    model.rows.get_mut(&at).unwrap().park_to = last;
                }
                "park".to_owned()
            }
            (9, Some(claim)) if random.bool() => {
                let one = waiting(key, &id, failures);
                room.hold("c", &one, Some(claim)).await.unwrap();
                let in_line = |at: &usize| model.rows[at].lined;
                if let Some(at) = model.holder(claim).filter(in_line) {
                    let row = model.rows.get_mut(&at).unwrap();
                    (row.state, row.claim, row.failures) = ("held", None, failures);
                }
                "hold".to_owned()
            }
            (9, _) => {
                let how = [ReleaseAs::Skip, ReleaseAs::Park, ReleaseAs::Retry][random.usize(0..3)];
                let line = Line::of("orders", key.as_bytes());
                let released = room.release("c", line, how).await.unwrap();
                let last = model.line(key).next_back();
                let held = model.line(key).find(|at| model.rows[at].state == "held");
                assert_eq!(released, held.is_some(), "SEED={seed} step {step}");
                match (held, how) {
                    (None, _) => {}
                    (Some(at), ReleaseAs::Retry) => {
                        let row = model.rows.get_mut(&at).unwrap();
                        (row.state, row.now, row.claim, row.failures) = ("due", true, None, 0);
                    }
                    (Some(at), how) => {
                        let park_to = last.filter(|_| how == ReleaseAs::Park);
                        model.remove(at, 0, park_to);
                    }
                }
                format!("release {key} {how:?}")
            }
            _ => continue,
        };
        let wanted = model.rows.values();
        let wanted: Vec<_> = wanted.map(|row| (row.id.clone(), row.state)).collect();
        assert_eq!(states(room).await, wanted, "SEED={seed} step {step}: {did}");
    }
}
