//! The scan floor: up to which position of a lane a fetch need not look, because everything there is settled.
//!
//! Pure and in memory, one per reader. `docs/decisions/0006-safe-scan-floor.md` has the rules and why they hold:
//!
//! - a floor follows what was read with a delay of one settled page, because only the settlement's own transaction id
//!   makes sure that the next snapshot knows every transaction that drew a position before the page was read;
//! - a transaction that runs while a page is read is *tracked*, with a bound below all positions it can bring: what it
//!   leaves below a floor is read by its id once it has ended;
//! - forgetting everything is always safe: the next fetch begins at the first row.

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::lane::Lane;
use crate::store::Lease;

/// Running transactions followed at most. A server with more of them is read from the first row.
const TRACKED_MAX: usize = 4_096;

/// What a statement saw: `pg_current_snapshot()`.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Snapshot {
    /// The first transaction id that had not ended as the latest of all.
    xmax: u64,
    /// Those below that were running.
    running: HashSet<u64>,
}

impl Snapshot {
    /// Reads `xmin:xmax:running,running`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split(':').skip(1);
        let xmax = parts.next()?.parse().ok()?;
        let running = parts.next()?.split(',').filter(|xid| !xid.is_empty());
        let running = running.map(|xid| xid.parse().ok()).collect::<Option<_>>()?;
        Some(Self { xmax, running })
    }

    fn ended(&self, xid: u64) -> bool {
        xid < self.xmax && !self.running.contains(&xid)
    }
}

/// Tracked transactions that have ended: their rows are to be read above a bound, up to each lane's floor.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ended {
    pub(super) xids: Vec<u64>,
    pub(super) above: i64,
}

/// What a fetch handed out of a lane.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct LanePage {
    /// Positions handed out, ascending.
    pub(super) positions: Vec<i64>,
    /// Where a limit ended the reading; `None` when it came to the end of the lane.
    pub(super) cut: Option<i64>,
}

#[derive(Debug, Default)]
pub(super) struct Floor {
    lanes: BTreeMap<Lane, LaneFloor>,
    /// Running transactions, each with a bound that is lower than every position it can bring.
    tracked: HashMap<u64, i64>,
    /// Highest position of any lane in the pages up to the last one.
    read_last: i64,
    /// ... up to the last but one.
    read_before: i64,
    page: Option<Page>,
}

#[derive(Debug)]
struct LaneFloor {
    token: i64,
    /// Nothing at or below is unsettled, but for rows of tracked transactions.
    floor: i64,
    /// Read up to here.
    read: i64,
}

/// A page that was handed out and not settled yet.
#[derive(Debug)]
struct Page {
    lanes: BTreeMap<Lane, LanePage>,
}

impl Floor {
    /// The floors under these leases, in their order. A page still open counts as not settled at all.
    ///
    /// A lane that is not asked for is forgotten: what its tracked transactions bring meanwhile is not read.
    pub(super) fn begin(&mut self, leases: &[Lease]) -> Vec<i64> {
        self.conclude(None);
        let current = |lane: Lane, token: i64| leases.contains(&Lease { lane, token });
        self.lanes.retain(|lane, floor| current(*lane, floor.token));
        let floors = leases.iter().map(|lease| {
            let new = LaneFloor {
                token: lease.token,
                floor: 0,
                read: 0,
            };
            self.lanes.entry(lease.lane).or_insert(new).floor
        });
        floors.collect()
    }

    pub(super) fn of(&self, lane: Lane) -> i64 {
        self.lanes.get(&lane).map_or(0, |lane| lane.floor)
    }

    /// The tracked transactions that had ended when the page was read.
    pub(super) fn ended(&self, snapshot: &Snapshot) -> Option<Ended> {
        let ended = || self.tracked.iter().filter(|(xid, _)| snapshot.ended(**xid));
        let above = ended().map(|(_, bound)| *bound).min()?;
        let mut xids: Vec<u64> = ended().map(|(xid, _)| *xid).collect();
        xids.sort_unstable();
        Some(Ended { xids, above })
    }

    pub(super) fn is_tracked(&self, xid: u64) -> bool {
        self.tracked.contains_key(&xid)
    }

    /// Notes what is handed out of each lane, and from which view.
    pub(super) fn read(&mut self, snapshot: &Snapshot, lanes: BTreeMap<Lane, LanePage>) {
        self.tracked.retain(|xid, _| !snapshot.ended(*xid));
        self.lanes.retain(|lane, _| lanes.contains_key(lane));
        for xid in &snapshot.running {
            self.tracked.entry(*xid).or_insert(self.read_before);
        }
        if self.tracked.len() > TRACKED_MAX {
            return self.forget();
        }
        self.page = Some(Page { lanes });
    }

    /// The page's rows at these places are settled, by a transaction that changed at least one row and has ended.
    pub(super) fn settled(&mut self, places: impl IntoIterator<Item = (Lane, i64)>) {
        let mut places: Vec<_> = places.into_iter().collect();
        places.sort_unstable();
        if !places.is_empty() {
            self.conclude(Some(&places));
        }
    }

    /// Begins anew.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }

    /// `settled`: the settled places in order, or `None` if that is not known.
    fn conclude(&mut self, settled: Option<&[(Lane, i64)]>) {
        let Some(page) = self.page.take() else {
            return;
        };
        let last = |lane: &LanePage| lane.positions.last().copied();
        let read = page.lanes.values().filter_map(last).max();
        // A lane that was read to its end is read up to here: positions of all lanes are drawn from one sequence.
        let newest = self.read_last.max(read.unwrap_or(0));
        // Only a settlement, or nothing to settle, lets the next snapshot vouch for what this one read.
        let vouched = read.is_none() || settled.is_some();
        for (lane, floor) in &mut self.lanes {
            let Some(part) = page.lanes.get(lane) else {
                continue;
            };
            let mut read = part.cut.unwrap_or(newest);
            let is_settled =
                |position| settled.is_some_and(|s| s.binary_search(&(*lane, position)).is_ok());
            if let Some(left) = part.positions.iter().find(|p| !is_settled(**p)) {
                read = read.min(left - 1);
            }
            if vouched {
                floor.floor = floor.read.min(read);
                floor.read = read;
            } else {
                floor.floor = floor.floor.min(read);
                floor.read = floor.read.min(read);
            }
        }
        if vouched {
            self.read_before = self.read_last;
            self.read_last = newest;
        }
    }
}

/// Rows of one lane in order of position, as one statement returned them.
#[derive(Debug)]
pub(super) struct Scan<T> {
    /// Position, stored size and the rest.
    pub(super) rows: Vec<(i64, i64, T)>,
    /// As in [`LanePage`].
    pub(super) cut: Option<i64>,
}

impl<T> Default for Scan<T> {
    fn default() -> Self {
        let (rows, cut) = (Vec::new(), None);
        Self { rows, cut }
    }
}

impl<T> Scan<T> {
    /// Puts the rows of ended transactions before those of the scan, and ends the lane at its limits: the first row
    /// comes however large it is.
    pub(super) fn after(mut self, mut older: Self, rows_max: usize, bytes_max: i64) -> Self {
        if older.cut.is_none() {
            older.rows.append(&mut self.rows);
            older.cut = self.cut;
        }
        let mut bytes = 0_i64;
        let fits = |(place, row): (usize, &(i64, i64, T))| {
            bytes = bytes.saturating_add(row.1);
            place < rows_max && (place == 0 || bytes <= bytes_max)
        };
        let kept = older.rows.iter().enumerate().map(fits);
        let kept = kept.take_while(|fits| *fits).count();
        if kept < older.rows.len() {
            older.rows.truncate(kept);
            // At least one is kept: a lane of which no row was wanted was not asked for.
            older.cut = Some(older.rows.last().map_or(0, |row| row.0));
        }
        older
    }
}
