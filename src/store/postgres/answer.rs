//! What a fetch asks of each lane, and what it returns.

use std::collections::BTreeMap;

use sqlx::postgres::PgRow;
use sqlx::{Error as SqlxError, Row as _};
use time::OffsetDateTime;

use super::floor::{Ended, Scan, Snapshot};
use super::read_message;
use crate::error::{Error, ErrorKind, Result};
use crate::lane::Lane;
use crate::message::Message;
use crate::store::{Ahead, Lease};

/// What one statement asks of each lane.
pub(super) struct Ask<'a> {
    pub(super) leases: Vec<Lease>,
    pub(super) floors: Vec<i64>,
    pub(super) known: Vec<i64>,
    pub(super) rows_max: Vec<usize>,
    pub(super) bytes_max: Vec<i64>,
    /// Whether something may be set aside in the lane.
    pub(super) aside: Vec<bool>,
    pub(super) closed: &'a [String],
}

/// What it returned, as it comes in.
#[derive(Default)]
pub(super) struct Answer {
    pub(super) snapshot: Snapshot,
    pub(super) server: Option<OffsetDateTime>,
    pub(super) scans: BTreeMap<Lane, Scan<Read>>,
    /// Rows set aside that may go.
    pub(super) drained: BTreeMap<Lane, Vec<(i64, i64, Result<Message>)>>,
    /// Lanes where something is set aside and will go by itself, or blocks; and those where something blocks.
    pub(super) aside: (Vec<Lane>, Vec<Lane>),
    /// Rows up to the known position, with their transaction.
    pub(super) below: Vec<(Lane, i64, u64)>,
    /// The statement marked a row: its lane is cut there, or bytes of it stayed behind.
    pub(super) marked: bool,
    seen: bool,
}

/// A message, or why it cannot be read, and what is set aside of its key.
pub(super) type Read = (Result<Message>, Vec<Ahead>);

impl Ask<'_> {
    /// The same lanes from the first row on.
    pub(super) fn begin_at_zero(&mut self) {
        self.floors.fill(0);
    }

    /// Only the lanes whose floor may hide rows of these transactions, from their bound on.
    pub(super) fn of_ended(&self, ended: &Ended) -> Self {
        let mut ask = Self {
            leases: Vec::new(),
            floors: Vec::new(),
            known: Vec::new(),
            rows_max: Vec::new(),
            bytes_max: Vec::new(),
            aside: Vec::new(),
            closed: self.closed,
        };
        for (at, floor) in self.floors.iter().enumerate() {
            if *floor > ended.above {
                ask.leases.push(self.leases[at]);
                ask.floors.push(ended.above);
                ask.known.push(*floor);
                ask.rows_max.push(self.rows_max[at]);
                ask.bytes_max.push(self.bytes_max[at]);
                ask.aside.push(self.aside[at]);
            }
        }
        ask
    }
}

/// Reads `1 17 orders`: blocked, last position, scope.
fn ahead_of(text: &str) -> Option<Ahead> {
    let (blocked, rest) = text.split_once(' ')?;
    let (last, scope) = rest.split_once(' ')?;
    Some(Ahead {
        scope: scope.to_owned(),
        last: last.parse().ok()?,
        blocked: blocked == "1",
    })
}

impl Answer {
    /// Takes one row in.
    pub(super) fn add(&mut self, row: &PgRow) -> Result<(), SqlxError> {
        let foreign = |what: &str| SqlxError::Decode(what.into());
        let Some(lane) = row.try_get(0)? else {
            let snapshot = Snapshot::parse(row.try_get(14)?);
            self.snapshot = snapshot.ok_or_else(|| foreign("the snapshot"))?;
            self.server = row.try_get(15)?;
            self.aside = (row.try_get(17)?, row.try_get(18)?);
            self.seen = true;
            return Ok(());
        };
        let (position, size) = (row.try_get(1)?, row.try_get::<i32, _>(11)?);
        let message = read_message(row, 2);
        let Some(marked) = row.try_get(12)? else {
            let drained = self.drained.entry(lane).or_default();
            drained.push((position, size.into(), message));
            return Ok(());
        };
        let ahead: Option<Vec<String>> = row.try_get(16)?;
        let ahead = ahead.iter().flatten().map(|text| ahead_of(text));
        let ahead: Option<_> = ahead.collect();
        let ahead = ahead.ok_or_else(|| foreign("what is ahead"))?;
        let scan = self.scans.entry(lane).or_default();
        scan.rows.push((position, size.into(), (message, ahead)));
        if marked {
            scan.cut = Some(position);
            self.marked = true;
        }
        if let Some(xid) = row.try_get::<Option<&str>, _>(13)? {
            let xid = xid.parse().map_err(|_| foreign("the transaction"))?;
            self.below.push((lane, position, xid));
        }
        Ok(())
    }

    /// All rows are in. The statement promises no order; in practice this finds them sorted.
    pub(super) fn complete(mut self, ask: &Ask<'_>) -> Result<Self> {
        if !self.seen {
            let detail = "no snapshot in the answer";
            return Err(Error::new(ErrorKind::Corrupt, "fetch", detail));
        }
        for (at, lease) in ask.leases.iter().enumerate() {
            let Some(scan) = self.scans.get_mut(&lease.lane) else {
                continue;
            };
            scan.rows.sort_by_key(|row| row.0);
            if scan.rows.len() >= ask.rows_max[at] {
                scan.cut = scan.rows.last().map(|row| row.0);
            }
        }
        for drained in self.drained.values_mut() {
            drained.sort_by_key(|row| row.0);
        }
        Ok(self)
    }
}
