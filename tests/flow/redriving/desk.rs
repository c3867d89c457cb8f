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
    assert_eq!(desk.discard("ann", &one, "a test order").await.unwrap(), 1);
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
