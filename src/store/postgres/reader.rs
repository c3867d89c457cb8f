//! Reading and settling for one worker of a relay.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::time::Instant;

use futures_util::TryStreamExt;
use futures_util::future::{BoxFuture, FutureExt};
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{Postgres, SqlStr};
use time::OffsetDateTime;
use tracing::error as alarm;

use super::PostgresStore;
use super::answer::{Answer, Ask, Read};
use super::floor::{Ended, Floor, LanePage, Scan};
use super::lines::Lines;
use super::outbox::columns_of;
use super::shares::Shares;
use crate::clock::at_most_a_day;
use crate::error::Result;
use crate::lane::Lane;
use crate::store::{
    FetchRequest, Lease, OutboxReader, Page, PendingMessage, Place, Settled, SettlementBatch,
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
    lines: Lines,
    /// The server that the floor is about: running since then. `None`: not known, or a standby.
    server: Option<OffsetDateTime>,
    /// The count of connections when it was.
    connections: u64,
    sweep_due: Instant,
    /// So many pages more are read by the sum of their bytes.
    pages_by_sum: u32,
}

impl Reader {
    pub(super) fn new(store: PostgresStore) -> Self {
        Self {
            sweep_due: Instant::now() + at_most_a_day(store.sweep_pause),
            store,
            turn: 0,
            shares: Shares::default(),
            floor: Floor::default(),
            lines: Lines::default(),
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
            aside: leases
                .iter()
                .map(|lease| self.lines.may_be_in(*lease))
                .collect(),
            leases,
            rows_max,
            closed: &request.closed,
        }
    }

    /// Reads the page. Where nothing is set aside it does so without a sum over its bytes, which costs a quarter of the
    /// fetch, unless a row is larger than its part of them: then that is where the page may have to end.
    async fn scan_page(&mut self, ask: &Ask<'_>) -> Result<Answer> {
        if self.pages_by_sum == 0 && !ask.aside.contains(&true) {
            let query = asked(&self.store.sql.fetch_plain, ask);
            let answer = self.scan(query, ask).await?;
            if !answer.marked {
                return Ok(answer);
            }
            self.pages_by_sum = PAGES_BY_SUM;
        }
        self.pages_by_sum = self.pages_by_sum.saturating_sub(1);
        let query = asked(&self.store.sql.fetch, ask)
            .bind(ask.aside.clone())
            .bind(ask.closed.to_vec());
        self.scan(query, ask).await
    }

    /// Reads what ended transactions left below the floors.
    async fn rescan(&self, ask: &Ask<'_>, ended: &Ended) -> Result<Answer> {
        let xids = ended.xids.iter().map(u64::to_string);
        let query = asked(&self.store.sql.refetch, ask)
            .bind(ask.aside.clone())
            .bind(xids.collect::<Vec<_>>());
        self.scan(query, ask).await
    }

    async fn scan(
        &self,
        query: Query<'static, Postgres, PgArguments>,
        ask: &Ask<'_>,
    ) -> Result<Answer> {
        // A row is decoded while the next ones are on their way.
        let answer = self.store.relayed("fetch", |connection| {
            async move {
                let mut answer = Answer::default();
                let mut rows = query.fetch(connection);
                while let Some(row) = rows.try_next().await? {
                    answer.add(&row)?;
                }
                Ok(answer)
            }
            .boxed()
        });
        answer.await?.complete(ask)
    }

    /// Reads the page, from the floors where they are certain to be about this server.
    async fn read(&mut self, request: &FetchRequest) -> Result<Page> {
        // Counted before the statement: a connection made while it runs is noticed after it, or by the next one.
        let connections = self.connections();
        if self.connections != connections || self.store.floor_alarms() > 0 {
            self.floor.forget();
            self.connections = connections;
        }
        self.lines.begin(&request.leases);
        if let Some(blocked) = self.lines.due() {
            let started = Instant::now();
            let freed = self.store.free(&blocked).await?;
            self.lines.freed(freed, started.elapsed());
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
        let by_sum = self.pages_by_sum;
        let mut answer = self.scan_page(&ask).await?;
        let read_twice = self.pages_by_sum > by_sum;
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
            self.sweep_due = Instant::now() + at_most_a_day(pause.max(self.store.sweep_pause));
        }
        self.raise_alarm(&answer.below);
        let (aside, blocked) = &answer.aside;
        self.lines.found(&ask.leases, aside, blocked);
        let ended = self.floor.ended(&answer.snapshot);
        let mut older = BTreeMap::new();
        if let Some(ended) = &ended {
            let ask = ask.of_ended(ended);
            if !ask.leases.is_empty() && read_twice {
                // With the settlement it would be a fourth statement. The next page is read by the sum at once.
                return Ok(Page {
                    full: true,
                    ..Page::default()
                });
            }
            if !ask.leases.is_empty() {
                older = self.rescan(&ask, ended).await?.scans;
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
        mut older: BTreeMap<Lane, Scan<Read>>,
        ended: Option<&Ended>,
    ) -> Page {
        let mut page = Page::default();
        let mut lanes = BTreeMap::new();
        let scanned = answer.scans.values().map(|scan| scan.rows.len());
        page.rows.reserve(scanned.sum());
        // In order of lanes, so that the page is sorted as it is put together.
        let mut asked: Vec<_> = ask.leases.iter().map(|l| l.lane).enumerate().collect();
        asked.sort_unstable_by_key(|(_, lane)| *lane);
        for (at, lane) in &asked {
            let at = *at;
            let scan = answer.scans.remove(lane).unwrap_or_default();
            let older = older.remove(lane).unwrap_or_default();
            let drained = answer.drained.remove(lane).unwrap_or_default();
            // What goes first takes its part of the limits.
            let rows_max = ask.rows_max[at].saturating_sub(drained.len()).max(1);
            let bytes: i64 = drained.iter().map(|row| row.1).sum();
            let scan = scan.after(older, rows_max, ask.bytes_max[at].saturating_sub(bytes));
            let count = drained.len() + scan.rows.len();
            self.shares.note(*lane, count, scan.cut.is_some());
            page.full |= scan.cut.is_some();
            let part = LanePage {
                positions: scan.rows.iter().map(|row| row.0).collect(),
                cut: scan.cut,
            };
            lanes.insert(*lane, part);
            let drained = drained.into_iter().map(|(position, _, message)| {
                (Place::aside(*lane, position), (message, Vec::new()))
            });
            let pending = scan
                .rows
                .into_iter()
                .map(|(position, _, read)| (Place::pending(*lane, position), read));
            for (place, (message, ahead)) in drained.chain(pending) {
                match message {
                    Ok(message) => page.rows.push(PendingMessage {
                        place,
                        message,
                        ahead,
                    }),
                    Err(error) => page.unreadable.push((place, error)),
                }
            }
        }
        page.full |= page.rows.len() + page.unreadable.len() >= request.rows_max;
        // A lane that was not asked stays where it is, or below what ended transactions may have left in it.
        for Lease { lane, .. } in &request.leases {
            let floor = self.floor.of(*lane);
            lanes.entry(*lane).or_insert_with(|| LanePage {
                positions: Vec::new(),
                cut: Some(ended.map_or(floor, |ended| floor.min(ended.above))),
            });
        }
        if answer.server.is_some() && self.store.floor_alarms() == 0 {
            self.floor.read(&answer.snapshot, lanes);
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

/// Binds what every fetch asks of each lane: `$1` to `$6`.
fn asked(sql: &SqlStr, ask: &Ask<'_>) -> Query<'static, Postgres, PgArguments> {
    let (lanes, tokens) = columns_of(&ask.leases);
    let rows_max = ask.rows_max.iter();
    let rows_max = rows_max.map(|rows| i64::try_from(*rows).unwrap_or(i64::MAX));
    sqlx::query(sql.clone())
        .bind(lanes)
        .bind(tokens)
        .bind(ask.floors.clone())
        .bind(ask.known.clone())
        .bind(rows_max.collect::<Vec<_>>())
        .bind(ask.bytes_max.clone())
}

impl OutboxReader for Reader {
    fn fetch<'a>(&'a mut self, request: &'a FetchRequest) -> BoxFuture<'a, Result<Page>> {
        async move {
            if request.leases.is_empty() || request.rows_max == 0 {
                self.floor.forget();
                self.lines.forget();
                return Ok(Page::default());
            }
            let page = self.read(request).await;
            if page.is_err() {
                self.floor.forget();
                self.lines.forget();
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
            self.lines.settling(batch);
            let settled = self.store.settle(batch).await;
            match &settled {
                Ok(Settled { fenced: 0, .. }) => {
                    let places = batch.verdicts.iter().map(|(place, _)| place);
                    let pending = places.filter(|place| !place.is_aside());
                    self.floor
                        .settled(pending.map(|place| (place.lane, place.position)));
                }
                // Nothing changed, or it is not known what.
                _ => self.floor.forget(),
            }
            settled
        }
        .boxed()
    }
}
