//! The bookkeeping of one publish call: which messages still need an outcome, and which may go next.

use std::collections::{HashMap, HashSet};

use rdkafka::producer::DeliveryFuture;

use super::error::{failed, rejected};
use crate::broker::{FailureScope, PublishOutcome, RejectionScope, Stored};
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind};

/// What orders together: the topic and the key.
type Order<'a> = (&'a str, &'a [u8]);

/// Messages and their outcomes so far.
pub(super) struct Batch<'a> {
    messages: &'a [Outgoing],
    outcomes: Vec<Option<PublishOutcome>>,
    /// The last trouble of messages without an outcome.
    notes: Vec<Option<(Stored, Error)>>,
    unanswered: Vec<(usize, DeliveryFuture)>,
    /// Keys of which a message was refused: nothing later of theirs is sent by this call.
    refused: HashSet<Order<'a>>,
    /// Keys of which this generation confirmed something, or that are under way in this attempt.
    begun: HashSet<Order<'a>>,
    /// Topics that refused a batch for the sake of one message.
    suspects: HashSet<&'a str>,
    attempt_sent: HashSet<usize>,
    confirmed: bool,
}

impl<'a> Batch<'a> {
    pub(super) fn new(messages: &'a [Outgoing]) -> Self {
        let mut notes = Vec::new();
        notes.resize_with(messages.len(), || None);
        let mut outcomes = Vec::new();
        outcomes.resize_with(messages.len(), || None);
        Self {
            messages,
            outcomes,
            notes,
            unanswered: Vec::new(),
            refused: HashSet::new(),
            begun: HashSet::new(),
            suspects: HashSet::new(),
            attempt_sent: HashSet::new(),
            confirmed: false,
        }
    }

    pub(super) fn outgoing(&self, at: usize) -> &'a Outgoing {
        &self.messages[at]
    }

    /// Every destination with a message that needs an outcome.
    pub(super) fn destinations(&self) -> Vec<&'a str> {
        let mut seen = HashSet::new();
        self.pending()
            .map(|at| self.destination(at))
            .filter(|name| seen.insert(*name))
            .collect()
    }

    fn destination(&self, at: usize) -> &'a str {
        &self.messages[at].message.destination
    }

    fn order(&self, at: usize) -> Option<Order<'a>> {
        let message = &self.messages[at].message;
        let key = message.key.as_deref()?;
        Some((&message.destination, key))
    }

    fn pending(&self) -> impl Iterator<Item = usize> {
        (0..self.messages.len()).filter(|at| self.outcomes[*at].is_none())
    }

    pub(super) fn is_settled(&self) -> bool {
        self.outcomes.iter().all(Option::is_some)
    }

    /// Starts over with a new generation, in which no partition is known.
    pub(super) fn begin(&mut self) {
        self.begun.clear();
        self.attempt_sent.clear();
    }

    /// The messages that may be queued now, in order: in a topic that is not open only the first of each key, and the
    /// others of the key once that one was confirmed.
    pub(super) fn wave(&mut self, is_open: impl Fn(&str) -> bool) -> Vec<usize> {
        let mut open: HashMap<&str, bool> = HashMap::new();
        let mut first = HashSet::new();
        let mut wave = Vec::new();
        for at in 0..self.messages.len() {
            if self.outcomes[at].is_some() || self.attempt_sent.contains(&at) {
                continue;
            }
            let pipelined = match self.order(at) {
                None => true,
                Some(order) => {
                    *open.entry(order.0).or_insert_with(|| is_open(order.0))
                        || self.begun.contains(&order)
                        || first.insert(order)
                }
            };
            if pipelined {
                wave.push(at);
            }
        }
        self.begun.extend(first);
        self.attempt_sent.extend(&wave);
        wave
    }

    /// Whether a message still needs an outcome and no earlier one of its key was refused. If one was, the message is
    /// withheld: sending it would overtake the decision about the refused one.
    pub(super) fn may_send(&mut self, at: usize) -> bool {
        if self.outcomes[at].is_some() {
            return false;
        }
        if self
            .order(at)
            .is_some_and(|order| self.refused.contains(&order))
        {
            self.outcomes[at] = Some(PublishOutcome::Withheld);
            return false;
        }
        true
    }

    pub(super) fn confirm(&mut self, at: usize) {
        self.confirmed = true;
        self.outcomes[at] = Some(PublishOutcome::Confirmed);
    }

    pub(super) fn reject_message(&mut self, at: usize, error: Error) {
        self.refused.extend(self.order(at));
        self.outcomes[at] = Some(rejected(RejectionScope::Message, error));
    }

    /// Rejects everything pending for a destination.
    pub(super) fn reject_destination(&mut self, name: &str, mut error: impl FnMut() -> Error) {
        for at in 0..self.messages.len() {
            if self.outcomes[at].is_none() && self.destination(at) == name {
                self.outcomes[at] = Some(rejected(RejectionScope::Destination, error()));
            }
        }
    }

    /// Fails everything pending for a destination about which nothing could be learnt; nothing of it was sent.
    pub(super) fn fail_destination(&mut self, name: &str, first: &mut Option<Error>) {
        for at in 0..self.messages.len() {
            if self.outcomes[at].is_none() && self.destination(at) == name {
                let error = first.take().unwrap_or_else(|| {
                    let detail = "the broker did not answer a question about the topic";
                    Error::new(ErrorKind::Unavailable, "publish", detail)
                });
                self.outcomes[at] = Some(failed(FailureScope::Broker, Stored::No, error));
            }
        }
    }

    /// Remembers a failure that another generation may mend. Once perhaps stored, always perhaps stored.
    pub(super) fn note(&mut self, at: usize, stored: Stored, error: Error) {
        let stored = match self.notes[at] {
            Some((Stored::Unknown, _)) => Stored::Unknown,
            _ => stored,
        };
        self.notes[at] = Some((stored, error));
    }

    /// Remembers that the topic refused a batch, of which this message may be the reason.
    pub(super) fn suspect(&mut self, at: usize, error: Error) {
        self.suspects.insert(self.destination(at));
        self.note(at, Stored::No, error);
    }

    pub(super) fn has_suspects(&self) -> bool {
        !self.suspects.is_empty()
    }

    /// The pending messages of suspect topics, in order; they are suspect no longer.
    pub(super) fn take_suspects(&mut self) -> Vec<usize> {
        let topics = std::mem::take(&mut self.suspects);
        self.pending()
            .filter(|at| topics.contains(self.destination(*at)))
            .collect()
    }

    pub(super) fn leave_unanswered(&mut self, at: usize, delivery: Option<DeliveryFuture>) {
        self.unanswered
            .extend(delivery.map(|delivery| (at, delivery)));
    }

    pub(super) fn take_unanswered(&mut self) -> Vec<(usize, DeliveryFuture)> {
        std::mem::take(&mut self.unanswered)
    }

    /// Remembers the same failure for everything pending.
    pub(super) fn fail_pending(&mut self, stored: Stored, error: Error) {
        let mut first = Some(error);
        for at in 0..self.messages.len() {
            if self.outcomes[at].is_none() {
                let error = first.take().unwrap_or_else(not_sent);
                self.note(at, stored, error);
            }
        }
    }

    /// One outcome per message. What is pending failed: the broker is to blame if the connection is lost, or if
    /// several destinations failed and nothing was confirmed.
    pub(super) fn into_outcomes(self, connected: bool) -> Vec<PublishOutcome> {
        let destinations = self.destinations().len();
        let scope = if !connected || (destinations > 1 && !self.confirmed) {
            FailureScope::Broker
        } else {
            FailureScope::Destination
        };
        self.outcomes
            .into_iter()
            .zip(self.notes)
            .map(|(outcome, note)| {
                outcome.unwrap_or_else(|| {
                    let (stored, error) = note.unwrap_or_else(|| (Stored::No, not_sent()));
                    failed(scope, stored, error)
                })
            })
            .collect()
    }
}

fn not_sent() -> Error {
    let detail = "not sent: the batch failed before its turn";
    Error::new(ErrorKind::Unavailable, "publish", detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Message;

    fn messages(keys: &[Option<&str>]) -> Vec<Outgoing> {
        keys.iter()
            .map(|key| {
                let message = Message::new("orders", "T");
                match key {
                    Some(key) => message.with_key(key),
                    None => message,
                }
                .into()
            })
            .collect()
    }

    #[test]
    fn in_a_closed_topic_the_first_of_each_key_goes_ahead_of_the_others() {
        let messages = messages(&[Some("a"), Some("b"), Some("a"), None, None, Some("b")]);
        let mut batch = Batch::new(&messages);
        batch.begin();
        assert_eq!(batch.wave(|_| false), [0, 1, 3, 4]);
        assert_eq!(batch.wave(|_| false), [2, 5]);
        assert!(batch.wave(|_| false).is_empty());
        batch.begin();
        assert_eq!(batch.wave(|_| true), [0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn a_new_generation_begins_with_the_first_that_is_not_confirmed() {
        let messages = messages(&[Some("a"), Some("a"), Some("a")]);
        let mut batch = Batch::new(&messages);
        batch.begin();
        assert_eq!(batch.wave(|_| false), [0]);
        batch.confirm(0);
        batch.begin();
        assert_eq!(batch.wave(|_| false), [1]);
        assert_eq!(batch.wave(|_| false), [2]);
    }

    #[test]
    fn a_refused_message_holds_back_its_key_only() {
        let messages = messages(&[Some("a"), Some("a"), Some("b"), None]);
        let mut batch = Batch::new(&messages);
        batch.reject_message(0, not_sent());
        assert!(!batch.may_send(1));
        assert!(batch.may_send(2) && batch.may_send(3));
        batch.confirm(2);
        batch.confirm(3);
        let outcomes = batch.into_outcomes(true);
        assert!(matches!(
            outcomes[0],
            PublishOutcome::Rejected {
                scope: RejectionScope::Message,
                ..
            }
        ));
        assert!(matches!(outcomes[1], PublishOutcome::Withheld));
    }

    #[test]
    fn once_perhaps_stored_stays_perhaps_stored() {
        let messages = messages(&[None]);
        let mut batch = Batch::new(&messages);
        batch.note(0, Stored::Unknown, not_sent());
        batch.note(0, Stored::No, not_sent());
        assert!(matches!(
            batch.into_outcomes(true)[0],
            PublishOutcome::Failed {
                stored: Stored::Unknown,
                scope: FailureScope::Destination,
                ..
            }
        ));
    }
}
