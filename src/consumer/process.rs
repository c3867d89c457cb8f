//! One delivery from arrival to settlement.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, watch};
use tracing::{debug, error, info, warn};

use crate::backoff::{DelayPolicy, Jitter};
use crate::broker::{Delivery, Publisher, Receipt, Settlement};
use crate::clock::Clock;
use crate::dlq::{DeadLetters, send_copy};
use crate::envelope::{Incoming, Outgoing};
use crate::error::Result;
use crate::inbox::{Attempt, attempt};
use crate::ladder::{Ask, Ladder, Step};
use crate::store::InboxStore;
use crate::story::{Origin, Reason, Story};

use super::config::{ConsumerConfig, MissingId};
use super::handler::Handler;
use super::outcome::Failure;

/// Local re-runs of one attempt after conflicts and broken connections; beyond that it counts as failed.
const RERUNS_MAX: u32 = 5;

/// How long a message stays away that is being handled elsewhere.
const BUSY_DELAY: Duration = Duration::from_secs(1);

/// What became of deliveries, counted since the start. A snapshot for people; the truth is in database and broker.
#[derive(Debug, Default)]
pub struct ConsumerCounts {
    /// Handled and committed (done or skip).
    pub handled: AtomicU64,
    /// Acknowledged because their effect was there already.
    pub duplicates: AtomicU64,
    /// Sent to a rung.
    pub retried: AtomicU64,
    /// Made a dead letter.
    pub dead: AtomicU64,
}

/// Everything that handling a delivery needs, shared by all tasks of a consumer.
pub(super) struct Processor<S, H> {
    pub(super) name: String,
    pub(super) homes: Homes,
    pub(super) config: ConsumerConfig,
    pub(super) ladder: Ladder,
    pub(super) dead_letters: DeadLetters,
    pub(super) publisher: Arc<dyn Publisher>,
    pub(super) store: S,
    pub(super) handler: H,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) counts: Arc<ConsumerCounts>,
}

impl<S, H> Processor<S, H>
where
    S: InboxStore,
    H: Handler<S::Connection>,
{
    /// Handles a delivery to its settlement. Returns without settling when it is no longer ours, or at a stop: then
    /// it is delivered again.
    ///
    /// `place` is its right to occupy a handler. It is given up when only the broker is waited for.
    pub(super) async fn process(
        &self,
        delivery: Delivery,
        place: OwnedSemaphorePermit,
        mut stop: watch::Receiver<bool>,
    ) {
        let Delivery {
            incoming,
            source,
            coordinates,
            receipt,
            ..
        } = delivery;
        let Some((incoming, topic, origin)) = self.locate(incoming, &source, coordinates) else {
            debug!(
                consumer = self.name,
                "copy on a shared rung belongs to another consumer"
            );
            return self.settle(receipt, Settlement::Acknowledge).await;
        };
        if incoming.id_missing && self.config.missing_id == MissingId::DeadLetter {
            let failure = Failure::new("the message has no usable x-message-id");
            let story = self.told(&incoming, &origin, &failure);
            let step = Step::Bury {
                story: story.dead(Reason::new(Reason::MISSING_ID)),
            };
            return self
                .go_on(step, &topic, incoming, receipt, place, &mut stop)
                .await;
        }
        let mut reruns = 0;
        let quick = DelayPolicy::exponential(Duration::from_millis(5)).with_jitter(Jitter::Full);
        let mut quick = quick
            .with_cap(Duration::from_millis(200))
            .delays(fastrand::u64(..));
        let mut patient = self.config.backoff.delays(fastrand::u64(..));
        loop {
            if !receipt.is_current() {
                return;
            }
            let timeout = self.config.handler_timeout;
            let ended = attempt(&self.store, &self.name, &self.handler, timeout, &incoming).await;
            let (failure, ask, pause) = match ended {
                Attempt::Done | Attempt::Skipped => {
                    return self.acknowledge(receipt, &self.counts.handled).await;
                }
                Attempt::Duplicate => {
                    return self.acknowledge(receipt, &self.counts.duplicates).await;
                }
                Attempt::Busy => {
                    let release = Settlement::Release { delay: BUSY_DELAY };
                    return self.settle(receipt, release).await;
                }
                Attempt::Failed { failure, ask } => (failure, ask, None),
                Attempt::Rerun(failure) => {
                    reruns += 1;
                    let pause = (reruns <= RERUNS_MAX).then(|| quick.next_delay());
                    (failure, Ask::Next, pause)
                }
                Attempt::Unavailable(error) => {
                    warn!(consumer = self.name, %error, "database away; the message waits");
                    if self.wait(patient.next_delay(), &mut stop).await {
                        return;
                    }
                    continue;
                }
            };
            if let Some(pause) = pause {
                debug!(consumer = self.name, reruns, "transaction is run again");
                if self.wait(pause, &mut stop).await {
                    return;
                }
                continue;
            }
            let story = self.told(&incoming, &origin, &failure);
            let now = self.clock.now();
            let step = self.ladder.step(&topic, &self.name, story, ask, now);
            return self
                .go_on(step, &topic, incoming, receipt, place, &mut stop)
                .await;
        }
    }

    /// Whose and from where a message is: its story as far as it is ours, its source, and its origin. `None` for a copy
    /// of another consumer on a rung that several share.
    fn locate(
        &self,
        mut incoming: Incoming,
        source: &str,
        place: Origin,
    ) -> Option<(Incoming, String, Origin)> {
        let ours = incoming.story.consumer.as_deref() == Some(&*self.name);
        let home = self
            .homes
            .home(source, incoming.story.origin.as_ref().filter(|_| ours));
        let topic = home.to_owned();
        if !self.homes.is_source(source) {
            if !ours && incoming.story.consumer.is_some() {
                return None;
            }
            // For a copy that had no room to say where it came from.
            let origin = Origin {
                topic: topic.clone(),
                partition: None,
                offset: None,
            };
            return Some((incoming, topic, origin));
        }
        if !ours {
            // What another consumer failed at, or a sender made up, is no attempt of ours.
            incoming.story = Story {
                redrive_count: incoming.story.redrive_count,
                ..Story::default()
            };
        }
        Some((incoming, topic, place))
    }

    /// The story with this failure in it.
    fn told(&self, incoming: &Incoming, origin: &Origin, failure: &Failure) -> Story {
        incoming.story.failed(
            &self.name,
            origin,
            failure.class(),
            &failure.to_string(),
            self.clock.now(),
        )
    }

    /// Puts the copy where the step says, and only after its confirm acknowledges the original. While the copy is
    /// not confirmed nothing is acknowledged, and the message's key waits.
    async fn go_on(
        &self,
        step: Step,
        topic: &str,
        incoming: Incoming,
        receipt: Box<dyn Receipt>,
        place: OwnedSemaphorePermit,
        stop: &mut watch::Receiver<bool>,
    ) {
        let mut place = Some(place);
        let mut patient = self.config.backoff.delays(fastrand::u64(..));
        let count = match step {
            Step::Climb { .. } => &self.counts.retried,
            Step::Bury { .. } => &self.counts.dead,
        };
        while receipt.is_current() {
            match self.take(&step, topic, &incoming).await {
                Ok(()) => {
                    self.tell(&step, &incoming);
                    return self.acknowledge(receipt, count).await;
                }
                Err(error) => error!(
                    consumer = self.name, id = %incoming.message.id, %error,
                    "copy of a failed message is not confirmed; the message stays and is tried again"
                ),
            }
            // Messages whose copies nobody takes must not keep the handlers from those that need none.
            drop(place.take());
            if self.wait(patient.next_delay(), stop).await {
                return;
            }
        }
    }

    /// Failures are never silent: what an operator sees without metrics.
    fn tell(&self, step: &Step, incoming: &Incoming) {
        let message = &incoming.message;
        let (Step::Climb { story, .. } | Step::Bury { story }) = step;
        let error = story.last_error.as_deref().unwrap_or_default();
        match step {
            Step::Climb { destination, .. } => info!(
                consumer = self.name, id = %message.id, event_type = message.event_type, attempt = story.retry_count,
                rung = destination, error, "attempt failed; the message waits"
            ),
            Step::Bury { .. } => warn!(
                consumer = self.name, id = %message.id, event_type = message.event_type, attempts = story.retry_count,
                reason = story.reason.as_ref().map(Reason::as_str), error, "message is a dead letter"
            ),
        }
    }

    async fn take(&self, step: &Step, topic: &str, incoming: &Incoming) -> Result<()> {
        let copy = |story: &Story| Outgoing {
            message: incoming.message.clone(),
            story: story.clone(),
        };
        match step {
            Step::Climb { destination, story } => {
                send_copy(&*self.publisher, destination.clone(), copy(story)).await
            }
            Step::Bury { story } => {
                self.dead_letters
                    .bury(&*self.publisher, topic, &self.name, copy(story))
                    .await
            }
        }
    }

    async fn acknowledge(&self, receipt: Box<dyn Receipt>, count: &AtomicU64) {
        count.fetch_add(1, Ordering::Relaxed);
        self.settle(receipt, Settlement::Acknowledge).await;
    }

    async fn settle(&self, receipt: Box<dyn Receipt>, settlement: Settlement) {
        if let Err(error) = receipt.settle(settlement).await {
            // The effect is durable; at worst the message comes again and the inbox suppresses it.
            warn!(consumer = self.name, %error, "settlement did not reach the broker");
        }
    }

    /// Waits; `true` when the consumer is told to stop meanwhile.
    async fn wait(&self, pause: Duration, stop: &mut watch::Receiver<bool>) -> bool {
        tokio::select! {
            () = self.clock.sleep(pause) => false,
            _ = stop.wait_for(|stop| *stop) => true,
        }
    }
}

/// Which source a message belongs to. Rungs and dead letters are named after it, so it is told by the place of receipt:
/// a name from a header would lead to a destination that nobody made.
#[derive(Debug)]
pub(super) struct Homes {
    sources: Vec<String>,
    /// The first source of each rung; several sources may share one.
    rungs: HashMap<String, String>,
}

impl Homes {
    pub(super) fn new(sources: &[String], ladder: &Ladder, consumer: &str) -> Self {
        let mut rungs = HashMap::new();
        for source in sources {
            for rung in ladder.rungs_of(source, consumer) {
                rungs
                    .entry(rung.destination)
                    .or_insert_with(|| source.clone());
            }
        }
        Self {
            sources: sources.to_vec(),
            rungs,
        }
    }

    fn is_source(&self, name: &str) -> bool {
        self.sources.iter().any(|source| source == name)
    }

    /// The source of what came through `source`, which may be a rung. A copy of ours tells where it first came from; that
    /// counts as far as it is one of our sources, and decides where several share a rung.
    fn home<'a>(&'a self, source: &'a str, origin: Option<&'a Origin>) -> &'a str {
        let told = origin
            .into_iter()
            .flat_map(|origin| [Some(&origin.topic), origin.partition.as_ref()])
            .flatten()
            .find(|name| self.is_source(name));
        told.map_or_else(
            || {
                self.rungs
                    .get(source)
                    .filter(|_| !self.is_source(source))
                    .map_or(source, String::as_str)
            },
            String::as_str,
        )
    }
}
