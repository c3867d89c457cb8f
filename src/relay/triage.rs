//! Triage: which rows of a page go out now, which are set aside, and which stay where they are. Pure.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;

use crate::store::{AsideState, PendingMessage, Place, SetAside};
use crate::story::Reason;

use super::config::DeadHead;
use super::destinations::reason;
use super::plan::Scopes;

/// A page, sorted.
#[derive(Debug, Default)]
pub(super) struct Triage {
    /// In the order of the page.
    pub(super) send: Vec<PendingMessage>,
    pub(super) set_aside: Vec<(Place, SetAside)>,
    /// Scopes and keys of what is set aside. A pending one of them that is sent in vain must go with the others: set
    /// aside, they would come in front of it.
    pub(super) parted: HashSet<(String, Bytes)>,
}

/// Sorts a page whose rows are in order: what is set aside of a key comes before what is pending.
///
/// `admit` is asked whether a row may go to its destination and scope, and whether it will if it may; it tells the reason
/// why not. A row that does not go keeps all later ones of its scope and key from going; pending ones are set aside with
/// it, so that they leave the outbox to others, and set-aside ones stay.
pub(super) fn triage<'s>(
    rows: Vec<PendingMessage>,
    dead_head: DeadHead,
    scopes: &impl Scopes,
    mut admit: impl FnMut(&str, &str, bool) -> Result<(), &'s str>,
) -> Triage {
    let mut sorted = Triage::default();
    let mut lines: HashMap<(String, Bytes), Line> = HashMap::new();
    for row in rows {
        let PendingMessage {
            place,
            message,
            ahead,
        } = &row;
        let scope = scopes.scope_of(&message.destination);
        let line = message
            .key
            .as_ref()
            .map(|key| (scope.to_owned(), key.clone()));
        let known = line.as_ref().and_then(|line| lines.get(line).copied());
        let ahead = ahead.iter().find(|ahead| ahead.scope == scope);
        let behind = match (known, ahead) {
            (Some(Line::Stopped { blocked }), _) => Some(blocked),
            // All that was ahead goes out in front of it.
            (Some(Line::Drained(last)), Some(ahead)) if last >= ahead.last => None,
            (_, ahead) => ahead.map(|ahead| ahead.blocked),
        };
        let verdict = admit(&message.destination, scope, behind.is_none());
        let verdict = match (verdict, behind) {
            (Err(reason), behind) => Err((reason, behind.unwrap_or(false))),
            (Ok(()), Some(blocked)) => Err((reason::BEHIND, blocked)),
            (Ok(()), None) => Ok(()),
        };
        let place = *place;
        match verdict {
            Ok(()) => sorted.send.push(row),
            Err((reason, blocked)) if !place.is_aside() => {
                let aside = put_off(follower(blocked, dead_head), reason, scope);
                sorted.set_aside.push((place, aside));
                sorted.parted.extend(line.clone());
            }
            Err(_) => {}
        }
        let line = match (verdict, line) {
            (Ok(()), Some(line)) if place.is_aside() => Some((line, Line::Drained(place.position))),
            (Err((_, blocked)), Some(line)) => Some((line, Line::Stopped { blocked })),
            _ => None,
        };
        lines.extend(line);
    }
    sorted
}

/// What is known of a scope and key from the rows of the page so far.
#[derive(Debug, Clone, Copy)]
enum Line {
    /// Those set aside go out, up to this position.
    Drained(i64),
    /// Nothing more of it goes out.
    Stopped { blocked: bool },
}

/// A row that was not refused, but may not go now.
pub(super) fn put_off(state: AsideState, reason: &str, scope: &str) -> SetAside {
    SetAside {
        state,
        reason: Reason::new(reason),
        error: String::new(),
        scope: scope.to_owned(),
    }
}

/// The state of a row that follows others of its key.
const fn follower(blocked: bool, dead_head: DeadHead) -> AsideState {
    match (blocked, dead_head) {
        (false, _) => AsideState::Waiting,
        (true, DeadHead::Park) => AsideState::Blocking,
        (true, DeadHead::Hold | DeadHead::Skip) => AsideState::Held,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Message;
    use crate::store::Ahead;

    fn row(place: Place, destination: &str, key: Option<&str>) -> PendingMessage {
        let mut message = Message::new(destination, "T");
        message.key = key.map(|key| Bytes::copy_from_slice(key.as_bytes()));
        PendingMessage {
            place,
            message,
            ahead: Vec::new(),
        }
    }

    fn pending(position: i64, destination: &str, key: &str) -> PendingMessage {
        row(Place::pending(0, position), destination, Some(key))
    }

    fn aside(position: i64, destination: &str, key: &str) -> PendingMessage {
        row(Place::aside(0, position), destination, Some(key))
    }

    fn behind(mut row: PendingMessage, scope: &str, last: i64, blocked: bool) -> PendingMessage {
        row.ahead.push(Ahead {
            scope: scope.into(),
            last,
            blocked,
        });
        row
    }

    /// Positions sent, and positions set aside with state and reason. Scopes end at the dot.
    fn sorted(
        rows: Vec<PendingMessage>,
        dead_head: DeadHead,
        closed: &[&str],
    ) -> (Vec<i64>, Vec<(i64, &'static str, String)>) {
        fn until_the_dot(destination: &str) -> &str {
            destination
                .split_once('.')
                .map_or(destination, |(scope, _)| scope)
        }
        let triage = triage(
            rows,
            dead_head,
            &until_the_dot,
            |destination, _, _| match closed.contains(&destination) {
                true => Err(reason::CLOSED),
                false => Ok(()),
            },
        );
        let send = triage.send.iter().map(|row| row.place.position);
        let set_aside = triage.set_aside.iter().map(|(place, aside)| {
            (
                place.position,
                aside.state.as_str(),
                aside.reason.as_str().to_owned(),
            )
        });
        (send.collect(), set_aside.collect())
    }

    fn waiting(position: i64, reason: &str) -> (i64, &'static str, String) {
        (position, "waiting", reason.into())
    }

    #[test]
    fn a_closed_destination_is_set_aside_and_others_go() {
        let rows = vec![
            pending(1, "a", "k"),
            pending(2, "b", "k"),
            row(Place::pending(0, 3), "a", None),
            pending(4, "a", "j"),
        ];
        let (send, set_aside) = sorted(rows, DeadHead::Skip, &["a"]);
        assert_eq!(send, [2]);
        let closed = |position| waiting(position, "closed");
        assert_eq!(set_aside, [closed(1), closed(3), closed(4)]);
    }

    #[test]
    fn a_key_keeps_its_order_over_the_destinations_of_one_scope() {
        let rows = vec![
            pending(1, "ev.a", "k"),
            pending(2, "ev.b", "k"),
            pending(3, "ev.b", "j"),
            row(Place::pending(0, 4), "ev.b", None),
        ];
        let (send, set_aside) = sorted(rows, DeadHead::Skip, &["ev.a"]);
        assert_eq!(send, [3, 4]);
        assert_eq!(set_aside, [waiting(1, "closed"), waiting(2, "behind")]);
    }

    #[test]
    fn what_is_set_aside_goes_first_and_the_rest_of_its_key_right_behind_it() {
        let rows = vec![
            aside(1, "a", "k"),
            aside(2, "a", "k"),
            behind(pending(3, "a", "k"), "a", 2, false),
        ];
        assert_eq!(sorted(rows, DeadHead::Skip, &[]).0, [1, 2, 3]);
    }

    #[test]
    fn what_is_ahead_and_not_in_the_page_holds_back() {
        let rows = vec![
            aside(1, "a", "k"),
            behind(pending(5, "a", "k"), "a", 4, false),
            behind(pending(6, "b", "k"), "a", 4, false),
        ];
        let (send, set_aside) = sorted(rows, DeadHead::Skip, &[]);
        assert_eq!(send, [1, 6]);
        assert_eq!(set_aside, [waiting(5, "behind")]);
    }

    #[test]
    fn a_row_set_aside_that_may_not_go_stays_and_stops_its_key() {
        let rows = vec![
            aside(1, "a", "k"),
            aside(2, "a", "k"),
            behind(pending(3, "a", "k"), "a", 2, false),
        ];
        let (send, set_aside) = sorted(rows, DeadHead::Skip, &["a"]);
        assert!(send.is_empty());
        assert_eq!(set_aside, [waiting(3, "closed")]);
    }

    #[test]
    fn behind_a_blocked_key_successors_are_held_or_parked_too() {
        for (dead_head, state) in [
            (DeadHead::Hold, "held"),
            (DeadHead::Park, "blocking"),
            (DeadHead::Skip, "held"),
        ] {
            let rows = vec![
                behind(pending(2, "a", "k"), "a", 1, true),
                behind(pending(3, "a", "k"), "a", 1, true),
                pending(4, "a", "j"),
            ];
            let (send, set_aside) = sorted(rows, dead_head, &[]);
            assert_eq!(send, [4]);
            let held = |position| (position, state, "behind".to_owned());
            assert_eq!(set_aside, [held(2), held(3)]);
        }
    }
}
