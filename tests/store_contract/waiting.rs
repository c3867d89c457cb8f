//! The waiting room, as cases, and against a simple model in memory.

use std::time::Duration;

use relaybox::Message;
use relaybox::envelope::Outgoing;
use relaybox::store::{Claims, Finished, Line, ReleaseAs, Waiting, WaitingState, WaitingStore};
use relaybox::story::{Origin, Reason, Story};

use super::Harness;

pub const HOUR: Duration = Duration::from_secs(3_600);
pub const NOW: Duration = Duration::ZERO;

pub fn waiting(key: &str, id: &str, failures: u32) -> Waiting {
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

pub async fn claim(room: &dyn WaitingStore) -> Claims {
    let claims = room.claim("c", 1_000, HOUR).await.unwrap();
    assert!(claims.unreadable.is_empty(), "{:?}", claims.unreadable);
    claims
}

pub async fn states(room: &dyn WaitingStore) -> Vec<(String, &'static str)> {
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

pub async fn a_line_whose_first_row_stands_behind_nobody_is_released<H: Harness>()
where
    H::Store: WaitingStore,
{
    let h = H::start().await;
    let store = h.store();
    let room: &dyn WaitingStore = &store;
    for (key, how, parked) in [
        ("k", ReleaseAs::Skip, false),
        ("j", ReleaseAs::Retry, false),
        ("i", ReleaseAs::Park, true),
    ] {
        room.put("c", &waiting(key, "head", 1), true, HOUR)
            .await
            .unwrap();
        for id in ["next", "last"] {
            assert!(room.follow("c", &waiting(key, id, 0)).await.unwrap());
        }
        let line = Line::of("orders", key.as_bytes());
        assert!(!room.release("c", line, how).await.unwrap(), "none is held");
        let gone = "DELETE FROM relaybox_waiting WHERE message_id = 'head'";
        H::autocommit(&store, gone).await;
        assert!(claim(room).await.rows.is_empty());
        assert!(room.release("c", line, how).await.unwrap(), "{how:?}");
        assert!(!room.release("c", line, how).await.unwrap(), "{how:?}");
        for id in ["next", "last"] {
            let claims = claim(room).await;
            assert_eq!(ids(&claims), [id], "{how:?}");
            assert_eq!(claims.rows[0].parked, parked, "{how:?}");
            assert!(room.finish(claims.rows[0].claim).await.unwrap().held);
        }
    }
}
