//! Random interleavings: whatever happens, a lane reads like one that is read from its first row.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, HashMap, HashSet};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use super::model::{KEYS, LANES, Server};
use super::*;

/// A rule bent on purpose: the random test must notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bent {
    Nothing,
    /// A floor is what was read last.
    HastyFloor,
    /// A running transaction is bound by the last page.
    HastyBound,
    /// Both: the two obvious rules.
    Hasty,
    /// A page that was not settled counts like a settled one.
    SettledOrNot,
}

/// A worker of a relay.
#[derive(Debug, Default)]
struct Worker {
    floor: Floor,
    /// What it believes to hold.
    leases: Vec<Lease>,
    /// Handed out and not settled: lane and position, and under which leases.
    page: Vec<(Lane, i64)>,
    under: Vec<Lease>,
}

#[derive(Debug)]
struct World {
    server: Server,
    workers: Vec<Worker>,
    /// The current tokens.
    held: Vec<Lease>,
    published: HashSet<i64>,
    first: HashMap<usize, i64>,
    bent: Bent,
}

impl World {
    fn new(bent: Bent) -> Self {
        let lanes = (0..).take(LANES);
        let held: Vec<_> = lanes.map(|lane| Lease { lane, token: 1 }).collect();
        let first = Worker {
            leases: held.clone(),
            ..Worker::default()
        };
        Self {
            server: Server::default(),
            workers: vec![first, Worker::default()],
            held,
            published: HashSet::new(),
            first: HashMap::new(),
            bent,
        }
    }

    fn step(&mut self, action: u16) -> Result<(), TestCaseError> {
        let choice = usize::from(action / 32);
        let count = self.server.transactions.len();
        let server = &mut self.server;
        match action % 32 {
            0..4 => server.begin(choice % KEYS, choice % 2 == 0),
            4..11 if count > 0 => server.insert(choice % count),
            11..16 if count > 0 => server.end(choice % count, true, choice % 3 > 0),
            16 if count > 0 => server.end(choice % count, false, true),
            17 if count > 0 => server.undo_to_savepoint(choice % count),
            18 if count > 0 => server.prepare(choice % count),
            19 => server.unrelated(),
            20 if choice % 4 == 0 => server.restart(),
            // A worker that dies, or finds a new server.
            21 => self.workers[choice % 2].floor.forget(),
            22 => self.change_hands(choice % 2, choice / 2 % LANES, choice % 3 == 0),
            23..28 => self.settle(choice % 2, choice / 2),
            _ => self.poll(choice % 2, choice / 2)?,
        }
        Ok(())
    }

    /// A lane goes to a worker, also to the one that had it. The other may not know yet.
    fn change_hands(&mut self, to: usize, lane: usize, known: bool) {
        self.held[lane].token += 1;
        let new = self.held[lane];
        let held = self.held.clone();
        for (at, worker) in self.workers.iter_mut().enumerate() {
            worker.leases.retain(|lease| {
                held.contains(lease) || !known && (at != to || lease.lane != new.lane)
            });
        }
        self.workers[to].leases.push(new);
    }

    /// What a statement returns of a lane: the first rows above a floor that the view has.
    fn scan(
        &self,
        view: &Snapshot,
        lane: Lane,
        floor: i64,
        limit: usize,
        ended: Option<(&Ended, i64)>,
    ) -> Scan<()> {
        let rows: Vec<_> = (self.server.rows.range(floor + 1..))
            .filter(|(_, row)| row.lane == lane)
            .filter(|(_, row)| self.server.sees(view, row))
            .filter(|(position, row)| {
                ended.is_none_or(|(e, known)| **position <= known && e.xids.contains(&row.xid))
            })
            .take(limit)
            .map(|(position, _)| (*position, 1, ()))
            .collect();
        let cut = (rows.len() == limit).then(|| rows.last().map_or(0, |row| row.0));
        Scan { rows, cut }
    }

    /// Fetch and publish, as the reader and the relay do it.
    fn poll(&mut self, at: usize, choice: usize) -> Result<(), TestCaseError> {
        let leases = self.workers[at].leases.clone();
        if leases.is_empty() {
            return Ok(());
        }
        let mut worker = std::mem::take(&mut self.workers[at]);
        worker.page.clear();
        worker.under.clone_from(&leases);
        let (limit, sweep, meanwhile) = (
            [1, 2, 3, 100][choice % 4],
            choice.is_multiple_of(16),
            choice / 4 % 8,
        );
        let floors = worker.floor.begin(&leases);
        let view = self.server.snapshot();
        let mut scans = Vec::new();
        for (lease, known) in leases.iter().zip(&floors) {
            let floor = if sweep { 0 } else { *known };
            let fence = if self.held.contains(lease) {
                0
            } else {
                i64::MAX - 1
            };
            let scan = self.scan(&view, lease.lane, floor.max(fence), limit, None);
            for (position, ..) in &scan.rows {
                let xid = self.server.rows[position].xid;
                let below = *position <= *known && !worker.floor.is_tracked(xid);
                prop_assert!(!below, "the belt found {position} at or below {known}");
            }
            // As a lane from its first row would read, but for what is settled.
            scans.push((scan, self.scan(&view, lease.lane, fence, usize::MAX, None)));
        }
        let ended = worker.floor.ended(&view);
        // The second statement has a later view of its own.
        self.busy(meanwhile);
        let mut lanes = BTreeMap::new();
        for ((lease, known), (scan, whole)) in leases.iter().zip(&floors).zip(scans) {
            let older = match &ended {
                Some(ended) if !sweep && *known > ended.above && self.held.contains(lease) => {
                    let view = self.server.snapshot();
                    self.scan(&view, lease.lane, ended.above, limit, Some((ended, *known)))
                }
                _ => Scan::default(),
            };
            let scan = scan.after(older, limit, 100);
            let positions: Vec<i64> = scan.rows.iter().map(|row| row.0).collect();
            let whole: Vec<i64> = whole.rows.iter().map(|row| row.0).collect();
            let cut = scan.cut;
            prop_assert!(
                whole.starts_with(&positions) && (cut.is_some() || positions.len() == whole.len()),
                "lane {} read {positions:?} where {whole:?} was pending; {:?}",
                lease.lane,
                worker.floor
            );
            for position in &positions {
                worker.page.push((lease.lane, *position));
                let row = &self.server.rows[position];
                if self.published.insert(*position) {
                    let before = self.first.insert(row.key, *position).unwrap_or(0);
                    prop_assert!(before < *position, "key {} out of order", row.key);
                }
            }
            lanes.insert(lease.lane, LanePage { positions, cut });
        }
        worker.floor.read(&view, lanes);
        if matches!(self.bent, Bent::SettledOrNot) {
            let page = worker.page.clone();
            worker.floor.settled(page);
        }
        self.bend(&mut worker.floor);
        self.workers[at] = worker;
        Ok(())
    }

    /// What others do between two statements.
    fn busy(&mut self, choice: usize) {
        let count = self.server.transactions.len();
        match choice {
            0..3 if count > 0 => self.server.end(choice % count, true, true),
            3 if count > 0 => self.server.insert(choice % count),
            4 => self.server.begin(choice % KEYS, true),
            _ => {}
        }
    }

    /// The outcomes of a settlement: all, some, none, fenced, failed, and failed after it was applied.
    fn settle(&mut self, at: usize, choice: usize) {
        let under = &self.workers[at].under;
        let owned = |place: &&(Lane, i64)| {
            let current = |lease: &Lease| lease.lane == place.0 && self.held.contains(lease);
            under.iter().any(current)
        };
        let page = &self.workers[at].page;
        let some = |place: &&(Lane, i64)| choice % 4 != 1 || place.1 % 3 != 0;
        let verdicts: Vec<_> = page.iter().filter(some).copied().collect();
        let held: Vec<_> = verdicts.iter().filter(owned).map(|place| place.1).collect();
        let whole = held.len() == verdicts.len();
        if verdicts.is_empty() {
            return;
        }
        let worker = &mut self.workers[at];
        worker.page.clear();
        match choice % 8 {
            // The future was dropped: nobody learns what became of it.
            2 => self.server.settle(&held),
            3 => {}
            6 => {
                worker.floor.forget();
                self.server.settle(&held);
            }
            _ if whole => {
                self.server.settle(&held);
                worker.floor.settled(verdicts);
                let mut floor = std::mem::take(&mut worker.floor);
                self.bend(&mut floor);
                self.workers[at].floor = floor;
            }
            _ => {
                worker.floor.forget();
                if !held.is_empty() {
                    self.server.settle(&held);
                }
            }
        }
    }

    fn bend(&self, floor: &mut Floor) {
        if matches!(self.bent, Bent::HastyFloor | Bent::Hasty) && floor.page.is_none() {
            floor
                .lanes
                .values_mut()
                .for_each(|lane| lane.floor = lane.read);
        }
        if matches!(self.bent, Bent::HastyBound | Bent::Hasty) {
            floor.read_before = floor.read_last;
        }
    }

    /// Everybody comes to an end; then everything is read and settled within few polls.
    fn finish(&mut self) -> Result<(), TestCaseError> {
        for worker in &mut self.workers {
            worker.leases.retain(|lease| self.held.contains(lease));
        }
        for at in (0..self.server.transactions.len()).rev() {
            self.server.end(at, at % 3 > 0, true);
        }
        let view = self.server.snapshot();
        for _ in 0..4 {
            for at in 0..2 {
                // With the largest limit, and never a sweep: the floor alone has to do it.
                self.poll(at, 3)?;
                self.settle(at, 0);
            }
        }
        let left = (self.server.rows.iter()).filter(|(_, row)| self.server.sees(&view, row));
        let left: Vec<_> = left.collect();
        prop_assert!(left.is_empty(), "never read: {left:?}");
        Ok(())
    }
}

/// Runs random worlds from a seed, printed to be repeated, and returns the first failure.
fn run(bent: Bent, cases: u32, seed: u64) -> Result<(), String> {
    println!("seed {seed}");
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    let bytes: Vec<u8> = seed.to_le_bytes().repeat(4);
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config, random);
    let result = runner.run(&vec(any::<u16>(), 0..300), |actions| {
        let mut world = World::new(bent);
        for action in actions {
            world.step(action)?;
        }
        world.finish()
    });
    result.map_err(|error| match error {
        TestError::Fail(why, actions) => format!("{why}: {actions:?}"),
        TestError::Abort(why) => why.to_string(),
    })
}

/// `RELAYBOX_SEED` repeats a run.
fn seed() -> u64 {
    let given = std::env::var("RELAYBOX_SEED").ok();
    given.map_or_else(|| fastrand::u64(..), |seed| seed.parse().unwrap_or(0))
}

#[test]
fn a_lane_reads_as_if_from_its_first_row() {
    if let Err(why) = run(Bent::Nothing, 1_500, seed()) {
        panic!("{why}");
    }
}

#[test]
fn every_bent_rule_is_noticed() {
    for bent in [
        Bent::HastyFloor,
        Bent::HastyBound,
        Bent::Hasty,
        Bent::SettledOrNot,
    ] {
        let why = run(bent, 20_000, 1).unwrap_err();
        println!("{bent:?}: {why}");
    }
}

const LEASE: Lease = Lease { lane: 0, token: 1 };

/// Reads these positions of lane 0 to the end, and settles them.
fn page(floor: &mut Floor, snapshot: &str, positions: &[i64]) {
    let snapshot = Snapshot::parse(snapshot).unwrap();
    let part = LanePage {
        positions: positions.to_vec(),
        cut: None,
    };
    floor.begin(&[LEASE]);
    floor.read(&snapshot, BTreeMap::from([(0, part)]));
    floor.settled(positions.iter().map(|position| (0, *position)));
}

#[test]
fn a_floor_belongs_to_one_lease() {
    let mut floor = Floor::default();
    page(&mut floor, "1:1:", &[1, 2]);
    assert_eq!(floor.of(0), 0);
    page(&mut floor, "2:2:", &[3]);
    assert_eq!(floor.begin(&[LEASE]), [2]);
    assert_eq!(floor.begin(&[Lease { token: 2, ..LEASE }]), [0]);
    page(&mut floor, "3:3:", &[4]);
    page(&mut floor, "4:4:", &[5]);
    assert_eq!(floor.begin(&[LEASE]), [4]);
    floor.begin(&[]);
    assert_eq!(floor.begin(&[LEASE]), [0]);
}

#[test]
fn what_is_tracked_is_bounded() {
    let mut floor = Floor::default();
    page(&mut floor, "1:1:", &[1, 2]);
    page(&mut floor, "2:2:", &[3]);
    let running: Vec<String> = (0..=TRACKED_MAX).map(|xid| xid.to_string()).collect();
    let many = format!("0:{}:{}", running.len(), running.join(","));
    page(&mut floor, &many, &[4]);
    assert_eq!((floor.of(0), floor.tracked.len()), (0, 0));
}

#[test]
fn snapshots_are_read_as_the_server_writes_them() {
    let read = Snapshot::parse("5:9:5,7").unwrap();
    let ended = [4, 5, 6, 7, 8, 9, 10].map(|xid| read.ended(xid));
    assert_eq!(ended, [true, false, true, false, true, false, false]);
    let epoch = Snapshot::parse("4294967300:4294967300:").unwrap();
    assert!(epoch.ended(4_294_967_299) && !epoch.ended(4_294_967_300));
    for text in ["", "1:2", "1:x:", "1:2:x"] {
        assert_eq!(Snapshot::parse(text), None, "{text}");
    }
}
