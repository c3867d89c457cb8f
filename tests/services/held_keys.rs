//! Messages whose keys a transaction elsewhere holds.

use std::sync::atomic::Ordering;
use std::time::Duration;

use relaybox::consumer::{Consumer, handler_fn};
use relaybox::envelope::Incoming;
use relaybox::store::InboxStore;
use relaybox::testing::eventually;
use sqlx::PgConnection;
use tokio::sync::oneshot;

use super::consuming::{DEADLINE, House};

/// A transaction that never ends holds the keys of some messages. They are put off, and are no suspects for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_held_elsewhere_delay_no_other_message() {
    let house = House::new().await;
    let held: Vec<String> = (0..4).map(|n| format!("held-{n}")).collect();
    let keys: Vec<&str> = held.iter().map(String::as_str).collect();
    let mut transaction = house.store.begin().await.unwrap();
    let record = house.store.record(&mut transaction, "billing", &keys);
    record.await.unwrap();
    for id in &keys {
        house.publish(id, &[id]).await;
    }
    for n in 0..200 {
        let id = format!("m-{n}");
        house.publish(&id, &[&id]).await;
    }
    async fn note(_: &(), db: &mut PgConnection, incoming: &Incoming) -> Result<(), sqlx::Error> {
        sqlx::query("INSERT INTO effect (message_id) VALUES ($1)")
            .bind(incoming.message.id.as_str())
            .execute(db)
            .await
            .map(drop)
    }
    let store = house
        .store
        .clone()
        .with_lock_wait(Duration::from_millis(300));
    let consumer = Consumer::new("billing", "orders", house.broker.clone(), store);
    let counts = consumer.counts();
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(handler_fn((), note), async {
        let _ = stopped.await;
    }));
    eventually(DEADLINE, "the others are done", || async {
        house.effects().await.len() == 200
    })
    .await;
    house.store.rollback(transaction).await.unwrap();
    house.consumed().await;
    let _ = stop.send(());
    running.await.unwrap().unwrap();
    assert_eq!(house.effects().await.len(), 204);
    assert_eq!(counts.crashed.load(Ordering::SeqCst), 0);
    assert!(house.dead().is_empty());
}
