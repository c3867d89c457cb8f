//! The lanes a relay holds: what the keeper knows of them, and which of its workers has which in hand.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::lane::Lane;
use crate::store::Lease;

use super::share::{Busy, surplus};

/// The lanes a relay holds, shared by its keeper and its workers.
#[derive(Debug, Default)]
pub(super) struct Held {
    lanes: Mutex<Lanes>,
    /// Woken when lanes were gained.
    pub(super) gained: Notify,
    /// Woken when a worker let go of a lane that is to be released.
    pub(super) at_rest: Notify,
}

#[derive(Debug, Default)]
struct Lanes {
    held: BTreeMap<Lane, Holding>,
    /// Lanes in a worker's hand. Kept apart from the leases, because a lease that was lost and gained again must not
    /// bring the lane to a second worker while the first still publishes what it read before.
    busy: BTreeMap<Lane, Hand>,
    /// Whom each lane was last dealt to.
    dealt: BTreeMap<Lane, usize>,
}

/// Whose hand a lane is in, and by how many claims.
#[derive(Debug)]
struct Hand {
    worker: usize,
    claims: usize,
}

/// Puts the lane into the worker's hand once more, unless it is in another's.
fn take(busy: &mut BTreeMap<Lane, Hand>, lane: Lane, worker: usize) -> bool {
    let free = Hand { worker, claims: 0 };
    let hand = busy.entry(lane).or_insert(free);
    let ours = hand.worker == worker;
    hand.claims += usize::from(ours);
    ours
}

#[derive(Debug, Clone, Copy)]
struct Holding {
    lease: Lease,
    /// Certainly ours until then. By this process's monotonic clock from before the request was sent, so never later
    /// than the database's own expiry: a process that was stopped for a while finds none that is certain.
    until: Instant,
    /// To be released: handed to no worker any more. There is no way back, because a release that failed may have
    /// happened all the same.
    leaving: bool,
}

impl Held {
    /// Hands `worker` out of `workers` its part of the lanes that are certain to last `needed` longer.
    ///
    /// The lanes are dealt out in turn, so that each worker has its part of however few there are. A gain or a loss
    /// deals them out anew; one that another worker still has in hand is then left out until it lets go, and one that
    /// comes from another worker is left out once. So no lane is ever with two, and the request after this claim is without
    /// a lane of which the worker's reader may remember what is true no more.
    pub(super) fn claim(
        self: &Arc<Self>,
        worker: usize,
        workers: usize,
        needed: Duration,
    ) -> Claim {
        let now = Instant::now();
        let mut lanes = self.lanes();
        let Lanes { held, busy, dealt } = &mut *lanes;
        let leases: Vec<Lease> = held
            .values()
            .filter(|holding| !holding.leaving)
            .enumerate()
            .filter(|(place, holding)| place % workers == worker && holding.until > now + needed)
            .map(|(_, holding)| holding.lease)
            .filter(|lease| {
                let before = dealt.insert(lease.lane, worker);
                before.is_none_or(|before| before == worker) && take(busy, lease.lane, worker)
            })
            .collect();
        drop(lanes);
        Claim {
            held: self.clone(),
            worker,
            leases,
        }
    }

    /// All leases, those of leaving lanes included.
    pub(super) fn all(&self) -> Vec<Lease> {
        self.lanes().held.values().map(|held| held.lease).collect()
    }

    /// How many lanes are worked on, and how many are leaving.
    pub(super) fn counts(&self) -> (usize, usize) {
        let lanes = self.lanes();
        let leaving = lanes.held.values().filter(|held| held.leaving).count();
        (lanes.held.len() - leaving, leaving)
    }

    /// Keeps of `asked` only what is in `kept`, good until `until`.
    pub(super) fn renewed(&self, asked: &[Lease], kept: &[Lease], until: Instant) {
        let mut lanes = self.lanes();
        for lease in asked {
            if kept.contains(lease) {
                if let Some(holding) = lanes.held.get_mut(&lease.lane) {
                    holding.until = until;
                }
            } else {
                lanes.held.remove(&lease.lane);
            }
        }
    }

    pub(super) fn add(&self, leases: &[Lease], until: Instant) {
        let gained = leases.iter().map(|lease| {
            let holding = Holding {
                lease: *lease,
                until,
                leaving: false,
            };
            (lease.lane, holding)
        });
        self.lanes().held.extend(gained);
        self.gained.notify_waiters();
    }

    /// Stops handing out `give` of the lanes.
    pub(super) fn give_up(&self, give: usize) {
        let mut lanes = self.lanes();
        let Lanes { held, busy, .. } = &mut *lanes;
        let working: Vec<_> = held
            .iter()
            .filter(|(_, holding)| !holding.leaving)
            .map(|(lane, _)| match busy.contains_key(lane) {
                true => (*lane, Busy::Yes),
                false => (*lane, Busy::No),
            })
            .collect();
        for lane in surplus(&working, give) {
            if let Some(holding) = held.get_mut(&lane) {
                holding.leaving = true;
            }
        }
    }

    /// Leaving lanes that no worker has in hand: nothing of them is on its way, and nothing will be.
    pub(super) fn drained(&self) -> Vec<Lease> {
        let lanes = self.lanes();
        lanes
            .held
            .values()
            .filter(|holding| holding.leaving && !lanes.busy.contains_key(&holding.lease.lane))
            .map(|holding| holding.lease)
            .collect()
    }

    /// These were released.
    pub(super) fn remove(&self, leases: &[Lease]) {
        let mut lanes = self.lanes();
        for lease in leases {
            lanes.held.remove(&lease.lane);
        }
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lanes in a worker's hand, until it is dropped: at the end of a cycle, however that ends, or of a late publish.
#[derive(Debug)]
pub(super) struct Claim {
    held: Arc<Held>,
    worker: usize,
    leases: Vec<Lease>,
}

impl Claim {
    pub(super) fn leases(&self) -> &[Lease] {
        &self.leases
    }

    /// Lets go of every lane but these: nothing of the others is on its way.
    pub(super) fn keep_only(&mut self, lanes: &BTreeSet<Lane>) {
        let (kept, others) = self
            .leases
            .iter()
            .partition(|lease| lanes.contains(&lease.lane));
        self.leases = kept;
        self.let_go(&others);
    }

    /// A second claim to some of the lanes, for what stays on its way when this one ends.
    pub(super) fn share(&self, wanted: &BTreeSet<Lane>) -> Self {
        let leases = self.leases.iter().copied();
        let leases: Vec<_> = leases
            .filter(|lease| wanted.contains(&lease.lane))
            .collect();
        let mut lanes = self.held.lanes();
        for lease in &leases {
            take(&mut lanes.busy, lease.lane, self.worker);
        }
        drop(lanes);
        Self {
            held: self.held.clone(),
            worker: self.worker,
            leases,
        }
    }

    /// Whether what was read under the lease may still be published: it is ours for `needed` longer. A leaving lane is.
    pub(super) fn lasts(&self, lane: Lane, needed: Duration) -> bool {
        let until = Instant::now() + needed;
        let lanes = self.held.lanes();
        lanes
            .held
            .get(&lane)
            .is_some_and(|holding| self.leases.contains(&holding.lease) && holding.until > until)
    }

    fn let_go(&self, leases: &[Lease]) {
        let mut lanes = self.held.lanes();
        let mut at_rest = false;
        for lease in leases {
            if let Some(hand) = lanes.busy.get_mut(&lease.lane) {
                hand.claims -= 1;
                if hand.claims > 0 {
                    continue;
                }
                lanes.busy.remove(&lease.lane);
            }
            let holding = lanes.held.get(&lease.lane);
            at_rest |= holding.is_some_and(|holding| holding.leaving);
        }
        drop(lanes);
        if at_rest {
            self.held.at_rest.notify_one();
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.let_go(&self.leases);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDED: Duration = Duration::from_secs(1);

    fn leases(lanes: impl IntoIterator<Item = Lane>, token: i64) -> Vec<Lease> {
        let lease = |lane| Lease { lane, token };
        lanes.into_iter().map(lease).collect()
    }

    fn holding(lanes: impl IntoIterator<Item = Lane>) -> Arc<Held> {
        let held = Arc::new(Held::default());
        held.add(&leases(lanes, 1), Instant::now() + 10 * NEEDED);
        held
    }

    fn lanes(claim: &Claim) -> Vec<Lane> {
        claim.leases().iter().map(|lease| lease.lane).collect()
    }

    #[test]
    fn few_lanes_are_dealt_out_to_all_workers() {
        let held = holding([3, 7, 11, 15]); // all of them 3 modulo 4
        for worker in 0..4 {
            assert_eq!(held.claim(worker, 4, NEEDED).leases().len(), 1);
        }
    }

    #[test]
    fn a_lane_that_is_dealt_anew_stays_with_its_worker_until_it_lets_go() {
        let held = holding([1, 2, 3]);
        let first = held.claim(0, 2, NEEDED);
        assert_eq!(lanes(&first), [1, 3]);
        held.add(&leases([0], 1), Instant::now() + 10 * NEEDED);
        // Now 0 and 2 are the first worker's, 1 and 3 the second one's.
        assert!(held.claim(1, 2, NEEDED).leases().is_empty());
        assert_eq!(lanes(&held.claim(0, 2, NEEDED)), [0, 2]);
        drop(first);
        assert_eq!(lanes(&held.claim(1, 2, NEEDED)), [1, 3]);
    }

    #[test]
    fn a_lane_that_comes_from_another_worker_is_left_out_once() {
        let held = holding([1, 2]);
        assert_eq!(lanes(&held.claim(1, 2, NEEDED)), [2]);
        held.remove(&leases([1], 1));
        assert!(held.claim(1, 2, NEEDED).leases().is_empty());
        assert!(held.claim(0, 2, NEEDED).leases().is_empty(), "left out");
        assert_eq!(lanes(&held.claim(0, 2, NEEDED)), [2]);
        held.add(&leases([1], 1), Instant::now() + 10 * NEEDED);
        assert!(held.claim(1, 2, NEEDED).leases().is_empty(), "again");
        assert_eq!(lanes(&held.claim(1, 2, NEEDED)), [2]);
    }

    #[test]
    fn a_lane_lost_and_gained_again_waits_for_the_worker_of_before() {
        let held = holding([3, 4]);
        let stale = held.claim(1, 2, NEEDED);
        assert!(stale.lasts(4, NEEDED));
        held.renewed(&leases([3, 4], 1), &[], Instant::now());
        assert!(!stale.lasts(4, NEEDED));
        held.add(&leases([4], 3), Instant::now() + 10 * NEEDED);
        assert!(!stale.lasts(4, NEEDED), "read under the old token");
        // Dealt to the other one now.
        assert!(held.claim(0, 2, NEEDED).leases().is_empty());
        drop(stale);
        assert_eq!(held.claim(0, 2, NEEDED).leases(), leases([4], 3));
    }

    #[test]
    fn only_lanes_that_last_long_enough_are_handed_out() {
        let held = holding([0]);
        assert!(held.claim(0, 1, 20 * NEEDED).leases().is_empty());
        let claim = held.claim(0, 1, NEEDED);
        assert!(!claim.lasts(0, 20 * NEEDED));
    }

    #[test]
    fn a_leaving_lane_is_handed_to_nobody_and_drained_once_let_go() {
        let held = holding([0, 1, 2, 3]);
        let mut claim = held.claim(0, 1, NEEDED);
        held.give_up(2);
        assert_eq!(held.counts(), (2, 2));
        assert!(held.drained().is_empty(), "all are in hand");
        assert!(claim.lasts(3, NEEDED), "what was read is finished");
        claim.keep_only(&BTreeSet::from([0, 3]));
        assert_eq!(held.drained(), leases([2], 1));
        assert_eq!(lanes(&held.claim(0, 1, NEEDED)), [0, 1]);
        held.remove(&leases([2], 1));
        // A renewal brings nothing back to work.
        let asked = held.all();
        held.renewed(&asked, &asked, Instant::now() + 10 * NEEDED);
        drop(claim);
        assert_eq!(held.drained(), leases([3], 1));
        assert_eq!(lanes(&held.claim(0, 1, NEEDED)), [0, 1]);
    }

    #[test]
    fn a_lane_with_a_late_publish_stays_in_the_hand_of_its_worker() {
        let held = holding([0, 2]);
        let claim = held.claim(0, 1, NEEDED);
        let late = claim.share(&BTreeSet::from([2]));
        drop(claim);
        assert_eq!(lanes(&late), [2]);
        assert_eq!(lanes(&held.claim(0, 1, NEEDED)), [0, 2], "its own");
        assert!(held.claim(1, 2, NEEDED).leases().is_empty(), "in another's");
        held.give_up(2);
        assert_eq!(held.drained(), leases([0], 1));
        drop(late);
        assert_eq!(held.drained(), leases([0, 2], 1));
    }

    #[tokio::test]
    async fn the_keeper_is_woken_when_a_leaving_lane_is_let_go() {
        let held = holding([0]);
        let claim = held.claim(0, 1, NEEDED);
        held.give_up(1);
        drop(claim);
        held.at_rest.notified().await;
    }
}
