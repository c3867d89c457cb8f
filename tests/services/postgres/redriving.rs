//! What an operator does at the same time as somebody else.

use relaybox::Message;
use relaybox::envelope::Outgoing;
use relaybox::store::{
    Arrival, DeadLetterStore, Leaving, LetterFilter, LetterOutcome, NewRun, Note, RedriveStore,
    RunState,
};
use relaybox::story::{Reason, Story};

use super::*;

const NOTE: Note<'static> = Note {
    consumer: "billing",
    operator: "ann",
    verb: "edit",
};

fn letter(id: &str) -> Outgoing {
    let mut story = Story::default();
    story.consumer = Some("billing".into());
    story.reason = Some(Reason::new(Reason::PERMANENT));
    Outgoing {
        message: Message::new("orders", "OrderPlaced").with_id(id),
        story,
    }
}

async fn entry(h: &Postgres) -> Leaving {
    let all = LetterFilter::all();
    let entries = h.store.entries("billing", &all, (0, i64::MAX), 1).await;
    let entry = entries.unwrap().remove(0);
    entry.leaving(LetterOutcome::Replaced, "because")
}

#[tokio::test]
async fn a_letter_that_leaves_while_it_arrives_again_is_not_taken_in() {
    let h = Postgres::start().await;
    h.store.put(&letter("a")).await.unwrap();
    let leaving = entry(&h).await;
    let mut other = h.pool().begin().await.unwrap();
    sqlx::raw_sql(
        "DELETE FROM relaybox_dead_letter; \
         INSERT INTO relaybox_redrive_audit (consumer, operator, verb, message_id, redrive_count, digest, outcome, detail) \
         SELECT 'billing', 'ann', 'edit', 'a', 0, '\\x00', 'replaced', ''",
    )
    .execute(&mut *other)
    .await
    .unwrap();
    sqlx::query("UPDATE relaybox_redrive_audit SET digest = $1")
        .bind(&leaving.digest)
        .execute(&mut *other)
        .await
        .unwrap();
    let store = h.store.clone();
    let arriving = tokio::spawn(async move { store.take_in(&letter("a")).await });
    h.blocked().await;
    other.commit().await.unwrap();
    assert_eq!(arriving.await.unwrap().unwrap(), Arrival::Left);
    assert_eq!(h.store.count("billing").await.unwrap(), 0);
}

#[tokio::test]
async fn an_edit_waits_for_a_run_that_just_takes_its_entry_in_hand() {
    let h = Postgres::start().await;
    h.store.put(&letter("a")).await.unwrap();
    let leaving = entry(&h).await;
    let run = NewRun {
        consumer: "billing",
        operator: "ann",
        plan: "{}",
        end: leaving.position,
    };
    let run = h.store.plan(&run).await.unwrap();
    let planned = [RunState::Planned];
    h.store.take_run("billing", run.id, &planned).await.unwrap();
    let mut other = h.pool().begin().await.unwrap();
    let alone = "SELECT pg_advisory_xact_lock(hashtextextended('relaybox redrive billing', 0))";
    sqlx::query(alone).execute(&mut *other).await.unwrap();
    let (store, old) = (h.store.clone(), leaving.clone());
    let edit = tokio::spawn(async move { store.replace(&old, &letter("b"), &NOTE).await });
    h.blocked().await;
    sqlx::query("UPDATE relaybox_redrive_run SET in_hand = ARRAY[$1]")
        .bind(leaving.position)
        .execute(&mut *other)
        .await
        .unwrap();
    other.commit().await.unwrap();
    assert_eq!(edit.await.unwrap().unwrap(), None);
    assert_eq!(entry(&h).await, leaving);
}
