//! Inbox, dead letters and the check of the tables.

use std::future::Future;
use std::task::Poll;
use std::time::Duration;

use relaybox::envelope::Outgoing;
use relaybox::store::{DeadLetterStore, InboxStore, OutboxStore, Recorded};
use relaybox::story::{Origin, Reason, Story};
use relaybox::{ErrorKind, Message};
use time::macros::datetime;

use super::*;

pub async fn an_id_is_new_once_per_consumer<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let keys = ["m-1"];
    for (consumer, expected) in [
        ("billing", Recorded::First),
        ("billing", Recorded::Duplicate),
        ("mail", Recorded::First),
        ("Billing", Recorded::First),
    ] {
        let mut transaction = store.begin().await.unwrap();
        let recorded = store
            .record(&mut transaction, consumer, &keys)
            .await
            .unwrap();
        assert_eq!(recorded, [expected], "{consumer}");
        store.commit(transaction).await.unwrap();
    }
    let mut transaction = store.begin().await.unwrap();
    let recorded = store.record(&mut transaction, "c", &keys).await.unwrap();
    assert_eq!(recorded, [Recorded::First]);
    store.rollback(transaction).await.unwrap();
    let mut transaction = store.begin().await.unwrap();
    let recorded = store.record(&mut transaction, "c", &keys).await.unwrap();
    assert_eq!(recorded, [Recorded::First]);
}

pub async fn a_concurrent_duplicate_waits_for_the_end_of_the_first<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let keys = ["m-1"];
    for (commits, expected) in [(false, Recorded::First), (true, Recorded::Duplicate)] {
        let mut first = store.begin().await.unwrap();
        store.record(&mut first, "c", &keys).await.unwrap();
        let second = async {
            let mut second = store.begin().await.unwrap();
            let recorded = store.record(&mut second, "c", &keys).await.unwrap();
            store.rollback(second).await.unwrap();
            recorded
        };
        let end = async {
            h.blocked().await;
            if commits {
                store.commit(first).await.unwrap();
            } else {
                store.rollback(first).await.unwrap();
            }
        };
        let (recorded, ()) = tokio::join!(second, end);
        assert_eq!(recorded, [expected]);
    }
}

pub async fn the_wait_for_a_concurrent_duplicate_is_bounded<H: Harness>() {
    let h = H::start().await;
    let store = h.impatient().await;
    let keys = ["m-1"];
    let mut first = store.begin().await.unwrap();
    store.record(&mut first, "c", &keys).await.unwrap();
    let second = async {
        let mut second = store.begin().await?;
        store.record(&mut second, "c", &keys).await
    };
    let error = second.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error:?}");
    assert!(error.is_transient());
    store.commit(first).await.unwrap();
}

pub async fn a_dropped_transaction_leaves_nothing_behind<H: Harness>() {
    let h = H::start().await;
    let store = h.single().await;
    for _ in 0..3 {
        let mut transaction = store.begin().await.unwrap();
        let keys = ["m-1"];
        let recorded = store.record(&mut transaction, "c", &keys).await.unwrap();
        assert_eq!(recorded, [Recorded::First]);
        let connection = H::Store::connection(&mut transaction);
        assert!(H::execute(connection, "INSERT INTO work (id) VALUES (1)").await);
        drop(transaction);
    }
    // The pool's connection is outside any transaction: what is committed now is there for another session.
    enqueue::<H>(&store, &[keyed("k", "1")]).await;
    assert_eq!(pending(&h.store()).await.rows.len(), 1);
}

pub async fn a_cancelled_begin_poisons_no_connection<H: Harness>() {
    let h = H::start().await;
    let store = h.single().await;
    // Given up after each possible number of wake-ups: somewhere in between, BEGIN is on its way.
    for polls_max in 1..30 {
        let mut begin = std::pin::pin!(store.begin());
        let mut polls = 0;
        std::future::poll_fn(|cx| {
            polls += 1;
            let done = begin.as_mut().poll(cx).is_ready();
            if done || polls == polls_max {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
    }
    // A connection left inside a transaction would not show this to others.
    H::autocommit(&store, "INSERT INTO work (id) VALUES (1)").await;
    let store = h.store();
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    assert_eq!(H::number(connection, "SELECT count(*) FROM work").await, 1);
}

pub async fn a_nested_transaction_is_a_savepoint<H: Harness>() {
    let h = H::start().await;
    let store = h.single().await;
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    H::nested(connection, "INSERT INTO work (id) VALUES (1)").await;
    store.rollback(transaction).await.unwrap();

    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    H::nested(connection, "INSERT INTO work (id) VALUES (2)").await;
    store.commit(transaction).await.unwrap();

    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    assert_eq!(H::number(connection, "SELECT sum(id) FROM work").await, 2);
}

pub async fn a_transaction_ended_inside_is_never_reported_as_committed<H: Harness>() {
    let h = H::start().await;
    let store = h.single().await;
    let mut transaction = store.begin().await.unwrap();
    store.record(&mut transaction, "c", &["m-1"]).await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    assert!(H::execute(connection, "ROLLBACK").await);
    let error = store.commit(transaction).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Handler, "{error:?}");
    assert!(!error.is_transient());
    enqueue::<H>(&store, &[keyed("k", "1")]).await;
    assert_eq!(pending(&h.store()).await.rows.len(), 1);
}

pub async fn clean_up_deletes_old_records_in_bounded_steps<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let mut transaction = store.begin().await.unwrap();
    for n in 0..25 {
        let key = n.to_string();
        store.record(&mut transaction, "c", &[&key]).await.unwrap();
    }
    // Another one on the same table may have to remember longer.
    let other = ["0"];
    store.record(&mut transaction, "d", &other).await.unwrap();
    store.commit(transaction).await.unwrap();
    for consumer in ["c", "d"] {
        store.note_start(consumer, "m-1", "one").await.unwrap();
    }
    assert_eq!(store.clean_up("c", MINUTE, 10).await.unwrap(), 0);
    assert!(store.note_start("c", "m-1", "other").await.unwrap());
    for deleted in [10, 10, 5, 0] {
        assert_eq!(
            store.clean_up("c", Duration::ZERO, 10).await.unwrap(),
            deleted
        );
    }
    assert!(
        !store.note_start("c", "m-1", "other").await.unwrap(),
        "it went too"
    );
    assert_eq!(store.clean_up("d", Duration::MAX, 10).await.unwrap(), 0);
    assert!(store.note_start("d", "m-1", "other").await.unwrap());
    let mut transaction = store.begin().await.unwrap();
    let found = store.record(&mut transaction, "d", &other).await.unwrap();
    assert_eq!(found, [Recorded::Duplicate]);
    store.rollback(transaction).await.unwrap();
}

pub async fn each_key_of_a_batch_is_new_once<H: Harness>() {
    use Recorded::{Duplicate, First};
    let h = H::start().await;
    let store = h.store();
    for (keys, expected) in [
        (
            &["b", "a", "b", "\"c\\"][..],
            &[First, First, Duplicate, First][..],
        ),
        (&["d", "a"], &[First, Duplicate]),
        (&["d"], &[Duplicate]),
        (&[], &[]),
        (&["a", "d"], &[Duplicate, Duplicate]),
    ] {
        let mut transaction = store.begin().await.unwrap();
        let recorded = store.record(&mut transaction, "c", keys).await.unwrap();
        assert_eq!(recorded, expected, "{keys:?}");
        store.commit(transaction).await.unwrap();
    }
    assert!(store.is_recorded("c", "\"c\\").await.unwrap());
    assert!(!store.is_recorded("d", "a").await.unwrap());
    assert!(!store.is_recorded("c", "e").await.unwrap());
}

pub async fn batches_with_the_same_keys_in_any_order_never_block_each_other_for_good<H: Harness>() {
    let h = H::start().await;
    let names: Vec<String> = (0..50).map(|n| format!("m-{n:02}")).collect();
    let there: Vec<&str> = names.iter().map(String::as_str).collect();
    let back: Vec<&str> = there.iter().rev().copied().collect();
    for round in 0..10 {
        let consumer = &*format!("c-{round}");
        let record = async |keys: &[&str]| {
            let store = h.store();
            let mut transaction = store.begin().await.unwrap();
            let recorded = store.record(&mut transaction, consumer, keys).await;
            let recorded = recorded.unwrap();
            store.commit(transaction).await.unwrap();
            recorded.iter().filter(|r| **r == Recorded::First).count()
        };
        let (one, other) = tokio::join!(record(&there), record(&back));
        assert_eq!(one + other, 50, "{one} {other}");
    }
}

pub async fn a_start_of_another_run_is_told_until_it_is_forgotten<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    for (consumer, key, run, others) in [
        ("c", "m-1", "one", false),
        ("c", "m-1", "one", false),
        ("c", "m-1", "two", true),
        ("c", "m-1", "two", true),
        ("c", "m-1", "one", false),
        ("c", "m-2", "two", false),
        ("d", "m-1", "two", false),
    ] {
        let told = store.note_start(consumer, key, run).await.unwrap();
        assert_eq!(told, others, "{consumer} {key} {run}");
    }
    store.forget_start("c", "m-1").await.unwrap();
    store.forget_start("c", "m-1").await.unwrap();
    assert!(!store.note_start("c", "m-1", "two").await.unwrap());
    assert!(store.note_start("c", "m-1", "one").await.unwrap());
    assert!(store.note_start("d", "m-1", "one").await.unwrap());
}

// Dead letters

pub async fn dead_letters_keep_bytes_and_story<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let at = datetime!(2026-01-05 10:00:00.000001 UTC);
    let origin = Origin {
        topic: "orders".into(),
        partition: Some("3".into()),
        offset: None,
    };
    let mut message = Message::new("orders", "a\0b")
        .with_key([0, 0xff])
        .with_payload(vec![0, 0xff])
        .with_trace("00-aa", None)
        .with_header("tracestate", "user's")
        .with_header("a", vec![0xff]);
    message.headers.push_optional("a", None);
    let mut story = Story::default()
        .failed("billing", &origin, "handler", "no stock", at)
        .dead(Reason::new(Reason::PERMANENT));
    story.owner = Some("team-billing".into());
    story.note = Some("see the runbook".into());
    let letter = Outgoing { message, story };
    store.put(&letter).await.unwrap();
    store.put(&letter).await.unwrap();
    let mut redriven = letter.clone();
    redriven.story.redrive_count = 1;
    redriven.story.last_error = Some("text with \0".into());
    store.put(&redriven).await.unwrap();
    let bare = Outgoing::from(Message::new("d", ""));
    store.put(&bare).await.unwrap();
    store.put(&bare).await.unwrap();

    assert_eq!(store.count("billing").await.unwrap(), 2);
    assert_eq!(store.count("").await.unwrap(), 1);
    assert_eq!(store.list("", 0, 10).await.unwrap()[0].letter, bare);
    let listed = store.list("billing", 0, 1).await.unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].letter, letter);
    let listed = store.list("billing", listed[0].position, 10).await.unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].letter.story.redrive_count, 1);
    assert_eq!(
        listed[0].letter.story.last_error.as_deref(),
        Some("text with \u{fffd}")
    );
    let position = listed[0].position;
    assert!(store.remove(position).await.unwrap());
    assert!(!store.remove(position).await.unwrap());
    assert_eq!(store.count("billing").await.unwrap(), 1);
}

/// Senders repeat ids, and the inbox may remember by another key: neither message may go.
pub async fn two_messages_of_one_id_are_two_dead_letters<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let message = |kind: &str| Message::new("orders", kind).with_id("m-1");
    let all = [
        message("T").with_key("a").with_payload("bc"),
        message("T").with_key("ab").with_payload("c"),
        message("T").with_payload(""),
        message("T"),
        message("U"),
    ];
    let mut letters = all.map(Outgoing::from);
    for letter in &letters {
        store.put(letter).await.unwrap();
    }
    // The same once more: another failure of it, and a header that it got on its way.
    for letter in &mut letters {
        letter.story.last_error = Some("later".into());
        letter.message.headers.push("via", "proxy");
        store.put(letter).await.unwrap();
    }
    assert_eq!(store.count("").await.unwrap(), 5);
    let listed = store.list("", 0, 10).await.unwrap();
    for (listed, letter) in listed.iter().zip(&letters) {
        let digest = listed.letter.message.digest();
        assert_eq!(digest, letter.message.digest());
        assert_eq!(listed.letter.story.last_error, None, "the first is kept");
    }
}

pub async fn checks_pass_on_migrated_tables<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    OutboxStore::check(&store).await.unwrap();
    InboxStore::check(&store).await.unwrap();
}
