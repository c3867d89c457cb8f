//! Enqueue, leases, fetch and settle.

use std::collections::HashSet;
use std::slice::from_ref;
use std::time::{Duration, Instant};

use relaybox::lane::{LANES, lane_of};
use relaybox::store::{Enqueue, InboxStore, OutboxStore, SettlementBatch, Verdict};
use relaybox::{ErrorKind, Message};
use time::macros::datetime;

use super::*;

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
        assert!(position < (row.place.lane, row.place.position));
        position = (row.place.lane, row.place.position);
        assert_eq!(row.place.lane, lane_of(row.message.key.as_ref().unwrap()));
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
    let lanes: HashSet<_> = page.rows.iter().map(|row| row.place.lane).collect();
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

/// After a restore, or a fail-over that lost commits, the tokens in the table are those of before.
pub async fn a_lease_of_a_state_that_was_undone_is_never_anothers<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    enqueue::<H>(&store, &[keyed("k", "1")]).await;
    let old = store.lease("old", 16, Duration::ZERO).await.unwrap();
    let mut old_reader = store.reader();
    let page = old_reader.fetch(&request(&old)).await.unwrap();
    H::autocommit(&store, "UPDATE relaybox_outbox_lane SET token = 0").await;
    // Some databases' clocks go by the millisecond.
    let undone = Instant::now();
    while undone.elapsed() < Duration::from_millis(2) {
        tokio::task::yield_now().await;
    }

    let new = lease_all(&store).await;
    assert!(old.iter().all(|lease| !new.contains(lease)));
    assert!(store.renew(&old, MINUTE).await.unwrap().is_empty());
    let settled = old_reader.settle(&confirm(&old, &page)).await.unwrap();
    assert_eq!((settled.applied, settled.fenced), (0, 1));
    store.release(&old).await.unwrap();
    assert_eq!(store.renew(&new, MINUTE).await.unwrap(), new);
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
    batch.verdicts[0].1 = Verdict::Confirmed;
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

pub async fn a_large_message_among_small_ones_arrives_whole<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let large = keyed("k", &"x".repeat(10_000)).with_header("h", "y".repeat(10_000));
    let small = || keyed("k", "s");
    let mut messages = vec![small(), small(), large.clone(), small(), large, small()];
    enqueue::<H>(&store, &messages).await;
    let leases: Vec<_> = lease_all(&store).await;
    let leases: Vec<_> = leases
        .into_iter()
        .filter(|l| l.lane == lane_of(b"k"))
        .collect();
    let mut reader = store.reader();
    let mut request = request(&leases);
    // Room for one large message and all small ones in each page, but a part of it for each row is less than that.
    request.rows_max = 100;
    request.bytes_max = 25_000;
    for (rows, full) in [(4, true), (2, false)] {
        let page = reader.fetch(&request).await.unwrap();
        let rest = messages.split_off(rows);
        let read: Vec<_> = page.rows.iter().map(|row| row.message.clone()).collect();
        assert!(read == messages, "every byte of {rows} messages");
        assert_eq!(page.full, full);
        reader.settle(&confirm(&leases, &page)).await.unwrap();
        messages = rest;
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
    let (place, error) = &page.unreadable[0];
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let parked = set_aside_as(AsideState::Parked, "unreadable", &error.to_string());
    let batch = SettlementBatch {
        leases,
        verdicts: vec![(*place, parked)],
    };
    assert_eq!(reader.settle(&batch).await.unwrap().applied, 1);
    assert_eq!(store.aside(10).await.unwrap(), 1);
}
