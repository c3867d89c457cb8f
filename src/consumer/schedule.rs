//! The schedule: which deliveries may run now, so that one key is handled in order and no key waits for another.

use std::collections::{HashMap, VecDeque};

use bytes::Bytes;

/// What a delivery may share while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Company {
    /// A transaction, with others.
    Batch,
    /// The process, not its transaction.
    Alone,
    /// Nothing: no other handler runs meanwhile.
    Isolated,
}

/// A key in work; given back with [`Schedule::finish`]. `None` for a delivery without a key.
pub(super) type Slot = Option<Bytes>;

/// Deliveries that run together.
#[derive(Debug)]
pub(super) struct Picked<T> {
    /// Keys in work until they are finished, each once.
    pub slots: Vec<Slot>,
    /// In order for each key.
    pub items: Vec<T>,
}

/// Deliveries waiting and running, by key. Pure: it starts nothing itself.
#[derive(Debug)]
pub(super) struct Schedule<T> {
    ready: VecDeque<(Slot, Company, T)>,
    /// Keys with something ready or running, and what waits behind it.
    busy: HashMap<Bytes, VecDeque<(Company, T)>>,
    waiting: usize,
}

impl<T> Schedule<T> {
    pub(super) fn new() -> Self {
        Self {
            ready: VecDeque::new(),
            busy: HashMap::new(),
            waiting: 0,
        }
    }

    /// Adds a delivery behind all earlier ones of its key.
    pub(super) fn push(&mut self, key: Slot, company: Company, item: T) {
        match key {
            None => self.ready.push_back((None, company, item)),
            Some(key) => match self.busy.get_mut(&key) {
                Some(behind) => {
                    behind.push_back((company, item));
                    self.waiting += 1;
                }
                None => {
                    self.busy.insert(key.clone(), VecDeque::new());
                    self.ready.push_back((Some(key), company, item));
                }
            },
        }
    }

    /// What the delivery that has been ready longest may share.
    pub(super) fn next_company(&self) -> Option<Company> {
        self.ready.front().map(|(_, company, _)| *company)
    }

    /// The delivery that has been ready longest, and others that may share its transaction: those that are ready, and then
    /// those behind them. Their keys are in work until [`finish`](Self::finish).
    pub(super) fn next(&mut self, count_max: usize) -> Option<Picked<T>> {
        let (slot, company, item) = self.ready.pop_front()?;
        let mut picked = Picked {
            slots: vec![slot],
            items: vec![item],
        };
        if company == Company::Batch {
            self.fill(&mut picked, count_max);
        }
        Some(picked)
    }

    fn fill(&mut self, picked: &mut Picked<T>, count_max: usize) {
        while picked.items.len() < count_max && self.next_company() == Some(Company::Batch) {
            let Some((slot, _, item)) = self.ready.pop_front() else {
                break;
            };
            picked.slots.push(slot);
            picked.items.push(item);
        }
        for key in picked.slots.iter().flatten() {
            let Some(behind) = self.busy.get_mut(key) else {
                continue;
            };
            while picked.items.len() < count_max
                && let Some((Company::Batch, _)) = behind.front()
                && let Some((_, item)) = behind.pop_front()
            {
                self.waiting -= 1;
                picked.items.push(item);
            }
        }
    }

    /// What was picked has ended, but for `returned` ones (in order for each key): they are in front of what waits behind
    /// them. The next one of each key is ready, behind those of other keys.
    pub(super) fn finish(&mut self, slots: Vec<Slot>, returned: Vec<(Slot, Company, T)>) {
        for (slot, company, item) in returned.into_iter().rev() {
            match slot.as_ref().and_then(|key| self.busy.get_mut(key)) {
                Some(behind) => {
                    behind.push_front((company, item));
                    self.waiting += 1;
                }
                None => self.ready.push_front((slot, company, item)),
            }
        }
        for key in slots.into_iter().flatten() {
            match self.busy.get_mut(&key).and_then(VecDeque::pop_front) {
                Some((company, item)) => {
                    self.waiting -= 1;
                    self.ready.push_back((Some(key), company, item));
                }
                None => {
                    self.busy.remove(&key);
                }
            }
        }
    }

    /// Drops what is not to be kept, of all that waits.
    pub(super) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        let mut freed = Vec::new();
        self.ready.retain(|(slot, _, item)| {
            let kept = keep(item);
            if !kept {
                freed.push(slot.clone());
            }
            kept
        });
        for behind in self.busy.values_mut() {
            let before = behind.len();
            behind.retain(|(_, item)| keep(item));
            self.waiting -= before - behind.len();
        }
        self.finish(freed, Vec::new());
    }

    /// Everything that waits.
    pub(super) fn items(&self) -> impl Iterator<Item = &T> {
        let ready = self.ready.iter().map(|(_, _, item)| item);
        let behind = self.busy.values().flatten().map(|(_, item)| item);
        ready.chain(behind)
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
    use super::Company::{Alone, Batch, Isolated};
    use super::*;
    use proptest::prelude::*;

    fn key(name: &str) -> Slot {
        Some(Bytes::copy_from_slice(name.as_bytes()))
    }

    fn pick<T>(schedule: &mut Schedule<T>, count_max: usize) -> (Vec<Slot>, Vec<T>) {
        let picked = schedule.next(count_max);
        picked.map_or((vec![], vec![]), |picked| (picked.slots, picked.items))
    }

    #[test]
    fn one_key_runs_one_at_a_time_and_others_pass() {
        let mut schedule = Schedule::new();
        for (key, n) in [(key("k"), 1), (key("k"), 2), (key("j"), 3), (None, 4)] {
            schedule.push(key, Batch, n);
        }
        let (slots, first) = pick(&mut schedule, 1);
        assert_eq!(first, [1]);
        assert_eq!(pick(&mut schedule, 1).1, [3]);
        assert_eq!(pick(&mut schedule, 1).1, [4]);
        assert!(schedule.next(1).is_none());
        assert_eq!(schedule.len(), 1);
        schedule.finish(slots, vec![]);
        assert_eq!(pick(&mut schedule, 1).1, [2]);
    }

    #[test]
    fn a_busy_key_takes_turns_with_the_others() {
        let mut schedule = Schedule::new();
        for n in 0..3 {
            schedule.push(key("hot"), Batch, n);
        }
        schedule.push(key("cold"), Batch, 10);
        let mut order = Vec::new();
        while let Some(picked) = schedule.next(1) {
            order.extend(picked.items);
            schedule.finish(picked.slots, vec![]);
        }
        assert_eq!(order, [0, 10, 1, 2]);
    }

    #[test]
    fn a_batch_takes_what_is_ready_first_and_then_what_is_behind_it() {
        let mut schedule = Schedule::new();
        for n in 0..3 {
            schedule.push(key("hot"), Batch, n);
        }
        schedule.push(key("cold"), Batch, 10);
        let (slots, items) = pick(&mut schedule, 3);
        assert_eq!(items, [0, 10, 1]);
        assert!(schedule.next(3).is_none(), "the key is in work");
        schedule.finish(slots, vec![]);
        assert_eq!(pick(&mut schedule, 3).1, [2]);
    }

    #[test]
    fn what_must_be_alone_is() {
        let mut schedule = Schedule::new();
        schedule.push(key("a"), Batch, 1);
        schedule.push(key("a"), Alone, 2);
        schedule.push(key("b"), Isolated, 3);
        schedule.push(key("c"), Batch, 4);
        let (slots, items) = pick(&mut schedule, 9);
        assert_eq!(items, [1]);
        assert_eq!(schedule.next_company(), Some(Isolated));
        schedule.finish(slots, vec![]);
        assert_eq!(pick(&mut schedule, 9).1, [3]);
        assert_eq!(pick(&mut schedule, 9).1, [4]);
        assert_eq!(pick(&mut schedule, 9).1, [2]);
    }

    #[test]
    fn what_is_returned_keeps_its_place_in_its_key() {
        let mut schedule = Schedule::new();
        for (name, n) in [("a", 1), ("a", 2), ("b", 3), ("a", 4)] {
            schedule.push(key(name), Batch, n);
        }
        let (slots, items) = pick(&mut schedule, 3);
        assert_eq!(items, [1, 3, 2]);
        let returned = vec![
            (key("a"), Alone, 1),
            (key("b"), Alone, 3),
            (key("a"), Alone, 2),
        ];
        schedule.finish(slots, returned);
        assert_eq!(schedule.len(), 4);
        let mut order = Vec::new();
        while let Some(picked) = schedule.next(9) {
            order.push(picked.items);
            schedule.finish(picked.slots, vec![]);
        }
        assert_eq!(order, [[1], [3], [2], [4]]);
        assert_eq!(schedule.len(), 0);
    }

    #[test]
    fn what_is_dropped_frees_its_key_and_leaves_the_rest_in_order() {
        let mut schedule = Schedule::new();
        for (name, n) in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("a", 5), ("c", 6)] {
            schedule.push(key(name), Batch, n);
        }
        schedule.push(None, Batch, 7);
        let (slots, items) = pick(&mut schedule, 1);
        assert_eq!(items, [1]);
        schedule.retain(|n| ![3, 4, 7].contains(n));
        assert_eq!(schedule.len(), 3);
        assert_eq!(pick(&mut schedule, 1).1, [6]);
        assert!(schedule.next(1).is_none());
        schedule.finish(slots, vec![]);
        schedule.push(key("b"), Batch, 8);
        assert_eq!(pick(&mut schedule, 9).1, [2, 8, 5]);
        let mut schedule = Schedule::new();
        schedule.push(key("a"), Batch, 1);
        schedule.push(key("a"), Batch, 2);
        schedule.retain(|n| *n != 1);
        assert_eq!(pick(&mut schedule, 1).1, [2]);
        assert_eq!(schedule.len(), 0);
    }

    proptest! {
        #[test]
        fn every_key_keeps_its_order_and_nothing_is_left(
            keys in proptest::collection::vec((0u8..4, 0u8..8), 0..60),
            workers in 1usize..5, count_max in 1usize..6, seed in any::<u64>(),
        ) {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut schedule = Schedule::new();
            let slot = |k: u8| (k > 0).then(|| Bytes::copy_from_slice(&[k]));
            for (n, (k, company)) in keys.iter().enumerate() {
                let company = match company { 0 => Isolated, 1 => Alone, _ => Batch };
                schedule.push(slot(*k), company, (*k, n));
            }
            let mut running: Vec<Picked<(u8, usize)>> = Vec::new();
            let mut done: Vec<(u8, usize)> = Vec::new();
            loop {
                while running.len() < workers {
                    let Some(picked) = schedule.next(count_max) else { break };
                    prop_assert!(picked.items.len() <= count_max);
                    for (k, _) in &picked.items {
                        let busy = running.iter().flat_map(|other| &other.slots);
                        prop_assert!(*k == 0 || busy.flatten().all(|key| key[..] != [*k]));
                    }
                    running.push(picked);
                }
                if running.is_empty() { break }
                let Picked { slots, items } = running.swap_remove(random.usize(..running.len()));
                let returned = if items.len() > 1 && random.bool() {
                    items.into_iter().map(|item| (slot(item.0), Alone, item)).collect()
                } else {
                    done.extend(items);
                    vec![]
                };
                schedule.finish(slots, returned);
            }
            prop_assert_eq!(done.len(), keys.len());
            prop_assert_eq!(schedule.len(), 0);
            prop_assert!(schedule.busy.is_empty());
            for k in 1..4 {
                let order: Vec<usize> = done.iter().filter(|(key, _)| *key == k).map(|(_, n)| *n).collect();
                prop_assert!(order.is_sorted());
            }
        }
    }
}
