//! PostgreSQL as far as a floor can tell: transaction ids, positions, snapshots, row visibility and row locks.

use std::collections::{BTreeMap, BTreeSet};

use super::Snapshot;
use crate::lane::Lane;

pub(super) const KEYS: usize = 4;
pub(super) const LANES: usize = 2;

pub(super) fn lane(key: usize) -> Lane {
    Lane::try_from(key % LANES).unwrap_or(0)
}

#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) lane: Lane,
    pub(super) key: usize,
    pub(super) xid: u64,
    /// Of a savepoint that was rolled back.
    pub(super) undone: bool,
}

/// A session's transaction, or a prepared one.
#[derive(Debug, Clone, Default)]
pub(super) struct Transaction {
    pub(super) xid: Option<u64>,
    pub(super) lock: Option<usize>,
    pub(super) prepared: bool,
    positions: Vec<i64>,
}

#[derive(Debug, Default)]
pub(super) struct Server {
    xid: u64,
    completed: u64,
    position: i64,
    running: BTreeSet<u64>,
    aborted: BTreeSet<u64>,
    locked: BTreeSet<usize>,
    pub(super) rows: BTreeMap<i64, Row>,
    pub(super) transactions: Vec<Transaction>,
}

impl Server {
    pub(super) fn snapshot(&self) -> Snapshot {
        let xmax = self.completed + 1;
        // As PostgreSQL builds it: what runs at or beyond `xmax` is not in the list.
        let running = self.running.range(..xmax).copied().collect();
        Snapshot { xmax, running }
    }

    pub(super) fn sees(&self, snapshot: &Snapshot, row: &Row) -> bool {
        !row.undone && snapshot.ended(row.xid) && !self.aborted.contains(&row.xid)
    }

    fn assign(&mut self) -> u64 {
        self.xid += 1;
        self.running.insert(self.xid);
        self.xid
    }

    fn complete(&mut self, xid: u64) {
        self.running.remove(&xid);
        self.completed = self.completed.max(xid);
    }

    /// A transaction on a key, waiting for nobody.
    pub(super) fn begin(&mut self, key: usize, early_xid: bool) {
        let xid = early_xid.then(|| self.assign());
        let lock = self.locked.insert(key).then_some(key);
        if lock.is_some() || early_xid {
            self.transactions.push(Transaction {
                xid,
                lock,
                ..Transaction::default()
            });
        }
    }

    /// Draws a position: the transaction's id first, as the columns stand.
    pub(super) fn insert(&mut self, at: usize) {
        let Some(key) = self.transactions[at].lock else {
            return self.relock(at);
        };
        if self.transactions[at].prepared {
            return;
        }
        let Some(xid) = self.transactions[at].xid else {
            // Between the two, others may act.
            self.transactions[at].xid = Some(self.assign());
            return;
        };
        self.position += 1;
        let row = Row {
            lane: lane(key),
            key,
            xid,
            undone: false,
        };
        self.rows.insert(self.position, row);
        self.transactions[at].positions.push(self.position);
    }

    /// The lock that a transaction with an id of its own waits for.
    fn relock(&mut self, at: usize) {
        let key = at % KEYS;
        if !self.transactions[at].prepared && self.locked.insert(key) {
            self.transactions[at].lock = Some(key);
        }
    }

    pub(super) fn undo_to_savepoint(&mut self, at: usize) {
        let transaction = &self.transactions[at];
        let last = transaction
            .positions
            .last()
            .filter(|_| !transaction.prepared);
        if let Some(row) = last.and_then(|position| self.rows.get_mut(position)) {
            row.undone = true;
        }
    }

    /// Ends a transaction: it leaves the running ones before its lock is free.
    pub(super) fn end(&mut self, at: usize, commit: bool, unlock: bool) {
        let transaction = self.transactions[at].clone();
        if let Some(xid) = transaction.xid.filter(|xid| self.running.contains(xid)) {
            if !commit {
                self.aborted.insert(xid);
            }
            self.complete(xid);
        }
        if unlock {
            self.transactions.swap_remove(at);
            if let Some(key) = transaction.lock {
                self.locked.remove(&key);
            }
        } else {
            // Ended, but its lock is still there: it can do no more than let it go.
            self.transactions[at].prepared = true;
        }
    }

    pub(super) fn prepare(&mut self, at: usize) {
        if self.transactions[at].xid.is_some() {
            self.transactions[at].prepared = true;
        }
    }

    /// The settlement of these rows: an id of its own, ended when it returns.
    pub(super) fn settle(&mut self, positions: &[i64]) {
        let xid = self.assign();
        for position in positions {
            self.rows.remove(position);
        }
        self.complete(xid);
    }

    /// Some other transaction comes and goes.
    pub(super) fn unrelated(&mut self) {
        let xid = self.assign();
        self.complete(xid);
    }

    /// All that was not prepared is gone.
    pub(super) fn restart(&mut self) {
        for at in (0..self.transactions.len()).rev() {
            if !self.transactions[at].prepared {
                self.end(at, false, true);
            }
        }
    }
}
