//! The contract suite finds broken adapters: each defect, worn by an adapter that is otherwise good, breaks the case that is
//! about it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::Result;
use relaybox::broker::memory::MemoryBroker;
use relaybox::broker::{
    Backlog, Delivery, Health, PublishOutcome, Publisher, PublisherCapabilities, Receipt,
    Retention, Settlement, Subscriber, SubscriberCapabilities, Subscription, SubscriptionRequest,
    TopologyMode,
};
use relaybox::conformance::{CASES, Fixture, Line, Verdict, fresh};
use relaybox::envelope::Outgoing;
use relaybox::headers::Headers;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Defect {
    None,
    ConfirmsAndLoses,
    TurnsBatchesRound,
    ForgetsAnOutcome,
    ConfirmsWhatHasNoPlace,
    BlamesAllForOne,
    DropsHeaders,
    DropsRepeatedIds,
    ForgetsWhenItIsDue,
    ChecksOnlyTheFirst,
    GivesMoreThanAsked,
    DropsWhatIsDropped,
    ReleasesAtOnce,
    MakesSources,
    VerifiesNothing,
    CountsNothing,
    KeepsWhatIsNotThere,
    IsAlwaysWell,
    NamesNothing,
}

#[derive(Clone)]
struct Worn {
    broker: MemoryBroker,
    defect: Defect,
    ids: Arc<Mutex<HashSet<String>>>,
}

impl Worn {
    fn new(defect: Defect) -> Self {
        Self {
            broker: MemoryBroker::new(),
            defect,
            ids: Arc::default(),
        }
    }

    fn is_new(&self, outgoing: &Outgoing) -> bool {
        let id = outgoing.message.id.to_string();
        self.ids.lock().unwrap().insert(id)
    }
}

impl Publisher for Worn {
    fn capabilities(&self) -> PublisherCapabilities {
        Publisher::capabilities(&self.broker)
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            let mut sent = batch.to_vec();
            match self.defect {
                Defect::ConfirmsAndLoses => {
                    return batch.iter().map(|_| PublishOutcome::Confirmed).collect();
                }
                Defect::TurnsBatchesRound => sent.reverse(),
                Defect::DropsHeaders => {
                    for outgoing in &mut sent {
                        outgoing.message.headers = Headers::new();
                    }
                }
                Defect::ForgetsWhenItIsDue => {
                    for outgoing in &mut sent {
                        outgoing.story.due_at = None;
                    }
                }
                Defect::DropsRepeatedIds => {
                    sent.retain(|outgoing| self.is_new(outgoing));
                    self.broker.publish(&sent).await;
                    return batch.iter().map(|_| PublishOutcome::Confirmed).collect();
                }
                _ => {}
            }
            let mut outcomes = self.broker.publish(&sent).await;
            match self.defect {
                Defect::ForgetsAnOutcome => drop(outcomes.pop()),
                Defect::ConfirmsWhatHasNoPlace => {
                    outcomes.fill_with(|| PublishOutcome::Confirmed);
                }
                Defect::BlamesAllForOne if !outcomes.iter().all(PublishOutcome::is_confirmed) => {
                    outcomes.fill_with(|| PublishOutcome::Withheld);
                }
                _ => {}
            }
            outcomes
        })
    }

    fn health(&self) -> Health {
        match self.defect {
            Defect::IsAlwaysWell => Health::up(),
            _ => Publisher::health(&self.broker),
        }
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        match self.defect {
            Defect::ChecksOnlyTheFirst => self.broker.check(&destinations[..1]),
            _ => self.broker.check(destinations),
        }
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        Publisher::close(&self.broker, deadline)
    }
}

impl Subscriber for Worn {
    fn capabilities(&self) -> SubscriberCapabilities {
        Subscriber::capabilities(&self.broker)
    }

    fn subscribe(
        &self,
        mut request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        match self.defect {
            Defect::GivesMoreThanAsked => request.in_flight_max = 1_000,
            Defect::VerifiesNothing => request.topology = TopologyMode::Unchecked,
            Defect::MakesSources => {
                for source in &request.sources {
                    drop(self.broker.create_topic(source, 1));
                }
            }
            _ => {}
        }
        Box::pin(async move {
            let inner = self.broker.subscribe(request).await?;
            let defect = self.defect;
            Ok(Box::new(WornSubscription { inner, defect }) as Box<dyn Subscription>)
        })
    }

    fn key_affinity(&self, source: &str) -> bool {
        self.broker.key_affinity(source)
    }

    fn depth<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        match self.defect {
            Defect::CountsNothing => Box::pin(async { Ok(Backlog::default()) }),
            _ => self.broker.depth(destination),
        }
    }

    fn lag<'a>(&'a self, consumer: &'a str, source: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        self.broker.lag(consumer, source)
    }

    fn destinations<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        match self.defect {
            Defect::NamesNothing => Box::pin(async { Ok(Vec::new()) }),
            _ => self.broker.destinations(prefix),
        }
    }

    fn retention<'a>(&'a self, source: &'a str) -> BoxFuture<'a, Result<Retention>> {
        match self.defect {
            Defect::KeepsWhatIsNotThere => Box::pin(async { Ok(Retention::Unbounded) }),
            _ => self.broker.retention(source),
        }
    }
}

struct WornSubscription {
    inner: Box<dyn Subscription>,
    defect: Defect,
}

impl Subscription for WornSubscription {
    fn receive(&mut self, count_max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            let mut deliveries = self.inner.receive(count_max).await?;
            for delivery in &mut deliveries {
                let nothing = Box::new(WornReceipt {
                    inner: None,
                    defect: self.defect,
                });
                let inner = std::mem::replace(&mut delivery.receipt, nothing);
                delivery.receipt = Box::new(WornReceipt {
                    inner: Some(inner),
                    defect: self.defect,
                });
            }
            Ok(deliveries)
        })
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn close(self: Box<Self>, deadline: Duration) -> BoxFuture<'static, Result<()>> {
        self.inner.close(deadline)
    }
}

struct WornReceipt {
    inner: Option<Box<dyn Receipt>>,
    defect: Defect,
}

impl Receipt for WornReceipt {
    fn is_current(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.is_current())
    }

    fn settle(mut self: Box<Self>, settlement: Settlement) -> BoxFuture<'static, Result<()>> {
        let settlement = match (self.defect, settlement) {
            (Defect::ReleasesAtOnce, Settlement::Release { .. }) => Settlement::Release {
                delay: Duration::ZERO,
            },
            (_, settlement) => settlement,
        };
        self.inner.take().unwrap().settle(settlement)
    }
}

impl Drop for WornReceipt {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.take()
            && self.defect == Defect::DropsWhatIsDropped
        {
            let settling = inner.settle(Settlement::Acknowledge);
            futures_util::FutureExt::now_or_never(settling)
                .unwrap()
                .unwrap();
        }
    }
}

impl Fixture for Worn {
    fn topic(&self, partitions: usize) -> BoxFuture<'_, String> {
        let name = fresh("topic");
        self.broker.create_topic(&name, partitions).unwrap();
        Box::pin(async { name })
    }

    fn publisher(&self) -> Arc<dyn Publisher> {
        Arc::new(self.clone())
    }

    fn subscriber(&self) -> Arc<dyn Subscriber> {
        Arc::new(self.clone())
    }

    fn line(&self) -> Option<Arc<dyn Line>> {
        Some(Arc::new(self.clone()))
    }
}

impl Line for Worn {
    fn pass(&self) -> BoxFuture<'_, ()> {
        self.broker.set_available(true);
        Box::pin(async {})
    }

    fn cut(&self) -> BoxFuture<'_, ()> {
        self.broker.set_available(false);
        Box::pin(async {})
    }

    fn silence(&self) -> BoxFuture<'_, ()> {
        self.cut()
    }
}

async fn verdict(name: &str, defect: Defect) -> Verdict {
    let case = CASES.iter().find(|case| case.name == name);
    let case = case.unwrap_or_else(|| panic!("no case is named {name}"));
    case.run(&Worn::new(defect)).await
}

/// Time goes by itself where everybody waits, so that waiting in vain takes no time. Not for what waits by the broker's own
/// clock, which is the machine's.
#[tokio::test(start_paused = true)]
async fn each_defect_breaks_the_case_that_is_about_it() {
    for (defect, name) in [
        (Defect::ConfirmsAndLoses, "every_byte_arrives"),
        (Defect::DropsHeaders, "every_byte_arrives"),
        (
            Defect::TurnsBatchesRound,
            "messages_of_a_key_keep_their_order",
        ),
        (
            Defect::ForgetsAnOutcome,
            "a_batch_has_one_outcome_per_message",
        ),
        (
            Defect::ConfirmsWhatHasNoPlace,
            "an_unknown_destination_rejects_only_itself",
        ),
        (
            Defect::BlamesAllForOne,
            "an_oversized_message_rejects_only_itself",
        ),
        (
            Defect::DropsRepeatedIds,
            "a_copy_with_another_story_is_a_message_of_its_own",
        ),
        (
            Defect::ForgetsWhenItIsDue,
            "a_rung_is_never_early_and_blocks_nobody",
        ),
        (
            Defect::NamesNothing,
            "a_rung_that_nobody_reads_is_named_or_comes_back_by_itself",
        ),
        (
            Defect::ChecksOnlyTheFirst,
            "check_names_every_missing_destination",
        ),
        (
            Defect::GivesMoreThanAsked,
            "no_more_than_in_flight_max_are_unsettled",
        ),
        (Defect::DropsWhatIsDropped, "a_dropped_delivery_comes_again"),
        (
            Defect::ReleasesAtOnce,
            "a_released_delivery_comes_again_after_its_delay",
        ),
        (Defect::MakesSources, "a_missing_source_is_never_created"),
        (Defect::VerifiesNothing, "verify_names_everything_missing"),
        (Defect::CountsNothing, "depth_and_lag_count_what_is_there"),
        (
            Defect::KeepsWhatIsNotThere,
            "a_source_tells_how_long_it_keeps_messages",
        ),
        (
            Defect::IsAlwaysWell,
            "a_broken_line_confirms_nothing_and_is_told",
        ),
    ] {
        let found = verdict(name, defect).await;
        assert!(matches!(found, Verdict::Failed(_)), "{defect:?}: {found:?}");
    }
}

#[tokio::test]
async fn without_a_defect_they_hold() {
    for case in CASES {
        // These wait by the machine's clock, and run elsewhere on the same broker.
        if case.name.contains("rung") {
            continue;
        }
        let found = verdict(case.name, Defect::None).await;
        assert_eq!(found, Verdict::Passed, "{}", case.name);
    }
}
