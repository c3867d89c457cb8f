//! What a relay parks, whatever the broker said about it.

use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::broker::{PublishOutcome, Publisher, PublisherCapabilities, RejectionScope};
use relaybox::envelope::Outgoing;
use relaybox::relay::Relay;
use relaybox::store::{AsideFilter, OutboxAdmin, OutboxStore};
use relaybox::story::ERROR_BYTES_MAX;
use relaybox::{Error, ErrorKind, Result};

use super::*;

/// Refuses every message, and says its payload a hundred thousand times.
struct Refusing;

impl Publisher for Refusing {
    fn capabilities(&self) -> PublisherCapabilities {
        PublisherCapabilities::new("refusing")
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        let refusal = |sent: &Outgoing| {
            let word = sent.message.payload.as_deref().unwrap_or_default();
            let text = String::from_utf8_lossy(word).repeat(100_000);
            PublishOutcome::Rejected {
                scope: RejectionScope::Message,
                error: Error::new(ErrorKind::Rejected, "publish", text),
            }
        };
        Box::pin(async move { batch.iter().map(refusal).collect() })
    }

    fn health(&self) -> relaybox::broker::Health {
        relaybox::broker::Health::up()
    }

    fn check<'a>(&'a self, _: &'a [String]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn close(&self, _: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

pub async fn an_error_text_of_any_length_and_characters_is_parked_and_listed<H: Harness>() {
    let h = H::start().await;
    let store = h.store();
    let words = [
        "x",
        "\0",
        "🚀",
        "a\0🚀\u{7f}\r\n'\\",
        "é🚀",
        "\u{fffd}\u{10ffff}",
    ];
    let messages = words.map(|word| keyed(word, word));
    enqueue::<H>(&store, &messages).await;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let relay = Relay::new(store.clone(), Refusing);
    let running = relay.run_until(async {
        let _ = stopped.await;
    });
    let wait = async {
        let parked = async {
            while store.aside(10).await.unwrap() < words.len() as u64 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(MINUTE, parked)
            .await
            .expect("all are parked");
        stop.send(()).unwrap();
    };
    let (ran, ()) = tokio::join!(running, wait);
    ran.unwrap();
    assert_eq!(store.pending(10).await.unwrap(), 0);
    let listed = store.list_aside(&AsideFilter::all(), 0, 10).await.unwrap();
    for message in &messages {
        let entry = listed.iter().find(|entry| entry.message_id == message.id);
        let error = entry.unwrap().error.as_deref().unwrap();
        // Cut between characters, so at most three bytes short.
        assert!((ERROR_BYTES_MAX - 3..=ERROR_BYTES_MAX).contains(&error.len()));
        assert!(!error.contains('\0'));
    }
}
