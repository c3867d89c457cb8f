//! Reading and settling for one worker of a relay.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::time::Instant;

use futures_util::TryStreamExt;
use futures_util::future::{BoxFuture, FutureExt};
use sqlx::postgres::PgRow;
use sqlx::{Row, SqlStr};
use time::OffsetDateTime;
use tracing::error as alarm;

use super::floor::{Ended, Floor, LanePage, Scan, Snapshot};
use super::outbox::columns_of;
use super::shares::Shares;
use super::{PostgresStore, read_message};
use crate::error::{Error, ErrorKind, Result};
use crate::lane::Lane;
use crate::message::Message;
use crate::store::header_codec::without_nul;
use crate::store::{
    FetchRequest, Lease, OutboxReader, Page, PendingMessage, Settled, SettlementBatch, Verdict,
};

/// The pause between two sweeps is at least so many times as long as the last one took: they walk through everything
/// that vacuum has not removed yet.
const SWEEP_PAUSE_FACTOR: u32 = 50;

/// A row larger than its part of a page costs one more statement, once in so many pages.
const PAGES_BY_SUM: u32 = 100;

/// Reads each lane from its floor, and shares the page out among the lanes.
pub(super) struct Reader {
    store: PostgresStore,
    /// Which lane goes first when there are more lanes than rows allowed.
    turn: usize,
    shares: Shares,
    floor: Floor,
    /// The server that the floor is about: running since then. `None`: not known, or a standby.
    server: Option<OffsetDateTime>,
    /// The count of connections when it was.
    connections: u64,
    sweep_due: Instant,
    /// So many pages more are read by the sum of their bytes.
    pages_by_sum: u32,
}

/// What one statement asks of each lane.
struct Ask<'a> {
    leases: Vec<Lease>,
    floors: Vec<i64>,
    known: Vec<i64>,
    rows_max: Vec<usize>,
    bytes_max: Vec<i64>,
    closed: &'a [String],
}

/// What it returned, as it comes in.
#[derive(Default)]
struct Lines {
    /// The row without a lane: the snapshot, and since when the server runs.
    view: Option<(String, Option<OffsetDateTime>)>,
    scans: BTreeMap<Lane, Scan<Result<Message>>>,
    /// Rows up to the known position, with their transaction.
    below: Vec<(Lane, i64, String)>,
    /// The statement marked a row: its lane is cut there, or bytes of it stayed behind.
    marked: bool,
}

impl Lines {
    fn add(&mut self, row: &PgRow) -> Result<(), sqlx::Error> {
        let Some(lane) = row.try_get(0)? else {
            self.view = Some((row.try_get(14)?, row.try_get(15)?));
            return Ok(());
        };
        let position = row.try_get(1)?;
        let size: i32 = row.try_get(11)?;
        let scan = self.scans.entry(lane).or_default();
        scan.rows
            .push((position, size.into(), read_message(row, 2)));
        if row.try_get(12)? {
            scan.cut = Some(position);
            self.marked = true;
        }
        if let Some(xid) = row.try_get(13)? {
            self.below.push((lane, position, xid));
        }
        Ok(())
    }
}

/// What it returned.
struct Answer {
    snapshot: Snapshot,
    server: Option<OffsetDateTime>,
    scans: BTreeMap<Lane, Scan<Result<Message>>>,
    /// Rows up to the known position, with their transaction.
    below: Vec<(Lane, i64, u64)>,
}

impl Ask<'_> {
    /// The same lanes from the first row on.
    fn begin_at_zero(&mut self) {
        self.floors.fill(0);
    }

    /// Only the lanes whose floor may hide rows of these transactions, from their bound on.
    fn of_ended(&self, ended: &Ended) -> Self {
        let mut ask = Self {
            leases: Vec::new(),
            floors: Vec::new(),
            known: Vec::new(),
            rows_max: Vec::new(),
            bytes_max: Vec::new(),
            closed: self.closed,
        };
        for (at, floor) in self.floors.iter().enumerate() {
            if *floor > ended.above {
                ask.leases.push(self.leases[at]);
                ask.floors.push(ended.above);
                ask.known.push(*floor);
                ask.rows_max.push(self.rows_max[at]);
                ask.bytes_max.push(self.bytes_max[at]);
            }
        }
        ask
    }
}

impl Reader {
    pub(super) fn new(store: PostgresStore) -> Self {
        Self {
            sweep_due: Instant::now() + store.sweep_pause,
            store,
            turn: 0,
            shares: Shares::default(),
            floor: Floor::default(),
            server: None,
            connections: 0,
            pages_by_sum: 0,
        }
    }

    fn connections(&self) -> u64 {
        self.store.relay.connections.load(Ordering::SeqCst)
    }

    /// The lanes of the request with their limits; those that get no row this time are left out.
    fn ask<'a>(&mut self, request: &'a FetchRequest) -> Ask<'a> {
        let mut leases = request.leases.clone();
        let count = leases.len().max(1);
        leases.rotate_left(self.turn % count);
        self.turn = (self.turn + 1) % count;
        let lanes: Vec<Lane> = leases.iter().map(|lease| lease.lane).collect();
        let mut rows_max = self.shares.of(&lanes, request.rows_max);
        let asked = rows_max.iter().filter(|rows| **rows > 0).count();
        rows_max.truncate(asked);
        leases.truncate(asked);
        let bytes = |rows: &usize| {
            let part = request.bytes_max as u128 * *rows as u128 / request.rows_max.max(1) as u128;
            i64::try_from(part).unwrap_or(i64::MAX)
        };
        Ask {
            floors: vec![0; asked],
            known: vec![0; asked],
            bytes_max: rows_max.iter().map(bytes).collect(),
            leases,
            rows_max,
            closed: &request.closed,
        }
    }

    /// Reads the page without a sum over its bytes, which costs a quarter of the fetch, unless a row is larger
    /// than its part of them: then that is where the page may have to end.
    async fn scan_page(&mut self, ask: &Ask<'_>) -> Result<Answer> {
        if self.pages_by_sum == 0 {
            let lines = self.scan(&self.store.sql.fetch, ask, None).await?;
            if !lines.marked {
                return Answer::of(lines, ask);
            }
            self.pages_by_sum = PAGES_BY_SUM;
        }
        self.pages_by_sum -= 1;
        let lines = self.scan(&self.store.sql.fetch_by_sum, ask, None).await?;
        Answer::of(lines, ask)
    }

    async fn scan(&self, sql: &SqlStr, ask: &Ask<'_>, ended: Option<&Ended>) -> Result<Lines> {
        let (lanes, tokens) = columns_of(&ask.leases);
        let rows_max = ask.rows_max.iter();
        let rows_max = rows_max.map(|rows| i64::try_from(*rows).unwrap_or(i64::MAX));
        let mut query = sqlx::query(sql.clone())
            .bind(lanes)
            .bind(tokens)
            .bind(ask.floors.clone())
            .bind(ask.known.clone())
            .bind(rows_max.collect::<Vec<_>>())
            .bind(ask.bytes_max.clone())
            .bind(ask.closed.to_vec());
        if let Some(ended) = ended {
            let xids = ended.xids.iter().map(u64::to_string);
            query = query.bind(xids.collect::<Vec<_>>());
        }
        // A row is decoded while the next ones are on their way.
        self.store
            .relayed("fetch", |connection| {
                async move {
                    let mut lines = Lines::default();
                    let mut rows = query.fetch(connection);
                    while let Some(row) = rows.try_next().await? {
                        lines.add(&row)?;
                    }
                    Ok(lines)
                }
                .boxed()
            })
            .await
    }

    /// Reads the page, from the floors where they are certain to be about this server.
    async fn read(&mut self, request: &FetchRequest) -> Result<Page> {
        // Counted before the statement: a connection made while it runs is noticed after it, or by the next one.
        let connections = self.connections();
        if self.connections != connections || self.store.floor_alarms() > 0 {
            self.floor.forget();
            self.connections = connections;
        }
        let mut ask = self.ask(request);
        // Also for lanes that are not asked this time.
        let known = self.floor.begin(&request.leases);
        let known: HashMap<Lane, i64> = request.leases.iter().map(|l| l.lane).zip(known).collect();
        let of = |lease: &Lease| known.get(&lease.lane).copied().unwrap_or(0);
        ask.known = ask.leases.iter().map(of).collect();
        ask.floors.clone_from(&ask.known);
        let started = Instant::now();
        let sweep = started >= self.sweep_due;
        if sweep {
            ask.begin_at_zero();
        }
        let mut answer = self.scan_page(&ask).await?;
        let same = answer.server.is_some() && answer.server == self.server;
        if !same || self.connections != self.connections() {
            self.floor.forget();
            self.floor.begin(&request.leases);
            if ask.floors.iter().any(|floor| *floor > 0) {
                self.connections = self.connections();
                ask.begin_at_zero();
                answer = self.scan_page(&ask).await?;
            }
            self.server = answer.server;
            answer.below.clear();
        }
        if sweep {
            let pause = started.elapsed().saturating_mul(SWEEP_PAUSE_FACTOR);
            self.sweep_due = Instant::now() + pause.max(self.store.sweep_pause);
        }
        self.raise_alarm(&answer.below);
        let ended = self.floor.ended(&answer.snapshot);
        let mut older = BTreeMap::new();
        if let Some(ended) = &ended {
            let ask = ask.of_ended(ended);
            if !ask.leases.is_empty() {
                let sql = &self.store.sql.refetch;
                let lines = self.scan(sql, &ask, Some(ended)).await?;
                older = Answer::of(lines, &ask)?.scans;
            }
        }
        Ok(self.assemble(request, &ask, answer, older, ended.as_ref()))
    }

    /// Puts the page together within its limits, and tells the floor what it holds.
    fn assemble(
        &mut self,
        request: &FetchRequest,
        ask: &Ask<'_>,
        mut answer: Answer,
        mut older: BTreeMap<Lane, Scan<Result<Message>>>,
        ended: Option<&Ended>,
    ) -> Page {
        let mut page = Page::default();
        page.rows
            .reserve(answer.scans.values().map(|scan| scan.rows.len()).sum());
        let mut lanes = BTreeMap::new();
        // In order of lanes, so that the page is sorted as it is put together.
        let mut asked: Vec<_> = ask
            .leases
            .iter()
            .map(|lease| lease.lane)
            .enumerate()
            .collect();
        asked.sort_unstable_by_key(|(_, lane)| *lane);
        for (at, lane) in &asked {
            let scan = answer.scans.remove(lane).unwrap_or_default();
            let older = older.remove(lane).unwrap_or_default();
            let scan = scan.after(older, ask.rows_max[*at], ask.bytes_max[*at]);
            self.shares.note(*lane, scan.rows.len(), scan.cut.is_some());
            page.full |= scan.cut.is_some();
            let part = LanePage {
                positions: scan.rows.iter().map(|row| row.0).collect(),
                cut: scan.cut,
            };
            lanes.insert(*lane, part);
            for (position, _, message) in scan.rows {
                match message {
                    Ok(message) => page.rows.push(PendingMessage {
                        lane: *lane,
                        position,
                        message,
                    }),
                    Err(error) => page.unreadable.push((*lane, position, error)),
                }
            }
        }
        page.full |= page.rows.len() + page.unreadable.len() >= request.rows_max;
        page.rows.sort_by_key(|row| (row.lane, row.position));
        // A lane that was not asked stays where it is, or below what ended transactions may have left in it.
        for Lease { lane, .. } in &request.leases {
            let floor = self.floor.of(*lane);
            lanes.entry(*lane).or_insert_with(|| LanePage {
                positions: Vec::new(),
                cut: Some(ended.map_or(floor, |ended| floor.min(ended.above))),
            });
        }
        let passed_over = !request.closed.is_empty();
        if answer.server.is_some() && self.store.floor_alarms() == 0 {
            self.floor.read(&answer.snapshot, lanes, passed_over);
        } else {
            self.floor.forget();
        }
        page
    }

    /// Rows at or below the floor must belong to tracked transactions. Others are sent all the same, but where they
    /// can be the floor cannot.
    fn raise_alarm(&self, below: &[(Lane, i64, u64)]) {
        for (lane, position, xid) in below {
            if !self.floor.is_tracked(*xid) {
                self.store.relay.floor_alarms.fetch_add(1, Ordering::SeqCst);
                alarm!(
                    lane,
                    position,
                    xid,
                    "row found below the scan floor and sent late: some writer gives positions or transaction ids \
                     itself; lanes are read from their first row from now on"
                );
            }
        }
    }
}

impl Answer {
    fn of(lines: Lines, ask: &Ask<'_>) -> Result<Self> {
        let foreign = || Error::new(ErrorKind::Corrupt, "fetch", "no snapshot in the answer");
        let (snapshot, server) = lines.view.ok_or_else(foreign)?;
        let mut scans = lines.scans;
        for (at, lease) in ask.leases.iter().enumerate() {
            let Some(scan) = scans.get_mut(&lease.lane) else {
                continue;
            };
            // The statement promises no order; in practice this finds its input sorted.
            scan.rows.sort_by_key(|row| row.0);
            if scan.rows.len() >= ask.rows_max[at] {
                scan.cut = scan.rows.last().map(|row| row.0);
            }
        }
        let below = lines.below.into_iter();
        let below = below
            .map(|(lane, position, xid)| Ok((lane, position, xid.parse().map_err(|_| foreign())?)));
        Ok(Self {
            snapshot: Snapshot::parse(&snapshot).ok_or_else(foreign)?,
            server,
            scans,
            below: below.collect::<Result<_>>()?,
        })
    }
}

impl OutboxReader for Reader {
    fn fetch<'a>(&'a mut self, request: &'a FetchRequest) -> BoxFuture<'a, Result<Page>> {
        async move {
            if request.leases.is_empty() || request.rows_max == 0 {
                self.floor.forget();
                return Ok(Page::default());
            }
            let page = self.read(request).await;
            if page.is_err() {
                self.floor.forget();
            }
            page
        }
        .boxed()
    }

    fn settle<'a>(&'a mut self, batch: &'a SettlementBatch) -> BoxFuture<'a, Result<Settled>> {
        async move {
            if batch.verdicts.is_empty() {
                return Ok(Settled::default());
            }
            let settled = self.store.settle(batch).await;
            match &settled {
                Ok(Settled { fenced: 0, .. }) => {
                    let verdicts = batch.verdicts.iter();
                    let places = verdicts.map(|(lane, position, _)| (*lane, *position));
                    self.floor.settled(places);
                }
                // Nothing changed, or it is not known what.
                _ => self.floor.forget(),
            }
            settled
        }
        .boxed()
    }
}

impl PostgresStore {
    /// One statement, which has ended for every later snapshot when this returns.
    async fn settle(&self, batch: &SettlementBatch) -> Result<Settled> {
        let mut leases = batch.leases.clone();
        // Only these are locked: the others may change hands meanwhile.
        leases.retain(|lease| batch.verdicts.iter().any(|(lane, ..)| *lane == lease.lane));
        let (lanes, tokens) = columns_of(&leases);
        let (mut confirmed, mut parked) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
        let (mut reasons, mut errors) = (Vec::new(), Vec::new());
        for (lane, position, verdict) in &batch.verdicts {
            match verdict {
                Verdict::Confirmed => {
                    confirmed.0.push(*lane);
                    confirmed.1.push(*position);
                }
                Verdict::Parked { reason, error } => {
                    parked.0.push(*lane);
                    parked.1.push(*position);
                    reasons.push(reason.as_str().to_owned());
                    // Refused here, one NUL would fail the whole batch for ever.
                    errors.push(without_nul(error).into_owned());
                }
            }
        }
        let applied = if parked.0.is_empty() {
            let query = sqlx::query(self.sql.settle_confirmed.clone())
                .bind(lanes)
                .bind(tokens)
                .bind(confirmed.0)
                .bind(confirmed.1);
            let done = self.relayed("settle", |c| query.execute(c).boxed());
            done.await?.rows_affected()
        } else {
            let query = sqlx::query_scalar(self.sql.settle.clone())
                .bind(lanes)
                .bind(tokens)
                .bind(confirmed.0)
                .bind(confirmed.1)
                .bind(parked.0)
                .bind(parked.1)
                .bind(reasons)
                .bind(errors);
            let counted = self.relayed("settle", |c| query.fetch_one(c).boxed());
            let applied: i64 = counted.await?;
            u64::try_from(applied).unwrap_or(0)
        };
        let applied = usize::try_from(applied).unwrap_or(0);
        Ok(Settled {
            applied,
            fenced: batch.verdicts.len().saturating_sub(applied),
        })
    }
}
