//! Ladders whose messages wait in the consumer's database, or in their place.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use relaybox::backoff::{DelayPolicy, Jitter};
use relaybox::consumer::{Consumer, Failure, Handler, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::ladder::{DeadHead, Ladder};
use relaybox::store::sqlite::SqliteStore;
use relaybox::store::{Line, ReleaseAs, WaitingState, WaitingStore};
use relaybox::testing::{Signal, eventually};
use relaybox::{Error, Message};
use sqlx::sqlite::SqliteConnection;

use super::support::{DEADLINE, House, Running, Shared, names, numbered, quick, run, write_effect};

pub const MS: Duration = Duration::from_millis(1);

/// Fails as often as the payload says, and writes down the end of each attempt.
#[derive(Clone, Default)]
pub struct Log {
    pub attempts: Shared<(String, u32, Instant)>,
    /// Attempts fail while it is set.
    pub closed: Arc<AtomicBool>,
}

impl Log {
    /// Ids in the order of their attempts.
    fn ids(&self) -> Vec<String> {
        let attempts = self.attempts.lock().unwrap();
        attempts.iter().map(|(id, ..)| id.clone()).collect()
    }

    pub fn of(&self, prefix: &str) -> Vec<String> {
        let ids = self.ids().into_iter();
        ids.filter(|id| id.starts_with(prefix)).collect()
    }
}

pub async fn obey(log: &Log, db: &mut SqliteConnection, incoming: &Incoming) -> Outcome {
    let id = incoming.message.id.to_string();
    let count = incoming.story.retry_count;
    log.attempts
        .lock()
        .unwrap()
        .push((id, count, Instant::now()));
    write_effect(db, "billing", incoming).await;
    let payload = incoming.message.payload.as_deref().unwrap_or_default();
    let word = std::str::from_utf8(payload).unwrap();
    let times = word.strip_prefix("fail ").and_then(|n| n.parse().ok());
    match word {
        "never" => Outcome::Permanent(Failure::new("pointless")),
        _ if log.closed.load(Ordering::SeqCst) => Outcome::Retry(Failure::new("closed")),
        _ if times.is_some_and(|times: u32| count < times) => {
            Outcome::Retry(Failure::new("not yet"))
        }
        _ => Outcome::Done,
    }
}

pub fn message(key: &str, n: usize, payload: &str) -> Message {
    let message = numbered(key, key, n + 1).remove(n);
    message.with_payload(payload.to_owned())
}

pub fn fixed(ms: u32, attempts: u32) -> Ladder {
    Ladder::backoff(DelayPolicy::fixed(ms * MS), attempts)
}

impl House {
    pub fn waiting(&self, ladder: Ladder) -> Consumer<SqliteStore> {
        self.consumer("billing")
            .with_ladder(ladder)
            .with_waiting_room(self.store.clone())
            .with_config(quick().with_waiting_lease(Duration::from_secs(1)))
    }

    pub fn wait_with(&self, ladder: Ladder, handler: impl Handler<SqliteConnection>) -> Running {
        run(self.waiting(ladder), handler)
    }

    pub async fn handled(&self, count: usize) {
        eventually(DEADLINE, "all is handled or dead", || async {
            self.effects("billing").await.len() + self.dead("billing").len() >= count
        })
        .await;
        eventually(DEADLINE, "nothing waits", || async {
            let counts = WaitingStore::count(&self.store, "billing").await.unwrap();
            counts.iter().all(|(state, _)| *state == WaitingState::Held)
        })
        .await;
    }

    pub async fn counted(&self, state: WaitingState) -> u64 {
        let counts = WaitingStore::count(&self.store, "billing").await.unwrap();
        let found = counts.iter().find(|(known, _)| *known == state);
        found.map_or(0, |(_, count)| *count)
    }

    pub fn reasons(&self) -> HashMap<String, (String, u32)> {
        let told = |letter: Incoming| {
            let reason = letter.story.reason.unwrap().as_str().to_owned();
            (
                letter.message.id.to_string(),
                (reason, letter.story.retry_count),
            )
        };
        self.dead("billing").into_iter().map(told).collect()
    }
}

#[tokio::test]
async fn arbitrary_delays_are_kept_never_early_and_end_with_the_attempts() {
    let house = House::new().await;
    let policy = DelayPolicy::exponential(30 * MS)
        .with_jitter(Jitter::Equal)
        .with_cap(100 * MS);
    let log = Log::default();
    let whole = message("a", 0, "fail 2").with_header("tenant", vec![0xff, 0]);
    house
        .publish(&[whole.clone(), message("b", 0, "fail 9")])
        .await;
    let consumer = house.wait_with(Ladder::backoff(policy, 4), handler_fn(log.clone(), obey));
    house.handled(2).await;
    consumer.stop().await.unwrap();
    assert_eq!(house.effects("billing").await, ["a-0"]);
    assert_eq!(house.reasons()["b-0"], ("retries-exhausted".into(), 4));
    assert_eq!(log.of("a").len(), 3);
    assert_eq!(log.of("b").len(), 4);
    let attempts = log.attempts.lock().unwrap().clone();
    let of_b: Vec<_> = attempts.iter().filter(|(id, ..)| id == "b-0").collect();
    for (n, pair) in of_b.windows(2).enumerate() {
        // Equal jitter keeps half of 30, 60 and 100 ms.
        let least = [15, 30, 50][n] * MS;
        let passed = pair[1].2 - pair[0].2;
        assert!(passed >= least, "{passed:?} after failure {}", n + 1);
    }
    let topics = house.broker.topics();
    assert!(
        !topics.iter().any(|topic| topic.contains("retry")),
        "{topics:?}"
    );
    let letter = &house.dead("billing")[0];
    assert_eq!(letter.story.origin.as_ref().unwrap().topic, "orders");
}

#[tokio::test]
async fn what_is_handled_out_of_the_room_is_the_message_byte_for_byte() {
    let house = House::new().await;
    let mut sent = Message::new("orders", "Order")
        .with_id("m-0")
        .with_key(vec![0, 0xff])
        .with_content_type("text/x-odd")
        .with_version(-7)
        .with_header("a", "1")
        .with_header("a", vec![0xff, 0]);
    sent.headers.push_optional("b", None);
    house.publish(std::slice::from_ref(&sent)).await;
    let seen: Shared<Incoming> = Shared::default();
    async fn look(seen: &Shared<Incoming>, _: &mut SqliteConnection, it: &Incoming) -> Outcome {
        seen.lock().unwrap().push(it.clone());
        match it.story.retry_count {
            0 => Outcome::Retry(Failure::new("once")),
            _ => Outcome::Done,
        }
    }
    let consumer = house.wait_with(fixed(10, 2), handler_fn(seen.clone(), look));
    eventually(DEADLINE, "it came twice", || async {
        seen.lock().unwrap().len() >= 2
    })
    .await;
    house.handled(0).await;
    consumer.stop().await.unwrap();
    let seen = seen.lock().unwrap();
    assert_eq!(seen[0].message, seen[1].message);
    assert_eq!(seen[1].message.headers, sent.headers);
    assert_eq!((seen[1].story.retry_count, seen.len()), (1, 2));
}

#[tokio::test]
async fn followers_wait_behind_a_failed_message_and_other_keys_go_on() {
    let house = House::new().await;
    let log = Log::default();
    let messages = [
        message("k", 0, "fail 2"),
        message("k", 1, "ok"),
        message("k", 2, "ok"),
        message("j", 0, "ok"),
    ];
    house.publish(&messages).await;
    let ladder = fixed(400, 5).by_key(DeadHead::Skip);
    let consumer = house.wait_with(ladder, handler_fn(log.clone(), obey));
    eventually(
        DEADLINE,
        "the other key is handled, and two wait",
        || async {
            house.effects("billing").await == ["j-0"]
                && house.counted(WaitingState::Behind).await == 2
        },
    )
    .await;
    house.handled(4).await;
    consumer.stop().await.unwrap();
    assert_eq!(log.of("k"), ["k-0", "k-0", "k-0", "k-1", "k-2"]);
    assert_eq!(house.effects("billing").await, ["j-0", "k-0", "k-1", "k-2"]);
    assert!(house.dead("billing").is_empty());
}

#[tokio::test]
async fn a_dead_head_frees_its_key_by_default() {
    let house = House::new().await;
    let log = Log::default();
    house
        .publish(&[message("k", 0, "fail 9"), message("k", 1, "ok")])
        .await;
    let ladder = fixed(100, 2).by_key(DeadHead::Skip);
    let consumer = house.wait_with(ladder, handler_fn(log.clone(), obey));
    house.handled(2).await;
    consumer.stop().await.unwrap();
    assert_eq!(log.of("k"), ["k-0", "k-0", "k-1"]);
    assert_eq!(house.reasons()["k-0"], ("retries-exhausted".into(), 2));
}

#[tokio::test]
async fn a_dead_head_parks_those_behind_it_without_an_attempt_and_later_ones_go_on() {
    let house = House::new().await;
    let log = Log::default();
    let messages = [
        message("k", 0, "fail 9"),
        message("k", 1, "ok"),
        message("k", 2, "ok"),
    ];
    house.publish(&messages).await;
    let ladder = fixed(300, 2).by_key(DeadHead::Park);
    let consumer = house.wait_with(ladder, handler_fn(log.clone(), obey));
    eventually(DEADLINE, "two wait", || async {
        house.counted(WaitingState::Behind).await == 2
    })
    .await;
    house.handled(3).await;
    house.publish(&[message("k", 3, "ok")]).await;
    house.handled(4).await;
    consumer.stop().await.unwrap();
    assert_eq!(log.of("k"), ["k-0", "k-0", "k-3"]);
    let reasons = house.reasons();
    assert_eq!(reasons["k-0"], ("retries-exhausted".into(), 2));
    assert_eq!(reasons["k-1"], ("parked".into(), 0));
    assert_eq!(reasons["k-2"], ("parked".into(), 0));
}

#[tokio::test]
async fn a_dead_head_holds_its_key_until_an_operator_releases_it() {
    for (how, attempts) in [
        (ReleaseAs::Skip, vec!["k-0", "k-1", "k-2"]),
        (ReleaseAs::Park, vec!["k-0"]),
        (ReleaseAs::Retry, vec!["k-0", "k-0", "k-1", "k-2"]),
    ] {
        let house = House::new().await;
        let log = Log::default();
        log.closed.store(true, Ordering::SeqCst);
        // Dead at its first attempt, which is another way than from the room.
        house
            .publish(&[message("k", 0, "ok"), message("k", 1, "ok")])
            .await;
        let ladder = fixed(10, 1).by_key(DeadHead::Hold);
        let consumer = house.wait_with(ladder, handler_fn(log.clone(), obey));
        eventually(DEADLINE, "one holds the key, one waits", || async {
            house.counted(WaitingState::Held).await == 1
                && house.counted(WaitingState::Behind).await == 1
        })
        .await;
        // A restart changes nothing about that.
        consumer.stop().await.unwrap();
        log.closed.store(false, Ordering::SeqCst);
        let ladder = fixed(10, 1).by_key(DeadHead::Hold);
        let consumer = house.wait_with(ladder, handler_fn(log.clone(), obey));
        house.publish(&[message("k", 2, "ok")]).await;
        eventually(DEADLINE, "both wait", || async {
            house.counted(WaitingState::Behind).await == 2
        })
        .await;
        assert_eq!(log.of("k"), ["k-0"]);
        assert_eq!(house.reasons()["k-0"], ("retries-exhausted".into(), 1));
        let listed = WaitingStore::list(&house.store, "billing", Some(WaitingState::Held), 0, 9);
        assert_eq!(listed.await.unwrap()[0].id.as_str(), "k-0");
        let line = Line::of("orders", b"k");
        assert!(house.store.release("billing", line, how).await.unwrap());
        eventually(DEADLINE, "nothing waits", || async {
            let counts = WaitingStore::count(&house.store, "billing").await.unwrap();
            counts.is_empty()
        })
        .await;
        consumer.stop().await.unwrap();
        assert_eq!(log.of("k"), attempts, "{how:?}");
        let parked = house
            .reasons()
            .values()
            .filter(|(r, _)| r == "parked")
            .count();
        assert_eq!(parked, if how == ReleaseAs::Park { 2 } else { 0 });
        assert!(!house.store.release("billing", line, how).await.unwrap());
    }
}

#[tokio::test]
async fn what_waits_survives_a_restart_and_a_change_of_the_ladder() {
    let by_key = || fixed(300, 9).by_key(DeadHead::Skip);
    // The same ladder keeps the order, rungs at the broker only the messages.
    for (later, ordered) in [(by_key(), true), (Ladder::rungs([50 * MS]), false)] {
        let house = House::new().await;
        let log = Log::default();
        log.closed.store(true, Ordering::SeqCst);
        house
            .publish(&[message("k", 0, "ok"), message("k", 1, "ok")])
            .await;
        let consumer = house.wait_with(by_key(), handler_fn(log.clone(), obey));
        eventually(DEADLINE, "one waits behind the other", || async {
            house.counted(WaitingState::Behind).await == 1
        })
        .await;
        consumer.kill().await;
        log.closed.store(false, Ordering::SeqCst);
        let consumer = house.wait_with(later, handler_fn(log.clone(), obey));
        house.handled(2).await;
        consumer.stop().await.unwrap();
        let mut effects = house.effects("billing").await;
        if !ordered {
            effects.sort();
        }
        assert_eq!(effects, ["k-0", "k-1"]);
    }
}

#[tokio::test]
async fn a_restart_makes_nothing_due_earlier() {
    let house = House::new().await;
    let log = Log::default();
    let delay = 1_500 * MS;
    house.publish(&[message("a", 0, "fail 1")]).await;
    let ladder = || fixed(1_500, 3);
    let first = house.wait_with(ladder(), handler_fn(log.clone(), obey));
    eventually(DEADLINE, "it waits", || async {
        house.counted(WaitingState::Due).await == 1
    })
    .await;
    first.stop().await.unwrap();
    let second = house.wait_with(ladder(), handler_fn(log.clone(), obey));
    house.handled(1).await;
    second.stop().await.unwrap();
    let attempts = log.attempts.lock().unwrap().clone();
    assert_eq!(attempts.len(), 2);
    let passed = attempts[1].2 - attempts[0].2;
    assert!(passed >= delay, "{passed:?}");
}

#[tokio::test]
async fn a_claim_of_a_member_that_died_comes_again_and_counts_no_attempt_for_that() {
    let house = House::new().await;
    let (entered, never) = (Signal::default(), Signal::default());
    async fn hang(
        (entered, never, hangs): &(Signal, Signal, bool),
        db: &mut SqliteConnection,
        incoming: &Incoming,
    ) -> Outcome {
        match incoming.story.retry_count {
            0 => Outcome::Retry(Failure::new("once")),
            _ => {
                if *hangs {
                    entered.set();
                    never.wait().await;
                }
                write_effect(db, "billing", incoming).await;
                Outcome::Done
            }
        }
    }
    house.publish(&[message("k", 0, "ok")]).await;
    let state = (entered.clone(), never.clone(), true);
    let first = house.wait_with(fixed(10, 2).by_key(DeadHead::Skip), handler_fn(state, hang));
    entered.wait().await;
    first.kill().await;
    let state = (entered, never, false);
    let second = house.wait_with(fixed(10, 2).by_key(DeadHead::Skip), handler_fn(state, hang));
    house.handled(1).await;
    second.stop().await.unwrap();
    assert_eq!(house.effects("billing").await, ["k-0"]);
    assert!(house.dead("billing").is_empty());
}

/// Its table is gone for a while, as in an outage of the database that only the room notices.
#[tokio::test]
async fn while_the_room_is_away_nothing_is_acknowledged_and_no_attempt_is_burnt() {
    for ladder in [fixed(10, 2).stored(), fixed(10, 2).by_key(DeadHead::Skip)] {
        let house = House::new().await;
        let log = Log::default();
        house.publish(&[message("w", 0, "ok")]).await;
        let consumer = house.waiting(ladder);
        let probe = consumer.probe();
        let consumer = run(consumer, handler_fn(log.clone(), obey));
        house.handled(1).await;
        let rename = async |from: &str, to: &str| {
            let sql = format!("ALTER TABLE {from} RENAME TO {to}");
            let sql = sqlx::AssertSqlSafe(sql);
            sqlx::raw_sql(sql)
                .execute(house.store.pool())
                .await
                .unwrap();
        };
        rename("relaybox_waiting", "elsewhere").await;
        house
            .publish(&[message("k", 0, "fail 1"), message("k", 1, "ok")])
            .await;
        eventually(DEADLINE, "the room is missed", || async {
            !probe.readiness().is_ready()
        })
        .await;
        let read: u64 = house.broker.committed("billing", "orders").iter().sum();
        assert_eq!(read, 1, "what may have failed is not acknowledged");
        rename("elsewhere", "relaybox_waiting").await;
        house.handled(3).await;
        consumer.stop().await.unwrap();
        assert_eq!(log.of("k").iter().filter(|id| *id == "k-0").count(), 2);
        assert_eq!(log.of("k").len(), 3);
        assert!(house.dead("billing").is_empty());
    }
}

#[tokio::test]
async fn a_ladder_without_a_room_or_affinity_is_refused_at_start() {
    let house = House::new().await;
    for ladder in [
        fixed(10, 2),
        fixed(10, 2).in_place(),
        Ladder::rungs([MS]).stored(),
    ] {
        let consumer = house.consumer("billing").with_ladder(ladder);
        let refused = consumer
            .run_until(handler_fn(Log::default(), obey), async {})
            .await;
        let error: Error = refused.unwrap_err();
        assert_eq!(error.violation().unwrap().field, "waiting_room", "{error}");
    }
}

#[tokio::test]
async fn a_thousand_messages_with_random_failures_keep_the_order_of_each_key() {
    let seed = std::env::var("SEED").map_or_else(|_| fastrand::u64(..), |s| s.parse().unwrap());
    println!("SEED={seed}");
    let house = House::new().await;
    let log = Log::default();
    let mut random = fastrand::Rng::with_seed(seed);
    let mut expected: HashMap<String, usize> = HashMap::new();
    let messages: Vec<Message> = (0..300)
        .map(|_| {
            let key = format!("key{}-", random.u8(0..20));
            let n = expected.entry(key.clone()).or_default();
            let payload = match random.u8(0..10) {
                0 => "fail 2",
                1 => "fail 1",
                2 => "never",
                _ => "ok",
            };
            *n += 1;
            message(&key, *n - 1, payload)
        })
        .collect();
    house.publish(&messages).await;
    let ladder = || fixed(20, 5).by_key(DeadHead::Skip);
    let first = house.wait_with(ladder(), handler_fn(log.clone(), obey));
    let second = house.wait_with(ladder(), handler_fn(log.clone(), obey));
    eventually(DEADLINE, "a third is done", || async {
        house.effects("billing").await.len() >= 100
    })
    .await;
    first.kill().await;
    house.handled(300).await;
    second.stop().await.unwrap();
    let effects = house.effects("billing").await;
    let never: Vec<String> = house.reasons().into_keys().collect();
    for (key, count) in expected {
        let done: Vec<&String> = effects.iter().filter(|id| id.starts_with(&key)).collect();
        let all = names(&key, 0..count);
        let wanted: Vec<&String> = all.iter().filter(|id| !never.contains(id)).collect();
        assert_eq!(done, wanted, "SEED={seed}");
    }
}
