//! Judging: from what the broker said to what becomes of each row.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use tracing::{debug, info, warn};

use crate::broker::{FailureScope, PublishOutcome, RejectionScope};
use crate::error::{Error, ErrorKind, cut};
use crate::event::{RELAY_PUBLISHED, Tally};
use crate::store::{AsideState, Place, SetAside, Verdict};
use crate::story::{ERROR_BYTES_MAX, Reason};

use super::config::{DeadHead, RelayConfig, Unroutable};
use super::destinations::{Destinations, Trouble, reason};
use super::plan::Group;
use super::publish::Outcomes;
use super::status::Reporter;
use super::triage::put_off;

/// Judges the groups of one page.
pub(super) struct Judge<'a> {
    pub(super) config: &'a RelayConfig,
    pub(super) destinations: &'a mut Destinations,
    pub(super) status: &'a Reporter,
    /// Scopes and keys of which later messages are set aside already.
    pub(super) parted: HashSet<(String, Bytes)>,
    pub(super) verdicts: Vec<(Place, Verdict)>,
    /// What the broker as a whole suffers from.
    pub(super) broker: Option<Error>,
}

impl Judge<'_> {
    pub(super) fn judge(&mut self, group: &Arc<Group>, outcomes: Outcomes) {
        let now = Instant::now();
        // Keys whose head is dead, and with it, by the user's choice, all that follows.
        let mut dead: HashSet<Bytes> = HashSet::new();
        let mut tally = Tally::new(&RELAY_PUBLISHED);
        for (at, outcome) in outcomes.into_iter().enumerate() {
            let place = group.places[at];
            let message = &group.messages[at].message;
            let word = outcome.as_ref().map_or("withheld", PublishOutcome::word);
            tally.add(&message.destination, word);
            let key = message.key.as_ref();
            let follows = key.is_some_and(|key| dead.contains(key));
            let judged = self.verdicts.len();
            match outcome {
                Some(PublishOutcome::Confirmed) => self.confirmed(place, &message.destination),
                Some(PublishOutcome::Rejected {
                    scope: RejectionScope::Message,
                    error,
                }) => {
                    warn!(?place, destination = message.destination, %error, "message parked");
                    self.park(group, place, key, "rejected", &error, &mut dead);
                }
                Some(PublishOutcome::Rejected { error, .. })
                    if error.kind() == ErrorKind::NotFound
                        && self.config.unroutable(&message.destination) != Unroutable::Hold =>
                {
                    if self.config.unroutable(&message.destination) == Unroutable::Accept {
                        debug!(
                            ?place,
                            destination = message.destination,
                            "unroutable message accepted"
                        );
                        self.confirmed(place, &message.destination);
                    } else {
                        warn!(?place, destination = message.destination, %error, "unroutable message parked");
                        self.park(group, place, key, "unroutable", &error, &mut dead);
                    }
                }
                Some(
                    PublishOutcome::Rejected { error, .. }
                    | PublishOutcome::Failed {
                        scope: FailureScope::Destination,
                        error,
                        ..
                    },
                ) => self.in_trouble(&message.destination, error, now),
                Some(PublishOutcome::Failed { error, .. }) => {
                    self.broker.get_or_insert(error);
                }
                Some(PublishOutcome::Withheld) | None if follows => self.follow(group, place),
                Some(PublishOutcome::Withheld) | None => {}
            }
            if self.verdicts.len() == judged && !place.is_aside() && self.is_parted(group, key) {
                let aside = put_off(AsideState::Waiting, reason::CLOSED, &group.scope);
                self.verdicts.push((place, Verdict::SetAside(aside)));
            }
        }
    }

    fn is_parted(&self, group: &Group, key: Option<&Bytes>) -> bool {
        let line = key.map(|key| (group.scope.clone(), key.clone()));
        !self.parted.is_empty() && line.is_some_and(|line| self.parted.contains(&line))
    }

    fn confirmed(&mut self, place: Place, destination: &str) {
        if self.destinations.confirmed(destination) {
            info!(destination, "destination takes messages again");
            self.status.destination(destination, None);
        }
        self.verdicts.push((place, Verdict::Confirmed));
    }

    fn park(
        &mut self,
        group: &Group,
        place: Place,
        key: Option<&Bytes>,
        reason: &str,
        error: &Error,
        dead: &mut HashSet<Bytes>,
    ) {
        let mut parked = parked(reason, error, &group.scope);
        if let (Some(key), true) = (key, self.config.dead_head != DeadHead::Skip) {
            parked.state = AsideState::Blocking;
            dead.insert(key.clone());
        }
        self.verdicts.push((place, Verdict::SetAside(parked)));
    }

    /// A row whose head is dead. One that is set aside already waits where it is, unless it is to be parked.
    fn follow(&mut self, group: &Group, place: Place) {
        let state = match self.config.dead_head {
            DeadHead::Park => AsideState::Blocking,
            DeadHead::Hold if !place.is_aside() => AsideState::Held,
            DeadHead::Hold | DeadHead::Skip => return,
        };
        let aside = put_off(state, reason::BEHIND, &group.scope);
        self.verdicts.push((place, Verdict::SetAside(aside)));
    }

    fn in_trouble(&mut self, destination: &str, error: Error, now: Instant) {
        match self.destinations.failed(destination, now) {
            Trouble::New => {
                warn!(destination, %error, "destination in trouble; its messages wait");
                self.status.destination(destination, Some(&error));
            }
            Trouble::Known => {
                debug!(destination, %error, "destination still in trouble");
                self.status.destination(destination, Some(&error));
            }
            Trouble::TooMany => {
                self.broker.get_or_insert(error);
            }
        }
    }
}

/// A row for an operator that holds nothing back.
pub(super) fn parked(reason: &str, error: &Error, scope: &str) -> SetAside {
    let text = error.to_string().replace('\0', "\u{fffd}");
    SetAside {
        state: AsideState::Parked,
        reason: Reason::new(reason),
        error: cut(&text, ERROR_BYTES_MAX).to_owned(),
        scope: scope.to_owned(),
    }
}
