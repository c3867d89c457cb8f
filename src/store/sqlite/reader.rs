//! Reading and settling for one worker of a relay.

use std::collections::BTreeMap;

use futures_util::future::{BoxFuture, FutureExt};
use serde_json::Value;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::outbox::rows_of;
use super::{SqliteStore, error, json, read_message};
use crate::error::{Error, ErrorKind, Result};
use crate::lane::Lane;
use crate::store::header_codec::without_nul;
use crate::store::{
    Ahead, FetchRequest, Lease, OutboxReader, Page, PendingMessage, Place, Settled,
    SettlementBatch, Table, Verdict,
};

/// Rows freed by one statement at most.
const FREED_MAX: i64 = 1_000;

/// Reads every lane from its first row: with one writer there is no late commit, and no dead row to pass.
pub(super) struct Reader {
    store: SqliteStore,
    /// Which lane goes first when there are more lanes than rows allowed.
    turn: usize,
}

/// What is left of a lane's limits.
struct Room {
    rows: usize,
    bytes: i64,
    /// One comes however large it is.
    first: bool,
    /// The table of which one did not fit: nothing behind it may come in front of it.
    ended: Option<Table>,
}

impl Reader {
    pub(super) const fn new(store: SqliteStore) -> Self {
        Self { store, turn: 0 }
    }

    async fn read(&mut self, request: &FetchRequest) -> Result<Page> {
        let count = request.leases.len();
        let mut leases = request.leases.clone();
        leases.rotate_left(self.turn % count);
        self.turn = (self.turn + 1) % count;
        let lane_rows = (request.rows_max / count).max(1);
        let lane_bytes = i64::try_from(request.bytes_max / count).unwrap_or(i64::MAX);
        let failed = self.store.pool_error("fetch");
        let store = &self.store;
        let any: bool = sqlx::query_scalar(store.sql.any_aside.clone())
            .fetch_one(&store.pool)
            .await
            .map_err(&failed)?;
        let mut found = Vec::new();
        if any {
            self.free(&leases).await?;
            let rows = sqlx::query(store.sql.drain.clone())
                .bind(rows_of(&leases))
                .bind(i64::try_from(lane_rows / 2 + 1).unwrap_or(i64::MAX))
                .bind(json(request.closed.iter().map(|d| Value::from(d.as_str()))))
                .fetch_all(&store.pool)
                .await
                .map_err(&failed)?;
            for row in rows {
                found.push((place(&row, Table::Aside)?, row));
            }
        }
        let rows = sqlx::query(store.sql.fetch.clone())
            .bind(rows_of(&leases))
            .bind(i64::try_from(lane_rows).unwrap_or(i64::MAX))
            .bind(any)
            .bind(lane_bytes)
            .bind(i64::try_from(request.rows_max).unwrap_or(i64::MAX))
            .fetch_all(&store.pool)
            .await
            .map_err(&failed)?;
        let mut page = Page {
            full: rows.len() >= request.rows_max,
            ..Page::default()
        };
        for row in rows {
            found.push((place(&row, Table::Outbox)?, row));
        }
        // The statements promise no order; in practice this finds its input sorted by lane.
        found.sort_by_key(|(place, _)| *place);
        let mut rooms: BTreeMap<Lane, Room> = BTreeMap::new();
        for (place, row) in found {
            let size: i64 = row.try_get(11).map_err(&failed)?;
            let room = rooms.entry(place.lane).or_insert(Room {
                rows: lane_rows,
                bytes: lane_bytes,
                first: true,
                ended: None,
            });
            // Rows set aside get half of it, so that pending ones are never left out altogether.
            let (rows, bytes) = match place.is_aside() {
                true => (
                    room.rows.saturating_sub(lane_rows / 2),
                    room.bytes - lane_bytes / 2,
                ),
                false => (room.rows, room.bytes),
            };
            let fits = rows > 0 && size <= bytes && room.ended != Some(place.table);
            if !fits && !room.first {
                page.full = true;
                room.ended = Some(place.table);
                continue;
            }
            room.first = false;
            room.rows = room.rows.saturating_sub(1);
            room.bytes -= size;
            page.full |= room.rows == 0;
            match read_message(&row, 2) {
                Ok(message) => page.rows.push(PendingMessage {
                    place,
                    message,
                    ahead: if place.is_aside() {
                        Vec::new()
                    } else {
                        ahead(&row)?
                    },
                }),
                Err(error) => page.unreadable.push((place, error)),
            }
        }
        Ok(page)
    }

    /// Lets those go on that nothing blocks any more.
    async fn free(&self, leases: &[Lease]) -> Result<()> {
        let failed = self.store.pool_error("free");
        let freeable: Vec<i64> = sqlx::query_scalar(self.store.sql.freeable.clone())
            .bind(rows_of(leases))
            .bind(FREED_MAX)
            .fetch_all(&self.store.pool)
            .await
            .map_err(&failed)?;
        if freeable.is_empty() {
            return Ok(());
        }
        sqlx::query(self.store.sql.free.clone())
            .bind(json(freeable.into_iter().map(Value::from)))
            .execute(&self.store.pool)
            .await
            .map_err(&failed)?;
        Ok(())
    }
}

fn place(row: &SqliteRow, table: Table) -> Result<Place> {
    let read = || -> Result<Place, sqlx::Error> {
        Ok(Place {
            lane: row.try_get(0)?,
            table,
            position: row.try_get(1)?,
        })
    };
    read().map_err(|e| error::of_statement("fetch", e))
}

/// Reads `[[blocked, last position, scope], ...]`.
fn ahead(row: &SqliteRow) -> Result<Vec<Ahead>> {
    let text: Option<&str> = row
        .try_get(12)
        .map_err(|e| error::of_statement("fetch", e))?;
    let Some(text) = text else {
        return Ok(Vec::new());
    };
    let foreign = |_| Error::new(ErrorKind::Corrupt, "fetch", "no list of what is ahead");
    let lines: Vec<(i64, i64, String)> = serde_json::from_str(text).map_err(foreign)?;
    let ahead = lines.into_iter().map(|(blocked, last, scope)| Ahead {
        scope,
        last,
        blocked: blocked != 0,
    });
    Ok(ahead.collect())
}

impl OutboxReader for Reader {
    fn fetch<'a>(&'a mut self, request: &'a FetchRequest) -> BoxFuture<'a, Result<Page>> {
        async move {
            if request.leases.is_empty() || request.rows_max == 0 {
                return Ok(Page::default());
            }
            self.read(request).await
        }
        .boxed()
    }

    fn settle<'a>(&'a mut self, batch: &'a SettlementBatch) -> BoxFuture<'a, Result<Settled>> {
        async move {
            if batch.verdicts.is_empty() {
                return Ok(Settled::default());
            }
            let (mut confirmed, mut moved) = (Vec::new(), Vec::new());
            let (mut sent, mut changed) = (Vec::new(), Vec::new());
            for (place, verdict) in &batch.verdicts {
                // A row of a lane without a lease has no token that could be current.
                let token = batch.leases.iter().find(|lease| lease.lane == place.lane);
                let Some(token) = token.map(|lease| lease.token) else {
                    continue;
                };
                let mut row = vec![
                    Value::from(place.lane),
                    Value::from(place.position),
                    Value::from(token),
                ];
                if let Verdict::SetAside(aside) = verdict {
                    row.push(Value::from(aside.state.as_str()));
                    row.push(Value::from(aside.reason.as_str()));
                    row.push(Value::from(without_nul(&aside.error)));
                    row.push(Value::from(without_nul(&aside.scope)));
                }
                let rows = match (verdict, place.table) {
                    (Verdict::Confirmed, Table::Outbox) => &mut confirmed,
                    (Verdict::Confirmed, Table::Aside) => &mut sent,
                    (Verdict::SetAside(_), Table::Outbox) => &mut moved,
                    (Verdict::SetAside(_), Table::Aside) => &mut changed,
                };
                rows.push(Value::from(row));
            }
            let sql = &self.store.sql;
            let mut transaction = self.store.begin_immediate("settle").await?;
            let failed = self.store.pool_error("settle");
            let moved = json(moved.into_iter());
            let (confirmed, sent) = (json(confirmed.into_iter()), json(sent.into_iter()));
            // Copied before they are deleted.
            let mut statements = match self.store.kept {
                None => vec![],
                Some(_) => vec![
                    (&sql.keep, confirmed.clone(), false),
                    (&sql.keep_aside, sent.clone(), false),
                ],
            };
            statements.extend([
                (&sql.confirm, confirmed, true),
                (&sql.set_aside, moved.clone(), false),
                (&sql.confirm, moved, true),
                (&sql.confirm_aside, sent, true),
                (&sql.change_aside, json(changed.into_iter()), true),
            ]);
            let mut applied = 0;
            for (sql, rows, counts) in statements {
                if rows == "[]" {
                    continue;
                }
                let done = sqlx::query(sql.clone())
                    .bind(rows)
                    .execute(transaction.connection())
                    .await
                    .map_err(&failed)?;
                if counts {
                    applied += usize::try_from(done.rows_affected()).unwrap_or(0);
                }
            }
            transaction.commit().await.map_err(&failed)?;
            Ok(Settled {
                applied,
                fenced: batch.verdicts.len().saturating_sub(applied),
            })
        }
        .boxed()
    }
}
