//! From a broker's dead letters into the table: stored first, and only then settled at the broker.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use crate::broker::{
    Delivery, Receipt, Settlement, Subscriber, Subscription, SubscriptionRequest, TopologyMode,
};
use crate::consumer::validate_name;
use crate::envelope::{Incoming, Outgoing};
use crate::error::{Error, Result, within};
use crate::message::MessageId;
use crate::store::Arrival;
use crate::story::{Origin, Reason};

use super::Redrive;

/// See [`Redrive::with_unwrap`].
pub type Unwrap = Arc<dyn Fn(&Incoming) -> Option<Incoming> + Send + Sync>;

/// Deliveries in hand; each may be as large as the broker allows.
const IN_FLIGHT_MAX: usize = 32;
const CLOSE_DEADLINE: Duration = Duration::from_secs(10);
/// Pause after trouble of the subscription.
const TROUBLE_PAUSE: Duration = Duration::from_millis(200);
/// How long what cannot be stored stays away.
const UNSTORED_DELAY: Duration = Duration::from_secs(60);

/// When to stop collecting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CollectLimits {
    /// Most letters taken (default 10,000).
    pub count_max: usize,
    /// The silence after which nothing more is expected (default 15 s: to join a consumer group takes a while).
    pub idle: Duration,
}

impl Default for CollectLimits {
    fn default() -> Self {
        Self {
            count_max: 10_000,
            idle: Duration::from_secs(15),
        }
    }
}

/// What was collected.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Collected {
    /// New entries.
    pub stored: u64,
    /// Letters that were entries already.
    pub known: u64,
    /// Letters that had left already, and were not taken in again.
    pub left: u64,
    /// New entries of other consumers, in their names: a queue that several share gives a letter to one of them.
    pub of_others: u64,
    /// Letters of other consumers that were left to them, where the broker gives everybody everything.
    pub passed: u64,
    /// Letters that the database would not take. They are at the broker still.
    pub unstored: u64,
}

impl Redrive {
    /// Brings letters from the broker's dead letter destinations into the table, as consumer `{consumer}.redrive`, until so
    /// many came or none did for a while. What is stored is then settled at the broker: on a queue it is gone there, on a log
    /// the group's place moves on.
    ///
    /// A letter that comes twice, because a process died in between or a group lost its place, is one entry; one that the
    /// audit tells to have left is not taken in again. What others put there is taken too: without a reason it gets `foreign`,
    /// without a usable id its coordinates, or a fresh one where the broker has no positions (there a crash in between makes a
    /// second entry).
    ///
    /// Cancel safety: nothing is lost. What is stored and not settled comes again.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound) when a destination is missing, else as the broker's or the database's.
    pub async fn collect(
        &self,
        subscriber: &dyn Subscriber,
        limits: CollectLimits,
    ) -> Result<Collected> {
        self.validate()?;
        within("count_max", limits.count_max, 1, usize::MAX)?;
        let capabilities = subscriber.capabilities();
        let mut destinations: Vec<(String, String)> = Vec::new();
        for source in &self.sources {
            let named = self.dead_letters.destination(source, &self.consumer);
            if let Some(name) = named
                && !destinations.iter().any(|(known, _)| *known == name)
            {
                destinations.push((name, source.clone()));
            }
        }
        if destinations.is_empty() {
            return Err(Error::configuration(
                "dead_letters",
                "a destination at the broker",
                "a table",
            ));
        }
        let names = destinations.iter().map(|(name, _)| name.clone()).collect();
        let mut request = SubscriptionRequest::new(format!("{}.redrive", self.consumer), names);
        request.topology = TopologyMode::Verify;
        // No more than will be taken: what a queue gets back at the end counts there as delivered.
        request.in_flight_max = IN_FLIGHT_MAX.min(limits.count_max);
        let mut subscription = subscriber.subscribe(request).await?;
        let mut collector = Collector {
            desk: self,
            destinations,
            positions: capabilities.positions,
            fan_out: capabilities.fan_out,
            collected: Collected::default(),
        };
        let ended = collector.run(&mut *subscription, limits).await;
        let closed = subscription.close(CLOSE_DEADLINE).await;
        let collected = collector.collected;
        info!(
            consumer = self.consumer,
            ?collected,
            "dead letters collected"
        );
        ended?;
        if let Err(error) = closed {
            // What the broker has not heard of comes again, and is known.
            warn!(consumer = self.consumer, %error, "subscription was not closed cleanly");
        }
        Ok(collected)
    }
}

struct Collector<'a> {
    desk: &'a Redrive,
    /// Each with the source that it is named after.
    destinations: Vec<(String, String)>,
    positions: bool,
    fan_out: bool,
    collected: Collected,
}

impl Collector<'_> {
    async fn run(
        &mut self,
        subscription: &mut dyn Subscription,
        limits: CollectLimits,
    ) -> Result<()> {
        let mut left = limits.count_max;
        while left > 0 {
            let most = left.min(IN_FLIGHT_MAX);
            let received = tokio::time::timeout(limits.idle, subscription.receive(most)).await;
            let deliveries = match received {
                Err(_idle) => return Ok(()),
                Ok(Err(error)) if error.is_transient() => {
                    warn!(consumer = self.desk.consumer, %error, "dead letters are not to be had now");
                    self.desk.clock.sleep(TROUBLE_PAUSE).await;
                    // So that a broker that stays in trouble ends it.
                    left -= 1;
                    continue;
                }
                Ok(deliveries) => deliveries?,
            };
            for delivery in deliveries {
                left = left.saturating_sub(1);
                self.take(delivery).await?;
            }
        }
        Ok(())
    }

    async fn take(&mut self, delivery: Delivery) -> Result<()> {
        let Delivery {
            incoming,
            source,
            coordinates,
            receipt,
            ..
        } = delivery;
        if !receipt.is_current() {
            return Ok(());
        }
        let shared = self.desk.dead_letters.is_shared();
        let letter = self.letter(incoming, &source, &coordinates);
        let ours = letter.story.consumer.as_deref() == Some(self.desk.consumer.as_str());
        if !ours && shared && self.fan_out {
            self.collected.passed += 1;
            settle(receipt, Settlement::Acknowledge).await;
            return Ok(());
        }
        let desk = self.desk;
        let arrival = desk.patiently(|| desk.store.take_in(&letter)).await;
        match arrival {
            Ok(Arrival::Stored) if ours => self.collected.stored += 1,
            Ok(Arrival::Stored) => self.collected.of_others += 1,
            Ok(Arrival::Known) => self.collected.known += 1,
            Ok(Arrival::Left) => self.collected.left += 1,
            Err(error) if error.is_transient() => return Err(error),
            Err(error) => {
                // One that cannot be stored must not keep back the others.
                warn!(consumer = desk.consumer, place = %coordinates, %error, "dead letter cannot be stored");
                self.collected.unstored += 1;
                let delay = UNSTORED_DELAY;
                settle(receipt, Settlement::Release { delay }).await;
                return Ok(());
            }
        }
        settle(receipt, Settlement::Acknowledge).await;
        Ok(())
    }

    /// What is stored of a delivery, whoever made it.
    fn letter(&self, incoming: Incoming, destination: &str, coordinates: &Origin) -> Outgoing {
        let desk = self.desk;
        let unwrap = |unwrap: &Unwrap| {
            catch_unwind(AssertUnwindSafe(|| unwrap(&incoming))).unwrap_or_else(|_| {
                warn!(consumer = desk.consumer, place = %coordinates, "unwrapping panicked; left as it is");
                None
            })
        };
        let unwrapped = desk.unwrap.as_ref().and_then(unwrap);
        let Incoming {
            mut message,
            story,
            id_missing,
        } = unwrapped.unwrap_or(incoming);
        if id_missing {
            message.id = if self.positions {
                last_bytes(&coordinates.to_string()).into()
            } else {
                MessageId::generate()
            };
        }
        let mut story = story.cut();
        story.due_at = None;
        let unusable = |name: &str| validate_name(name).is_err();
        if story.consumer.as_deref().is_none_or(unusable) {
            story.consumer = Some(desk.consumer.clone());
        }
        story
            .reason
            .get_or_insert_with(|| Reason::new(Reason::FOREIGN));
        let named = self
            .destinations
            .iter()
            .find(|(name, _)| name == destination);
        if let Some((_, topic)) = named {
            story.origin.get_or_insert_with(|| Origin {
                topic: topic.clone(),
                partition: None,
                offset: None,
            });
        }
        Outgoing { message, story }
    }
}

/// A lost settlement is no harm: the letter comes again, and is known.
async fn settle(receipt: Box<dyn Receipt>, settlement: Settlement) {
    if let Err(error) = receipt.settle(settlement).await {
        warn!(%error, "dead letter was not settled");
    }
}

/// The end of a name that is too long for an id: partition and offset stand there.
fn last_bytes(text: &str) -> String {
    let mut from = text.len().saturating_sub(255);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    text[from..].to_owned()
}
