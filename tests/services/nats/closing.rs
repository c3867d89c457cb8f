//! Ends and beginnings: what one run leaves, the next one finds in its order.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use relaybox_testcontainers::Proxy;

use super::*;

/// Nothing is given back out of order, and nothing that comes while a member closes is left to the ack wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn each_run_goes_on_exactly_where_the_one_before_ended() {
    const HELD: usize = 5;
    let url = shared_nats().await.url();
    let name = stream("runs").await;
    // What waited for it would come after all others.
    let patient = config(&url).with_ack_wait(600 * SECOND);
    let nats = Nats::connect(patient).await.unwrap();
    let enough = Arc::new(AtomicBool::new(false));
    let publishing = tokio::spawn({
        let (nats, name, enough) = (nats.clone(), name.clone(), Arc::clone(&enough));
        async move {
            let mut sent = 0;
            while !enough.load(Ordering::SeqCst) {
                publish_all(&nats, &numbered(&name, sent..sent + 4)).await;
                sent += 4;
            }
        }
    });
    let mut expected = 0;
    for run in 0..15 {
        let mut asked = request("reader", &name);
        asked.in_flight_max = 100;
        let mut subscription = subscribe(&nats, asked).await;
        let mut held = Vec::new();
        for at in 0..40 {
            let delivery = receive(&mut subscription, 1).await.remove(0);
            let number: usize = text(&delivery).parse().unwrap();
            assert_eq!(number, expected + held.len(), "run {run}, delivery {at}");
            if at < 40 - HELD {
                acknowledge(delivery).await;
                expected += 1;
            } else {
                held.push(delivery);
            }
        }
        within("a close", subscription.close(DEADLINE))
            .await
            .unwrap();
        assert!(held.iter().all(|delivery| !delivery.receipt.is_current()));
    }
    enough.store(true, Ordering::SeqCst);
    publishing.await.unwrap();
}

/// Flushing would wait for a connection, and there is nothing to be flushed without one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publisher_closes_without_a_connection_and_takes_nothing_any_more() {
    let url = shared_nats().await.url();
    let name = stream("closed").await;
    let target = url.strip_prefix("nats://").unwrap().to_owned();
    let proxy = Proxy::start(target).await.unwrap();
    let through = format!("nats://{}", proxy.address());
    let nats = Nats::connect(config(through)).await.unwrap();
    proxy.cut();
    relaybox::testing::eventually(DEADLINE, "the loss is seen", || async {
        !nats.health().is_up()
    })
    .await;
    within("a close", nats.close(3 * SECOND)).await.unwrap();
    let outcomes = publish(&nats, &[message(&name, "0")]).await;
    let error = outcomes[0].error().unwrap();
    assert_eq!(error.kind(), relaybox::ErrorKind::Closed, "{error}");
}
