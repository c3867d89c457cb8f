//! Planning: which messages of a page may be on their way at the same time.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;

use crate::broker::{Publisher, PublisherOrder};
use crate::envelope::Outgoing;
use crate::store::{PendingMessage, Place};

use super::config::OrderMode;

/// Messages of one scope in the order in which they go out. Groups are independent of each other.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) scope: String,
    pub(super) places: Vec<Place>,
    pub(super) messages: Vec<Outgoing>,
}

/// What tells the scope of a destination: a publisher, or in tests a function. A trait, because the name may be the
/// publisher's own as well as a part of the destination's.
pub(super) trait Scopes {
    fn scope_of<'a>(&'a self, destination: &'a str) -> &'a str;
}

impl<F: for<'d> Fn(&'d str) -> &'d str> Scopes for F {
    fn scope_of<'a>(&'a self, destination: &'a str) -> &'a str {
        self(destination)
    }
}

pub(super) struct ScopesOf<'p, P>(pub(super) &'p P);

impl<P: Publisher> Scopes for ScopesOf<'_, P> {
    fn scope_of<'a>(&'a self, destination: &'a str) -> &'a str {
        self.0.scope(destination)
    }
}

/// Splits a page into groups by scope, each in page order.
pub(super) fn groups(rows: Vec<PendingMessage>, scopes: &impl Scopes) -> Vec<Group> {
    let mut index: HashMap<String, usize> = HashMap::new();
    let mut groups: Vec<Group> = Vec::new();
    // Room for all of them, since most pages go to one scope.
    let mut room = rows.len();
    for row in rows {
        let scope = scopes.scope_of(&row.message.destination);
        let at = index.get(scope).copied().unwrap_or_else(|| {
            index.insert(scope.to_owned(), groups.len());
            groups.push(Group {
                scope: scope.to_owned(),
                places: Vec::with_capacity(room),
                messages: Vec::with_capacity(std::mem::take(&mut room)),
            });
            groups.len() - 1
        });
        groups[at].places.push(row.place);
        groups[at].messages.push(row.message.into());
    }
    groups
}

/// Whether a group must go out in waves with one message per key each.
pub(super) fn needs_waves(publisher: PublisherOrder, mode: OrderMode) -> bool {
    publisher == PublisherOrder::Gap && mode == OrderMode::Strict
}

/// Walks through a group wave by wave: a wave holds at most one message of each key, and a key whose message was not
/// confirmed is left out of all later waves.
#[derive(Debug)]
pub(super) struct Waves {
    waiting: Vec<usize>,
    stopped: HashSet<Bytes>,
}

impl Waves {
    pub(super) fn new(group: &Group) -> Self {
        Self {
            waiting: (0..group.messages.len()).collect(),
            stopped: HashSet::new(),
        }
    }

    /// Indexes of the next wave; empty at the end.
    pub(super) fn next(&mut self, group: &Group) -> Vec<usize> {
        let mut taken: HashSet<&Bytes> = HashSet::new();
        let mut wave = Vec::new();
        let stopped = &self.stopped;
        self.waiting
            .retain(|&at| match &group.messages[at].message.key {
                None => {
                    wave.push(at);
                    false
                }
                Some(key) if stopped.contains(key) => false,
                Some(key) => {
                    let first = taken.insert(key);
                    if first {
                        wave.push(at);
                    }
                    !first
                }
            });
        wave
    }

    /// The key's later messages must wait.
    pub(super) fn stop(&mut self, key: Option<&Bytes>) {
        if let Some(key) = key {
            self.stopped.insert(key.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Message;

    fn row(position: i64, destination: &str, key: Option<&str>) -> PendingMessage {
        let mut message = Message::new(destination, "T");
        message.key = key.map(|k| Bytes::copy_from_slice(k.as_bytes()));
        PendingMessage {
            place: Place::pending(0, position),
            message,
            ahead: Vec::new(),
        }
    }

    fn first_letter(destination: &str) -> &str {
        &destination[..1]
    }

    fn itself(destination: &str) -> &str {
        destination
    }

    #[test]
    fn groups_keep_order_within_a_scope() {
        let rows = vec![
            row(1, "a/x", None),
            row(2, "b/x", None),
            row(3, "a/y", None),
        ];
        let scoped = groups(rows, &first_letter).into_iter();
        let scoped: Vec<_> = scoped.map(|group| (group.scope, group.places)).collect();
        let place = |position| Place::pending(0, position);
        let a = ("a".to_owned(), vec![place(1), place(3)]);
        assert_eq!(scoped, [a, ("b".to_owned(), vec![place(2)])]);
    }

    #[test]
    fn a_wave_holds_one_message_per_key_and_a_stopped_key_waits() {
        let rows = vec![
            row(1, "t", Some("k")),
            row(2, "t", Some("j")),
            row(3, "t", Some("k")),
            row(4, "t", None),
            row(5, "t", Some("k")),
            row(6, "t", Some("j")),
            row(7, "t", None),
        ];
        let group = groups(rows, &itself).remove(0);
        let mut waves = Waves::new(&group);
        assert_eq!(waves.next(&group), [0, 1, 3, 6]);
        waves.stop(Some(&Bytes::from_static(b"j")));
        assert_eq!(waves.next(&group), [2]);
        assert_eq!(waves.next(&group), [4]);
        assert!(waves.next(&group).is_empty());
    }

    #[test]
    fn only_a_gap_publisher_in_strict_order_needs_waves() {
        assert!(needs_waves(PublisherOrder::Gap, OrderMode::Strict));
        assert!(!needs_waves(PublisherOrder::Prefix, OrderMode::Strict));
        assert!(!needs_waves(PublisherOrder::Gap, OrderMode::Relaxed));
    }
}
