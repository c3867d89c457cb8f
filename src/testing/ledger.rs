//! What became of each message, as seen from the broker's side and the handler's. Pure bookkeeping.

use std::collections::{BTreeSet, HashMap};
use std::fmt;

use time::OffsetDateTime;

use crate::broker::SubscriptionRequest;
use crate::consumer::Outcome;
use crate::envelope::{Incoming, Outgoing};
use crate::message::MessageId;
use crate::story::Reason;

/// What became of one delivery of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// The handler did it, and it is committed.
    Done,
    /// The handler had nothing to do, or failed and its route skips that; and that is committed.
    Skipped,
    /// It was done before: acknowledged without the handler.
    Duplicate,
    /// It failed and went to a rung.
    Retried {
        /// The rung's destination.
        rung: String,
        /// Class and text of the failure, as in `x-last-error`.
        error: String,
    },
    /// It became a dead letter.
    Dead {
        /// The reason code, as in `x-dead-letter-reason`.
        reason: String,
        /// Class and text of the last failure, as in `x-last-error`.
        error: String,
    },
    /// The consumer gave it back; it comes again.
    Released,
    /// The consumer died with it in hand; it comes again.
    Crashed,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("done"),
            Self::Skipped => f.write_str("skipped"),
            Self::Duplicate => f.write_str("duplicate"),
            Self::Retried { rung, .. } => write!(f, "retried on {rung}"),
            Self::Dead { reason, .. } => write!(f, "dead: {reason}"),
            Self::Released => f.write_str("released"),
            Self::Crashed => f.write_str("crashed"),
        }
    }
}

/// What became of a message, step by step.
///
/// As text, without the errors: `retried on orders.billing.retry.5s, done`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fate {
    /// One for each delivery that ended, in order.
    pub steps: Vec<Step>,
    /// How often the handler was called for it.
    pub attempts: u32,
}

impl Fate {
    /// How it ended so far.
    #[must_use]
    pub fn end(&self) -> Option<&Step> {
        self.steps.last()
    }

    /// Class and text of the last failure.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        self.steps.iter().rev().find_map(|step| match step {
            Step::Retried { error, .. } | Step::Dead { error, .. } => Some(error.as_str()),
            _ => None,
        })
    }
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, step) in self.steps.iter().enumerate() {
            let comma = if at > 0 { ", " } else { "" };
            write!(f, "{comma}{step}")?;
        }
        Ok(())
    }
}

/// A message at the broker that the consumer has to deal with.
#[derive(Debug, Clone)]
pub(super) struct Waiting {
    destination: String,
    /// Under which it was sent; what is received may lack one.
    pub(super) id: MessageId,
    due: OffsetDateTime,
}

/// What is known of the delivery that is in hand under an id.
#[derive(Debug, Default)]
struct InHand {
    word: Option<Word>,
    copy: Option<Step>,
}

#[derive(Debug)]
enum Word {
    /// Called, and not answered: it hangs, or it panicked.
    Called,
    Done,
    Skip,
    Failed(String),
    Permanent(String),
}

/// What to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Everything is settled.
    Nothing,
    /// The consumer has something in hand, or something it could take.
    Progress {
        /// Whether something is in hand.
        in_hand: bool,
        /// When the next thing is due that is not yet.
        then: Option<OffsetDateTime>,
    },
    /// Nothing happens before this instant.
    Until(OffsetDateTime),
}

#[derive(Debug, Default)]
pub(super) struct Ledger {
    request: Option<SubscriptionRequest>,
    waiting: Vec<Waiting>,
    in_hand_count: usize,
    in_hand: HashMap<MessageId, InHand>,
    fates: HashMap<MessageId, Fate>,
    sent: Vec<Outgoing>,
    /// The next acknowledgement is where the consumer dies.
    pub(super) dies: bool,
    /// It died there.
    pub(super) died: bool,
}

impl Ledger {
    pub(super) fn subscribed(&mut self, request: SubscriptionRequest) {
        self.request = Some(request);
    }

    pub(super) fn is_subscribed(&self) -> bool {
        self.request.is_some()
    }

    /// The consumer is gone, with whatever it had in hand.
    pub(super) fn ended(&mut self) {
        self.request = None;
    }

    /// Before it is published: it may be received before the publisher has answered.
    pub(super) fn sending(&mut self, outgoing: &Outgoing, now: OffsetDateTime) {
        self.waiting.push(Waiting {
            destination: outgoing.message.destination.clone(),
            id: outgoing.message.id.clone(),
            due: outgoing.story.due_at.unwrap_or(now),
        });
    }

    pub(super) fn not_sent(&mut self, outgoing: &Outgoing) {
        let message = &outgoing.message;
        let is_it = |waiting: &Waiting| {
            waiting.destination == message.destination && waiting.id == message.id
        };
        if let Some(at) = self.waiting.iter().rposition(is_it) {
            self.waiting.remove(at);
        }
    }

    pub(super) fn sent(&mut self, outgoing: &Outgoing) {
        let destination = &outgoing.message.destination;
        let told = |text: &Option<String>| text.clone().unwrap_or_default();
        if let Some(request) = &self.request {
            let error = told(&outgoing.story.last_error);
            let copy = if request.dead_letters.contains(destination) {
                let reason = outgoing.story.reason.as_ref();
                let reason = reason.map_or("", Reason::as_str).to_owned();
                Some(Step::Dead { reason, error })
            } else if request.rungs.iter().any(|r| r.destination == *destination) {
                let rung = destination.clone();
                Some(Step::Retried { rung, error })
            } else {
                None
            };
            if let Some(copy) = copy {
                self.in_hand_of(&outgoing.message.id).copy = Some(copy);
            }
        }
        self.sent.push(outgoing.clone());
    }

    /// A delivery is handed over; what comes back settles it.
    pub(super) fn handed(
        &mut self,
        source: &str,
        incoming: &Incoming,
        now: OffsetDateTime,
    ) -> Waiting {
        let id = &incoming.message.id;
        let is_it = |waiting: &Waiting| {
            let nameless = incoming.id_missing && waiting.id.as_str().trim().is_empty();
            waiting.destination == source && (waiting.id == *id || nameless)
        };
        let found = self.waiting.iter().position(is_it);
        self.in_hand_count += 1;
        self.in_hand.insert(id.clone(), InHand::default());
        match found {
            Some(at) => self.waiting.remove(at),
            // Published past us.
            None => Waiting {
                destination: source.to_owned(),
                id: id.clone(),
                due: now,
            },
        }
    }

    /// Whether it is a copy of another consumer, on a rung that several share.
    pub(super) fn is_foreign(&self, source: &str, incoming: &Incoming) -> bool {
        self.request.as_ref().is_some_and(|request| {
            let of = incoming.story.consumer.as_ref();
            let is_source = request.sources.iter().any(|name| name == source);
            !is_source && of.is_some_and(|of| *of != request.consumer)
        })
    }

    pub(super) fn called(&mut self, id: &MessageId) {
        self.in_hand_of(id).word = Some(Word::Called);
        let fate = self.fates.entry(id.clone()).or_default();
        fate.attempts = fate.attempts.saturating_add(1);
    }

    pub(super) fn answered(&mut self, id: &MessageId, outcome: &Outcome) {
        self.in_hand_of(id).word = Some(match outcome {
            Outcome::Done => Word::Done,
            Outcome::Skip => Word::Skip,
            Outcome::Retry(failure) | Outcome::RetryAfter(_, failure) => {
                Word::Failed(failure.to_string())
            }
            Outcome::Permanent(failure) => Word::Permanent(failure.to_string()),
        });
    }

    /// Acknowledged at the broker.
    pub(super) fn acknowledged(&mut self, place: &Waiting, incoming: &Known) {
        let in_hand = self.taken_back(&incoming.id);
        if incoming.is_foreign {
            return;
        }
        let step = in_hand.copy.unwrap_or_else(|| {
            let dead = |reason: &str, error| Step::Dead {
                reason: reason.to_owned(),
                error,
            };
            match in_hand.word {
                Some(Word::Done) => Step::Done,
                Some(Word::Skip) => Step::Skipped,
                // Dead letters that go to the broker would have been seen: a route skipped it.
                Some(Word::Failed(_) | Word::Called) if self.letters_go_to_the_broker() => {
                    Step::Skipped
                }
                // Without a copy at the broker they are in a table.
                Some(Word::Permanent(error)) => dead(Reason::PERMANENT, error),
                Some(Word::Failed(error)) => dead(Reason::RETRIES_EXHAUSTED, error),
                Some(Word::Called) => dead(Reason::RETRIES_EXHAUSTED, String::new()),
                None if incoming.id_missing => dead(Reason::MISSING_ID, String::new()),
                None => Step::Duplicate,
            }
        });
        self.step(&place.id, step);
    }

    fn letters_go_to_the_broker(&self) -> bool {
        let mut request = self.request.iter();
        request.any(|request| !request.dead_letters.is_empty())
    }

    /// Given back, or lost with its consumer.
    pub(super) fn returned(&mut self, mut place: Waiting, id: &MessageId, how: Returned) {
        let in_hand = self.taken_back(id);
        match how {
            Returned::Released(until) => {
                place.due = until;
                self.step(&place.id, Step::Released);
            }
            // What nobody had begun was only fetched.
            Returned::Dropped if in_hand.word.is_some() => self.step(&place.id, Step::Crashed),
            Returned::Dropped => {}
        }
        self.waiting.push(place);
    }

    /// Several deliveries of one id may be in hand, so it may have been taken away by another one.
    fn in_hand_of(&mut self, id: &MessageId) -> &mut InHand {
        self.in_hand.entry(id.clone()).or_default()
    }

    fn taken_back(&mut self, id: &MessageId) -> InHand {
        self.in_hand_count = self.in_hand_count.saturating_sub(1);
        self.in_hand.remove(id).unwrap_or_default()
    }

    fn step(&mut self, id: &MessageId, step: Step) {
        self.fates.entry(id.clone()).or_default().steps.push(step);
    }

    pub(super) fn is_in_hand(&self) -> bool {
        self.in_hand_count > 0
    }

    pub(super) fn next(&self, now: OffsetDateTime) -> Next {
        let read = self.read();
        let waits = || {
            self.waiting
                .iter()
                .filter(|w| read.contains(&*w.destination))
        };
        let then = waits()
            .map(|waiting| waiting.due)
            .filter(|due| *due > now)
            .min();
        let in_hand = self.is_in_hand();
        if in_hand || waits().any(|waiting| waiting.due <= now) {
            return Next::Progress { in_hand, then };
        }
        then.map_or(Next::Nothing, Next::Until)
    }

    /// Where the consumer reads.
    fn read(&self) -> BTreeSet<&str> {
        let request = self.request.iter();
        request
            .flat_map(|request| {
                let rungs = request.rungs.iter().chain(&request.earlier_rungs);
                let rungs = rungs.map(|rung| &rung.destination);
                request.sources.iter().chain(rungs)
            })
            .map(String::as_str)
            .collect()
    }

    pub(super) fn fate(&self, id: &MessageId) -> Fate {
        self.fates.get(id).cloned().unwrap_or_default()
    }

    pub(super) fn sent_to(&self, destination: &str) -> Vec<Outgoing> {
        let to = |sent: &&Outgoing| sent.message.destination == destination;
        self.sent.iter().filter(to).cloned().collect()
    }

    pub(super) fn dead_letters(&self) -> Vec<Outgoing> {
        let destinations = self
            .request
            .iter()
            .flat_map(|request| &request.dead_letters);
        destinations.flat_map(|name| self.sent_to(name)).collect()
    }
}

/// How a delivery came back.
#[derive(Debug, Clone, Copy)]
pub(super) enum Returned {
    Released(OffsetDateTime),
    Dropped,
}

/// What is remembered of what was received.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub(super) id: MessageId,
    pub(super) id_missing: bool,
    /// A copy of another consumer on a rung that several share.
    pub(super) is_foreign: bool,
}
