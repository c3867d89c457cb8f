//! How many rows of a page each lane may fill: what quiet lanes leave goes to busy ones. Pure.

use std::collections::HashMap;

use crate::lane::Lane;

/// A lane that had nothing is still asked for this part of an equal share, so that a page shows when it wakes up.
const QUIET_PART: usize = 8;

/// What the lanes of the last page turned out to hold.
#[derive(Debug, Default)]
pub(super) struct Shares {
    last: HashMap<Lane, Last>,
}

#[derive(Debug, Clone, Copy)]
struct Last {
    rows: usize,
    cut: bool,
}

impl Shares {
    /// Most rows of each lane: together at most `rows_max`. Where that is less than one for each, the first ones get
    /// one and the others none.
    pub(super) fn of(&self, lanes: &[Lane], rows_max: usize) -> Vec<usize> {
        let quiet = (rows_max / lanes.len().max(1) / QUIET_PART).max(1);
        let wanted = |lane| match self.last.get(lane) {
            Some(last) if !last.cut => last.rows.saturating_mul(2).max(quiet).min(rows_max),
            _ => rows_max,
        };
        let wanted: Vec<usize> = lanes.iter().map(wanted).collect();
        let mut shares = vec![0; lanes.len()];
        let mut left = rows_max;
        // From the most modest on, nobody gets more than an equal part of what is left.
        let mut by_wish: Vec<usize> = (0..lanes.len()).collect();
        by_wish.sort_by_key(|at| wanted[*at]);
        if rows_max < lanes.len() {
            by_wish = (0..rows_max).collect();
        }
        for (done, at) in by_wish.iter().enumerate() {
            shares[*at] = wanted[*at].min(left / (by_wish.len() - done));
            left -= shares[*at];
        }
        // What nobody asked for is there for a sudden wish.
        for (done, at) in by_wish.iter().enumerate() {
            let more = left / (by_wish.len() - done);
            shares[*at] += more;
            left -= more;
        }
        shares
    }

    /// Notes how many rows a lane had, and whether a limit ended it.
    pub(super) fn note(&mut self, lane: Lane, rows: usize, cut: bool) {
        self.last.insert(lane, Last { rows, cut });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shares(last: &[(usize, bool)], rows_max: usize) -> Vec<usize> {
        let mut shares = Shares::default();
        let lanes: Vec<Lane> = (0..16).collect();
        for (lane, (rows, cut)) in lanes.iter().zip(last) {
            shares.note(*lane, *rows, *cut);
        }
        shares.of(&lanes, rows_max)
    }

    #[test]
    fn at_first_all_lanes_get_the_same() {
        assert_eq!(shares(&[], 1_600), [100; 16]);
        assert_eq!(shares(&[(0, false); 16], 1_600), [100; 16]);
    }

    #[test]
    fn a_hot_lane_gets_what_the_others_leave() {
        let mut last = [(0, false); 16];
        last[3] = (62, true);
        let shares = shares(&last, 1_000);
        assert_eq!(shares[3], 1_000 - 15 * 7);
        assert_eq!(shares[4], 7);
    }

    #[test]
    fn two_hot_lanes_divide_and_steady_ones_keep_room_to_grow() {
        let mut last = [(20, false); 16];
        (last[0], last[1]) = ((62, true), (62, true));
        let shares = shares(&last, 1_000);
        assert_eq!(shares[2], 40);
        assert_eq!((shares[0], shares[1]), (220, 220));
    }

    #[test]
    fn fewer_rows_than_lanes_go_one_by_one() {
        let shares = shares(&[(1, true); 16], 2);
        assert_eq!(shares[..3], [1, 1, 0]);
    }

    proptest! {
        #[test]
        fn shares_fill_the_page_and_starve_nobody(
            last in proptest::collection::vec((0_usize..3_000, any::<bool>()), 16),
            rows_max in 0_usize..3_000,
        ) {
            let shares = shares(&last, rows_max);
            prop_assert_eq!(shares.iter().sum::<usize>(), rows_max);
            let least = if rows_max < 16 { 0 } else { (rows_max / 16 / QUIET_PART).max(1) };
            prop_assert!(shares.iter().all(|share| *share >= least));
        }
    }
}
