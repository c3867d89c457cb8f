//! What an operator does to single entries.

use super::*;

#[tokio::test]
async fn an_edited_entry_is_another_message_that_tells_its_cause() {
    let house = House::new().await;
    open_way_back(&house);
    bury(&house, precious()).await;
    let desk = desk(&house);
    let full = LetterFilter::all().with_message_id("m-full");
    let entry = desk.list(&full, 0, 1).await.unwrap().remove(0);
    let refused = desk.edit("ann", entry.position, "wrong", |message| {
        message.headers.push("X-Consumer", "mail");
    });
    assert_eq!(refused.await.unwrap_err().kind(), ErrorKind::Invalid);
    let position = desk
        .edit("ann", entry.position, "a wrong price", |message| {
            message.payload = Some("{}".into());
        })
        .await
        .unwrap();
    assert!(desk.show(entry.position).await.unwrap().is_none());
    let edited = desk.show(position).await.unwrap().unwrap();
    let message = edited.message.unwrap();
    assert_ne!(message.id.as_str(), "m-full");
    assert_eq!(message.causation_id(), Some("m-full"));
    assert_eq!(message.payload.as_deref(), Some(&b"{}"[..]));
    assert_eq!(edited.entry.story.reason, entry.story.reason);
    let audit = desk.audit(0, 10).await.unwrap();
    assert_eq!(audit.len(), 1);
    assert_eq!(
        (audit[0].verb.as_str(), audit[0].outcome.as_str()),
        ("edit", "replaced")
    );
    assert_eq!(audit[0].message_id.as_str(), "m-full");
    assert!(audit[0].detail.contains("a wrong price"));
    let again = desk
        .edit("ann", entry.position, "again", |_| {})
        .await
        .unwrap_err();
    assert_eq!(again.kind(), ErrorKind::NotFound);
    run_all(&desk).await;
    let ids = house.ids("orders.billing.redrive");
    assert_eq!(ids.len(), 3);
    assert!(ids.contains(&message.id.to_string()));
}

#[tokio::test]
async fn what_is_discarded_leaves_a_trace_and_is_not_collected_again() {
    let house = House::new().await;
    let billing = Billing::default();
    let consumer = billing.start(&house, DeadLetters::topic());
    house.publish(&numbered("a", "m", 3)).await;
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    let desk = desk(&house);
    desk.collect(&house.broker, BRIEF).await.unwrap();
    let one = LetterFilter::all().with_message_id("m-1");
    let blank = desk.discard("ann", &one, " ").await.unwrap_err();
    assert_eq!(blank.kind(), ErrorKind::Invalid);
    let discarded = desk.discard("ann", &one, "a test order").await.unwrap();
    assert_eq!((discarded.count, discarded.in_hand), (1, 0));
    let audit = desk.audit(0, 10).await.unwrap();
    assert_eq!(audit.len(), 1);
    assert_eq!(
        (audit[0].outcome.as_str(), audit[0].detail.as_str()),
        ("discarded", "a test order")
    );
    assert_eq!(audit[0].digest.len(), 16);
    // A group that lost its place reads everything again.
    for letter in house.broker.log("orders.billing.DLQ") {
        let letter = Outgoing {
            message: letter.message,
            story: letter.story,
        };
        assert!(house.broker.publish(&[letter]).await[0].is_confirmed());
    }
    let collected = desk.collect(&house.broker, BRIEF).await.unwrap();
    assert_eq!(
        (collected.stored, collected.known, collected.left),
        (0, 2, 1)
    );
    assert_eq!(desk.clean_up_audit(Duration::ZERO).await.unwrap(), 1);
    assert!(desk.audit(0, 10).await.unwrap().is_empty());
}

#[tokio::test]
async fn what_was_handled_is_handled_once_more_only_as_another_message() {
    let house = House::new().await;
    let billing = Billing::default();
    billing.repair();
    let consumer = billing.start(&house, DeadLetters::table(house.store.clone()));
    let order = Message::new("orders", "Order")
        .with_id("m-1")
        .with_payload("{}");
    house.publish(std::slice::from_ref(&order)).await;
    house.consumed("billing", "orders").await;
    let desk = desk(&house);
    // A redrive of what was handled changes nothing.
    bury(&house, [order.clone()]).await;
    run_all(&desk).await;
    house.consumed("billing", "orders.billing.redrive").await;
    assert_eq!(house.effects("billing").await, ["m-1"]);
    let position = desk
        .reprocess("ann", &order, "the price was wrong")
        .await
        .unwrap();
    let entered = desk.show(position).await.unwrap().unwrap().message.unwrap();
    let from_entry = desk
        .reprocess_entry("ann", position, "twice")
        .await
        .unwrap();
    assert_ne!(from_entry, position);
    run_all(&desk).await;
    house.consumed("billing", "orders.billing.redrive").await;
    consumer.stop().await.unwrap();
    let effects = house.effects("billing").await;
    assert_eq!(effects.len(), 3);
    assert!(effects.contains(&entered.id.to_string()));
    assert_eq!(entered.causation_id(), Some("m-1"));
}

/// A publisher whose word about these messages never arrives.
fn without_word(house: &House, id: &'static str, stored: Stored) -> impl Publisher + use<> {
    Altered::answering(house.broker.clone(), move |sent| {
        (sent.message.id.as_str() == id).then(|| PublishOutcome::Failed {
            scope: FailureScope::Destination,
            stored,
            error: Error::new(ErrorKind::Timeout, "publish", "no answer"),
        })
    })
}

#[tokio::test]
async fn what_a_run_may_have_sent_is_neither_edited_nor_discarded_until_that_is_known() {
    let house = House::new().await;
    open_way_back(&house);
    bury(&house, numbered("a", "m", 3)).await;
    let all = LetterFilter::all();
    let silent = desk_over(&house, without_word(&house, "m-1", Stored::Unknown));
    let run = plan(&silent).await.row.id;
    assert!(silent.run("ann", run, |_| {}).await.is_err());
    assert_eq!(house.ids("orders.billing.redrive"), ["m-0", "m-2"]);
    let desk = desk(&house);
    let left = desk.list(&all, 0, 10).await.unwrap();
    assert_eq!(left.len(), 1);
    // Under the old id it may have its effect still.
    let edited = desk.edit("ann", left[0].position, "a wrong price", |_| {});
    let error = edited.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(
        error.to_string().contains(&format!("run {run} ")),
        "{error}"
    );
    let discarded = desk.discard("ann", &all, "not wanted").await.unwrap();
    assert_eq!((discarded.count, discarded.in_hand), (0, 1));
    // Whoever ends the run knows no more than before.
    assert!(desk.cancel("ann", run, "enough").await.unwrap());
    let discarded = desk.discard("ann", &all, "not wanted").await.unwrap();
    assert_eq!((discarded.count, discarded.in_hand), (0, 1));
    // As it is it may go again.
    run_all(&desk).await;
    assert_eq!(house.store.count("billing").await.unwrap(), 0);
}

#[tokio::test]
async fn what_was_certainly_not_sent_may_be_edited_though_its_run_has_not_ended() {
    let house = House::new().await;
    open_way_back(&house);
    bury(&house, numbered("a", "m", 3)).await;
    let refusing = desk_over(&house, without_word(&house, "m-1", Stored::No));
    let run = plan(&refusing).await.row.id;
    assert!(refusing.run("ann", run, |_| {}).await.is_err());
    let desk = desk(&house);
    let left = desk.list(&LetterFilter::all(), 0, 10).await.unwrap();
    let edited = desk.edit("ann", left[0].position, "a wrong price", |_| {});
    edited.await.unwrap();
    // The edited one came later than the run's end.
    let done = desk.resume("ann", run, |_| {}).await.unwrap();
    assert_eq!((done.row.sent, done.row.state), (2, RunState::Done));
    assert_eq!(house.store.count("billing").await.unwrap(), 1);
}

#[tokio::test]
async fn what_the_inbox_knows_by_its_business_key_is_not_entered_once_more() {
    let house = House::new().await;
    let key = InboxKey::business(|incoming| {
        let payload = incoming.message.payload.as_deref();
        payload.map(|payload| String::from_utf8_lossy(payload).into_owned())
    });
    let mut transaction = house.store.begin().await.unwrap();
    let paid = house
        .store
        .record(&mut transaction, "billing", &["payment-7"]);
    paid.await.unwrap();
    house.store.commit(transaction).await.unwrap();
    let desk = desk(&house).with_inbox(house.store.clone(), key);
    let of = |payment: &str| Message::new("orders", "Order").with_payload(payment.to_owned());
    // Another id would not help: it would be taken for a duplicate.
    let error = desk.reprocess("ann", &of("payment-7"), "again").await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Invalid);
    desk.reprocess("ann", &of("payment-8"), "again")
        .await
        .unwrap();
    assert_eq!(house.store.count("billing").await.unwrap(), 1);
}

#[tokio::test]
async fn what_another_process_may_have_sent_is_held_though_this_one_certainly_did_not() {
    let house = House::new().await;
    open_way_back(&house);
    bury(&house, numbered("a", "m", 3)).await;
    let silent = desk_over(&house, without_word(&house, "m-1", Stored::Unknown));
    let run = plan(&silent).await.row.id;
    assert!(silent.run("ann", run, |_| {}).await.is_err());
    let refusing = desk_over(&house, without_word(&house, "m-1", Stored::No));
    assert!(refusing.resume("bea", run, |_| {}).await.is_err());
    let all = LetterFilter::all();
    let discarded = desk(&house).discard("ann", &all, "not wanted").await;
    assert_eq!(discarded.unwrap().in_hand, 1);
}

#[tokio::test]
async fn what_was_never_to_be_sent_is_in_nobodys_hand() {
    let house = House::new().await;
    open_way_back(&house);
    let message = |id: &str| Message::new("orders", "Order").with_id(id);
    let mut looping = Story::default();
    looping.redrive_count = 9;
    put(&house, message("m-0"), Story::default()).await;
    put(&house, message("loop"), looping).await;
    put(&house, message("m-1"), Story::default()).await;
    let silent = desk_over(&house, without_word(&house, "m-1", Stored::Unknown));
    let run = plan(&silent).await.row.id;
    assert!(silent.run("ann", run, |_| {}).await.is_err());
    assert!(silent.cancel("ann", run, "enough").await.unwrap());
    let all = LetterFilter::all();
    let discarded = desk(&house).discard("ann", &all, "not wanted").await;
    let discarded = discarded.unwrap();
    assert_eq!((discarded.count, discarded.in_hand), (1, 1));
}

#[tokio::test]
async fn what_may_have_been_sent_is_held_though_the_rules_refuse_it_now() {
    let house = House::new().await;
    open_way_back(&house);
    bury(&house, numbered("a", "m", 2)).await;
    let silent = desk_over(&house, without_word(&house, "m-1", Stored::Unknown));
    let run = plan(&silent).await.row.id;
    assert!(silent.run("ann", run, |_| {}).await.is_err());
    let strict = RedriveConfig::default().with_redrives_max(0);
    let done = desk(&house)
        .with_config(strict)
        .resume("bea", run, |_| {})
        .await;
    assert_eq!(done.unwrap().row.state, RunState::Done);
    let all = LetterFilter::all();
    let discarded = desk(&house).discard("ann", &all, "not wanted").await;
    assert_eq!(discarded.unwrap().in_hand, 1);
    // It goes as it is.
    assert_eq!(run_all(&desk(&house)).await.row.sent, 1);
}

#[tokio::test]
async fn an_old_message_that_is_edited_or_entered_again_is_no_old_letter() {
    let house = House::new().await;
    open_way_back(&house);
    let mut old = Message::new("orders", "Order").with_id("m-1");
    old.occurred_at -= Duration::from_secs(40 * 86_400);
    bury(&house, [old.clone()]).await;
    let desk = desk(&house);
    assert_eq!(plan(&desk).await.would.send, 0);
    let entry = desk
        .list(&LetterFilter::all(), 0, 1)
        .await
        .unwrap()
        .remove(0);
    let edited = desk.edit("ann", entry.position, "a wrong price", |_| {});
    edited.await.unwrap();
    desk.reprocess("ann", &old, "again").await.unwrap();
    assert_eq!(plan(&desk).await.would.send, 2);
}
