//! What is kept of published messages.

use std::slice::from_ref;
use std::time::Duration;

use relaybox::store::{
    AsideState, OutboxAdmin, OutboxStore, PublishedMessage, SettlementBatch, Verdict,
};
use relaybox::{ErrorKind, Message, MessageId};
use time::OffsetDateTime;

use super::*;

/// A database whose stores can keep what is published.
pub trait Keeps: Harness {
    fn keeping(&self, duration: Duration) -> Self::Store;
    /// So many days, to be taken from an instant in a table.
    fn days(count: u32) -> String;
}

const WEEK: Duration = Duration::from_secs(7 * 86_400);

/// Fetches everything there is and settles it with one verdict.
async fn settle_all<S: OutboxStore>(store: &S, leases: &[Lease], verdict: &Verdict) -> usize {
    let mut reader = store.reader();
    let page = reader.fetch(&request(leases)).await.unwrap();
    let mut batch = confirm(leases, &page);
    for (.., given) in &mut batch.verdicts {
        *given = verdict.clone();
    }
    reader.settle(&batch).await.unwrap().applied
}

async fn found<S: OutboxAdmin>(store: &S, id: &MessageId) -> Vec<PublishedMessage> {
    store.find_published(id, 10).await.unwrap()
}

async fn kept<H: Keeps>(store: &H::Store) -> i64 {
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    H::number(connection, "SELECT count(*) FROM relaybox_outbox_history").await
}

pub async fn what_was_published_is_kept_with_every_byte_and_nothing_else<H: Keeps>() {
    let h = H::start().await;
    let store = h.keeping(WEEK);
    OutboxStore::check(&store).await.unwrap();
    let mut every = Message::new("ключ-🚀", "T")
        .with_id("é".repeat(70))
        .with_key([0, 0xff, b'\''])
        .with_payload(vec![0, 1, 0xff, 0xfe])
        .with_content_type("application/json; charset=utf-8")
        .with_version(i64::MIN)
        .with_trace("00-aa-bb-01", Some("v=1".into()))
        .with_header("a", "1")
        .with_header("a", vec![0xff, 0]);
    every.headers.push_optional("d", None);
    let sent = [
        every,
        Message::new("d", "T").with_id("é".repeat(69) + "e"),
        Message::new("d", "T").with_payload(vec![7; 5_000_000]),
        keyed("", ""),
    ];
    let (dead, pending) = (keyed("dead", "1"), keyed("pending", "1"));
    enqueue::<H>(&store, &sent).await;
    enqueue::<H>(&store, &[dead.clone(), pending.clone()]).await;
    let leases = lease_all(&store).await;
    let mut reader = store.reader();
    let page = reader.fetch(&request(&leases)).await.unwrap();
    let verdicts = page.rows.iter().filter(|row| row.message != pending);
    let verdicts = verdicts.map(|row| {
        let parked = set_aside_as(AsideState::Parked, "rejected", "");
        let verdict = if row.message == dead {
            parked
        } else {
            Verdict::Confirmed
        };
        (row.place, verdict)
    });
    let batch = SettlementBatch {
        leases,
        verdicts: verdicts.collect(),
    };
    let before = OffsetDateTime::now_utc();
    assert_eq!(reader.settle(&batch).await.unwrap().applied, 5);
    let after = OffsetDateTime::now_utc();
    // Settled again it changes nothing, and so keeps nothing.
    assert_eq!(reader.settle(&batch).await.unwrap().applied, 0);

    for message in &sent {
        let [found] = &found(&store, &message.id).await[..] else {
            panic!("not found once: {:?}", message.id);
        };
        assert!(found.message.as_ref().unwrap() == message, "{message:?}");
        let row = page.rows.iter().find(|row| row.message.id == message.id);
        assert_eq!(found.position, row.unwrap().place.position);
        // The database's clock may be another one than ours.
        assert!(found.published_at > before - MINUTE && found.published_at < after + MINUTE);
    }
    for message in [&dead, &pending] {
        assert!(found(&store, &message.id).await.is_empty());
    }
    assert_eq!(kept::<H>(&store).await, 4);
    assert_eq!(
        (
            store.pending(10).await.unwrap(),
            store.aside(10).await.unwrap()
        ),
        (1, 1)
    );
}

pub async fn nothing_is_kept_unless_asked_for<H: Keeps>() {
    let h = H::start().await;
    let store = h.store();
    enqueue::<H>(&store, &[keyed("k", "1")]).await;
    let leases = lease_all(&store).await;
    assert_eq!(settle_all(&store, &leases, &Verdict::Confirmed).await, 1);
    assert_eq!(kept::<H>(&store).await, 0);
    H::autocommit(&store, "DROP TABLE relaybox_outbox_history").await;
    OutboxStore::check(&store).await.unwrap();
    assert!(!store.clean_up_history().await.unwrap());
    let error = OutboxStore::check(&h.keeping(WEEK)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("migrate()"), "{error}");
}

pub async fn what_was_set_aside_is_kept_once_it_is_confirmed<H: Keeps>() {
    let h = H::start().await;
    let store = h.keeping(WEEK);
    let (waited, plain) = (keyed("k", "1"), keyed("l", "2"));
    enqueue::<H>(&store, from_ref(&waited)).await;
    let leases = lease_all(&store).await;
    let waiting = set_aside_as(AsideState::Waiting, "slow", "");
    assert_eq!(settle_all(&store, &leases, &waiting).await, 1);
    assert_eq!(kept::<H>(&store).await, 0);
    enqueue::<H>(&store, from_ref(&plain)).await;
    assert_eq!(settle_all(&store, &leases, &Verdict::Confirmed).await, 2);
    for message in [&waited, &plain] {
        let [found] = &found(&store, &message.id).await[..] else {
            panic!("not found once: {:?}", message.id);
        };
        assert!(found.message.as_ref().unwrap() == message);
    }
    assert_eq!(store.aside(10).await.unwrap(), 0);
}

pub async fn a_fenced_settlement_keeps_nothing<H: Keeps>() {
    let h = H::start().await;
    let store = h.keeping(WEEK);
    let messages = [keyed("k", "1"), keyed("k", "2")];
    enqueue::<H>(&store, &messages).await;
    let old = store.lease("old", 16, Duration::ZERO).await.unwrap();
    let mut reader = store.reader();
    let page = reader.fetch(&request(&old)).await.unwrap();
    let new = lease_all(&store).await;
    assert_eq!(
        reader.settle(&confirm(&old, &page)).await.unwrap().fenced,
        2
    );
    assert_eq!(kept::<H>(&store).await, 0);
    // Neither does the one that carries other verdicts too.
    let mut mixed = confirm(&old, &page);
    mixed.verdicts[0].1 = set_aside_as(AsideState::Parked, "rejected", "");
    assert_eq!(reader.settle(&mixed).await.unwrap().fenced, 2);
    assert_eq!(kept::<H>(&store).await, 0);
    assert_eq!(settle_all(&store, &new, &Verdict::Confirmed).await, 2);
    assert_eq!(kept::<H>(&store).await, 2);
}

pub async fn a_message_sent_again_is_found_each_time<H: Keeps>() {
    let h = H::start().await;
    let store = h.keeping(WEEK);
    let message = keyed("k", "1");
    let leases = lease_all(&store).await;
    for sends in 1..=3 {
        enqueue::<H>(&store, from_ref(&message)).await;
        assert_eq!(settle_all(&store, &leases, &Verdict::Confirmed).await, 1);
        let found = found(&store, &message.id).await;
        assert_eq!(found.len(), sends);
        assert!(found.is_sorted_by_key(|found| (found.published_at, found.position)));
        assert!(
            found
                .iter()
                .all(|found| *found.message.as_ref().unwrap() == message)
        );
    }
    assert_eq!(store.find_published(&message.id, 2).await.unwrap().len(), 2);
}

/// Rows pending, leased, dead and waiting, all old, and sent ones, old and new: only the old sent ones go.
pub async fn history_goes_by_age_and_nothing_else_does<H: Keeps>() {
    let h = H::start().await;
    let store = h.keeping(WEEK);
    let message = |text: &str| keyed(text, "x").with_id(text.to_owned());
    let (old, new) = (message("sent long ago"), message("sent now"));
    let leases = lease_all(&store).await;
    enqueue::<H>(&store, from_ref(&old)).await;
    assert_eq!(settle_all(&store, &leases, &Verdict::Confirmed).await, 1);
    aged::<H>(&store, "outbox_history", "published_at").await;
    enqueue::<H>(&store, from_ref(&new)).await;
    assert_eq!(settle_all(&store, &leases, &Verdict::Confirmed).await, 1);
    for (text, state) in [("dead", AsideState::Parked), ("waits", AsideState::Waiting)] {
        enqueue::<H>(&store, &[message(text)]).await;
        let verdict = set_aside_as(state, "rejected", "");
        assert_eq!(settle_all(&store, &leases, &verdict).await, 1);
    }
    enqueue::<H>(&store, &[message("leased"), message("pending")]).await;
    let mut reader = store.reader();
    let page = reader.fetch(&request(&leases)).await.unwrap();
    aged::<H>(&store, "outbox", "enqueued_at").await;
    aged::<H>(&store, "outbox_aside", "set_aside_at").await;

    while store.clean_up_history().await.unwrap() {}
    assert!(found(&store, &old.id).await.is_empty());
    assert_eq!(found(&store, &new.id).await.len(), 1);
    assert_eq!(store.pending(10).await.unwrap(), 2);
    assert_eq!(store.aside(10).await.unwrap(), 2);
    assert_eq!(page.rows.len(), 3);
    assert_eq!(
        reader
            .settle(&confirm(&leases, &page))
            .await
            .unwrap()
            .applied,
        3
    );
}

/// Makes every row of a table 40 days older.
async fn aged<H: Keeps>(store: &H::Store, table: &str, column: &str) {
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    let days = H::days(40);
    let update = format!("UPDATE relaybox_{table} SET {column} = {column} - {days}");
    assert!(H::execute(connection, &update).await);
    store.commit(transaction).await.unwrap();
}
