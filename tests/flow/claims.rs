//! Claims in the waiting room, and what becomes of a message without one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use relaybox::backoff::DelayPolicy;
use relaybox::broker::RejectionScope;
use relaybox::consumer::{FailureGuard, handler_fn};
use relaybox::envelope::Outgoing;
use relaybox::ladder::DeadHead;
use relaybox::story::Reason;
use relaybox::testing::eventually;

use super::support::{Altered, DEADLINE, House, loaded, quick, refused, run};
use super::waiting::{Log, MS, fixed, message, obey};

#[tokio::test]
async fn a_message_that_is_parked_is_no_probe_of_the_guard() {
    let house = House::new().await;
    let log = Log::default();
    house
        .publish(&[message("k", 0, "fail 9"), message("k", 1, "ok")])
        .await;
    // No dead letter is taken of a message that stood behind another one.
    let refusals = Arc::new(AtomicU64::new(0));
    let publisher = {
        let refusals = refusals.clone();
        Altered::answering(house.broker.clone(), move |sent: &Outgoing| {
            let reason = sent.story.reason.as_ref().map(Reason::as_str);
            (reason == Some(Reason::PARKED)).then(|| {
                refusals.fetch_add(1, Ordering::SeqCst);
                refused(RejectionScope::Destination)
            })
        })
    };
    // Closed by the two failures of the one in front.
    let guard = FailureGuard::default()
        .with_window(2)
        .with_pause(DelayPolicy::fixed(20 * MS));
    let consumer = house
        .waiting(fixed(300, 2).by_key(DeadHead::Park))
        .with_publisher(publisher)
        .with_config(quick().with_failure_guard(guard));
    let consumer = run(consumer, handler_fn(log.clone(), obey));
    eventually(DEADLINE, "the dead letter is refused", || async {
        loaded(&refusals) > 0
    })
    .await;
    house.publish(&[message("j", 0, "ok")]).await;
    eventually(DEADLINE, "another key goes on", || async {
        house.effects("billing").await == ["j-0"]
    })
    .await;
    consumer.stop().await.unwrap();
}
