//! Fair share: how many lanes a relay should hold, what it takes, and what it gives up. Pure; `leases.rs` does it.
//!
//! Every live relay computes its own share from the same count, and all shares add up to exactly the number of lanes.
//! So nobody negotiates: who is above gives up, who is below takes what is free, and once everybody has the same count
//! nothing moves any more.

use crate::lane::{LANES, Lane};
use crate::store::Standing;

/// What a relay does about its lanes now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Decision {
    /// Lanes to stop working on and then release.
    pub(super) give: usize,
    /// Free lanes to take, if there are so many.
    pub(super) take: usize,
}

/// The lanes that a relay should hold: rounded up for those that come first, rounded down for the others, and none for
/// those beyond the number of lanes.
pub(super) fn share(standing: Standing) -> usize {
    let lanes = usize::try_from(LANES).unwrap_or(0);
    let live = standing.live.max(1);
    lanes / live + usize::from(standing.place < lanes % live)
}

/// Decides for a relay that works on `working` lanes and is about to release `leaving` others.
///
/// Lanes that are leaving still count as held: only what is released makes room.
pub(super) fn decide(standing: Standing, working: usize, leaving: usize) -> Decision {
    let share = share(standing);
    Decision {
        give: working.saturating_sub(share),
        take: share.saturating_sub(working + leaving),
    }
}

/// Which `give` of the lanes leave: those at rest first, because they can go at once, then the last ones.
pub(super) fn surplus(lanes: &[(Lane, Busy)], give: usize) -> Vec<Lane> {
    let mut lanes = lanes.to_vec();
    lanes.sort_by_key(|(lane, busy)| (*busy, -lane));
    lanes.into_iter().take(give).map(|(lane, _)| lane).collect()
}

/// Whether a worker has a lane in hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Busy {
    No,
    Yes,
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    const ALL: usize = LANES as usize;

    fn standing(live: usize, place: usize) -> Standing {
        Standing { live, place }
    }

    #[test]
    fn shares_add_up_to_all_lanes_and_differ_by_one_at_most() {
        for live in 1..40 {
            let shares: Vec<_> = (0..live)
                .map(|place| share(standing(live, place)))
                .collect();
            assert_eq!(shares.iter().sum::<usize>(), ALL, "{live}");
            assert!(shares[0] - shares[live - 1] <= 1, "{live}");
            assert_eq!(shares[0], ALL.div_ceil(live), "{live}");
        }
        assert_eq!(share(standing(1, 0)), ALL, "a lone relay takes all");
        assert_eq!(share(standing(0, 0)), ALL, "nonsense harms nobody");
    }

    #[test]
    fn a_relay_above_its_share_gives_and_one_below_takes() {
        let two = standing(2, 0);
        assert_eq!(decide(two, 16, 0), Decision { give: 8, take: 0 });
        assert_eq!(decide(two, 8, 0), Decision::default());
        assert_eq!(decide(two, 3, 0), Decision { give: 0, take: 5 });
        let alone_again = standing(1, 0);
        assert_eq!(decide(alone_again, 8, 8), Decision::default());
        assert_eq!(decide(alone_again, 8, 3), Decision { give: 0, take: 5 });
        assert_eq!(
            decide(standing(20, 19), 1, 0),
            Decision { give: 1, take: 0 }
        );
    }

    #[test]
    fn lanes_at_rest_leave_first() {
        let lanes = [(0, Busy::No), (1, Busy::Yes), (2, Busy::No), (3, Busy::Yes)];
        assert!(surplus(&lanes, 0).is_empty());
        assert_eq!(surplus(&lanes, 1), [2]);
        assert_eq!(surplus(&lanes, 3), [2, 0, 3]);
        assert_eq!(surplus(&lanes, 9), [2, 0, 3, 1]);
    }

    /// One step of some relay, or a relay that comes, stops, or is killed.
    #[derive(Debug, Clone, Copy)]
    enum Event {
        Join,
        Stop(usize),
        Kill(usize),
        /// Its keeper's round.
        Round(usize),
        /// A worker of it begins or ends a batch on a lane.
        Work(usize, Lane),
        /// What a killed relay left runs out.
        Expire,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            1 => Just(Event::Join),
            1 => any::<usize>().prop_map(Event::Stop),
            1 => any::<usize>().prop_map(Event::Kill),
            8 => any::<usize>().prop_map(Event::Round),
            8 => (any::<usize>(), 0..LANES).prop_map(|(relay, lane)| Event::Work(relay, lane)),
            1 => Just(Event::Expire),
        ]
    }

    /// The lanes as the database has them, and what each relay believes. Relays are numbered in the order of their ids.
    #[derive(Default)]
    struct Model {
        next: usize,
        registered: BTreeSet<usize>,
        killed: BTreeSet<usize>,
        owner: BTreeMap<Lane, usize>,
        leaving: BTreeSet<Lane>,
        busy: BTreeSet<(usize, Lane)>,
    }

    impl Model {
        fn alive(&self, pick: usize) -> Option<usize> {
            let alive: Vec<_> = self.registered.difference(&self.killed).collect();
            alive
                .get(pick.checked_rem(alive.len())?)
                .map(|relay| **relay)
        }

        fn release(&mut self, lane: Lane) {
            self.owner.remove(&lane);
            self.leaving.remove(&lane);
        }

        fn of(&self, relay: usize) -> Vec<Lane> {
            let lanes = self.owner.iter().filter(|(_, owner)| **owner == relay);
            lanes.map(|(lane, _)| *lane).collect()
        }

        fn gone(&mut self, relay: usize) {
            for lane in self.of(relay) {
                self.release(lane);
            }
            self.registered.remove(&relay);
            self.busy.retain(|(busy, _)| *busy != relay);
        }

        fn work(&mut self, relay: usize, lane: Lane) {
            if self.busy.remove(&(relay, lane)) {
                return;
            }
            if self.owner.get(&lane) == Some(&relay) && !self.leaving.contains(&lane) {
                self.busy.insert((relay, lane));
                let workers = self.busy.iter().filter(|(_, busy)| *busy == lane).count();
                assert_eq!(workers, 1, "two relays work on lane {lane}");
            }
        }

        /// What `Keeper::round` does. Whether anything changed.
        fn round(&mut self, relay: usize) -> bool {
            let place = self.registered.range(..relay).count();
            let standing = standing(self.registered.len(), place);
            let held = self.of(relay);
            let working: Vec<_> = held
                .iter()
                .filter(|lane| !self.leaving.contains(lane))
                .map(|lane| match self.busy.contains(&(relay, *lane)) {
                    true => (*lane, Busy::Yes),
                    false => (*lane, Busy::No),
                })
                .collect();
            let decision = decide(standing, working.len(), held.len() - working.len());
            self.leaving.extend(surplus(&working, decision.give));
            let mut released = 0;
            for lane in held {
                if self.leaving.contains(&lane) && !self.busy.contains(&(relay, lane)) {
                    self.release(lane);
                    released += 1;
                }
            }
            let free: Vec<_> = (0..LANES)
                .filter(|lane| !self.owner.contains_key(lane))
                .take(decision.take)
                .collect();
            for lane in &free {
                assert_eq!(self.owner.insert(*lane, relay), None, "held twice");
            }
            if decision.take > 0 {
                assert!(self.of(relay).len() <= share(standing), "beyond its share");
            }
            decision.give + released + free.len() > 0
        }

        fn apply(&mut self, event: Event) {
            match event {
                Event::Join if self.registered.len() < 24 => {
                    self.registered.insert(self.next);
                    self.next += 1;
                }
                Event::Join => {}
                Event::Expire => {
                    for relay in std::mem::take(&mut self.killed) {
                        self.gone(relay);
                    }
                }
                Event::Stop(pick) => {
                    if let Some(relay) = self.alive(pick) {
                        self.gone(relay);
                    }
                }
                Event::Kill(pick) => {
                    if let Some(relay) = self.alive(pick) {
                        self.killed.insert(relay);
                        // Its batches end with it, its leases and its registration do not.
                        self.busy.retain(|(busy, _)| *busy != relay);
                    }
                }
                Event::Round(pick) => {
                    if let Some(relay) = self.alive(pick) {
                        self.round(relay);
                    }
                }
                Event::Work(pick, lane) => {
                    if let Some(relay) = self.alive(pick) {
                        self.work(relay, lane);
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn whoever_comes_and_goes_the_lanes_end_up_fairly_shared_and_then_rest(
            events in prop::collection::vec(event(), 0..300),
        ) {
            let mut model = Model::default();
            for event in events {
                model.apply(event);
            }
            model.apply(Event::Expire);
            model.busy.clear();
            // Two rounds of everybody: give up, then take.
            for _ in 0..2 {
                for relay in model.registered.clone() {
                    model.round(relay);
                }
            }
            for (place, relay) in model.registered.clone().into_iter().enumerate() {
                let fair = share(standing(model.registered.len(), place));
                prop_assert_eq!(model.of(relay).len(), fair);
                prop_assert!(!model.round(relay), "still moving");
            }
            prop_assert!(model.registered.is_empty() || model.owner.len() == ALL);
        }
    }
}
