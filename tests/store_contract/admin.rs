//! What an operator sees and does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::broker::{PublishOutcome, Publisher, PublisherCapabilities, RejectionScope};
use relaybox::envelope::Outgoing;
use relaybox::lane::lane_of;
use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::{AsideFilter, InboxStore, Mode, OutboxAdmin, OutboxStore};
use relaybox::story::Reason;
use relaybox::{Error, ErrorKind, Message, Result};
use time::macros::datetime;

use super::*;

/// Enqueues and parks, in this order within a key.
async fn set_aside<H: Harness>(store: &H::Store, reason: &str, messages: &[Message]) {
    enqueue::<H>(store, messages).await;
    let leases = lease_all(store).await;
    let mut reader = store.reader();
    loop {
        let page = reader.fetch(&request(&leases)).await.unwrap();
        if page.rows.is_empty() {
            break;
        }
        let mut batch = confirm(&leases, &page);
        for (.., verdict) in &mut batch.verdicts {
            *verdict = set_aside_as(AsideState::Parked, reason, &format!("no: {reason}"));
        }
        reader.settle(&batch).await.unwrap();
    }
    store.release(&leases).await.unwrap();
}

async fn run<H: Harness>(store: &H::Store, sql: &str) {
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    assert!(H::execute(connection, sql).await, "{sql}");
    store.commit(transaction).await.unwrap();
}

/// Confirms or rejects everything, and remembers it.
#[derive(Clone)]
struct Broker {
    seen: Arc<Mutex<Vec<Message>>>,
    rejects: bool,
}

impl Broker {
    fn new(rejects: bool) -> Self {
        let seen = Arc::default();
        Self { seen, rejects }
    }
}

impl Publisher for Broker {
    fn capabilities(&self) -> PublisherCapabilities {
        let mut capabilities = PublisherCapabilities::new("test");
        capabilities.publish_deadline = Duration::from_secs(2);
        capabilities
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async {
            let outcome = |letter: &Outgoing| {
                self.seen.lock().unwrap().push(letter.message.clone());
                if !self.rejects {
                    return PublishOutcome::Confirmed;
                }
                let (scope, kind) = (RejectionScope::Message, ErrorKind::Rejected);
                let error = Error::new(kind, "publish", "too large");
                PublishOutcome::Rejected { scope, error }
            };
            batch.iter().map(outcome).collect()
        })
    }

    fn health(&self) -> relaybox::broker::Health {
        relaybox::broker::Health::up()
    }

    fn check<'a>(&'a self, _: &'a [String]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn close(&self, _: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

pub async fn depth_is_counted_by_destination_and_reason_with_the_oldest_age<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let admin: Box<dyn OutboxAdmin> = Box::new(store.clone());
    assert_eq!(admin.depth(10, 10).await.unwrap().destinations, []);

    let other = || Message::new("invoices", "T").with_key("i");
    set_aside::<H>(&store, "rejected", &[keyed("a", "1"), keyed("b", "2")]).await;
    set_aside::<H>(&store, "undecodable", &[keyed("a", "3"), other()]).await;
    // When it happened does not count, only since when it waits.
    let long_ago = keyed("a", "4").with_occurred_at(datetime!(2001-01-01 0:00 UTC));
    enqueue::<H>(&store, &[long_ago, keyed("b", "5")]).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    enqueue::<H>(&store, &[Message::new("mails", "T").with_key("a")]).await;

    let depth = admin.depth(100, 10).await.unwrap();
    assert!(!depth.cut);
    let [orders, mails, invoices] = &depth.destinations[..] else {
        panic!("{depth:?}");
    };
    let names = [orders, mails, invoices].map(|depth| depth.destination.as_str());
    assert_eq!(names, ["orders", "mails", "invoices"]);
    assert_eq!([orders.pending, mails.pending, invoices.pending], [2, 1, 0]);
    let oldest = orders.oldest.unwrap();
    assert!(oldest >= Duration::from_millis(10), "{oldest:?}");
    assert!(
        oldest < Duration::from_secs(60),
        "{oldest:?}: not occurred_at"
    );
    assert!(mails.oldest.unwrap() < oldest);
    assert_eq!(invoices.oldest, None);
    let reasons = |counts: &[(&str, u64)]| -> Vec<(Reason, u64)> {
        let of = |(code, count): &(&str, u64)| (Reason::new(code), *count);
        counts.iter().map(of).collect()
    };
    assert_eq!(
        orders.aside,
        reasons(&[("rejected", 2), ("undecodable", 1)])
    );
    assert_eq!(invoices.aside, reasons(&[("undecodable", 1)]));
    assert_eq!(mails.aside, []);
}

pub async fn depth_counts_and_returns_no_more_than_asked<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages: Vec<_> = (0..100)
        .map(|n| Message::new(format!("d{n}"), "T").with_key("one lane"))
        .collect();
    enqueue::<H>(&store, &messages).await;
    let depth = store.depth(1_000, 7).await.unwrap();
    assert!(depth.cut);
    assert_eq!(depth.destinations.len(), 7);
    // The oldest are counted: positions rise with time.
    let depth = store.depth(3, 100).await.unwrap();
    assert!(depth.cut);
    let mut names: Vec<_> = depth.destinations.iter().map(|d| &*d.destination).collect();
    names.sort_unstable();
    assert_eq!(names, ["d0", "d1", "d2"]);
    let whole = store.depth(1_000, 100).await.unwrap();
    assert_eq!((whole.cut, whole.destinations.len()), (false, 100));
    // A long lane does not hide the others.
    let other = |key: &String| lane_of(key.as_bytes()) != lane_of(b"one lane");
    let key = (0..).map(|n: u32| n.to_string()).find(other).unwrap();
    enqueue::<H>(&store, &[Message::new("elsewhere", "T").with_key(key)]).await;
    let depth = store.depth(3, 100).await.unwrap();
    let seen = depth.destinations.iter();
    assert_eq!(seen.filter(|d| d.destination == "elsewhere").count(), 1);
}

pub async fn each_filter_finds_its_rows_and_lists_go_by_pages<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let invoice = Message::new("invoices", "T").with_key([0xff, 0]);
    let messages = [keyed("a", "1"), keyed("a", "2"), keyed("b", "3")];
    set_aside::<H>(&store, "rejected", &messages).await;
    set_aside::<H>(&store, "undecodable", std::slice::from_ref(&invoice)).await;
    run::<H>(
        &store,
        "INSERT INTO relaybox_outbox_aside (state, reason, lane, message_id, destination, event_type, size, occurred_at) \
         SELECT 'delayed', 'wait', lane, 'm-delayed', destination, event_type, size, occurred_at \
         FROM relaybox_outbox_aside LIMIT 1",
    )
    .await;

    let all = store.list_aside(&AsideFilter::all(), 0, 100).await.unwrap();
    assert_eq!(all.len(), 5);
    assert!(all.windows(2).all(|two| two[0].position < two[1].position));
    let entry = &all[3];
    assert_eq!(entry.state, "parked");
    assert_eq!(entry.reason, Reason::new("undecodable"));
    assert_eq!(entry.error.as_deref(), Some("no: undecodable"));
    assert_eq!(entry.attempts, 0);
    assert_eq!(entry.message_id, invoice.id);
    assert_eq!(entry.key, invoice.key);
    assert_eq!(entry.size, invoice.bytes() as u64);
    let age = time::OffsetDateTime::now_utc() - entry.set_aside_at;
    assert!(age.abs() < time::Duration::minutes(5), "{age}");

    let mut paged = Vec::new();
    loop {
        let after = paged
            .last()
            .map_or(0, |last: &relaybox::store::AsideEntry| last.position);
        let page = store
            .list_aside(&AsideFilter::all(), after, 2)
            .await
            .unwrap();
        assert!(page.len() <= 2);
        if page.is_empty() {
            break;
        }
        paged.extend(page);
    }
    assert_eq!(paged, all);

    let of = AsideFilter::all;
    // How many are listed, and how many of them an operator may act on.
    for (filter, listed, acted_on) in [
        (of().with_destination("orders"), 4, 3),
        (of().with_destination("order"), 0, 0),
        (of().with_destination("' OR 1=1 --"), 0, 0),
        (of().with_reason(Reason::new("undecodable")), 1, 1),
        (of().with_reason(Reason::new("wait")), 1, 0),
        (of().with_key("a"), 2, 2),
        (of().with_key([0xff, 0]), 1, 1),
        (of().with_key(""), 0, 0),
        (of().with_message_id(messages[2].id.as_str()), 1, 1),
        (of().with_message_id("m-delayed"), 1, 0),
        (of().with_age(Duration::ZERO), 5, 4),
        (of().with_age(Duration::from_secs(3_600)), 0, 0),
        (of().with_age(Duration::MAX), 0, 0),
        (of().with_position(all[1].position), 1, 1),
        (of().with_position(i64::MAX), 0, 0),
        (of().with_position(i64::MIN), 0, 0),
        (
            of().with_key("a").with_message_id(messages[2].id.as_str()),
            0,
            0,
        ),
        (
            of().with_key("b").with_reason(Reason::new("rejected")),
            1,
            1,
        ),
    ] {
        let found = store.list_aside(&filter, 0, 100).await.unwrap();
        assert_eq!(found.len(), listed, "{filter:?}");
        let would = [
            store.requeue(&filter, Mode::DryRun).await.unwrap(),
            store.discard(&filter, "test", Mode::DryRun).await.unwrap(),
        ];
        assert_eq!(would, [acted_on; 2], "{filter:?}");
    }
    // Nothing of that changed anything.
    assert_eq!(store.list_aside(&of(), 0, 100).await.unwrap(), all);
    assert_eq!(store.pending(10).await.unwrap(), 0);

    let filter = of().with_key("a");
    assert_eq!(
        store.discard(&filter, "test", Mode::Apply).await.unwrap(),
        2
    );
    let filter = of().with_position(all[2].position);
    assert_eq!(store.requeue(&filter, Mode::Apply).await.unwrap(), 1);
    assert_eq!(ids(&pending(&store).await), [messages[2].id.as_str()]);
    assert_eq!(store.requeue(&of(), Mode::Apply).await.unwrap(), 1);
    let left = store.list_aside(&of(), 0, 100).await.unwrap();
    assert_eq!(left.len(), 1, "what waits for something else stays");
    assert_eq!(left[0].state, "delayed");
}

pub async fn a_filter_or_words_that_mean_nothing_are_refused_by_name<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    set_aside::<H>(&store, "rejected", &[keyed("a", "1")]).await;
    let long = "x".repeat(1_025);
    for (field, filter) in [
        ("destination", AsideFilter::all().with_destination("")),
        ("destination", AsideFilter::all().with_destination("a\0")),
        ("destination", AsideFilter::all().with_destination(&long)),
        ("message_id", AsideFilter::all().with_message_id(" ")),
    ] {
        for error in [
            store.list_aside(&filter, 0, 1).await.unwrap_err(),
            store.requeue(&filter, Mode::Apply).await.unwrap_err(),
            store.discard(&filter, "x", Mode::Apply).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert_eq!(error.violation().unwrap().field, field);
        }
    }
    let all = AsideFilter::all();
    let error = store.discard(&all, "", Mode::DryRun).await.unwrap_err();
    assert_eq!(error.violation().unwrap().field, "because");
    assert_eq!(store.aside(10).await.unwrap(), 1);
}

pub async fn a_requeued_message_is_the_same_message_at_a_new_position<H: Harness>() {
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
        .with_header("c", "x\0y🚀");
    every.headers.push_optional("d", None);
    let messages = [
        every,
        keyed("", ""),
        Message::new("d", "T"),
        // Larger than a step may be together with others.
        Message::new("d", "T").with_payload(vec![7; 17 * 1_024 * 1_024]),
        Message::new("d", "T").with_payload("last"),
    ];
    enqueue::<H>(&store, &messages).await;
    let before = pending(&store).await;
    let highest = before
        .rows
        .iter()
        .map(|row| row.place.position)
        .max()
        .unwrap();
    let leases = lease_all(&store).await;
    let batch = park(&leases, &before);
    store.reader().settle(&batch).await.unwrap();
    store.release(&leases).await.unwrap();

    let entries = store.list_aside(&AsideFilter::all(), 0, 100).await.unwrap();
    for entry in &entries {
        let shown = store.show_aside(entry.position).await.unwrap().unwrap();
        let message = messages.iter().find(|m| m.id == entry.message_id).unwrap();
        assert_eq!(shown.entry, *entry);
        assert!(shown.message.unwrap() == *message);
        assert_eq!(shown.payload, message.payload);
    }
    let all = AsideFilter::all();
    assert_eq!(store.requeue(&all, Mode::Apply).await.unwrap(), 5);
    assert_eq!(store.aside(10).await.unwrap(), 0);
    assert!(
        store
            .show_aside(entries[0].position)
            .await
            .unwrap()
            .is_none()
    );

    let mut after = pending(&store).await.rows;
    assert_eq!(after.len(), messages.len());
    for row in &after {
        assert!(row.place.position > highest);
        let old = before
            .rows
            .iter()
            .find(|old| old.message.id == row.message.id);
        assert!(old.unwrap().message == row.message, "{row:?}");
        assert_eq!(old.unwrap().place.lane, row.place.lane);
    }
    // In the order in which they were set aside.
    after.sort_by_key(|row| row.place.position);
    let order: Vec<_> = after.iter().map(|row| row.message.id.clone()).collect();
    let aside: Vec<_> = entries.iter().map(|e| e.message_id.clone()).collect();
    assert_eq!(order, aside);
    // Its wait begins anew.
    let depth = store.depth(10, 10).await.unwrap();
    assert_eq!(depth.destinations.iter().map(|d| d.pending).sum::<u64>(), 5);
}

pub async fn a_row_that_cannot_be_read_is_listed_shown_and_discarded<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    set_aside::<H>(&store, "undecodable", &[keyed("a", "pay"), keyed("a", "2")]).await;
    run::<H>(
        &store,
        "UPDATE relaybox_outbox_aside SET headers = 'oops' WHERE position IN \
         (SELECT min(position) FROM relaybox_outbox_aside)",
    )
    .await;
    let all = AsideFilter::all();
    let entries = store.list_aside(&all, 0, 10).await.unwrap();
    assert_eq!(entries.len(), 2);
    let shown = store
        .show_aside(entries[0].position)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(shown.message.unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(shown.stored_headers.as_deref(), Some("oops"));
    assert_eq!(shown.payload.as_deref(), Some(b"pay".as_slice()));
    assert_eq!(store.discard(&all, "test", Mode::Apply).await.unwrap(), 2);
    assert_eq!(store.aside(10).await.unwrap(), 0);
    assert_eq!(store.pending(10).await.unwrap(), 0);
}

pub async fn requeues_and_discards_at_once_neither_double_nor_lose<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages: Vec<_> = (0..3_000)
        .map(|n| keyed(&(n % 50).to_string(), "x"))
        .collect();
    set_aside::<H>(&store, "rejected", &messages).await;
    let all = AsideFilter::all();
    let some = AsideFilter::all().with_key("7");
    let (a, b, c, d) = tokio::join!(
        store.requeue(&all, Mode::Apply),
        store.requeue(&all, Mode::Apply),
        store.requeue(&all, Mode::Apply),
        store.discard(&some, "test", Mode::Apply),
    );
    let requeued = a.unwrap() + b.unwrap() + c.unwrap();
    let discarded = d.unwrap();
    assert_eq!(requeued + discarded, 3_000);
    assert!(discarded <= 60);
    assert_eq!(store.aside(10).await.unwrap(), 0);
    let page = pending(&store).await;
    assert_eq!(page.rows.len() as u64, requeued);
    let mut ids = ids(&page);
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len() as u64, requeued, "none twice");
}

pub async fn ten_thousand_rows_are_requeued_under_a_relay_and_each_is_sent_once<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages: Vec<_> = (0..10_000)
        .map(|n| keyed(&(n % 100).to_string(), &n.to_string()))
        .collect();
    set_aside::<H>(&store, "rejected", &messages).await;
    let broker = Broker::new(false);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let relay = Relay::new(store.clone(), broker.clone())
        .with_config(RelayConfig::default().with_lease(Duration::from_secs(10)));
    let running = relay.run_until(async {
        let _ = stopped.await;
    });
    let operate = async {
        let all = AsideFilter::all();
        let would = store.requeue(&all, Mode::DryRun).await.unwrap();
        assert_eq!(would, 10_000);
        assert_eq!(store.requeue(&all, Mode::Apply).await.unwrap(), would);
        while store.pending(1).await.unwrap() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        stop.send(()).unwrap();
    };
    let (ran, ()) = tokio::join!(running, operate);
    ran.unwrap();
    let seen = broker.seen.lock().unwrap();
    assert_eq!(seen.len(), 10_000);
    let mut last: HashMap<_, u32> = HashMap::new();
    for message in seen.iter() {
        let payload = message.payload.as_deref().unwrap();
        let number: u32 = std::str::from_utf8(payload).unwrap().parse().unwrap();
        let before = last.insert(message.key.clone(), number);
        assert!(before.is_none_or(|before| before < number), "{number}");
    }
    assert_eq!(last.len(), 100);
}

pub async fn a_requeue_ends_though_the_same_messages_are_refused_again<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let messages: Vec<_> = (0..2_000).map(|n| keyed(&n.to_string(), "x")).collect();
    set_aside::<H>(&store, "rejected", &messages).await;
    let broker = Broker::new(true);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = Relay::new(store.clone(), broker).run_until(async {
        let _ = stopped.await;
    });
    let operate = async {
        let all = AsideFilter::all();
        let requeued =
            tokio::time::timeout(Duration::from_secs(60), store.requeue(&all, Mode::Apply))
                .await
                .expect("it ends");
        assert_eq!(requeued.unwrap(), 2_000);
        while store.pending(1).await.unwrap() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        stop.send(()).unwrap();
    };
    let (ran, ()) = tokio::join!(running, operate);
    ran.unwrap();
    assert_eq!(store.aside(10_000).await.unwrap(), 2_000);
}
