//! A delivery made ready for work: whose it is, which source it belongs to, and what the inbox knows it by. Pure.

use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::broker::{Delivery, Receipt, Rung};
use crate::envelope::{Incoming, is_usable_id};
use crate::inbox::Keyed;
use crate::ladder::told_source;
use crate::story::{Origin, Story};

use super::config::MissingId;
use super::outcome::Failure;
use super::room::{Arrival, Ticket};
use super::schedule::{Company, Slot};

/// What the inbox remembers a message by.
#[derive(Clone, Default)]
pub enum InboxKey {
    /// Its id (the default): the same for every copy.
    #[default]
    MessageId,
    /// What a function makes of it, for example the number of the payment that it asks for: so two messages that a sender
    /// made for one and the same thing have one effect. `None`, blank or more than 255 bytes: [`MissingId`] decides.
    Business(BusinessKey),
}

/// See [`InboxKey::Business`].
pub type BusinessKey = Arc<dyn Fn(&Incoming) -> Option<String> + Send + Sync>;

impl InboxKey {
    /// What this function makes of a message.
    pub fn business(key: impl Fn(&Incoming) -> Option<String> + Send + Sync + 'static) -> Self {
        Self::Business(Arc::new(key))
    }

    /// The key. A function that panics has made none.
    pub(crate) fn of(&self, incoming: &Incoming) -> Option<String> {
        match self {
            Self::MessageId => {
                (!incoming.id_missing).then(|| incoming.message.id.as_str().to_owned())
            }
            Self::Business(key) => catch_unwind(AssertUnwindSafe(|| key(incoming)))
                .ok()
                .flatten()
                .filter(|key| is_usable_id(key)),
        }
    }
}

impl fmt::Debug for InboxKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MessageId => "MessageId",
            Self::Business(_) => "Business",
        })
    }
}

/// A delivery, ready for work.
pub(super) struct Job {
    pub(super) message: Keyed,
    /// The source that it belongs to.
    pub(super) topic: String,
    /// Where it first came from, if its story does not say.
    pub(super) origin: Origin,
    pub(super) lot: Lot,
    /// How often it failed in this process and was to be handled again here.
    pub(super) tries: u32,
    /// If it came out of the waiting room.
    pub(super) ticket: Option<Ticket>,
    /// The partition or queue, where that is to be kept in order.
    lane: Option<Bytes>,
    /// How long it has to wait in its place before its next attempt.
    pub(super) pause: Option<Duration>,
    /// Whether the waiting room was asked for a note about it, and has one.
    pub(super) recalled: bool,
    pub(super) noted: bool,
    pub(super) receipt: Box<dyn Receipt>,
}

/// What is to be done with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lot {
    /// Handle it.
    Work,
    /// It may have ended a process: find out whether it is in work, or done.
    Suspect,
    /// It is neither: handle it while nothing else runs, and keep book of that.
    Watched,
    /// A copy of another consumer, on a rung that several share.
    Foreign,
    /// The inbox could not remember it.
    Unkeyed,
}

impl Job {
    /// Takes a delivery of `consumer`.
    pub(super) fn of(
        Arrival { delivery, ticket }: Arrival,
        consumer: &str,
        homes: &Homes,
        key: &InboxKey,
        missing: MissingId,
    ) -> Self {
        let Delivery {
            mut incoming,
            source,
            coordinates,
            redelivered,
            receipt,
        } = delivery;
        let ours = incoming.story.consumer.as_deref() == Some(consumer);
        let home = homes.home(&source, incoming.story.origin.as_ref().filter(|_| ours));
        let topic = home.to_owned();
        let on_rung = !homes.is_source(&source);
        let mut lot = Lot::Work;
        let origin = if on_rung {
            if !ours && incoming.story.consumer.is_some() {
                lot = Lot::Foreign;
            }
            // For a copy that had no room to say where it came from.
            Origin {
                topic: topic.clone(),
                partition: None,
                offset: None,
            }
        } else {
            coordinates
        };
        if !ours && !on_rung {
            // What another consumer failed at, or a sender made up, is no attempt of ours.
            incoming.story = Story {
                redrive_count: incoming.story.redrive_count,
                ..Story::default()
            };
        }
        let key = key.of(&incoming).or_else(|| {
            // A copy on a rung that had no room for its origin has no coordinates of its own either.
            let place = (incoming.story.origin.as_ref()).or((!on_rung).then_some(&origin));
            place
                .filter(|_| missing == MissingId::BrokerCoordinates)
                .map(ToString::to_string)
        });
        if lot == Lot::Work {
            lot = match key {
                None => Lot::Unkeyed,
                Some(_) if redelivered || ended_its_process(&incoming.story) => Lot::Suspect,
                Some(_) => Lot::Work,
            };
        }
        Self {
            message: Keyed {
                incoming,
                key: key.unwrap_or_default(),
            },
            topic,
            origin,
            lot,
            tries: 0,
            ticket,
            lane: None,
            pause: None,
            recalled: false,
            noted: false,
            receipt,
        }
    }

    /// The same, one of whose partition or queue is in work at a time.
    pub(super) fn in_lane(mut self) -> Self {
        let partition = self.origin.partition.as_deref().unwrap_or_default();
        self.lane = Some(format!("{}\0{partition}", self.topic).into());
        self
    }

    pub(super) const fn company(&self) -> Company {
        match self.lot {
            // No attempt is made at it.
            _ if matches!(self.ticket, Some(Ticket { parked: true, .. })) => Company::Alone,
            Lot::Work => Company::Batch,
            Lot::Watched => Company::Isolated,
            Lot::Suspect | Lot::Foreign | Lot::Unkeyed => Company::Alone,
        }
    }

    /// Whether a transaction for its attempt is the first thing that it needs.
    pub(super) fn begins_with_an_attempt(&self) -> bool {
        self.company() == Company::Batch
    }

    /// Its key, or its lane, one of which is in work at a time.
    pub(super) fn slot(&self) -> Slot {
        let key = &self.message.incoming.message.key;
        self.lane.as_ref().or(key.as_ref()).cloned()
    }

    pub(super) fn bytes(&self) -> usize {
        self.message.incoming.message.bytes()
    }
}

pub(super) fn ended_its_process(story: &Story) -> bool {
    let error = story.last_error.as_deref().unwrap_or_default();
    error
        .strip_prefix(Failure::CRASH)
        .is_some_and(|text| text.starts_with(':'))
}

/// Which source a message belongs to. Rungs and dead letters are named after it, so it is told by the place of receipt:
/// a name from a header would lead to a destination that nobody made.
#[derive(Debug)]
pub(super) struct Homes {
    sources: Vec<String>,
    /// The first source of each rung and way back; several sources may share one.
    rungs: HashMap<String, String>,
}

impl Homes {
    pub(super) fn new(sources: &[String], copies: &[Rung]) -> Self {
        let mut rungs = HashMap::new();
        for rung in copies {
            rungs
                .entry(rung.destination.clone())
                .or_insert_with(|| rung.source.clone());
        }
        Self {
            sources: sources.to_vec(),
            rungs,
        }
    }

    /// Also rungs that the ladder no longer has.
    pub(super) fn with_earlier(mut self, rungs: &[Rung]) -> Self {
        for rung in rungs {
            let source = || rung.source.clone();
            self.rungs
                .entry(rung.destination.clone())
                .or_insert_with(source);
        }
        self
    }

    fn is_source(&self, name: &str) -> bool {
        self.sources.iter().any(|source| source == name)
    }

    /// The source of what came through `source`, which may be a rung. A copy of ours tells where it first came from; that
    /// counts as far as it is one of our sources, and decides where several share a rung.
    fn home<'a>(&'a self, source: &'a str, origin: Option<&'a Origin>) -> &'a str {
        let told = origin.and_then(|origin| told_source(&self.sources, origin));
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

#[cfg(test)]
mod tests {
    use futures_util::future::BoxFuture;

    use super::*;
    use crate::broker::Settlement;
    use crate::message::Message;
    use crate::store::Claim;

    struct Settled;

    impl Receipt for Settled {
        fn is_current(&self) -> bool {
            true
        }

        fn settle(self: Box<Self>, _: Settlement) -> BoxFuture<'static, crate::error::Result<()>> {
            Box::pin(async { Ok(()) })
        }
    }

    fn job(redelivered: bool, parked: Option<bool>) -> Job {
        let origin = Origin {
            topic: "orders".into(),
            partition: None,
            offset: None,
        };
        let delivery = Delivery {
            incoming: Incoming {
                message: Message::new("orders", "T").with_key("k"),
                story: Story::default(),
                id_missing: false,
            },
            source: "orders".into(),
            coordinates: origin,
            redelivered,
            receipt: Box::new(Settled),
        };
        let claim = Claim {
            position: 1,
            token: 1,
        };
        let ticket = parked.map(|parked| Ticket { claim, parked });
        let homes = Homes::new(&["orders".into()], &[]);
        Job::of(
            Arrival { delivery, ticket },
            "billing",
            &homes,
            &InboxKey::MessageId,
            MissingId::DeadLetter,
        )
    }

    #[test]
    fn what_is_examined_or_parked_first_needs_no_transaction() {
        assert!(job(false, None).begins_with_an_attempt());
        assert!(job(false, Some(false)).begins_with_an_attempt());
        assert!(!job(true, None).begins_with_an_attempt());
        assert!(!job(false, Some(true)).begins_with_an_attempt());
    }
}
