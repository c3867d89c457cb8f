//! The store contracts as cases, written once and run against every database.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashSet;
use std::future::Future;
use std::slice::from_ref;
use std::task::Poll;
use std::time::Duration;

use relaybox::envelope::Outgoing;
use relaybox::lane::{LANES, lane_of};
use relaybox::store::{
    DeadLetterStore, Enqueue, FetchRequest, InboxStore, Lease, OutboxStore, Page, Recorded,
    SettlementBatch, Verdict,
};
use relaybox::story::{Origin, Reason, Story};
use relaybox::{ErrorKind, Message, MessageId};
use time::macros::datetime;

/// A fresh, migrated database with an empty table `work (id int primary key)`.
pub trait Harness: Sized {
    type Connection: Send;
    type Store: Enqueue<Connection = Self::Connection>
        + InboxStore<Connection = Self::Connection>
        + OutboxStore
        + DeadLetterStore
        + Clone;

    fn start() -> impl Future<Output = Self>;
    fn store(&self) -> Self::Store;
    /// A store that waits for another transaction's id only briefly.
    fn impatient(&self) -> impl Future<Output = Self::Store>;
    /// A store whose pool has one connection.
    fn single(&self) -> impl Future<Output = Self::Store>;
    /// Runs a statement; whether it succeeded.
    fn execute(connection: &mut Self::Connection, sql: &str) -> impl Future<Output = bool>;
    fn number(connection: &mut Self::Connection, sql: &str) -> impl Future<Output = i64>;
    /// Begins and commits a transaction inside, by the driver's own means.
    fn nested(connection: &mut Self::Connection, sql: &str) -> impl Future<Output = ()>;
    /// Runs a statement on a connection of the store's pool, outside any transaction.
    fn autocommit(store: &Self::Store, sql: &'static str) -> impl Future<Output = ()>;
    /// Completes once a session waits for another one's lock, where the database can tell.
    fn blocked(&self) -> impl Future<Output = ()>;
}

const MINUTE: Duration = Duration::from_secs(60);

pub fn keyed(key: &str, payload: &str) -> Message {
    Message::new("orders", "OrderPlaced")
        .with_key(key)
        .with_payload(payload.to_owned())
}

pub async fn enqueue<H: Harness>(store: &H::Store, messages: &[Message]) {
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    store.insert(connection, messages).await.unwrap();
    store.commit(transaction).await.unwrap();
}

pub fn request(leases: &[Lease]) -> FetchRequest {
    FetchRequest {
        leases: leases.to_vec(),
        rows_max: 16_000,
        bytes_max: 1 << 30,
        closed: Vec::new(),
    }
}

pub async fn lease_all<S: OutboxStore>(store: &S) -> Vec<Lease> {
    let leases = store.lease("relay", 100, MINUTE).await.unwrap();
    assert_eq!(leases.len(), LANES as usize);
    leases
}

pub async fn pending<S: OutboxStore>(store: &S) -> Page {
    let leases = lease_all(store).await;
    let page = store.reader().fetch(&request(&leases)).await.unwrap();
    store.release(&leases).await.unwrap();
    page
}

fn ids(page: &Page) -> Vec<&str> {
    page.rows
        .iter()
        .map(|row| row.message.id.as_str())
        .collect()
}

fn confirm(leases: &[Lease], page: &Page) -> SettlementBatch {
    SettlementBatch {
        leases: leases.to_vec(),
        verdicts: page
            .rows
            .iter()
            .map(|row| (row.lane, row.position, Verdict::Confirmed))
            .collect(),
    }
}

fn park(leases: &[Lease], page: &Page) -> SettlementBatch {
    let mut batch = confirm(leases, page);
    for (.., verdict) in &mut batch.verdicts {
        *verdict = Verdict::Parked {
            reason: Reason::new("rejected"),
            error: "too \0 large".into(),
        };
    }
    batch
}

// Enqueue

pub async fn rolled_back_and_savepoint_rolled_back_messages_do_not_exist<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    store.insert(connection, &[keyed("k", "1")]).await.unwrap();
    store.rollback(transaction).await.unwrap();

    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    let kept = keyed("k", "2");
    assert!(H::execute(connection, "SAVEPOINT s").await);
    store.insert(connection, &[keyed("k", "3")]).await.unwrap();
    assert!(H::execute(connection, "ROLLBACK TO SAVEPOINT s").await);
    store.insert(connection, from_ref(&kept)).await.unwrap();
    store.commit(transaction).await.unwrap();
    assert_eq!(ids(&pending(&store).await), [kept.id.as_str()]);
}

pub async fn rows_come_in_order_of_position_within_a_lane_and_key<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages: Vec<_> = (0..700)
        .map(|n| keyed(&format!("k{}", n % 7), &n.to_string()))
        .collect();
    enqueue::<H>(&store, &messages).await;
    enqueue::<H>(&store, &[keyed("k0", "700")]).await;
    enqueue::<H>(&store, &[]).await;
    let page = pending(&store).await;
    assert_eq!(page.rows.len(), 701);
    let mut last = std::collections::HashMap::new();
    let mut position = (-1, -1);
    for row in &page.rows {
        assert!(position < (row.lane, row.position));
        position = (row.lane, row.position);
        assert_eq!(row.lane, lane_of(row.message.key.as_ref().unwrap()));
        let number: i32 = std::str::from_utf8(row.message.payload.as_ref().unwrap())
            .unwrap()
            .parse()
            .unwrap();
        let before = last.insert(row.message.key.clone(), number);
        assert!(before.is_none_or(|before| before < number));
    }
}

pub async fn messages_without_a_key_spread_over_lanes<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages: Vec<_> = (0..100).map(|_| Message::new("orders", "T")).collect();
    enqueue::<H>(&store, &messages).await;
    let page = pending(&store).await;
    let lanes: HashSet<_> = page.rows.iter().map(|row| row.lane).collect();
    assert_eq!(page.rows.len(), 100);
    assert!(lanes.len() > 8, "{lanes:?}");
}

pub async fn payload_key_and_headers_keep_every_byte<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let mut every = Message::new("ключ-🚀", "T")
        .with_key([0, 0xff, b'\''])
        .with_payload(vec![0, 1, 0xff, 0xfe])
        .with_content_type("application/json; charset=utf-8")
        .with_version(i64::MIN)
        .with_occurred_at(datetime!(1969-12-31 23:59:59.999999 UTC))
        .with_trace("00-aa-bb-01", Some("v=1".into()))
        .with_header("a", "1")
        .with_header("a", vec![0xff, 0])
        .with_header("b", "")
        .with_header("c", "x\0y🚀");
    every.headers.push_optional("d", None);
    let messages = [
        every,
        keyed("k", "{\"x\":\"\\u0000\",\"y\":\"\\ud800\"}"),
        keyed(
            "k",
            "{\"z\":1, \"a\":750727362669608961,\"n\":1.10,\"big\":1e400}",
        ),
        keyed("", ""),
        Message::new("d", "T"),
        Message::new("d", "T").with_payload(vec![7; 5_000_000]),
    ];
    enqueue::<H>(&store, &messages).await;
    let page = pending(&store).await;
    assert_eq!(page.rows.len(), messages.len());
    for message in &messages {
        let row = page.rows.iter().find(|row| row.message.id == message.id);
        assert!(row.unwrap().message == *message, "{message:?}");
    }
}

pub async fn a_refused_message_leaves_the_business_transaction_usable<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    assert!(H::execute(connection, "INSERT INTO work (id) VALUES (1)").await);
    let refused = [keyed("k", "1"), Message::new("or\0ders", "T")];
    let error = store.insert(connection, &refused).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(error.violation().unwrap().field, "destination");
    store.insert(connection, &[keyed("k", "2")]).await.unwrap();
    store.commit(transaction).await.unwrap();
    assert_eq!(pending(&store).await.rows.len(), 1);
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    assert_eq!(H::number(connection, "SELECT count(*) FROM work").await, 1);
}

// Leases

pub async fn two_relays_leasing_in_the_same_instant_get_disjoint_lanes<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    for _ in 0..20 {
        let (a, b) = tokio::join!(store.lease("a", 8, MINUTE), store.lease("b", 8, MINUTE));
        let (a, b) = (a.unwrap(), b.unwrap());
        let lanes: HashSet<_> = a.iter().chain(&b).map(|lease| lease.lane).collect();
        assert_eq!(lanes.len(), a.len() + b.len(), "{a:?} {b:?}");
        assert!(a.len() <= 8 && b.len() <= 8);
        store.release(&a).await.unwrap();
        store.release(&b).await.unwrap();
    }
    let all = lease_all(&store).await;
    assert!(store.lease("c", 16, MINUTE).await.unwrap().is_empty());
    store.release(&all).await.unwrap();
    assert_eq!(store.lease("c", 16, MINUTE).await.unwrap().len(), 16);
}

pub async fn a_lease_taken_over_fences_its_old_holder<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    enqueue::<H>(&store, &[keyed("k", "1"), keyed("k", "2")]).await;
    let old = store.lease("old", 16, Duration::ZERO).await.unwrap();
    let mut old_reader = store.reader();
    let page = old_reader.fetch(&request(&old)).await.unwrap();
    assert_eq!(page.rows.len(), 2);

    let new = lease_all(&store).await;
    assert!(old.iter().zip(&new).all(|(o, n)| n.token > o.token));
    let settled = old_reader.settle(&confirm(&old, &page)).await.unwrap();
    assert_eq!((settled.applied, settled.fenced), (0, 2));
    let settled = old_reader.settle(&park(&old, &page)).await.unwrap();
    assert_eq!((settled.applied, settled.fenced), (0, 2));
    assert!(
        old_reader
            .fetch(&request(&old))
            .await
            .unwrap()
            .rows
            .is_empty()
    );
    assert!(store.renew(&old, MINUTE).await.unwrap().is_empty());
    store.release(&old).await.unwrap();
    assert_eq!(store.renew(&new, MINUTE).await.unwrap(), new);

    let mut reader = store.reader();
    let page = reader.fetch(&request(&new)).await.unwrap();
    assert_eq!(page.rows.len(), 2);
    let settled = reader.settle(&confirm(&new, &page)).await.unwrap();
    assert_eq!((settled.applied, settled.fenced), (2, 0));
    assert_eq!(store.pending(10).await.unwrap(), 0);
    assert_eq!(store.aside(10).await.unwrap(), 0);
}

pub async fn an_expired_lease_renews_until_taken_and_a_released_one_never<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let leases = store.lease("relay", 3, Duration::ZERO).await.unwrap();
    assert_eq!(store.renew(&leases, MINUTE).await.unwrap(), leases);
    assert_eq!(store.lease("other", 16, MINUTE).await.unwrap().len(), 13);
    store.release(&leases).await.unwrap();
    assert!(store.renew(&leases, MINUTE).await.unwrap().is_empty());
    assert_eq!(store.lease("other", 16, MINUTE).await.unwrap().len(), 3);
    assert!(
        store
            .lease("other", 16, Duration::MAX)
            .await
            .unwrap()
            .is_empty()
    );
}

// Fetch and settle

pub async fn a_parked_row_moves_with_its_reason_and_is_counted<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    enqueue::<H>(&store, &[keyed("a", "1"), keyed("a", "2"), keyed("b", "3")]).await;
    let leases = lease_all(&store).await;
    let mut reader = store.reader();
    let page = reader.fetch(&request(&leases)).await.unwrap();
    let mut batch = park(&leases, &page);
    batch.verdicts[0].2 = Verdict::Confirmed;
    batch.verdicts.pop();
    let settled = reader.settle(&batch).await.unwrap();
    assert_eq!((settled.applied, settled.fenced), (2, 0));
    assert_eq!(store.pending(10).await.unwrap(), 1);
    assert_eq!(store.aside(10).await.unwrap(), 1);
    // The same again finds the rows gone.
    let settled = reader.settle(&batch).await.unwrap();
    assert_eq!((settled.applied, settled.fenced), (0, 2));
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    let moved = "SELECT count(*) FROM relaybox_outbox_aside WHERE state = 'parked' AND reason = 'rejected' \
        AND error LIKE 'too _ large' AND destination = 'orders' AND payload IS NOT NULL AND set_aside_at IS NOT NULL";
    assert_eq!(H::number(connection, moved).await, 1);
}

pub async fn closed_destinations_are_passed_over<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages: Vec<_> = (0..40)
        .map(|n| Message::new(if n % 2 == 0 { "open" } else { "closed" }, "T").with_key("k"))
        .collect();
    enqueue::<H>(&store, &messages).await;
    let leases = lease_all(&store).await;
    let mut request = request(&leases);
    request.closed = vec!["closed".into(), "other".into()];
    let page = store.reader().fetch(&request).await.unwrap();
    assert_eq!(page.rows.len(), 20);
    assert!(
        page.rows
            .iter()
            .all(|row| row.message.destination == "open")
    );
}

pub async fn row_limits_hold_and_no_lane_is_starved<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages: Vec<_> = (0..320).map(|n| keyed(&n.to_string(), "x")).collect();
    enqueue::<H>(&store, &messages).await;
    let leases = lease_all(&store).await;
    let mut reader = store.reader();
    let mut request = request(&leases);
    request.rows_max = 32;
    let page = reader.fetch(&request).await.unwrap();
    assert!(page.full && page.rows.len() <= 32 && page.rows.len() > 16);
    // Fewer rows allowed than there are lanes: all rows leave, one at a time.
    request.rows_max = 1;
    for _ in 0..messages.len() {
        let mut page = reader.fetch(&request).await.unwrap();
        for _ in 0..LANES {
            if !page.rows.is_empty() {
                break;
            }
            page = reader.fetch(&request).await.unwrap();
        }
        assert_eq!(page.rows.len(), 1);
        reader.settle(&confirm(&leases, &page)).await.unwrap();
    }
    let page = reader.fetch(&request).await.unwrap();
    assert!(page.rows.is_empty() && !page.full);
}

pub async fn byte_limits_hold_but_for_one_message_a_lane<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let body = "x".repeat(1_000);
    let messages: Vec<_> = (0..10).map(|_| keyed("k", &body)).collect();
    enqueue::<H>(&store, &messages).await;
    let size = messages[0].bytes();
    let lane = lane_of(b"k");
    let leases: Vec<_> = lease_all(&store).await;
    let leases: Vec<_> = leases.into_iter().filter(|l| l.lane == lane).collect();
    let mut reader = store.reader();
    let mut request = request(&leases);
    for (bytes_max, rows, full) in [
        (3 * size, 3, true),
        (4 * size - 1, 3, true),
        (10 * size, 10, false),
        (1, 1, true),
        (0, 1, true),
    ] {
        request.bytes_max = bytes_max;
        let page = reader.fetch(&request).await.unwrap();
        assert_eq!((page.rows.len(), page.full), (rows, full), "{bytes_max}");
    }
}

pub async fn an_unreadable_row_is_named_and_stops_no_other<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages = [keyed("k", "1"), keyed("k", "2"), keyed("k", "3")];
    enqueue::<H>(&store, &messages).await;
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    let spoil = format!(
        "UPDATE relaybox_outbox SET headers = 'oops' WHERE message_id = '{}'",
        messages[1].id
    );
    assert!(H::execute(connection, &spoil).await);
    store.commit(transaction).await.unwrap();
    let leases = lease_all(&store).await;
    let mut reader = store.reader();
    let page = reader.fetch(&request(&leases)).await.unwrap();
    assert_eq!(
        ids(&page),
        [messages[0].id.as_str(), messages[2].id.as_str()]
    );
    let (lane, position, error) = &page.unreadable[0];
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let batch = SettlementBatch {
        leases,
        verdicts: vec![(
            *lane,
            *position,
            Verdict::Parked {
                reason: Reason::new(Reason::UNDECODABLE),
                error: error.to_string(),
            },
        )],
    };
    assert_eq!(reader.settle(&batch).await.unwrap().applied, 1);
    assert_eq!(store.aside(10).await.unwrap(), 1);
}

// Inbox

pub async fn an_id_is_new_once_per_consumer<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let id = MessageId::new("m-1");
    for (consumer, expected) in [
        ("billing", Recorded::First),
        ("billing", Recorded::Duplicate),
        ("mail", Recorded::First),
        ("Billing", Recorded::First),
    ] {
        let mut transaction = store.begin().await.unwrap();
        let recorded = store.record(&mut transaction, consumer, &id).await.unwrap();
        assert_eq!(recorded, expected, "{consumer}");
        store.commit(transaction).await.unwrap();
    }
    let mut transaction = store.begin().await.unwrap();
    let recorded = store.record(&mut transaction, "c", &id).await.unwrap();
    assert_eq!(recorded, Recorded::First);
    store.rollback(transaction).await.unwrap();
    let mut transaction = store.begin().await.unwrap();
    let recorded = store.record(&mut transaction, "c", &id).await.unwrap();
    assert_eq!(recorded, Recorded::First);
}

pub async fn a_concurrent_duplicate_waits_for_the_end_of_the_first<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let id = MessageId::new("m-1");
    for (commits, expected) in [(false, Recorded::First), (true, Recorded::Duplicate)] {
        let mut first = store.begin().await.unwrap();
        store.record(&mut first, "c", &id).await.unwrap();
        let second = async {
            let mut second = store.begin().await.unwrap();
            let recorded = store.record(&mut second, "c", &id).await.unwrap();
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
        assert_eq!(recorded, expected);
    }
}

pub async fn the_wait_for_a_concurrent_duplicate_is_bounded<H: Harness>() {
    let h = H::start().await;
    let store = h.impatient().await;
    let id = MessageId::new("m-1");
    let mut first = store.begin().await.unwrap();
    store.record(&mut first, "c", &id).await.unwrap();
    let second = async {
        let mut second = store.begin().await?;
        store.record(&mut second, "c", &id).await
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
        let id = MessageId::new("m-1");
        let recorded = store.record(&mut transaction, "c", &id).await.unwrap();
        assert_eq!(recorded, Recorded::First);
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
    store
        .record(&mut transaction, "c", &MessageId::new("m-1"))
        .await
        .unwrap();
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
        let id = MessageId::new(n.to_string());
        store.record(&mut transaction, "c", &id).await.unwrap();
    }
    store.commit(transaction).await.unwrap();
    assert_eq!(store.clean_up(MINUTE, 10).await.unwrap(), 0);
    for deleted in [10, 10, 5, 0] {
        assert_eq!(store.clean_up(Duration::ZERO, 10).await.unwrap(), deleted);
    }
    assert_eq!(store.clean_up(Duration::MAX, 10).await.unwrap(), 0);
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
    let story = Story::default()
        .failed("billing", &origin, "handler", "no stock", at)
        .dead(Reason::new(Reason::PERMANENT));
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

pub async fn checks_pass_on_migrated_tables<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    OutboxStore::check(&store).await.unwrap();
    InboxStore::check(&store).await.unwrap();
}

/// One test a case.
#[macro_export]
macro_rules! store_contract {
    ($harness:ty: $($case:ident),* $(,)?) => {
        $(
            #[tokio::test]
            async fn $case() {
                $crate::store_contract::$case::<$harness>().await;
            }
        )*
    };
    ($harness:ty) => {
        $crate::store_contract!(
            $harness: rolled_back_and_savepoint_rolled_back_messages_do_not_exist,
            rows_come_in_order_of_position_within_a_lane_and_key,
            messages_without_a_key_spread_over_lanes,
            payload_key_and_headers_keep_every_byte,
            a_refused_message_leaves_the_business_transaction_usable,
            two_relays_leasing_in_the_same_instant_get_disjoint_lanes,
            a_lease_taken_over_fences_its_old_holder,
            an_expired_lease_renews_until_taken_and_a_released_one_never,
            a_parked_row_moves_with_its_reason_and_is_counted,
            closed_destinations_are_passed_over,
            row_limits_hold_and_no_lane_is_starved,
            byte_limits_hold_but_for_one_message_a_lane,
            an_unreadable_row_is_named_and_stops_no_other,
            an_id_is_new_once_per_consumer,
            a_concurrent_duplicate_waits_for_the_end_of_the_first,
            the_wait_for_a_concurrent_duplicate_is_bounded,
            a_dropped_transaction_leaves_nothing_behind,
            a_cancelled_begin_poisons_no_connection,
            a_nested_transaction_is_a_savepoint,
            a_transaction_ended_inside_is_never_reported_as_committed,
            clean_up_deletes_old_records_in_bounded_steps,
            dead_letters_keep_bytes_and_story,
            checks_pass_on_migrated_tables,
        );
    };
}
