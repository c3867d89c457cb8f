//! The waiting room, as cases, and against a simple model in memory.

use std::collections::BTreeMap;
use std::time::Duration;

use relaybox::Message;
use relaybox::envelope::Outgoing;
use relaybox::store::{
    Claim, Claims, Finished, Line, ReleaseAs, Waiting, WaitingState, WaitingStore,
};
use relaybox::story::{Origin, Reason, Story};

use super::Harness;

const HOUR: Duration = Duration::from_secs(3_600);
const NOW: Duration = Duration::ZERO;

fn waiting(key: &str, id: &str, failures: u32) -> Waiting {
    let message = Message::new("orders", "T")
        .with_id(id)
        .with_key(key)
        .with_payload(id.to_owned());
    let mut story = Story::default();
    story.retry_count = failures;
    story.consumer = Some("c".into());
    Waiting {
        source: "orders".into(),
        known_as: id.into(),
        letter: Outgoing { message, story },
    }
}

fn ids(claims: &Claims) -> Vec<&str> {
    let rows = claims.rows.iter();
    rows.map(|row| row.letter.message.id.as_str()).collect()
}

async fn claim(room: &dyn WaitingStore) -> Claims {
    let claims = room.claim("c", 1_000, HOUR).await.unwrap();
    assert!(claims.unreadable.is_empty(), "{:?}", claims.unreadable);
    claims
}

async fn states(room: &dyn WaitingStore) -> Vec<(String, &'static str)> {
    let listed = room.list("c", None, 0, 10_000).await.unwrap();
    let told = listed.into_iter();
    told.map(|entry| (entry.id.to_string(), entry.state.unwrap().as_str()))
        .collect()
}

pub async fn what_waits_keeps_every_byte_and_its_story<H: Harness>()
where
    H::Store: WaitingStore,
{
    let h = H::start().await;
    let store = h.store();
    let room: &dyn WaitingStore = &store;
    room.check().await.unwrap();
    let mut message = Message::new("orders", "T\0ype")
        .with_id("m-1")
        .with_key(vec![0, 0xff])
        .with_content_type("a\0b")
        .with_version(-9)
        .with_header("a", "1")
        .with_header("a", vec![0xff, 0]);
    message.headers.push_optional("b", None);
    let origin = Origin {
        topic: "orders".into(),
        partition: Some("3".into()),
        offset: Some("99".into()),
    };
    let at = time::macros::datetime!(2026-01-05 10:00:00.000001 UTC);
    let story = Story::default().failed("c", &origin, "handler", "no stock", at);
    let sent = Waiting {
        source: "orders".into(),
        known_as: "m-1".into(),
        letter: Outgoing { message, story },
    };
    room.put("c", &sent, false, NOW).await.unwrap();
    room.put("other", &sent, true, NOW).await.unwrap();
    let claims = claim(room).await;
    let [row] = &*claims.rows else {
        panic!("{claims:?}");
    };
    assert_eq!(row.letter, sent.letter);
    assert_eq!(
        (&*row.source, row.parked, row.again),
        ("orders", false, false)
    );
    assert!(room.finish(row.claim).await.unwrap().held);
    assert!(room.count("c").await.unwrap().is_empty());
    assert_eq!(room.count("other").await.unwrap(), [(WaitingState::Due, 1)]);
}

pub async fn nothing_is_claimed_before_its_time_and_the_next_time_is_told<H: Harness>()
where
    H::Store: WaitingStore,
{
    let h = H::start().await;
    let store = h.store();
    let room: &dyn WaitingStore = &store;
    assert_eq!(claim(room).await.next_in, None);
    let soon = Duration::from_millis(300);
    room.put("c", &waiting("k", "late", 1), false, HOUR)
        .await
        .unwrap();
    let began = std::time::Instant::now();
    room.put("c", &waiting("k", "soon", 1), false, soon)
        .await
        .unwrap();
    loop {
        let claims = claim(room).await;
        if let [row] = &*claims.rows {
            assert_eq!(row.letter.message.id.as_str(), "soon");
            assert!(began.elapsed() >= soon, "{:?}", began.elapsed());
            assert!(row.late <= began.elapsed());
            break;
        }
        // What is told is how long to wait, at most.
        let next_in = claims.next_in.unwrap();
        assert!(next_in <= soon, "{next_in:?}");
        tokio::time::sleep(next_in.max(Duration::from_millis(1))).await;
    }
    let claims = claim(room).await;
    assert!(claims.rows.is_empty());
    let next_in = claims.next_in.unwrap();
    assert!(next_in <= HOUR && next_in > HOUR / 2, "{next_in:?}");
}

pub async fn a_row_is_one_holders_until_its_lease_ends_and_then_it_is_told_so<H: Harness>()
where
    H::Store: WaitingStore,
{
    let h = H::start().await;
    let store = h.store();
    let room: &dyn WaitingStore = &store;
    for n in 0..40 {
        let one = waiting("k", &format!("m-{n}"), 1);
        room.put("c", &one, false, NOW).await.unwrap();
    }
    let (a, b) = tokio::join!(room.claim("c", 25, HOUR), room.claim("c", 25, HOUR));
    let (a, b) = (a.unwrap(), b.unwrap());
    let mut all: Vec<&str> = ids(&a).into_iter().chain(ids(&b)).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(
        all.len(),
        a.rows.len() + b.rows.len(),
        "none is two members'"
    );
    let rest = claim(room).await;
    assert_eq!(all.len() + rest.rows.len(), 40);

    let first = a.rows[0].claim;
    let kept = room.renew(&[first], NOW).await.unwrap();
    assert_eq!(kept, [first]);
    let again = claim(room).await;
    let [row] = &*again.rows else {
        panic!("{again:?}");
    };
    assert!(row.again, "the first holder ended without a word");
    assert!(room.renew(&[first], HOUR).await.unwrap().is_empty());
    assert_eq!(room.finish(first).await.unwrap(), Finished::default());
    room.give_back(&[first], NOW).await.unwrap();
    assert!(
        claim(room).await.rows.is_empty(),
        "a lost claim gives nothing back"
    );
    room.give_back(&[row.claim], NOW).await.unwrap();
    let given = claim(room).await;
    assert!(!given.rows[0].again, "it was given back in order");
}

pub async fn a_message_that_fails_again_keeps_its_place_and_voids_its_claim<H: Harness>()
where
    H::Store: WaitingStore,
{
    let h = H::start().await;
    let store = h.store();
    let room: &dyn WaitingStore = &store;
    room.put("c", &waiting("k", "m-1", 1), true, NOW)
        .await
        .unwrap();
    assert!(room.follow("c", &waiting("k", "m-2", 0)).await.unwrap());
    assert!(room.follow("c", &waiting("k", "m-2", 0)).await.unwrap());
    assert!(!room.follow("c", &waiting("j", "n-1", 0)).await.unwrap());
    let claims = claim(room).await;
    assert_eq!(ids(&claims), ["m-1"]);
    room.put("c", &waiting("k", "m-1", 2), true, NOW)
        .await
        .unwrap();
    assert!(!room.finish(claims.rows[0].claim).await.unwrap().held);
    // A member that was slower, with what it failed at before.
    room.put("c", &waiting("k", "m-1", 1), true, HOUR)
        .await
        .unwrap();
    room.put("c", &waiting("k", "m-1", 2), true, HOUR)
        .await
        .unwrap();
    let claims = claim(room).await;
    assert_eq!(ids(&claims), ["m-1"]);
    assert_eq!(claims.rows[0].letter.story.retry_count, 2);
    let wanted = [("m-1".to_owned(), "due"), ("m-2".to_owned(), "behind")];
    assert_eq!(states(room).await, wanted);
    let finished = room.finish(claims.rows[0].claim).await.unwrap();
    assert!(finished.held && finished.promoted);
    assert_eq!(ids(&claim(room).await), ["m-2"]);
    let (k, j) = (Line::of("orders", b"k"), Line::of("orders", b"j"));
    assert_eq!(room.occupied("c", &[j, k]).await.unwrap(), [k]);
    assert!(room.occupied("other", &[j, k]).await.unwrap().is_empty());
}

/// Either the end of the last one finds who follows, or the one who follows finds nobody.
pub async fn a_follower_and_the_end_of_its_head_never_miss_each_other<H: Harness>()
where
    H::Store: WaitingStore,
{
    let h = H::start().await;
    let store = h.store();
    let room: &dyn WaitingStore = &store;
    let (mut followed, rounds) = (0, 60);
    for n in 0..rounds {
        let head = waiting("k", &format!("head-{n}"), 1);
        room.put("c", &head, true, NOW).await.unwrap();
        let claims = claim(room).await;
        let next = waiting("k", &format!("next-{n}"), 0);
        let follow = async {
            // Now a little earlier, now a little later than the end.
            for _ in 0..n % 7 {
                tokio::task::yield_now().await;
            }
            room.follow("c", &next).await.unwrap()
        };
        let (finished, follows) = tokio::join!(room.finish(claims.rows[0].claim), follow);
        assert!(finished.unwrap().held);
        let due = claim(room).await;
        if follows {
            followed += 1;
            assert_eq!(ids(&due), [format!("next-{n}")], "round {n}");
            room.finish(due.rows[0].claim).await.unwrap();
        }
        assert!(room.count("c").await.unwrap().is_empty(), "round {n}");
    }
    println!("{followed} of {rounds} followed");
}

pub async fn notes_are_recalled_with_what_is_left_of_the_wait_and_cleaned_up<H: Harness>()
where
    H::Store: WaitingStore,
{
    let h = H::start().await;
    let store = h.store();
    let room: &dyn WaitingStore = &store;
    let (one, other) = (waiting("k", "m-1", 2), waiting("k", "m-2", 1));
    room.note("c", &one, HOUR).await.unwrap();
    room.note("c", &waiting("k", "m-1", 1), NOW).await.unwrap();
    room.note("c", &other, NOW).await.unwrap();
    assert!(claim(room).await.rows.is_empty(), "a note is no message");
    assert!(!room.follow("c", &waiting("k", "m-3", 0)).await.unwrap());
    let asked = [one.note_identity(), waiting("k", "x", 0).note_identity()];
    let noted = room.recall("c", &asked).await.unwrap();
    let [note] = &*noted else {
        panic!("{noted:?}");
    };
    assert_eq!((note.identity, note.story.retry_count), (asked[0], 2));
    assert!(note.due_in > HOUR / 2 && note.due_in <= HOUR);
    assert!(room.recall("other", &asked).await.unwrap().is_empty());
    room.forget("c", &asked[0]).await.unwrap();
    assert!(room.recall("c", &asked).await.unwrap().is_empty());
    assert_eq!(room.clean_up("c", HOUR, 10).await.unwrap(), 0);
    assert_eq!(room.clean_up("c", NOW, 10).await.unwrap(), 1);
    assert!(room.count("c").await.unwrap().is_empty());
}

// ---- A model

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
                if let Some(at) = model.holder(claim) {
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

/// For the reader of a parked one's reason.
pub async fn a_held_line_is_listed_and_counted<H: Harness>()
where
    H::Store: WaitingStore,
{
    let h = H::start().await;
    let store = h.store();
    let room: &dyn WaitingStore = &store;
    let mut dead = waiting("k", "m-1", 3);
    dead.letter.story.last_error = Some("handler: no\0stock".into());
    dead.letter.story.reason = Some(Reason::new(Reason::PERMANENT));
    room.hold("c", &dead, None).await.unwrap();
    room.hold("c", &dead, None).await.unwrap();
    assert!(room.follow("c", &waiting("k", "m-2", 0)).await.unwrap());
    assert!(claim(room).await.rows.is_empty());
    let mut counts = room.count("c").await.unwrap();
    counts.sort_unstable();
    assert_eq!(counts, [(WaitingState::Behind, 1), (WaitingState::Held, 1)]);
    let listed = room
        .list("c", Some(WaitingState::Held), 0, 10)
        .await
        .unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].key.as_deref(), Some(&b"k"[..]));
    assert_eq!(listed[0].retry_count, 3);
    assert!(
        listed[0]
            .last_error
            .as_deref()
            .unwrap()
            .starts_with("handler: no")
    );
    assert!(
        room.list("c", None, listed[0].position, 10)
            .await
            .unwrap()
            .len()
            == 1
    );
}
