//! Cases about what an adapter tells of itself and its broker.

use std::time::Duration;

use super::{
    Fixture, acknowledge, close, eventually, fresh, numbered, publish_all, receive_count,
    subscribe, within,
};
use crate::ErrorKind;
use crate::broker::{Retention, SubscriptionRequest};

pub(super) async fn depth_and_lag_count_what_is_there(fixture: &dyn Fixture) {
    let topic = fixture.topic(2).await;
    let subscriber = fixture.subscriber();
    let consumer = fresh("consumer");
    let depth = || async { within("a depth", subscriber.depth(&topic)).await.unwrap() };
    let lag = || async {
        within("a lag", subscriber.lag(&consumer, &topic))
            .await
            .unwrap()
    };
    assert_eq!(depth().await.messages, 0);
    assert_eq!(depth().await.oldest, None);

    let batch: Vec<_> = (0..5).map(|n| numbered(&topic, "a", n)).collect();
    publish_all(&*fixture.publisher(), &batch).await;
    eventually("all are counted", || async { depth().await.messages == 5 }).await;
    let request = SubscriptionRequest::new(&consumer, vec![topic.clone()]);
    let mut subscription = subscribe(fixture, request).await;
    // What is with the member may be counted or not; what it gave back is.
    for (n, delivery) in receive_count(&mut *subscription, 5)
        .await
        .into_iter()
        .enumerate()
    {
        if n < 3 {
            acknowledge(delivery).await;
        }
    }
    close(subscription).await;
    eventually("two are left", || async { lag().await.messages == 2 }).await;

    let request = SubscriptionRequest::new(&consumer, vec![topic.clone()]);
    let mut subscription = subscribe(fixture, request).await;
    for delivery in receive_count(&mut *subscription, 2).await {
        acknowledge(delivery).await;
    }
    close(subscription).await;
    eventually("none is left", || async { lag().await.messages == 0 }).await;
    assert_eq!(lag().await.oldest, None);
}

pub(super) async fn what_is_missing_has_no_depth(fixture: &dyn Fixture) {
    let subscriber = fixture.subscriber();
    let missing = fresh("missing");
    let depth = within("a depth", subscriber.depth(&missing)).await;
    assert_eq!(depth.unwrap_err().kind(), ErrorKind::NotFound);
    let lag = within("a lag", subscriber.lag("consumer", &missing)).await;
    assert_eq!(lag.unwrap_err().kind(), ErrorKind::NotFound);
}

pub(super) async fn a_source_tells_how_long_it_keeps_messages(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let subscriber = fixture.subscriber();
    let found = within("a retention", subscriber.retention(&topic)).await;
    assert_ne!(found.unwrap(), Retention::Bounded(Duration::ZERO));
    let missing = fresh("missing");
    let found = within("a retention", subscriber.retention(&missing)).await;
    assert_eq!(found.unwrap_err().kind(), ErrorKind::NotFound);
}

pub(super) async fn health_is_up_while_messages_go_through(fixture: &dyn Fixture) {
    let topic = fixture.topic(1).await;
    let publisher = fixture.publisher();
    let request = SubscriptionRequest::new(fresh("consumer"), vec![topic.clone()]);
    let mut subscription = subscribe(fixture, request).await;
    publish_all(&*publisher, &[numbered(&topic, "a", 0)]).await;
    assert!(publisher.health().is_up(), "{:?}", publisher.health());
    for delivery in receive_count(&mut *subscription, 1).await {
        acknowledge(delivery).await;
    }
    assert!(subscription.health().is_up(), "{:?}", subscription.health());
}
