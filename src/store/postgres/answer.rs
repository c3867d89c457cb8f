//! What a fetch asks of each lane, and what it returns.

use std::collections::HashMap;

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

/// One row of what it returned.
#[allow(
    clippy::large_enum_variant,
    reason = "nearly all are of the large kind"
)]
pub(super) enum Row {
    /// The row without a lane.
    View {
        snapshot: String,
        server: Option<OffsetDateTime>,
        aside: (Vec<Lane>, Vec<Lane>),
    },
    /// Set aside, and may go.
    Drained {
        lane: Lane,
        position: i64,
        size: i32,
        message: Result<Message>,
    },
    Pending {
        lane: Lane,
        position: i64,
        size: i32,
        /// By the statement: the lane is cut here, or bytes of this row stayed behind.
        mark: bool,
        /// Of rows up to the known position.
        xid: Option<String>,
        read: Read,
    },
}

/// A message, or why it cannot be read, and what is set aside of its key.
pub(super) type Read = (Result<Message>, Vec<Ahead>);

/// All of it.
#[derive(Default)]
pub(super) struct Answer {
    pub(super) snapshot: Snapshot,
    pub(super) server: Option<OffsetDateTime>,
    pub(super) scans: HashMap<Lane, Scan<Read>>,
    /// Rows set aside that may go.
    pub(super) drained: HashMap<Lane, Vec<(i64, i64, Result<Message>)>>,
    /// Lanes where something is set aside and will go by itself, or blocks; and those where something blocks.
    pub(super) aside: (Vec<Lane>, Vec<Lane>),
    /// Rows up to the known position, with their transaction.
    pub(super) below: Vec<(Lane, i64, u64)>,
}

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

impl Row {
    pub(super) fn read(row: &PgRow) -> Result<Self, SqlxError> {
        let Some(lane) = row.try_get(0)? else {
            return Ok(Self::View {
                snapshot: row.try_get(14)?,
                server: row.try_get(15)?,
                aside: (row.try_get(17)?, row.try_get(18)?),
            });
        };
        let (position, size) = (row.try_get(1)?, row.try_get(11)?);
        let message = read_message(row, 2);
        let Some(mark) = row.try_get(12)? else {
            return Ok(Self::Drained {
                lane,
                position,
                size,
                message,
            });
        };
        let ahead: Option<Vec<String>> = row.try_get(16)?;
        let ahead = ahead.unwrap_or_default();
        let ahead: Option<_> = ahead.iter().map(|text| ahead_of(text)).collect();
        let ahead = ahead.ok_or_else(|| SqlxError::Decode("what is ahead".into()))?;
        Ok(Self::Pending {
            lane,
            position,
            size,
            mark,
            xid: row.try_get(13)?,
            read: (message, ahead),
        })
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
    pub(super) fn of(rows: Vec<Row>, ask: &Ask<'_>) -> Result<Self> {
        let foreign = || Error::new(ErrorKind::Corrupt, "fetch", "no snapshot in the answer");
        let mut answer = Self::default();
        let mut seen = None;
        for row in rows {
            match row {
                Row::View {
                    snapshot,
                    server,
                    aside,
                } => {
                    seen = Snapshot::parse(&snapshot);
                    answer.server = server;
                    answer.aside = aside;
                }
                Row::Drained {
                    lane,
                    position,
                    size,
                    message,
                } => {
                    let drained = answer.drained.entry(lane).or_default();
                    drained.push((position, i64::from(size), message));
                }
                Row::Pending {
                    lane,
                    position,
                    size,
                    mark: cut,
                    xid,
                    read,
                } => {
                    if let Some(xid) = xid {
                        let xid = xid.parse().map_err(|_| foreign())?;
                        answer.below.push((lane, position, xid));
                    }
                    let scan = answer.scans.entry(lane).or_default();
                    scan.rows.push((position, i64::from(size), read));
                    if cut {
                        scan.cut = Some(position);
                    }
                }
            }
        }
        answer.snapshot = seen.ok_or_else(foreign)?;
        for (at, lease) in ask.leases.iter().enumerate() {
            let Some(scan) = answer.scans.get_mut(&lease.lane) else {
                continue;
            };
            // The statement promises no order; in practice this finds its input sorted.
            scan.rows.sort_by_key(|row| row.0);
            if scan.rows.len() >= ask.rows_max[at] {
                scan.cut = scan.rows.last().map(|row| row.0);
            }
        }
        for drained in answer.drained.values_mut() {
            drained.sort_by_key(|row| row.0);
        }
        Ok(answer)
    }
}
