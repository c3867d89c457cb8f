//! The schedule: which deliveries may run now, so that one key is handled in order and no key waits for another.

use std::collections::{HashMap, VecDeque};

use bytes::Bytes;

/// Deliveries waiting and running, by key. Pure: it starts nothing itself.
#[derive(Debug)]
pub(super) struct Schedule<T> {
    ready: VecDeque<(Slot, T)>,
    /// Keys with something ready or running, and what waits behind it.
    busy: HashMap<Bytes, VecDeque<T>>,
    waiting: usize,
}

/// A key in work; given back with [`Schedule::finish`]. `None` for a delivery without a key.
pub(super) type Slot = Option<Bytes>;

impl<T> Schedule<T> {
    pub(super) fn new() -> Self {
        Self {
            ready: VecDeque::new(),
            busy: HashMap::new(),
            waiting: 0,
        }
    }

    /// Adds a delivery behind all earlier ones of its key.
    pub(super) fn push(&mut self, key: Option<Bytes>, item: T) {
        match key {
            None => self.ready.push_back((None, item)),
            Some(key) => match self.busy.get_mut(&key) {
                Some(behind) => {
                    behind.push_back(item);
                    self.waiting += 1;
                }
                None => {
                    self.busy.insert(key.clone(), VecDeque::new());
                    self.ready.push_back((Some(key), item));
                }
            },
        }
    }

    /// The delivery that has been ready longest; its key is in work until [`finish`](Self::finish).
    pub(super) fn next(&mut self) -> Option<(Slot, T)> {
        self.ready.pop_front()
    }

    /// The key's delivery has ended: the next one of the key is ready, behind those of other keys.
    pub(super) fn finish(&mut self, slot: Slot) {
        let Some(key) = slot else { return };
        let next = self.busy.get_mut(&key).and_then(VecDeque::pop_front);
        match next {
            Some(item) => {
                self.waiting -= 1;
                self.ready.push_back((Some(key), item));
            }
            None => {
                self.busy.remove(&key);
            }
        }
    }

    /// Whether a delivery could be started.
    pub(super) fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Deliveries held and not yet started.
    pub(super) fn len(&self) -> usize {
        self.ready.len() + self.waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(name: &str) -> Option<Bytes> {
        Some(Bytes::copy_from_slice(name.as_bytes()))
    }

    #[test]
    fn one_key_runs_one_at_a_time_and_others_pass() {
        let mut schedule = Schedule::new();
        schedule.push(key("k"), 1);
        schedule.push(key("k"), 2);
        schedule.push(key("j"), 3);
        schedule.push(None, 4);
        let (slot, first) = schedule.next().unwrap_or((None, 0));
        assert_eq!(first, 1);
        assert_eq!(schedule.next().map(|(_, n)| n), Some(3));
        assert_eq!(schedule.next().map(|(_, n)| n), Some(4));
        assert!(schedule.next().is_none());
        assert_eq!(schedule.len(), 1);
        schedule.finish(slot);
        assert_eq!(schedule.next().map(|(_, n)| n), Some(2));
    }

    #[test]
    fn a_busy_key_takes_turns_with_the_others() {
        let mut schedule = Schedule::new();
        for n in 0..3 {
            schedule.push(key("hot"), n);
        }
        schedule.push(key("cold"), 10);
        let mut order = Vec::new();
        while let Some((slot, n)) = schedule.next() {
            order.push(n);
            schedule.finish(slot);
        }
        assert_eq!(order, [0, 10, 1, 2]);
    }

    proptest! {
        #[test]
        fn every_key_keeps_its_order_and_nothing_is_left(
            keys in proptest::collection::vec(0u8..4, 0..60),
            workers in 1usize..5, seed in any::<u64>(),
        ) {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut schedule = Schedule::new();
            for (n, k) in keys.iter().enumerate() {
                let key = (*k > 0).then(|| Bytes::copy_from_slice(&[*k]));
                schedule.push(key, (*k, n));
            }
            let mut running: Vec<(Slot, (u8, usize))> = Vec::new();
            let mut started: Vec<(u8, usize)> = Vec::new();
            loop {
                while running.len() < workers {
                    let Some((slot, item)) = schedule.next() else { break };
                    prop_assert!(slot.is_none() || running.iter().all(|(other, _)| *other != slot));
                    started.push(item);
                    running.push((slot, item));
                }
                if running.is_empty() { break }
                let (slot, _) = running.swap_remove(random.usize(..running.len()));
                schedule.finish(slot);
            }
            prop_assert_eq!(started.len(), keys.len());
            prop_assert_eq!(schedule.len(), 0);
            prop_assert!(schedule.busy.is_empty());
            for k in 1..4 {
                let order: Vec<usize> = started.iter().filter(|(key, _)| *key == k).map(|(_, n)| *n).collect();
                prop_assert!(order.is_sorted());
            }
        }
    }
}
