//! From the failure to the effect.

use std::collections::BTreeMap;

use relaybox::broker::Subscriber;
use relaybox::dlq::redrive::Order;
use relaybox::store::RunState;

use super::*;

over_each_broker! {
    what_failed_is_handled_after_all_byte_for_byte_and_by_nobody_else
    what_fails_again_comes_back_as_a_new_entry
}

/// With everything in it that a broker might spoil.
fn precious(topic: &str) -> Vec<Message> {
    let mut full = Message::new(topic, "Order")
        .with_id("m-full")
        .with_key([0xff, 0])
        .with_payload(&[0, 0xfe, 0x80][..])
        .with_content_type("application/x-odd")
        .with_version(-4)
        .with_trace("00-aa-bb-01", Some("v=1".into()))
        .with_header("repeated", "1")
        .with_header("bytes", &b"\0\xc3\x28"[..])
        .with_header("repeated", "2")
        .with_header("empty", "");
    full.headers.push_optional("null", None);
    let bare = Message::new(topic, "Order").with_id("m-null");
    let empty = Message::new(topic, "Order")
        .with_id("m-empty")
        .with_key("")
        .with_payload("");
    vec![full, bare, empty]
}

fn seen(app: &App) -> BTreeMap<String, Incoming> {
    let seen = app.seen.lock().unwrap();
    let by_id = |incoming: &Incoming| (incoming.message.id.to_string(), incoming.clone());
    seen.iter().map(by_id).collect()
}

async fn what_failed_is_handled_after_all_byte_for_byte_and_by_nobody_else(product: Product) {
    let scene = Scene::new(product).await;
    let billing = scene.start();
    let other = App {
        consumer: unique_name("other"),
        ..App::default()
    };
    other.repaired.store(true, Ordering::SeqCst);
    let fan_out = Subscriber::capabilities(&scene.broker).fan_out;
    let mail = fan_out.then(|| scene.start_as(other.clone()));
    let sent = precious(&scene.topic);
    scene.publish(sent.clone()).await;
    eventually(DEADLINE, "all failed", || async {
        seen(&scene.app).len() == 3
    })
    .await;
    let before = seen(&scene.app);
    scene.until_quiet().await;
    scene.collect(3).await;

    scene.repair();
    scene.app.seen.lock().unwrap().clear();
    let desk = scene.desk();
    let planned = desk
        .plan("ann", &Order::of(LetterFilter::all()))
        .await
        .unwrap();
    assert_eq!(planned.would.send, 3);
    let done = desk.run("ann", planned.row.id, |_| {}).await.unwrap();
    assert_eq!((done.row.state, done.row.sent), (RunState::Done, 3));
    scene.until_effects(3).await;
    scene.until_quiet().await;
    if fan_out {
        eventually(DEADLINE, "the other handled the originals", || async {
            scene.effects(&other.consumer).await.len() == 3
        })
        .await;
    }
    billing.stop().await;
    if let Some(mail) = mail {
        mail.stop().await;
        assert_eq!(other.seen.lock().unwrap().len(), 3, "no redrive reached it");
    }
    let after = seen(&scene.app);
    for message in &sent {
        let id = message.id.as_str();
        let (first, again) = (&before[id], &after[id]);
        let mut back = again.message.clone();
        back.destination.clone_from(&message.destination);
        assert_eq!(back, *message);
        assert_eq!(
            (first.story.redrive_count, again.story.redrive_count),
            (0, 1)
        );
        assert_eq!((again.story.retry_count, &again.story.reason), (0, &None));
        assert_eq!(again.story.last_error, None);
        assert_eq!(
            again.story.consumer.as_deref(),
            Some(scene.consumer.as_str())
        );
    }
    assert_eq!(scene.effects(&scene.consumer).await.len(), 3);
    assert_eq!(scene.entries().await, 0);
}

async fn what_fails_again_comes_back_as_a_new_entry(product: Product) {
    let scene = Scene::new(product).await;
    scene.bury("m", 6).await;
    let billing = scene.start();
    let desk = scene.desk();
    let planned = desk
        .plan("ann", &Order::of(LetterFilter::all()))
        .await
        .unwrap();
    // The consumer may not have made its way back yet.
    let mut done = desk.run("ann", planned.row.id, |_| {}).await;
    let until = std::time::Instant::now() + DEADLINE;
    while done.is_err() {
        assert!(std::time::Instant::now() < until, "{done:?}");
        done = desk.resume("ann", planned.row.id, |_| {}).await;
    }
    assert_eq!(done.unwrap().row.sent, 6);
    scene.until_quiet().await;
    scene.collect(6).await;
    billing.stop().await;
    let again = scene.list().await;
    assert!(again.iter().all(|entry| entry.story.redrive_count == 1));
    assert!(again.iter().all(|entry| entry.position > planned.row.end));
    assert_eq!(
        scene.app.seen.lock().unwrap().len(),
        6,
        "once in the same run"
    );
}
