//! What a reader knows of the rows set aside in its lanes, so that a lane without any costs nothing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::lane::Lane;
use crate::store::{AsideState, Lease, SettlementBatch, Verdict};

/// The pause between two looks for rows that nothing blocks any more.
const FREE_PAUSE: Duration = Duration::from_secs(1);
/// ... is at least so many times as long as the last look took: it walks over every key that is blocked.
const FREE_PAUSE_FACTOR: u32 = 20;

#[derive(Debug, Default)]
pub(super) struct Lines {
    lanes: BTreeMap<Lane, Known>,
    free_due: Option<Instant>,
}

#[derive(Debug)]
struct Known {
    token: i64,
    /// Nothing is there that goes by itself. Only a settlement of ours can change that.
    empty: bool,
    /// Something blocks.
    blocked: bool,
}

impl Lines {
    /// Only these lanes are ours from here on; of a new one nothing is known.
    pub(super) fn begin(&mut self, leases: &[Lease]) {
        self.lanes.retain(|lane, known| {
            let token = known.token;
            leases.contains(&Lease { lane: *lane, token })
        });
    }

    pub(super) fn may_be_in(&self, lease: Lease) -> bool {
        self.lanes.get(&lease.lane).is_none_or(|known| !known.empty)
    }

    /// The lanes where it is time to look whether something is blocked no more.
    pub(super) fn due(&self) -> Option<Vec<Lease>> {
        let blocked = self.lanes.iter().filter(|(_, known)| known.blocked);
        let leases: Vec<Lease> = blocked
            .map(|(lane, known)| Lease {
                lane: *lane,
                token: known.token,
            })
            .collect();
        let due = self.free_due.is_none_or(|due| due <= Instant::now());
        (due && !leases.is_empty()).then_some(leases)
    }

    /// A look freed so many rows and took so long. Where there were some there may be more.
    pub(super) fn freed(&mut self, count: u64, took: Duration) {
        let pause = (took.saturating_mul(FREE_PAUSE_FACTOR)).max(FREE_PAUSE);
        self.free_due = (count == 0).then(|| Instant::now() + pause);
    }

    /// What a page said of these lanes: in `aside` something is set aside, in `blocked` something blocks.
    pub(super) fn found(&mut self, asked: &[Lease], aside: &[Lane], blocked: &[Lane]) {
        for lease in asked {
            let known = Known {
                token: lease.token,
                empty: !aside.contains(&lease.lane),
                blocked: blocked.contains(&lease.lane),
            };
            self.lanes.insert(lease.lane, known);
        }
    }

    /// From here on something is set aside in these lanes, or may be: the answer can be lost.
    pub(super) fn settling(&mut self, batch: &SettlementBatch) {
        for (place, verdict) in &batch.verdicts {
            if let (Verdict::SetAside(aside), Some(known)) =
                (verdict, self.lanes.get_mut(&place.lane))
            {
                known.empty = false;
                known.blocked |= matches!(aside.state, AsideState::Blocking | AsideState::Held);
            }
        }
    }

    /// Nothing is known.
    pub(super) fn forget(&mut self) {
        self.lanes.clear();
    }
}
