//! How far a partition is dealt with: the longest finished prefix of what was received.

use std::collections::VecDeque;

/// Offsets received from one partition and which of them are finished.
///
/// It goes by the order of receipt, not by arithmetic: compaction and transaction markers leave holes.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// From the first unfinished one on; offsets ascend.
    entries: VecDeque<Entry>,
    /// One past the finished prefix.
    commit_point: Option<i64>,
    last_received: Option<i64>,
}

#[derive(Debug)]
struct Entry {
    offset: i64,
    finished: bool,
}

impl Progress {
    /// Takes note of a received offset. False if the partition went backwards: the log was cut or reset, and what is
    /// known here is about other messages.
    #[must_use]
    pub(super) fn received(&mut self, offset: i64) -> bool {
        if self.last_received.is_some_and(|last| offset <= last) {
            return false;
        }
        self.last_received = Some(offset);
        self.entries.push_back(Entry {
            offset,
            finished: false,
        });
        true
    }

    /// Marks an offset finished; unknown ones and repetitions change nothing.
    pub(super) fn finished(&mut self, offset: i64) {
        if let Ok(at) = self
            .entries
            .binary_search_by_key(&offset, |entry| entry.offset)
            && let Some(entry) = self.entries.get_mut(at)
        {
            entry.finished = true;
        }
        while let Some(first) = self.entries.front().filter(|entry| entry.finished) {
            self.commit_point = Some(first.offset + 1);
            self.entries.pop_front();
        }
    }

    /// One past the longest finished prefix: where a successor starts. `None` before anything is finished.
    pub(super) const fn commit_point(&self) -> Option<i64> {
        self.commit_point
    }

    /// Where a successor starts, also before anything is finished: then at the first that was received.
    pub(super) fn next(&self) -> Option<i64> {
        self.commit_point
            .or_else(|| self.entries.front().map(|entry| entry.offset))
    }

    /// How many offsets are kept in memory: all since the first unfinished one.
    pub(super) fn tracked(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_unfinished_offset_holds_the_commit_point() {
        let mut progress = Progress::default();
        assert!((0..100).all(|offset| progress.received(offset)));
        assert_eq!(progress.commit_point(), None);
        (0..100)
            .filter(|o| *o != 17)
            .for_each(|o| progress.finished(o));
        assert_eq!(progress.commit_point(), Some(17));
        assert_eq!(progress.tracked(), 83);
        progress.finished(17);
        assert_eq!(progress.commit_point(), Some(100));
        assert_eq!(progress.tracked(), 0);
    }

    #[test]
    fn a_partition_that_goes_backwards_is_noticed() {
        let mut progress = Progress::default();
        assert!(progress.received(5));
        assert!(!progress.received(5));
        assert!(!progress.received(3));
        progress.finished(5);
        assert!(!progress.received(5));
    }

    /// What it must compute, written down naively.
    fn expected(received: &[i64], finished: &[i64]) -> Option<i64> {
        received
            .iter()
            .take_while(|offset| finished.contains(offset))
            .last()
            .map(|offset| offset + 1)
    }

    proptest! {
        #[test]
        fn the_commit_point_is_one_past_the_finished_prefix(
            gaps in prop::collection::vec(1_i64..5, 1..60),
            order in prop::collection::vec(any::<prop::sample::Index>(), 0..120),
            early in 0_usize..60,
        ) {
            let offsets: Vec<i64> = gaps
                .iter()
                .scan(0, |at, gap| { *at += gap; Some(*at) })
                .collect();
            let mut progress = Progress::default();
            // Some are received only after others were finished already.
            let early = early.min(offsets.len());
            offsets[..early].iter().for_each(|o| assert!(progress.received(*o)));
            let mut seen = early;
            let mut finished = Vec::new();
            for index in order {
                if seen < offsets.len() && index.index(3) == 0 {
                    assert!(progress.received(offsets[seen]));
                    seen += 1;
                }
                if seen > 0 {
                    let offset = offsets[index.index(seen)];
                    progress.finished(offset);
                    finished.push(offset);
                }
                prop_assert_eq!(progress.commit_point(), expected(&offsets[..seen], &finished));
            }
        }
    }
}
