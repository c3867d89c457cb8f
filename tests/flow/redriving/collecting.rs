//! From the broker into the table.

use super::*;

#[tokio::test]
async fn what_others_put_among_dead_letters_is_taken_in_and_nothing_panics() {
    let house = House::new().await;
    open_way_back(&house);
    house.broker.create_topic("orders.billing.DLQ", 1).unwrap();
    let dlq = |id: &str| Message::new("orders.billing.DLQ", "").with_id(id);
    let mut damaged = dlq("damaged");
    for (name, value) in [
        ("x-redrive-count", &b"many"[..]),
        ("x-first-failed-at", b"\xff"),
        ("x-version", b"seven"),
        ("x-consumer", b"no such \0 name"),
        ("x-dead-letter-reason", b"\xff\xff"),
    ] {
        damaged.headers.push(name, value);
    }
    let wrapped = Message::new("orders.billing.DLQ", "Wrapper")
        .with_id("wrapper")
        .with_payload("{\"inner\":\"m-9\"}");
    house
        .publish(&[dlq("plain"), dlq(" "), dlq(" "), damaged, wrapped])
        .await;
    let desk = desk(&house).with_unwrap(|incoming| {
        assert_ne!(
            incoming.message.id.as_str(),
            "damaged",
            "a hook that panics"
        );
        (incoming.message.event_type == "Wrapper")
            .then(|| Incoming::from(Message::new("orders", "Order").with_id("m-9")))
    });
    let collected = desk.collect(&house.broker, BRIEF).await.unwrap();
    assert_eq!(collected.stored, 5);
    let entries = desk.list(&LetterFilter::all(), 0, 10).await.unwrap();
    let ids: Vec<&str> = entries.iter().map(|e| e.message_id.as_str()).collect();
    let expected = [
        "plain",
        "orders.billing.DLQ/0/1",
        "orders.billing.DLQ/0/2",
        "damaged",
        "m-9",
    ];
    assert_eq!(ids, expected);
    for entry in &entries {
        assert_eq!(entry.story.consumer.as_deref(), Some("billing"));
        assert!(entry.story.reason.is_some());
    }
    assert_eq!(
        entries[0].story.reason.as_ref().unwrap().as_str(),
        "foreign"
    );
    assert_eq!(run_all(&desk).await.row.sent, 5);
    assert_eq!(way_back(&house).len(), 5);
    let damaged = way_back(&house)
        .into_iter()
        .find(|m| m.message.id.as_str() == "damaged");
    assert!(damaged.unwrap().message.headers.get("x-version").is_some());
}

#[tokio::test]
async fn a_letter_whose_collector_dies_before_it_settles_is_one_entry() {
    let house = House::new().await;
    let billing = Billing::default();
    let consumer = billing.start(&house, DeadLetters::topic());
    house.publish(&numbered("a", "m", 20)).await;
    house.consumed("billing", "orders").await;
    consumer.stop().await.unwrap();
    let desk = desk(&house);
    let collecting = tokio::spawn({
        let (desk, broker) = (desk.clone(), house.broker.clone());
        async move {
            desk.collect(
                &broker,
                CollectLimits {
                    idle: DEADLINE,
                    ..BRIEF
                },
            )
            .await
        }
    });
    eventually(DEADLINE, "some are stored", || async {
        house.store.count("billing").await.unwrap() >= 5
    })
    .await;
    collecting.abort();
    let _ = collecting.await;
    desk.collect(&house.broker, BRIEF).await.unwrap();
    assert_eq!(house.store.count("billing").await.unwrap(), 20);
    assert_eq!(
        house
            .broker
            .committed("billing.redrive", "orders.billing.DLQ")
            .iter()
            .sum::<u64>(),
        20
    );
}

#[tokio::test]
async fn a_destination_that_consumers_share_gives_each_desk_its_own_letters() {
    let house = House::new().await;
    let shared = || DeadLetters::topic().with_template("{topic}.dead");
    let billing = Billing::default();
    let consumer = billing.start(&house, shared());
    let mail = house
        .consumer("mail")
        .with_ladder(Ladder::none())
        .with_dead_letters(shared());
    let mail = run(mail, handler_fn(billing.clone(), bill));
    house.publish(&numbered("a", "m", 3)).await;
    house.consumed("billing", "orders").await;
    house.consumed("mail", "orders").await;
    consumer.stop().await.unwrap();
    mail.stop().await.unwrap();
    assert_eq!(house.ids("orders.dead").len(), 6);
    for name in ["billing", "mail"] {
        let store = house.store.clone();
        let desk = Redrive::new(name, "orders", house.broker.clone(), store);
        let desk = desk.with_dead_letters(shared());
        let collected = desk.collect(&house.broker, BRIEF).await.unwrap();
        assert_eq!((collected.stored, collected.passed), (3, 3), "{name}");
        assert_eq!(house.store.count(name).await.unwrap(), 3);
        assert_eq!(run_all(&desk).await.row.sent, 3);
        assert_eq!(house.ids(&format!("orders.{name}.redrive")).len(), 3);
    }
}
