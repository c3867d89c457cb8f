//! Messages with a delay, and destinations under an operator's control.

use std::time::Duration;

use relaybox::ErrorKind;
use relaybox::store::{AsideFilter, Enqueue, InboxStore, Mode, OutboxStore};

use super::*;

const HOUR: Duration = Duration::from_secs(3_600);

pub async fn a_delayed_message_is_released_once_when_it_is_due<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    let due: Vec<_> = (0..20).map(|n| keyed("k", &n.to_string())).collect();
    store
        .insert_delayed(connection, &due, Duration::ZERO)
        .await
        .unwrap();
    store
        .insert_delayed(connection, &[keyed("k", "later")], HOUR)
        .await
        .unwrap();
    store.commit(transaction).await.unwrap();
    assert_eq!(
        (
            store.pending(50).await.unwrap(),
            store.aside(50).await.unwrap()
        ),
        (0, 21)
    );
    let (a, b) = tokio::join!(store.release_due(5), store.release_due(5));
    let (a, b) = (a.unwrap(), b.unwrap());
    assert!(a.released <= 5 && b.released <= 5);
    let mut released = a.released + b.released;
    loop {
        let more = store.release_due(50).await.unwrap();
        released += more.released;
        let next = more.next.unwrap();
        if more.released == 0 {
            assert!(next > HOUR - MINUTE && next <= HOUR, "{next:?}");
            break;
        }
    }
    assert_eq!(released, 20);
    assert_eq!(
        (
            store.pending(50).await.unwrap(),
            store.aside(50).await.unwrap()
        ),
        (20, 1)
    );
    let read = pending(&store).await.rows;
    let sent: Vec<_> = read.iter().map(|row| row.message.id.clone()).collect();
    let expected: Vec<_> = due.iter().map(|message| message.id.clone()).collect();
    if a.released + b.released == 5 {
        assert_eq!(sent, expected);
    }
    assert!(read.iter().all(|row| due.contains(&row.message)));
    // Nobody's to discard or requeue by mistake.
    let all = AsideFilter::all();
    assert_eq!(store.requeue(&all, Mode::Apply).await.unwrap(), 0);
    assert_eq!(store.discard(&all, "a test", Mode::Apply).await.unwrap(), 0);
}

pub async fn a_delayed_message_exists_only_if_its_transaction_commits<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let mut transaction = store.begin().await.unwrap();
    let connection = H::Store::connection(&mut transaction);
    let message = [keyed("k", "1")];
    store
        .insert_delayed(connection, &message, Duration::ZERO)
        .await
        .unwrap();
    store.rollback(transaction).await.unwrap();
    assert_eq!(store.aside(10).await.unwrap(), 0);
    assert_eq!(store.release_due(10).await.unwrap().released, 0);
}

pub async fn operators_pause_resume_and_limit_destinations<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    assert!(store.controls().await.unwrap().is_empty());
    store.resume("never paused").await.unwrap();
    store.pause("orders", "the warehouse moves").await.unwrap();
    store
        .limit("mail", Some(20), "the provider's limit")
        .await
        .unwrap();
    store
        .limit("orders", Some(5), "slowly afterwards")
        .await
        .unwrap();
    let told = async || -> Vec<(String, bool, Option<u32>)> {
        let controls = store.controls().await.unwrap().into_iter();
        controls
            .map(|c| (c.destination, c.paused, c.rate_max))
            .collect()
    };
    let mail = ("mail".to_owned(), false, Some(20));
    assert_eq!(
        told().await,
        [mail.clone(), ("orders".into(), true, Some(5))]
    );
    store.resume("orders").await.unwrap();
    assert_eq!(
        told().await,
        [mail.clone(), ("orders".into(), false, Some(5))]
    );
    store.limit("orders", None, "over").await.unwrap();
    assert_eq!(told().await, [mail]);
    let because = store.controls().await.unwrap().remove(0).because;
    assert_eq!(because, "the provider's limit");
    for refused in [
        store.pause("", "x").await,
        store.pause("orders", " ").await,
        store.limit("orders", Some(0), "x").await,
        store.pause(&"x".repeat(1_025), "x").await,
    ] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    }
}
