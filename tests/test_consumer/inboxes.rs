//! The inboxes for tests by themselves.

use std::time::Duration;

use relaybox::ErrorKind;
use relaybox::store::{InboxStore, NoInbox, Recorded};
use relaybox::testing::{FaultyInbox, InboxCall, InboxFault, MemoryInbox};

use super::SECOND;

#[tokio::test]
async fn faults_are_counted_for_each_call_and_happen_once() {
    let inbox = FaultyInbox::new(MemoryInbox::new(()))
        .with_fault(InboxCall::Begin, 2, InboxFault::Fail(ErrorKind::Busy))
        .with_fault(InboxCall::Commit, 1, InboxFault::LoseAnswer);
    let mut transaction = inbox.begin().await.unwrap();
    let recorded = inbox.record(&mut transaction, "c", &["m"]).await.unwrap();
    assert_eq!(recorded, [Recorded::First]);
    let error = inbox.commit(transaction).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let error = inbox.begin().await.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    let mut transaction = inbox.begin().await.unwrap();
    let recorded = inbox.record(&mut transaction, "c", &["m"]).await.unwrap();
    assert_eq!(
        recorded,
        [Recorded::Duplicate],
        "it was committed all the same"
    );
    inbox.rollback(transaction).await.unwrap();
    let calls = [InboxCall::Begin, InboxCall::Record, InboxCall::Commit];
    assert_eq!(calls.map(|call| inbox.calls(call)), [3, 2, 1]);
    assert!(inbox.is_recorded("c", "m").await.unwrap());
    assert!(inbox.remembers());
    assert!(!FaultyInbox::new(NoInbox).remembers());
}

#[tokio::test]
async fn a_memory_inbox_keeps_what_is_committed_and_nothing_else() {
    use Recorded::{Duplicate, First};
    let inbox = MemoryInbox::new(Vec::new());
    for (commits, consumer, keys, expected) in [
        (false, "a", &["m", "m"], [First, Duplicate]),
        (true, "a", &["m", "n"], [First, First]),
        (true, "a", &["n", "o"], [Duplicate, First]),
        (true, "b", &["m", "p"], [First, First]),
    ] {
        let mut transaction = inbox.begin().await.unwrap();
        let recorded = inbox.record(&mut transaction, consumer, keys).await;
        assert_eq!(recorded.unwrap(), expected);
        MemoryInbox::connection(&mut transaction).push(consumer);
        if commits {
            inbox.commit(transaction).await.unwrap();
        }
    }
    assert_eq!(inbox.state(), ["a", "a", "b"]);
    assert!(inbox.is_recorded("a", "o").await.unwrap());
    assert!(!inbox.is_recorded("b", "o").await.unwrap());
    assert_eq!(inbox.clean_up("a", Duration::ZERO, 2).await.unwrap(), 2);
    assert_eq!(inbox.clean_up("b", 60 * SECOND, 10).await.unwrap(), 0);
    assert_eq!(inbox.recorded(), 3);
    for (run, others) in [("one", false), ("one", false), ("two", true)] {
        assert_eq!(inbox.note_start("a", "m", run).await.unwrap(), others);
    }
    assert!(!inbox.note_start("b", "m", "two").await.unwrap());
    inbox.forget_start("a", "m").await.unwrap();
    assert!(!inbox.note_start("a", "m", "two").await.unwrap());
}

#[tokio::test]
async fn transactions_of_a_memory_inbox_take_turns() {
    let inbox = MemoryInbox::new(0);
    let mut first = inbox.begin().await.unwrap();
    let second = tokio::spawn({
        let inbox = inbox.clone();
        async move {
            let mut second = inbox.begin().await.unwrap();
            *MemoryInbox::connection(&mut second) += 1;
            inbox.commit(second).await
        }
    });
    tokio::task::yield_now().await;
    *MemoryInbox::connection(&mut first) += 1;
    inbox.commit(first).await.unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(
        inbox.state(),
        2,
        "the second began with what the first left"
    );
}
