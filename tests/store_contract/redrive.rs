//! Redrive: entries that an operator works on, and the book of their leaving.

use std::time::Duration;

use relaybox::Message;
use relaybox::envelope::Outgoing;
use relaybox::store::{
    Arrival, DeadLetterStore, Leaving, LetterFilter, LetterOutcome, NewRun, Note, RedriveStore,
    RunRow, RunState, RunStep,
};
use relaybox::story::{Reason, Story};

use super::{Harness, MINUTE};

const EVERYTHING: (i64, i64) = (0, i64::MAX);
const NOTE: Note<'static> = Note {
    consumer: "billing",
    operator: "ann",
    verb: "discard",
};

fn letter(id: &str) -> Outgoing {
    told(id, "permanent", 0)
}

fn told(id: &str, reason: &str, redrives: u32) -> Outgoing {
    let mut story = Story::default();
    story.consumer = Some("billing".into());
    story.reason = Some(Reason::new(reason));
    story.redrive_count = redrives;
    story.last_error = Some(format!("handler: 100% of {id} wrong"));
    Outgoing {
        message: Message::new("orders", "OrderPlaced")
            .with_id(id)
            .with_key("k")
            .with_payload(id.to_owned()),
        story,
    }
}

async fn found<S: RedriveStore>(store: &S, filter: &LetterFilter) -> Vec<String> {
    let entries = store.entries("billing", filter, EVERYTHING, 100).await;
    let ids = entries.unwrap().into_iter();
    ids.map(|entry| entry.message_id.to_string()).collect()
}

async fn leaving<S: RedriveStore>(store: &S, outcome: LetterOutcome) -> Vec<Leaving> {
    let all = LetterFilter::all();
    let entries = store.entries("billing", &all, EVERYTHING, 100).await;
    let entries = entries.unwrap().into_iter();
    entries
        .map(|entry| entry.leaving(outcome, "because"))
        .collect()
}

async fn planned<S: RedriveStore>(store: &S) -> RunRow {
    let run = NewRun {
        consumer: "billing",
        operator: "ann",
        plan: "{}",
        end: store.last_position().await.unwrap(),
    };
    store.plan(&run).await.unwrap()
}

async fn taken<S: RedriveStore>(store: &S, id: i64, from: RunState) -> Option<RunRow> {
    store.take_run("billing", id, &[from]).await.unwrap()
}

pub async fn each_letter_filter_finds_its_entries_and_lists_go_by_pages<H: Harness>() {
    let harness = H::start().await;
    let store = harness.store();
    let mut other = letter("b");
    other.message.event_type = "Other".into();
    other.message.key = None;
    let mut foreign = letter("z");
    foreign.story.consumer = Some("mail".into());
    for letter in [letter("a"), other, told("c", "crash", 2), foreign] {
        store.put(&letter).await.unwrap();
    }
    let all = || LetterFilter::all();
    let entries = store
        .entries("billing", &all(), EVERYTHING, 100)
        .await
        .unwrap();
    let stored = |n: usize| entries[n].stored_at;
    let cases: [(LetterFilter, &[&str]); 13] = [
        (all(), &["a", "b", "c"]),
        (all().with_reason(Reason::new("crash")), &["c"]),
        (all().with_event_type("Other"), &["b"]),
        (all().with_key("k"), &["a", "c"]),
        (all().with_key(""), &[]),
        (all().with_message_id("b"), &["b"]),
        (all().with_redrives(1, 5), &["c"]),
        (all().with_redrives(0, 0), &["a", "b"]),
        (all().with_error("100% of b"), &["b"]),
        (all().with_error("100_"), &[]),
        (all().with_position(entries[1].position), &["b"]),
        (all().with_stored_from(stored(0)), &["a", "b", "c"]),
        (all().with_stored_until(stored(0)), &[]),
    ];
    for (filter, expected) in cases {
        assert_eq!(found(&store, &filter).await, expected, "{filter:?}");
    }
    let page = |after, last| {
        let store = store.clone();
        async move {
            store
                .entries("billing", &all(), (after, last), 1)
                .await
                .unwrap()
        }
    };
    let first = page(0, i64::MAX).await.remove(0);
    assert_eq!(first.message_id.as_str(), "a");
    assert_eq!(first.digest, letter("a").message.digest());
    assert_eq!(first.story, letter("a").story);
    let second = page(first.position, i64::MAX).await.remove(0);
    assert_eq!(second.message_id.as_str(), "b");
    assert!(page(first.position, first.position).await.is_empty());
    assert_eq!(
        store.last_position().await.unwrap(),
        entries[2].position + 1
    );
}

pub async fn letters_are_read_whole_and_bounded_in_bytes<H: Harness>() {
    let harness = H::start().await;
    let store = harness.store();
    for id in ["a", "b", "c"] {
        store.put(&letter(id)).await.unwrap();
    }
    let size = usize::try_from(
        store
            .entries("billing", &LetterFilter::all(), EVERYTHING, 1)
            .await
            .unwrap()[0]
            .size,
    )
    .unwrap();
    for (bytes_max, expected) in [
        (1, 1),
        (size, 1),
        (2 * size, 2),
        (3 * size - 1, 2),
        (3 * size, 3),
    ] {
        let read = store
            .letters("billing", &LetterFilter::all(), EVERYTHING, 10, bytes_max)
            .await
            .unwrap();
        assert_eq!(read.len(), expected, "{bytes_max}");
    }
    let read = store
        .letters("billing", &LetterFilter::all(), EVERYTHING, 2, 1 << 30)
        .await
        .unwrap();
    assert_eq!(read.len(), 2);
    assert_eq!(read[1].message.as_ref().unwrap(), &{
        let mut message = letter("b").message;
        message.occurred_at = read[1].message.as_ref().unwrap().occurred_at;
        message
    });
}

pub async fn an_entry_that_cannot_be_read_is_listed_and_stops_no_other<H: Harness>() {
    let harness = H::start().await;
    let store = harness.store();
    for id in ["a", "b", "c"] {
        store.put(&letter(id)).await.unwrap();
    }
    let spoil = "UPDATE relaybox_dead_letter SET headers = 'no json' WHERE message_id = 'b'";
    H::autocommit(&store, spoil).await;
    assert_eq!(found(&store, &LetterFilter::all()).await, ["a", "b", "c"]);
    let read = store
        .letters("billing", &LetterFilter::all(), EVERYTHING, 10, 1 << 30)
        .await
        .unwrap();
    let readable: Vec<bool> = read.iter().map(|letter| letter.message.is_ok()).collect();
    assert_eq!(readable, [true, false, true]);
}

pub async fn a_letter_that_left_is_not_taken_in_again<H: Harness>() {
    let harness = H::start().await;
    let store = harness.store();
    let take_in = |letter: Outgoing| {
        let store = store.clone();
        async move { store.take_in(&letter).await.unwrap() }
    };
    assert_eq!(take_in(letter("a")).await, Arrival::Stored);
    assert_eq!(take_in(letter("a")).await, Arrival::Known);
    let all = leaving(&store, LetterOutcome::Discarded).await;
    assert_eq!(store.take_out(&all, &NOTE).await.unwrap(), 1);
    assert_eq!(
        store.take_out(&all, &NOTE).await.unwrap(),
        0,
        "it left once"
    );
    assert_eq!(take_in(letter("a")).await, Arrival::Left);
    // After another redrive, with other bytes or of another consumer it is another letter.
    assert_eq!(take_in(told("a", "permanent", 1)).await, Arrival::Stored);
    let mut changed = letter("a");
    changed.message.payload = None;
    assert_eq!(take_in(changed).await, Arrival::Stored);
    let mut foreign = letter("a");
    foreign.story.consumer = Some("mail".into());
    assert_eq!(take_in(foreign).await, Arrival::Stored);
    let audit = store.audit("billing", 0, 10).await.unwrap();
    assert_eq!(audit.len(), 1);
    assert_eq!(
        (audit[0].operator.as_str(), audit[0].outcome.as_str()),
        ("ann", "discarded")
    );
    assert_eq!((audit[0].run, audit[0].detail.as_str()), (None, "because"));
    // What stayed is no reason.
    let stays = leaving(&store, LetterOutcome::Rejected).await;
    let run = planned(&store).await;
    let run = taken(&store, run.id, RunState::Planned).await.unwrap();
    let step = RunStep {
        operator: "ann".into(),
        leaving: stays,
        ..RunStep::default()
    };
    assert!(store.settle_run(&run, &step).await.unwrap());
    assert_eq!(take_in(told("a", "permanent", 1)).await, Arrival::Known);
}

pub async fn a_settlement_is_whole_fenced_and_harmless_to_repeat<H: Harness>() {
    let harness = H::start().await;
    let store = harness.store();
    for id in ["a", "b", "c"] {
        store.put(&letter(id)).await.unwrap();
    }
    let run = planned(&store).await;
    assert_eq!(run.state, RunState::Planned);
    assert!(taken(&store, run.id, RunState::Running).await.is_none());
    let first = taken(&store, run.id, RunState::Planned).await.unwrap();
    let mut all = leaving(&store, LetterOutcome::Sent).await;
    all[1].outcome = LetterOutcome::Rejected;
    let step = RunStep {
        operator: "bea".into(),
        cursor: all[1].position,
        leaving: all[..2].to_vec(),
        sent: 1,
        rejected: 1,
        ..RunStep::default()
    };
    for _ in 0..2 {
        assert!(store.settle_run(&first, &step).await.unwrap());
    }
    assert_eq!(found(&store, &LetterFilter::all()).await, ["b", "c"]);
    let audit = store.audit("billing", 0, 10).await.unwrap();
    let outcomes: Vec<&str> = audit.iter().map(|entry| entry.outcome.as_str()).collect();
    assert_eq!(outcomes, ["sent", "rejected"]);
    assert_eq!(
        (audit[0].run, audit[0].operator.as_str()),
        (Some(run.id), "bea")
    );

    let second = taken(&store, run.id, RunState::Running).await.unwrap();
    assert!(second.token > first.token);
    assert_eq!(
        (second.cursor, second.sent, second.rejected),
        (all[1].position, 1, 1)
    );
    let late = RunStep {
        cursor: all[2].position,
        leaving: all[2..].to_vec(),
        sent: 2,
        ..step.clone()
    };
    assert!(
        !store.settle_run(&first, &late).await.unwrap(),
        "it has lost the run"
    );
    assert!(!store.end_run(&first, RunState::Done, None).await.unwrap());
    assert_eq!(found(&store, &LetterFilter::all()).await, ["b", "c"]);
    assert_eq!(store.audit("billing", 0, 10).await.unwrap().len(), 2);
    assert!(store.settle_run(&second, &late).await.unwrap());
    assert!(
        store
            .end_run(&second, RunState::Stopped, Some("a\0b"))
            .await
            .unwrap()
    );
    let stopped = &store.runs("billing", i64::MAX, 10).await.unwrap()[0];
    assert_eq!((stopped.state, stopped.sent), (RunState::Stopped, 2));
    assert!(stopped.error.is_some());
    assert!(!store.settle_run(&second, &late).await.unwrap(), "it rests");

    let third = taken(&store, run.id, RunState::Stopped).await.unwrap();
    assert!(store.cancel_run("billing", run.id, "enough").await.unwrap());
    assert!(!store.settle_run(&third, &late).await.unwrap());
    assert!(!store.cancel_run("billing", run.id, "enough").await.unwrap());
    assert!(store.find_run("mail", run.id).await.unwrap().is_none());
    let found = store.find_run("billing", run.id).await.unwrap().unwrap();
    assert_eq!(found.state, RunState::Cancelled);
}

pub async fn what_a_run_may_have_sent_is_nobodys_to_change<H: Harness>() {
    let harness = H::start().await;
    let store = harness.store();
    for id in ["a", "b", "c", "d"] {
        store.put(&letter(id)).await.unwrap();
    }
    let all = leaving(&store, LetterOutcome::Discarded).await;
    let at = |n: usize| all[n].position;
    let run = planned(&store).await;
    let run = taken(&store, run.id, RunState::Planned).await.unwrap();
    // What left before the run took it in hand is not sent.
    assert_eq!(store.take_out(&all[2..3], &NOTE).await.unwrap(), 1);
    let there = store
        .take_in_hand(&run, &[at(0), at(1), at(2)])
        .await
        .unwrap();
    assert_eq!(there, Some(vec![at(0), at(1)]));
    let changed = |n: usize| {
        let (store, old) = (store.clone(), all[n].clone());
        let new = letter(&format!("x-{n}"));
        async move { store.replace(&old, &new, &NOTE).await.unwrap() }
    };
    assert_eq!(store.take_out(&all[..2], &NOTE).await.unwrap(), 0);
    assert_eq!((changed(0).await, changed(1).await), (None, None));
    assert!(changed(3).await.is_some(), "it is in nobody's hand");
    let holder = |n: usize| {
        let (store, position) = (store.clone(), at(n));
        async move { store.may_have_sent("billing", position).await.unwrap() }
    };
    assert_eq!((holder(1).await, holder(3).await), (Some(run.id), None));
    assert_eq!(store.may_have_sent("mail", at(1)).await.unwrap(), None);
    let step = RunStep {
        operator: "ann".into(),
        cursor: at(0),
        in_hand: vec![at(1)],
        ..RunStep::default()
    };
    assert!(store.settle_run(&run, &step).await.unwrap());
    assert_eq!((holder(0).await, holder(1).await), (None, Some(run.id)));
    let known = store.find_run("billing", run.id).await.unwrap().unwrap();
    assert_eq!((known.cursor, known.in_hand), (at(0), vec![at(1)]));
    assert!(store.cancel_run("billing", run.id, "x").await.unwrap());
    assert_eq!(
        store.take_in_hand(&run, &[at(1)]).await.unwrap(),
        None,
        "fenced"
    );
    assert_eq!(
        holder(1).await,
        Some(run.id),
        "nobody knows more than before"
    );
    assert!(changed(0).await.is_some());

    // Once it is known that nothing is on its way, it is free.
    let second = planned(&store).await;
    let second = taken(&store, second.id, RunState::Planned).await.unwrap();
    let last = leaving(&store, LetterOutcome::Discarded)
        .await
        .pop()
        .unwrap();
    let there = store.take_in_hand(&second, &[last.position]).await.unwrap();
    assert_eq!(there, Some(vec![last.position]));
    let last = [last];
    assert_eq!(store.take_out(&last, &NOTE).await.unwrap(), 0);
    let step = RunStep {
        cursor: last[0].position,
        in_hand: Vec::new(),
        ..step
    };
    assert!(store.settle_run(&second, &step).await.unwrap());
    assert_eq!(store.take_out(&last, &NOTE).await.unwrap(), 1);
}

pub async fn two_runs_at_once_each_take_an_entry_out_once<H: Harness>() {
    let harness = H::start().await;
    let store = harness.store();
    for n in 0..50 {
        store.put(&letter(&format!("m-{n}"))).await.unwrap();
    }
    let all = leaving(&store, LetterOutcome::Sent).await;
    let mut tasks = Vec::new();
    for _ in 0..2 {
        let run = planned(&store).await;
        let run = taken(&store, run.id, RunState::Planned).await.unwrap();
        let (store, all) = (store.clone(), all.clone());
        tasks.push(tokio::spawn(async move {
            for chunk in all.chunks(5) {
                let step = RunStep {
                    operator: "ann".into(),
                    cursor: chunk[4].position,
                    leaving: chunk.to_vec(),
                    ..RunStep::default()
                };
                assert!(store.settle_run(&run, &step).await.unwrap());
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(store.count("billing").await.unwrap(), 0);
    // Both sent each, and both say so.
    assert_eq!(store.audit("billing", 0, 200).await.unwrap().len(), 100);
}

pub async fn an_entry_is_replaced_or_entered_together_with_its_audit<H: Harness>() {
    let harness = H::start().await;
    let store = harness.store();
    store.put(&letter("a")).await.unwrap();
    let old = leaving(&store, LetterOutcome::Replaced).await.remove(0);
    let edit = Note {
        verb: "edit",
        ..NOTE
    };
    let position = store.replace(&old, &letter("b"), &edit).await.unwrap();
    assert!(position.is_some_and(|position| position > old.position));
    assert_eq!(
        store.replace(&old, &letter("c"), &edit).await.unwrap(),
        None
    );
    assert_eq!(found(&store, &LetterFilter::all()).await, ["b"]);
    let told = Leaving {
        outcome: LetterOutcome::Entered,
        ..old.clone()
    };
    let entered = store.enter(&letter("d"), &told, &edit).await.unwrap();
    assert!(Some(entered) > position);
    // As after a lost answer.
    let again = store.enter(&letter("d"), &told, &edit).await.unwrap();
    assert_eq!(again, entered);
    let audit = store.audit("billing", 0, 10).await.unwrap();
    let outcomes: Vec<&str> = audit.iter().map(|entry| entry.outcome.as_str()).collect();
    assert_eq!(outcomes, ["replaced", "entered"]);
    assert_eq!(audit[0].message_id.as_str(), "a");
    // Another consumer's entry is nobody else's to touch.
    let foreign = Note {
        consumer: "mail",
        ..NOTE
    };
    let all = leaving(&store, LetterOutcome::Discarded).await;
    assert_eq!(store.take_out(&all, &foreign).await.unwrap(), 0);
    assert_eq!(store.count("billing").await.unwrap(), 2);
}

pub async fn clean_up_takes_old_audit_and_ended_runs_in_bounded_steps<H: Harness>() {
    let harness = H::start().await;
    let store = harness.store();
    for n in 0..5 {
        store.put(&letter(&format!("m-{n}"))).await.unwrap();
    }
    let all = leaving(&store, LetterOutcome::Discarded).await;
    store.take_out(&all, &NOTE).await.unwrap();
    let ended = planned(&store).await;
    let ended = taken(&store, ended.id, RunState::Planned).await.unwrap();
    assert!(store.end_run(&ended, RunState::Done, None).await.unwrap());
    let open = planned(&store).await;
    let clean = |age: Duration| {
        let store = store.clone();
        async move { store.clean_up_audit("billing", age, 2).await.unwrap() }
    };
    assert_eq!(clean(MINUTE).await, 0);
    assert_eq!(
        store
            .clean_up_audit("mail", Duration::ZERO, 9)
            .await
            .unwrap(),
        0
    );
    assert_eq!(
        (clean(Duration::ZERO).await, clean(Duration::ZERO).await),
        (2, 2)
    );
    assert_eq!(
        (clean(Duration::ZERO).await, clean(Duration::ZERO).await),
        (1, 0)
    );
    let left = store.runs("billing", i64::MAX, 10).await.unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].id, open.id);
}
