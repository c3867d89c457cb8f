//! Runs: what they refuse, how they stop, and how they go on.

use super::*;

/// A target that refuses everything after so many.
fn full_after(house: &House, count: usize) -> (impl Publisher + use<>, Arc<AtomicUsize>) {
    let left = Arc::new(AtomicUsize::new(count));
    let publisher = Altered::answering(house.broker.clone(), {
        let left = left.clone();
        move |_| {
            let taken = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                left.checked_sub(1)
            });
            taken.is_err().then(|| PublishOutcome::Failed {
                scope: FailureScope::Destination,
                stored: Stored::No,
                error: Error::new(ErrorKind::Busy, "publish", "full"),
            })
        }
    });
    (publisher, left)
}

#[tokio::test]
async fn a_full_target_and_a_killed_mover_lose_nothing_and_double_nothing() {
    let house = House::new().await;
    open_way_back(&house);
    bury(&house, numbered("a", "m", 100)).await;
    let (publisher, left) = full_after(&house, 40);
    let config = RedriveConfig::default()
        .with_rate_max(100_000)
        .with_batch_max(7)
        .with_attempts_max(2)
        .with_backoff(DelayPolicy::fixed(Duration::from_millis(1)));
    let desk = desk_over(&house, publisher).with_config(config);
    let planned = plan(&desk).await;
    assert_eq!(planned.would.send, 100);
    let error = desk.run("ann", planned.row.id, |_| {}).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(
        error.to_string().contains("orders.billing.redrive"),
        "{error}"
    );
    assert_eq!(way_back(&house).len(), 40);
    assert_eq!(house.store.count("billing").await.unwrap(), 60);
    let stopped = &desk.runs(None, 10).await.unwrap()[0];
    assert_eq!((stopped.state, stopped.sent), (RunState::Stopped, 40));

    // Killed at 60 % of the second run, between a confirm and its settlement.
    left.store(1_000, Ordering::SeqCst);
    let killed = tokio::spawn({
        let (desk, id) = (desk.clone(), planned.row.id);
        async move {
            let mut die = false;
            desk.resume("ann", id, |run| die |= run.row.sent >= 76)
                .await
        }
    });
    eventually(DEADLINE, "most of it is sent", || async {
        way_back(&house).len() >= 76
    })
    .await;
    killed.abort();
    let _ = killed.await;
    let ended = match desk.resume("bea", planned.row.id, |_| {}).await {
        Ok(ended) => ended.row,
        // It may have been faster than its killer.
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            desk.runs(None, 1).await.unwrap().remove(0)
        }
    };
    assert_eq!(ended.state, RunState::Done);
    assert_eq!(house.store.count("billing").await.unwrap(), 0);
    let billing = Billing::default();
    billing.repair();
    let consumer = billing.start(&house, DeadLetters::table(house.store.clone()));
    house.consumed("billing", "orders.billing.redrive").await;
    consumer.stop().await.unwrap();
    let mut effects = house.effects("billing").await;
    effects.sort();
    let mut all = names("m", 0..100);
    all.sort();
    assert_eq!(effects, all, "each once");
}

#[tokio::test]
async fn one_message_that_is_refused_stays_and_the_others_go() {
    let house = House::new().await;
    open_way_back(&house);
    bury(&house, numbered("a", "m", 5)).await;
    let publisher = Altered::answering(house.broker.clone(), |sent| {
        (sent.message.id.as_str() == "m-2").then(|| refused(RejectionScope::Message))
    });
    let desk = desk_over(&house, publisher);
    let ended = run_all(&desk).await;
    assert_eq!(ended.row.state, RunState::Done);
    assert_eq!((ended.row.sent, ended.row.rejected), (4, 1));
    let left = desk.list(&LetterFilter::all(), 0, 10).await.unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].message_id.as_str(), "m-2");
    let audit = desk.audit(0, 10).await.unwrap();
    let told = audit.iter().find(|e| e.outcome == "rejected").unwrap();
    assert!(told.detail.contains("not this one"));
}

#[tokio::test]
async fn a_vanished_target_is_named_and_the_run_can_be_resumed() {
    let house = House::new().await;
    bury(&house, numbered("a", "m", 3)).await;
    let desk = desk(&house);
    let planned = plan(&desk).await;
    let error = desk.run("ann", planned.row.id, |_| {}).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("orders.billing.redrive"));
    assert_eq!(house.store.count("billing").await.unwrap(), 3);
    open_way_back(&house);
    let ended = desk.resume("ann", planned.row.id, |_| {}).await.unwrap();
    assert_eq!(ended.row.sent, 3);
    // It vanishes after the check.
    bury(&house, numbered("a", "n", 3)).await;
    let gone = Altered::answering(house.broker.clone(), |_| {
        Some(refused(RejectionScope::Destination))
    });
    let desk = desk_over(&house, gone);
    let planned = plan(&desk).await;
    let error = desk.run("ann", planned.row.id, |_| {}).await.unwrap_err();
    assert!(error.to_string().contains("orders.billing.redrive"));
    let row = &desk.runs(None, 1).await.unwrap()[0];
    assert_eq!(row.state, RunState::Stopped);
    assert!(
        row.error
            .as_ref()
            .unwrap()
            .contains("orders.billing.redrive")
    );
    assert_eq!(house.store.count("billing").await.unwrap(), 3);
}

#[tokio::test]
async fn what_goes_round_or_is_older_than_the_inbox_is_refused_unless_forced() {
    let house = House::new().await;
    open_way_back(&house);
    let now = time::OffsetDateTime::now_utc();
    let message = |id: &str| Message::new("orders", "Order").with_id(id);
    let mut looping = Story::default();
    looping.redrive_count = 3;
    let mut old = Story::default();
    old.first_failed_at = Some(now - Duration::from_secs(31 * 86_400));
    put(&house, message("looping"), looping).await;
    put(&house, message("old"), old).await;
    put(&house, message("good"), Story::default()).await;
    let desk = desk(&house);
    let planned = plan(&desk).await;
    assert_eq!(planned.would.send, 1);
    let refuse = BTreeMap::from([(Refusal::Loop, 1), (Refusal::Age, 1)]);
    assert_eq!(planned.would.refuse, refuse);
    let ended = desk.run("ann", planned.row.id, |_| {}).await.unwrap();
    assert_eq!((ended.row.sent, ended.row.refused), (1, 2));
    assert_eq!(house.ids("orders.billing.redrive"), ["good"]);
    let forced = Order::of(LetterFilter::all()).with_force_age();
    let planned = plan_of(&desk, forced.clone()).await;
    assert_eq!(
        desk.run("ann", planned.row.id, |_| {})
            .await
            .unwrap()
            .row
            .sent,
        1
    );
    let planned = plan_of(&desk, forced.with_force_loop()).await;
    assert_eq!(
        desk.run("ann", planned.row.id, |_| {})
            .await
            .unwrap()
            .row
            .sent,
        1
    );
    let mut sent = house.ids("orders.billing.redrive");
    sent.sort();
    assert_eq!(sent, ["good", "looping", "old"]);
    let counts: Vec<u32> = way_back(&house)
        .iter()
        .map(|m| m.story.redrive_count)
        .collect();
    assert_eq!(counts.iter().max(), Some(&4));
}

#[tokio::test]
async fn of_several_sources_the_entry_tells_its_own_or_is_not_sent() {
    let house = House::new().await;
    open_way_back(&house);
    house.broker.create_topic("returns", 1).unwrap();
    house
        .broker
        .create_topic("returns.billing.redrive", 1)
        .unwrap();
    let from = |topic: &str| {
        let mut story = Story::default();
        story.origin = Some(Origin {
            topic: topic.into(),
            partition: None,
            offset: None,
        });
        story
    };
    for (id, topic) in [("a", "orders"), ("b", "returns"), ("c", "elsewhere")] {
        put(&house, Message::new("x", "T").with_id(id), from(topic)).await;
    }
    let desk = desk(&house).with_source("returns");
    let planned = plan(&desk).await;
    assert_eq!(planned.would.refuse, BTreeMap::from([(Refusal::Source, 1)]));
    desk.run("ann", planned.row.id, |_| {}).await.unwrap();
    assert_eq!(house.ids("orders.billing.redrive"), ["a"]);
    assert_eq!(house.ids("returns.billing.redrive"), ["b"]);
    let named = Order::of(LetterFilter::all()).with_source("returns");
    let planned = plan_of(&desk, named).await;
    desk.run("ann", planned.row.id, |_| {}).await.unwrap();
    assert_eq!(house.ids("returns.billing.redrive"), ["b", "c"]);
    let unknown = Order::of(LetterFilter::all()).with_source("x");
    let error = desk.plan("ann", &unknown);
    assert_eq!(error.await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn canaries_go_first_and_the_others_only_once_they_are_handled() {
    let house = House::new().await;
    bury(&house, numbered("a", "m", 10)).await;
    let billing = Billing::default();
    let consumer = billing.start(&house, DeadLetters::table(house.store.clone()));
    eventually(DEADLINE, "the way back is there", || async {
        house
            .broker
            .topics()
            .contains(&"orders.billing.redrive".to_owned())
    })
    .await;
    let desk = desk(&house).with_inbox(house.store.clone(), InboxKey::MessageId);
    let careful = Order::of(LetterFilter::all()).with_canary(Canary {
        count: 2,
        wait: DEADLINE,
    });
    let planned = plan_of(&desk, careful.clone()).await;
    // Not repaired: they come back, and nobody waits any longer.
    let paused = desk.run("ann", planned.row.id, |_| {}).await.unwrap();
    assert_eq!((paused.row.state, paused.row.sent), (RunState::Paused, 2));
    assert!(paused.row.error.unwrap().contains("dead letter again"));
    assert_eq!(way_back(&house).len(), 2);
    let error = desk
        .resume("ann", planned.row.id, |_| {})
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "only if told so");
    billing.repair();
    let done = desk
        .resume_past_canary("ann", planned.row.id, |_| {})
        .await
        .unwrap();
    assert_eq!((done.row.state, done.row.sent), (RunState::Done, 10));
    house.consumed("billing", "orders.billing.redrive").await;
    // The two that came back, all of them canaries that are handled.
    let planned = plan_of(&desk, careful.clone()).await;
    let done = desk.run("ann", planned.row.id, |_| {}).await.unwrap();
    assert_eq!((done.row.state, done.row.sent), (RunState::Done, 2));
    consumer.stop().await.unwrap();
    // Nobody handles them in time.
    bury(&house, numbered("a", "n", 3)).await;
    let hasty = Order::of(LetterFilter::all()).with_canary(Canary {
        count: 1,
        wait: Duration::from_millis(50),
    });
    let planned = plan_of(&desk, hasty).await;
    let paused = desk.run("ann", planned.row.id, |_| {}).await.unwrap();
    assert_eq!((paused.row.state, paused.row.sent), (RunState::Paused, 1));
    assert!(paused.row.error.unwrap().contains("n-0"));
    assert_eq!(house.effects("billing").await.len(), 10);
}

/// As another process would.
fn take_over(store: SqliteStore, id: i64) {
    let other = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let running = [RunState::Running];
            store
                .take_run("billing", id, &running)
                .await
                .unwrap()
                .unwrap();
        });
    });
    other.join().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_cancelled_or_taken_over_settles_nothing_more() {
    let house = House::new().await;
    open_way_back(&house);
    bury(&house, numbered("a", "m", 9)).await;
    let desk = desk(&house).with_config(
        RedriveConfig::default()
            .with_rate_max(100_000)
            .with_batch_max(3),
    );
    let planned = plan(&desk).await;
    let id = planned.row.id;
    // A second process takes it after the first batch.
    let mut taken = false;
    let running = desk.run("ann", id, |_| {
        if !std::mem::replace(&mut taken, true) {
            take_over(house.store.clone(), id);
        }
    });
    let error = running.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert_eq!(
        house.store.count("billing").await.unwrap(),
        6,
        "what it sent then stays"
    );
    let done = desk.resume("bea", id, |_| {}).await.unwrap();
    assert_eq!((done.row.sent, done.row.state), (9, RunState::Done));
    assert_eq!(house.store.count("billing").await.unwrap(), 0);

    bury(&house, numbered("a", "n", 3)).await;
    let planned = plan(&desk).await;
    assert!(
        desk.cancel("ann", planned.row.id, "a mistake")
            .await
            .unwrap()
    );
    let error = desk.run("ann", planned.row.id, |_| {}).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(!desk.cancel("ann", planned.row.id, "again").await.unwrap());
    assert_eq!(house.store.count("billing").await.unwrap(), 3);
}
