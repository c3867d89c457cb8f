//! From a real server: time that runs out, members, rungs, and foreign messages.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use async_nats::HeaderMap;
use relaybox::broker::{Rung, TopologyMode};
use relaybox::story::Story;
use relaybox::testing::eventually;
use relaybox::{ErrorKind, MessageId};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::*;

/// Handlers take longer than the ack wait, and messages wait their turn in the member: signs of life keep them.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn slow_handlers_of_two_members_handle_each_message_once() {
    const ALL: usize = 4;
    let url = shared_nats().await.url();
    let name = stream("slow").await;
    let config = config(&url).with_ack_wait(2 * SECOND);
    let nats = Nats::connect(config).await.unwrap();
    publish_all(&nats, &numbered(&name, 0..ALL)).await;
    let handled: Arc<Mutex<Vec<String>>> = Arc::default();
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let mut asked = request("slow", &name);
        asked.in_flight_max = ALL / 2;
        let mut member = subscribe(&nats, asked).await;
        let handled = Arc::clone(&handled);
        workers.spawn(async move {
            while handled.lock().unwrap().len() < ALL {
                let receiving = member.receive(1);
                let Ok(received) = tokio::time::timeout(SECOND / 5, receiving).await else {
                    continue;
                };
                for delivery in received.unwrap() {
                    assert!(delivery.receipt.is_current());
                    // The work; the other message of this member waits meanwhile.
                    tokio::time::sleep(5 * SECOND).await;
                    assert!(delivery.receipt.is_current(), "{}", text(&delivery));
                    handled.lock().unwrap().push(text(&delivery));
                    acknowledge(delivery).await;
                }
            }
            member.close(DEADLINE).await.unwrap();
        });
    }
    within("all are handled", workers.join_all()).await;
    let mut handled = std::mem::take(&mut *handled.lock().unwrap());
    handled.sort();
    assert_eq!(handled, ["0", "1", "2", "3"]);
    assert_eq!(nats.lag("slow", &name).await.unwrap().messages, 0);
}

/// A process that dies leaves nothing behind but the ack wait, and the server never gives up.
#[test]
fn a_message_that_kills_its_process_every_time_is_never_orphaned() {
    let quick = |url: String| config(url).with_ack_wait(SECOND / 2);
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
    };
    let watching = runtime().unwrap();
    let (url, name) = watching.block_on(async {
        let name = stream("deadly").await;
        publish_all(&connect().await, &[message(&name, "deadly")]).await;
        (shared_nats().await.url(), name)
    });
    for round in 0..6 {
        let process = runtime().unwrap();
        process.block_on(async {
            let nats = Nats::connect(quick(url.clone())).await.unwrap();
            let mut subscription = subscribe(&nats, request("victim", &name)).await;
            let delivery = receive(&mut subscription, 1).await.remove(0);
            assert_eq!(delivery.redelivered, round > 0);
            // Neither settled nor dropped: the process is gone with all its tasks.
            std::mem::forget(delivery);
            std::mem::forget(subscription);
        });
        process.shutdown_background();
    }
    watching.block_on(async {
        let nats = Nats::connect(quick(url.clone())).await.unwrap();
        let mut subscription = subscribe(&nats, request("victim", &name)).await;
        acknowledge(receive(&mut subscription, 1).await.remove(0)).await;
        subscription.close(DEADLINE).await.unwrap();
        let lag = nats.lag("victim", &name).await.unwrap();
        assert_eq!(lag.messages, 0);
    });
}

/// Delays beyond the ack wait, mixed on one rung: nothing is early, and no long one keeps a short one waiting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mixed_delays_on_a_rung_are_each_kept() {
    let url = shared_nats().await.url();
    let name = stream("ladder").await;
    let nats = Nats::connect(config(&url).with_ack_wait(SECOND))
        .await
        .unwrap();
    let rung = format!("{name}.billing.retry");
    let mut asked = request("billing", &name);
    asked.rungs = vec![Rung {
        destination: rung.clone(),
        delay: SECOND,
        source: name.clone(),
    }];
    let mut subscription = subscribe(&nats, asked).await;
    let copy = |seconds: u64| {
        let Outgoing { message, .. } = message(&rung, seconds.to_string());
        let story = Story::default().due(message.occurred_at + Duration::from_secs(seconds));
        Outgoing { message, story }
    };
    publish_all(&nats, &[copy(6), copy(4), copy(2), copy(0)]).await;
    for expected in ["0", "2", "4", "6"] {
        let delivery = receive(&mut subscription, 1).await.remove(0);
        let now = Message::new("now", "T").occurred_at;
        assert_eq!(text(&delivery), expected);
        assert!(delivery.incoming.story.due_at.is_some_and(|due| now >= due));
        assert_eq!(delivery.source, rung);
        // It was kept alive the whole time, over several ack waits.
        assert!(!delivery.redelivered, "{expected}");
        acknowledge(delivery).await;
    }
    subscription.close(DEADLINE).await.unwrap();
    eventually(DEADLINE, "the rung is empty", || async {
        nats.depth(&rung)
            .await
            .is_ok_and(|depth| depth.messages == 0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_released_message_stays_away_beyond_the_ack_wait() {
    const DELAY: Duration = Duration::from_secs(3);
    let url = shared_nats().await.url();
    let name = stream("released").await;
    let nats = Nats::connect(config(&url).with_ack_wait(SECOND))
        .await
        .unwrap();
    publish_all(&nats, &[message(&name, "0")]).await;
    let mut subscription = subscribe(&nats, request("reader", &name)).await;
    let delivery = receive(&mut subscription, 1).await.remove(0);
    let released = Instant::now();
    let settlement = Settlement::Release { delay: DELAY };
    delivery.receipt.settle(settlement).await.unwrap();
    let again = receive(&mut subscription, 1).await.remove(0);
    let waited = released.elapsed();
    assert!(waited >= DELAY, "came after {waited:?}");
    assert!(again.redelivered);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_consumer_deleted_under_a_pull_is_made_anew() {
    let url = shared_nats().await.url();
    let name = stream("deleted").await;
    let nats = connect().await;
    let mut subscription = subscribe(&nats, request("reader", &name)).await;
    publish_all(&nats, &[message(&name, "0")]).await;
    acknowledge(receive(&mut subscription, 1).await.remove(0)).await;
    let stream = client(&url).await.get_stream(&name).await.unwrap();
    stream.delete_consumer("reader").await.unwrap();
    publish_all(&nats, &[message(&name, "1")]).await;
    loop {
        // It begins at the oldest again.
        let delivery = receive(&mut subscription, 1).await.remove(0);
        let number = text(&delivery);
        acknowledge(delivery).await;
        if number == "1" {
            break;
        }
    }
}

/// Its messages have the numbers of those that are still in work, and what is said of those must not settle them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_made_anew_under_a_consumer_loses_no_message() {
    let url = shared_nats().await.url();
    let name = stream("anew").await;
    let patient = config(&url).with_ack_wait(600 * SECOND);
    let nats = Nats::connect(patient).await.unwrap();
    publish_all(&nats, &[message(&name, "old")]).await;
    let mut subscription = subscribe(&nats, request("reader", &name)).await;
    let old = receive(&mut subscription, 1).await.remove(0);
    client(&url).await.delete_stream(&name).await.unwrap();
    nats.create_stream(&name, [&name]).await.unwrap();
    publish_all(&nats, &[message(&name, "new")]).await;
    let new = receive(&mut subscription, 1).await.remove(0);
    assert_eq!(text(&new), "new");
    assert_eq!(new.coordinates.offset, old.coordinates.offset);
    assert!(!old.receipt.is_current());
    acknowledge(old).await;
    assert!(new.receipt.is_current());
    acknowledge(new).await;
    subscription.close(DEADLINE).await.unwrap();
    assert_eq!(nats.lag("reader", &name).await.unwrap().messages, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_consumer_ends_the_subscription_where_that_was_asked_for() {
    let url = shared_nats().await.url();
    let name = stream("ended").await;
    let strict = config(&url).without_recreated_consumers();
    let nats = Nats::connect(strict).await.unwrap();
    let mut subscription = subscribe(&nats, request("reader", &name)).await;
    let stream = client(&url).await.get_stream(&name).await.unwrap();
    stream.delete_consumer("reader").await.unwrap();
    let error = within("the end", async {
        loop {
            match subscription.receive(1).await {
                Err(error) if !error.is_transient() => return error,
                _ => {}
            }
        }
    })
    .await;
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_messages_come_out_with_all_their_bytes() {
    let url = shared_nats().await.url();
    let name = stream("foreign").await;
    let nats = connect().await;
    let foreign = client(&url).await;
    let sent = foreign.publish(name.clone(), "bare".into()).await.unwrap();
    sent.await.unwrap();
    let mut headers = HeaderMap::new();
    for (header, value) in [
        ("x-message-id", " "),
        ("x-version", "seven"),
        ("x-headers", "[[\"a\"]]"),
        ("x-key", "not base64"),
        ("Foreign", "1"),
        ("Foreign", "2"),
    ] {
        headers.append(header, value);
    }
    let sent = foreign.publish_with_headers(name.clone(), headers, "broken".into());
    sent.await.unwrap().await.unwrap();
    publish_all(&nats, &[message(&name, "ours")]).await;

    let mut subscription = subscribe(&nats, request("reader", &name)).await;
    let received = receive(&mut subscription, 3).await;
    assert_eq!(texts(&received), ["bare", "broken", "ours"]);
    let ids: Vec<bool> = received.iter().map(|d| d.incoming.id_missing).collect();
    assert_eq!(ids, [true, true, false]);
    let coordinates = MessageId::new(format!("{name}/{name}/1"));
    assert_eq!(received[0].incoming.message.id, coordinates);
    let kept: Vec<_> = received[1].incoming.message.headers.iter().collect();
    let kept: Vec<_> = kept.iter().map(|header| header.name.as_str()).collect();
    let expected = [
        "Foreign",
        "Foreign",
        "x-headers",
        "x-key",
        "x-message-id",
        "x-version",
    ];
    assert_eq!(kept, expected);
}

/// The client gives up the connection that such headers come by, each time. They must not stop what is behind them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_that_are_no_text_do_not_stop_those_behind_them() {
    pass_what_is_unreadable("no_text", b"NATS/1.0\r\nForeign: \xff\xfe\r\n\r\n").await;
}

/// The client's own task panics over it, and makes no connection any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_carriage_return_within_a_header_does_not_stop_those_behind_it() {
    pass_what_is_unreadable("return", b"NATS/1.0\r\nForeign: x\ry\r\n\r\n").await;
}

async fn pass_what_is_unreadable(prefix: &str, headers: &[u8]) {
    let url = shared_nats().await.url();
    let name = stream(prefix).await;
    let nats = Nats::connect(config(&url).with_ack_wait(SECOND))
        .await
        .unwrap();
    publish_all(&nats, &[message(&name, "before")]).await;
    raw_publish(&url, &name, headers, b"unreadable").await;
    eventually(DEADLINE, "it is stored", || async {
        stored(&url, &name).await == 2
    })
    .await;
    publish_all(&nats, &numbered(&name, 0..3)).await;
    let mut subscription = subscribe(&nats, request("reader", &name)).await;
    let mut seen = Vec::new();
    while seen.len() < 5 {
        for delivery in receive(&mut subscription, 1).await {
            if delivery.receipt.is_current() && !seen.contains(&text(&delivery)) {
                seen.push(text(&delivery));
            }
            acknowledge(delivery).await;
        }
    }
    seen.sort();
    assert_eq!(seen, ["0", "1", "2", "before", "unreadable"]);
    eventually(DEADLINE, "receiving is up again", || async {
        subscription.health().is_up()
    })
    .await;
    // Publishing has a connection of its own.
    assert!(nats.health().is_up(), "{:?}", nats.health());
}

/// Publishes bytes that no client would.
async fn raw_publish(url: &str, subject: &str, headers: &[u8], payload: &[u8]) {
    let address = url.strip_prefix("nats://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let mut said = format!(
        "CONNECT {{\"verbose\":false,\"headers\":true}}\r\nHPUB {subject} {} {}\r\n",
        headers.len(),
        headers.len() + payload.len()
    )
    .into_bytes();
    said.extend_from_slice(headers);
    said.extend_from_slice(payload);
    said.extend_from_slice(b"\r\nPING\r\n");
    stream.write_all(&said).await.unwrap();
    let mut heard = Vec::new();
    within("a pong", async {
        let mut buffer = [0; 1_024];
        while !heard.windows(4).any(|window| window == b"PONG") {
            let count = stream.read(&mut buffer).await.unwrap();
            assert!(count > 0, "the server hung up");
            heard.extend_from_slice(&buffer[..count]);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unchecked_subscription_asks_nothing_and_makes_nothing() {
    let url = shared_nats().await.url();
    let name = stream("unchecked").await;
    let nats = connect().await;
    let mut asked = request("reader", &name);
    asked.topology = TopologyMode::Unchecked;
    let mut subscription = subscribe(&nats, asked.clone()).await;
    let report = within("a report", subscription.receive(1))
        .await
        .unwrap_err();
    assert!(report.is_transient(), "{report}");
    let mut stream = client(&url).await.get_stream(&name).await.unwrap();
    assert_eq!(stream.info().await.unwrap().state.consumer_count, 0);
    asked.topology = TopologyMode::Verify;
    drop(subscribe(&nats, asked).await);
    publish_all(&nats, &[message(&name, "0")]).await;
    assert_eq!(texts(&receive(&mut subscription, 1).await), ["0"]);
}
