//! Destinations in trouble, and what an operator says about them: nobody else waits, and order is kept.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use relaybox::backoff::DelayPolicy;
use relaybox::broker::{
    FailureScope, PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder, RejectionScope,
    Stored,
};
use relaybox::envelope::Outgoing;
use relaybox::lane::lane_of;
use relaybox::outbox::Outbox;
use relaybox::relay::{Relay, Unroutable};
use relaybox::store::{AsideFilter, OutboxAdmin, OutboxStore};
use relaybox::story::Reason;
use relaybox::testing::{Signal, eventually};
use relaybox::{Error, ErrorKind, Message, Result};

use futures_util::future::BoxFuture;

use super::hanging::Hanging;
use super::support::{
    Altered, DEADLINE, House, Running, brisk, impatient, names, numbered, refused, to,
};

/// A house with a second topic whose publishes hang, and the signals to that.
async fn hanging(
    house: &House,
) -> (
    Hanging<relaybox::broker::memory::MemoryBroker>,
    Signal,
    Signal,
) {
    house.broker.create_topic("slow", 1).unwrap();
    let (reached, release) = (Signal::new(), Signal::new());
    let publisher = Hanging {
        inner: house.broker.clone(),
        destination: "slow",
        reached: reached.clone(),
        release: release.clone(),
    };
    (publisher, reached, release)
}

#[tokio::test]
async fn a_hanging_destination_delays_neither_the_others_nor_their_settlement() {
    let house = House::new().await;
    let (publisher, reached, release) = hanging(&house).await;
    // All in one lane, the slow ones in front.
    house.enqueue(&to("slow", numbered("k", "slow", 5))).await;
    house.enqueue(&numbered("k", "a", 5)).await;
    let relay = house.relay(publisher, impatient().with_batch_rows_max(16));
    reached.wait().await;
    eventually(DEADLINE, "the others are out and settled", || async {
        house.ids_of("k").len() == 5 && house.pending().await == 0
    })
    .await;
    assert_eq!(house.aside("waiting").await, 5);
    house.enqueue(&to("slow", numbered("k", "later", 2))).await;
    house.enqueue(&numbered("k", "b", 5)).await;
    eventually(DEADLINE, "more of the others too", || async {
        house.ids_of("k").len() == 10 && house.pending().await == 0
    })
    .await;
    assert_eq!(house.aside("waiting").await, 7);
    assert!(house.ids("slow").is_empty());
    release.set();
    house.drained().await;
    relay.stop().await.unwrap();
    let mut slow = house.ids("slow");
    slow.dedup();
    assert_eq!(slow, [names("slow", 0..5), names("later", 0..2)].concat());
    assert_eq!(
        house.ids_of("k"),
        [names("a", 0..5), names("b", 0..5)].concat()
    );
}

/// The answer comes after the publisher's deadline, or never: the messages are tried again, in order.
#[tokio::test]
async fn what_a_hanging_destination_never_answered_is_sent_again() {
    let house = House::new().await;
    let (publisher, reached, release) = hanging(&house).await;
    house.enqueue(&to("slow", numbered("k", "slow", 3))).await;
    let relay = Relay::new(house.store.clone(), publisher).with_config(impatient());
    let status = relay.status();
    let relay = Running::start(|stop| relay.run_until(stop));
    reached.wait().await;
    eventually(DEADLINE, "the destination is told of", || async {
        status.borrow().destinations_down.contains_key("slow")
    })
    .await;
    release.set();
    house.drained().await;
    eventually(DEADLINE, "it is well again", || async {
        status.borrow().destinations_down.is_empty()
    })
    .await;
    relay.stop().await.unwrap();
    assert_eq!(house.ids("slow"), names("slow", 0..3));
}

#[tokio::test]
async fn a_stop_settles_what_was_late() {
    let house = House::new().await;
    let (publisher, reached, release) = hanging(&house).await;
    house.enqueue(&to("slow", numbered("k", "slow", 3))).await;
    let relay = house.relay(publisher, impatient());
    reached.wait().await;
    eventually(DEADLINE, "they are late", || async {
        house.aside("waiting").await == 3
    })
    .await;
    let stopping = tokio::spawn(relay.stop());
    release.set();
    stopping.await.unwrap().unwrap();
    assert_eq!(house.ids("slow"), names("slow", 0..3));
    assert_eq!(house.store.aside(10).await.unwrap(), 0);
}

/// A lane with a publish that is not finished stays where it is: the next owner could send a key's later message first.
#[tokio::test]
async fn a_lane_is_handed_over_only_after_its_late_publish_has_ended() {
    let house = House::new().await;
    let (publisher, reached, release) = hanging(&house).await;
    for n in 0..16 {
        let key = (0..)
            .map(|m: u32| m.to_string())
            .find(|key| lane_of(key.as_bytes()) == n);
        house
            .enqueue(&to("slow", numbered(&key.unwrap(), &format!("slow{n}"), 2)))
            .await;
    }
    let config = || impatient().with_lease(Duration::from_secs(3_600));
    let first = house.relay(publisher, config());
    reached.wait().await;
    eventually(DEADLINE, "all are late", || async {
        house.aside("waiting").await == 32
    })
    .await;
    let second = house.relay(house.broker.clone(), config());
    let owned = async || -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM relaybox_relay")
            .fetch_one(house.store.pool())
            .await
            .unwrap()
    };
    eventually(DEADLINE, "both are there", async || owned().await == 2).await;
    assert!(
        house.ids("slow").is_empty(),
        "nobody sent them past the first"
    );
    release.set();
    house.drained().await;
    first.stop().await.unwrap();
    second.stop().await.unwrap();
    let mut ids = house.ids("slow");
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 32);
}

/// Two destinations order together; the first one's trouble must not let a key's later message to the second one pass.
#[tokio::test]
async fn a_key_keeps_its_order_over_all_destinations_of_a_scope() {
    struct Exchange<P>(P);
    impl<P: Publisher> Publisher for Exchange<P> {
        fn capabilities(&self) -> PublisherCapabilities {
            let mut capabilities = self.0.capabilities();
            capabilities.order = PublisherOrder::Gap;
            capabilities
        }
        fn scope<'a>(&'a self, destination: &'a str) -> &'a str {
            destination.split('.').next().unwrap_or(destination)
        }
        fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
            self.0.publish(batch)
        }
        fn health(&self) -> relaybox::broker::Health {
            self.0.health()
        }

        fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
            self.0.check(destinations)
        }
        fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
            self.0.close(deadline)
        }
    }
    let house = House::new().await;
    house.broker.create_topic("ev.b", 1).unwrap();
    let log = Arc::new(std::sync::Mutex::new(Vec::new()));
    let sent = log.clone();
    let logged = Altered::answering(house.broker.clone(), move |sending| {
        let taken = house_has(&sending.message.destination);
        if taken {
            sent.lock().unwrap().push(sending.message.id.to_string());
        }
        (!taken).then(|| refused(RejectionScope::Destination))
    });
    static A_IS_THERE: AtomicBool = AtomicBool::new(false);
    fn house_has(destination: &str) -> bool {
        destination == "ev.b" || A_IS_THERE.load(Ordering::SeqCst)
    }
    let all = numbered("k", "m", 6);
    for (n, message) in all.into_iter().enumerate() {
        let destination = if n % 2 == 0 { "ev.a" } else { "ev.b" };
        house.enqueue(&to(destination, vec![message])).await;
    }
    house.enqueue(&to("ev.b", numbered("j", "other", 3))).await;
    let relay = house.relay(Exchange(logged), impatient());
    eventually(DEADLINE, "another key flows", || async {
        house.ids("ev.b").len() == 3 && house.pending().await == 0
    })
    .await;
    assert_eq!(house.ids("ev.b"), names("other", 0..3));
    A_IS_THERE.store(true, Ordering::SeqCst);
    house.broker.create_topic("ev.a", 1).unwrap();
    house.drained().await;
    relay.stop().await.unwrap();
    let log = log.lock().unwrap().clone();
    let of_key: Vec<_> = log.into_iter().filter(|id| id.starts_with('m')).collect();
    assert_eq!(of_key, names("m", 0..6));
}

#[tokio::test]
async fn a_paused_destination_gets_nothing_until_it_is_resumed_also_over_a_restart() {
    let house = House::new().await;
    house.broker.create_topic("mail", 1).unwrap();
    house
        .store
        .pause("mail", "the provider moves")
        .await
        .unwrap();
    house.enqueue(&to("mail", numbered("k", "mail", 3))).await;
    house.enqueue(&numbered("k", "m", 3)).await;
    let relay = house.relay(house.broker.clone(), impatient());
    eventually(DEADLINE, "the others are out", || async {
        house.ids_of("k").len() == 3 && house.pending().await == 0
    })
    .await;
    relay.stop().await.unwrap();
    let relay = house.relay(house.broker.clone(), impatient());
    house.enqueue(&to("mail", numbered("k", "more", 3))).await;
    eventually(DEADLINE, "all wait", || async {
        house.aside("waiting").await == 6
    })
    .await;
    let listed = house
        .store
        .list_aside(&AsideFilter::all(), 0, 9)
        .await
        .unwrap();
    assert!(
        listed
            .iter()
            .all(|entry| entry.reason == Reason::new("paused"))
    );
    assert!(house.ids("mail").is_empty());
    house.store.resume("mail").await.unwrap();
    house.drained().await;
    relay.stop().await.unwrap();
    assert_eq!(
        house.ids("mail"),
        [names("mail", 0..3), names("more", 0..3)].concat()
    );
}

#[tokio::test]
async fn a_limited_destination_gets_no_more_than_its_rate_from_all_relays_and_others_flow() {
    const RATE: u32 = 32;
    let house = House::new().await;
    house.broker.create_topic("mail", 1).unwrap();
    house
        .store
        .limit("mail", Some(RATE), "the provider's limit")
        .await
        .unwrap();
    for n in 0..40 {
        house
            .enqueue(&to(
                "mail",
                numbered(&format!("k{n}"), &format!("mail{n}"), 4),
            ))
            .await;
    }
    let started = Instant::now();
    let relays = [0, 1].map(|_| house.relay(house.broker.clone(), impatient()));
    house.enqueue(&numbered("k", "m", 50)).await;
    eventually(DEADLINE, "the others are out", || async {
        house.ids_of("k").len() == 50
    })
    .await;
    eventually(
        DEADLINE,
        "a second or so of the limited ones is out",
        || async {
            let sent = house.ids("mail").len();
            // What each lane may have saved up, twice for lanes that changed hands, and what each second allows.
            let allowed = f64::from(RATE) * (2.0 + started.elapsed().as_secs_f64()) + 16.0;
            assert!(sent as f64 <= allowed, "{sent} of {allowed}");
            sent >= 90
        },
    )
    .await;
    house.store.limit("mail", None, "over").await.unwrap();
    house.drained().await;
    for relay in relays {
        relay.stop().await.unwrap();
    }
    let mut ids = house.ids("mail");
    for n in 0..40 {
        let prefix = format!("mail{n}-");
        let of_key: Vec<_> = ids
            .iter()
            .filter(|id| id.starts_with(&prefix))
            .cloned()
            .collect();
        assert_eq!(of_key, names(&format!("mail{n}"), 0..4));
    }
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 160);
}

#[tokio::test]
async fn an_unroutable_message_waits_is_parked_or_counts_as_sent() {
    let house = House::new().await;
    for destination in ["waits", "parks", "nobody"] {
        house
            .enqueue(&to(destination, numbered("k", destination, 2)))
            .await;
    }
    let config = impatient()
        .with_unroutable_at("parks", Unroutable::Park)
        .with_unroutable_at("nobody", Unroutable::Accept);
    let relay = house.relay(house.broker.clone(), config);
    eventually(DEADLINE, "each has its end", || async {
        house.pending().await == 0
            && house.aside("parked").await == 2
            && house.aside("waiting").await == 2
    })
    .await;
    relay.stop().await.unwrap();
    let parked = AsideFilter::all().with_reason(Reason::new("unroutable"));
    let listed = house.store.list_aside(&parked, 0, 9).await.unwrap();
    assert!(listed.iter().all(|entry| entry.destination == "parks"));
    assert_eq!(listed.len(), 2);
}

/// Forbidden is not unroutable: it may be allowed again.
#[tokio::test]
async fn a_forbidden_destination_waits_whatever_the_rule_for_unroutable_ones() {
    let house = House::new().await;
    house.enqueue(&numbered("k", "m", 2)).await;
    let forbidden = Arc::new(AtomicBool::new(true));
    let forbids = forbidden.clone();
    let publisher = Altered::answering(house.broker.clone(), move |_| {
        let refused = refused(RejectionScope::Destination);
        forbids.load(Ordering::SeqCst).then_some(refused)
    });
    let config = impatient().with_unroutable(Unroutable::Accept);
    let relay = house.relay(publisher, config);
    eventually(DEADLINE, "they wait", || async {
        house.aside("waiting").await == 2
    })
    .await;
    forbidden.store(false, Ordering::SeqCst);
    house.drained().await;
    relay.stop().await.unwrap();
    assert_eq!(house.ids_of("k"), names("m", 0..2));
}

/// A destination that comes back is asked with one message, not with all that waited.
#[tokio::test]
async fn a_destination_in_trouble_is_tried_with_one_message_at_a_time() {
    let house = House::new().await;
    house.enqueue(&numbered("k", "m", 20)).await;
    let (tries, largest) = (Arc::new(std::sync::Mutex::new(Vec::new())), Signal::new());
    struct Counting {
        tries: Arc<std::sync::Mutex<Vec<usize>>>,
        enough: Signal,
        inner: relaybox::broker::memory::MemoryBroker,
    }
    impl Publisher for Counting {
        fn capabilities(&self) -> PublisherCapabilities {
            self.inner.capabilities()
        }
        fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
            let mut tries = self.tries.lock().unwrap();
            tries.push(batch.len());
            if tries.len() >= 4 {
                self.enough.set();
            }
            let failed = |_: &Outgoing| PublishOutcome::Failed {
                scope: FailureScope::Destination,
                stored: Stored::No,
                error: Error::new(ErrorKind::Unavailable, "publish", "no leader"),
            };
            let outcomes = batch.iter().map(failed).collect();
            Box::pin(async { outcomes })
        }
        fn health(&self) -> relaybox::broker::Health {
            self.inner.health()
        }

        fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
            self.inner.check(destinations)
        }
        fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
            self.inner.close(deadline)
        }
    }
    let publisher = Counting {
        tries: tries.clone(),
        enough: largest.clone(),
        inner: house.broker.clone(),
    };
    let relay = house.relay(publisher, impatient());
    largest.wait().await;
    relay.stop().await.unwrap();
    let tries = tries.lock().unwrap().clone();
    assert!(tries[1..].iter().all(|sent| *sent == 1), "{tries:?}");
}

/// The one that is tried must not fall behind those that are set aside meanwhile.
#[tokio::test]
async fn a_message_tried_in_vain_stays_in_front_of_its_key() {
    let house = House::new().await;
    let tries = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counted = tries.clone();
    let publisher = Altered::gap(Altered::answering(house.broker.clone(), move |_| {
        let failed = PublishOutcome::Failed {
            scope: FailureScope::Destination,
            stored: Stored::No,
            error: Error::new(ErrorKind::Unavailable, "publish", "no leader"),
        };
        (counted.fetch_add(1, Ordering::SeqCst) < 2).then_some(failed)
    }));
    house.enqueue(&numbered("k", "m", 6)).await;
    // The pause is over at once, so that pending messages are tried.
    let config = impatient().with_backoff(DelayPolicy::fixed(Duration::ZERO));
    let relay = house.relay(publisher, config);
    house.drained().await;
    relay.stop().await.unwrap();
    assert_eq!(house.ids_of("k"), names("m", 0..6));
}

#[tokio::test]
async fn a_delayed_message_leaves_when_it_is_due_and_not_before() {
    let house = House::new().await;
    let outbox = Outbox::new(house.store.clone());
    let relay = house.relay(house.broker.clone(), brisk());
    let delay = Duration::from_millis(700);
    let started = Instant::now();
    let mut tx = house.store.pool().begin().await.unwrap();
    outbox
        .enqueue_later(&mut tx, &numbered("k", "later", 2), delay)
        .await
        .unwrap();
    let too_large = Message::new("orders", "");
    let refused = outbox.enqueue_later(&mut tx, &[too_large], delay).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    tx.commit().await.unwrap();
    house.enqueue(&numbered("k", "now", 1)).await;
    eventually(DEADLINE, "all are out", || async {
        let ids = house.ids_of("k");
        assert!(ids.len() < 2 || started.elapsed() >= delay, "too early");
        ids.len() == 3
    })
    .await;
    house.drained().await;
    relay.stop().await.unwrap();
    assert_eq!(house.ids_of("k"), ["now-0", "later-0", "later-1"]);
}
