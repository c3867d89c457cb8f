//! Writing in the caller's transaction; leasing, reading and settling for relays.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use serde_json::Value;
use sqlx::{Connection, Row, SqliteConnection};

use super::{SqliteStore, error, json, micros, read_message, size, sql};
use crate::clock::unix_micros;
use crate::error::{Error, Result};
use crate::lane::{LANES, Lane, lane_of_message};
use crate::message::Message;
use crate::store::header_codec::{self, without_nul};
use crate::store::{
    Enqueue, FetchRequest, Lease, OutboxReader, OutboxStore, Page, PendingMessage, Settled,
    SettlementBatch, Standing, Verdict,
};

/// Registrations that have ended and that one heartbeat removes at most.
const FORGOTTEN_MAX: i64 = 100;

impl Enqueue for SqliteStore {
    type Connection = SqliteConnection;

    /// One statement for up to 500 messages; more of them are one savepoint.
    async fn insert(&self, connection: &mut SqliteConnection, messages: &[Message]) -> Result<()> {
        for message in messages {
            storable(message)?;
        }
        let failed = |e| error::of_statement("enqueue", e);
        if messages.len() <= sql::INSERT_ROWS_MAX {
            return insert_rows(self, connection, messages)
                .await
                .map_err(failed);
        }
        let mut savepoint = connection.begin().await.map_err(failed)?;
        for rows in messages.chunks(sql::INSERT_ROWS_MAX) {
            insert_rows(self, &mut savepoint, rows)
                .await
                .map_err(failed)?;
        }
        savepoint.commit().await.map_err(failed)
    }
}

async fn insert_rows(
    store: &SqliteStore,
    connection: &mut SqliteConnection,
    messages: &[Message],
) -> Result<(), sqlx::Error> {
    if messages.is_empty() {
        return Ok(());
    }
    // Only the text for one row is worth keeping prepared: the number of others varies.
    let mut query = sqlx::query(store.sql.insert(messages.len())).persistent(messages.len() == 1);
    for message in messages {
        query = query
            .bind(lane_of_message(message))
            .bind(message.id.as_str())
            .bind(&message.destination)
            .bind(message.key.as_deref())
            .bind(&message.event_type)
            .bind(message.content_type.as_deref())
            .bind(header_codec::encode(message))
            .bind(message.payload.as_deref())
            .bind(message.version)
            .bind(unix_micros(message.occurred_at))
            .bind(size(message));
    }
    query.execute(connection).await?;
    Ok(())
}

/// Refuses what a text column does not keep whole.
fn storable(message: &Message) -> Result<()> {
    let texts = [
        ("id", Some(message.id.as_str())),
        ("destination", Some(&*message.destination)),
        ("event_type", Some(&*message.event_type)),
        ("content_type", message.content_type.as_deref()),
    ];
    for (field, text) in texts {
        if let Some(text) = text.filter(|text| text.contains('\0')) {
            return Err(Error::invalid(field, "text without NUL", text));
        }
    }
    Ok(())
}

impl OutboxStore for SqliteStore {
    fn name(&self) -> &'static str {
        "sqlite"
    }

    fn check(&self) -> BoxFuture<'_, Result<()>> {
        async move {
            let (lanes, _, _, _): (i64, i64, i64, i64) =
                sqlx::query_as(self.sql.check_outbox.clone())
                    .fetch_one(&self.pool)
                    .await
                    .map_err(self.pool_error("check outbox"))?;
            if lanes != i64::from(LANES) {
                return Err(Error::configuration(
                    "rows of outbox_lane",
                    LANES.to_string(),
                    lanes.to_string(),
                ));
            }
            Ok(())
        }
        .boxed()
    }

    fn heartbeat<'a>(
        &'a self,
        id: &'a str,
        name: &'a str,
        duration: Duration,
    ) -> BoxFuture<'a, Result<Standing>> {
        async move {
            let mut transaction = self.begin_immediate("heartbeat").await?;
            let failed = self.pool_error("heartbeat");
            sqlx::query(self.sql.heartbeat.clone())
                .bind(id)
                .bind(without_nul(name))
                .bind(micros(duration))
                .execute(transaction.connection())
                .await
                .map_err(&failed)?;
            sqlx::query(self.sql.forget.clone())
                .bind(id)
                .bind(FORGOTTEN_MAX)
                .execute(transaction.connection())
                .await
                .map_err(&failed)?;
            let counted = sqlx::query_as(self.sql.standing.clone())
                .bind(id)
                .fetch_one(transaction.connection())
                .await
                .map_err(&failed)?;
            transaction.commit().await.map_err(&failed)?;
            Ok(standing_of(counted))
        }
        .boxed()
    }

    fn standing<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<Standing>> {
        async move {
            let counted = sqlx::query_as(self.sql.standing.clone())
                .bind(id)
                .fetch_one(&self.pool)
                .await
                .map_err(self.pool_error("count relays"))?;
            Ok(standing_of(counted))
        }
        .boxed()
    }

    fn leave<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<()>> {
        async move {
            sqlx::query(self.sql.leave.clone())
                .bind(id)
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("leave"))?;
            Ok(())
        }
        .boxed()
    }

    fn lease<'a>(
        &'a self,
        relay: &'a str,
        count_max: usize,
        duration: Duration,
    ) -> BoxFuture<'a, Result<Vec<Lease>>> {
        async move {
            let rows: Vec<(Lane, i64)> = sqlx::query_as(self.sql.lease.clone())
                .bind(without_nul(relay))
                .bind(i64::try_from(count_max).unwrap_or(i64::MAX))
                .bind(micros(duration))
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("lease lanes"))?;
            Ok(leases_of(rows))
        }
        .boxed()
    }

    fn renew<'a>(
        &'a self,
        leases: &'a [Lease],
        duration: Duration,
    ) -> BoxFuture<'a, Result<Vec<Lease>>> {
        async move {
            let rows: Vec<(Lane, i64)> = sqlx::query_as(self.sql.renew.clone())
                .bind(rows_of(leases))
                .bind(micros(duration))
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("renew leases"))?;
            Ok(leases_of(rows))
        }
        .boxed()
    }

    fn release<'a>(&'a self, leases: &'a [Lease]) -> BoxFuture<'a, Result<()>> {
        async move {
            sqlx::query(self.sql.release.clone())
                .bind(rows_of(leases))
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("release leases"))?;
            Ok(())
        }
        .boxed()
    }

    fn reader(&self) -> Box<dyn OutboxReader> {
        Box::new(Reader {
            store: self.clone(),
            turn: 0,
        })
    }

    fn pending(&self, count_max: u64) -> BoxFuture<'_, Result<u64>> {
        async move {
            let sql = self.sql.pending.clone();
            count(self, "count pending", sql, count_max).await
        }
        .boxed()
    }

    fn aside(&self, count_max: u64) -> BoxFuture<'_, Result<u64>> {
        async move {
            let sql = self.sql.aside.clone();
            count(self, "count aside", sql, count_max).await
        }
        .boxed()
    }
}

async fn count(
    store: &SqliteStore,
    operation: &'static str,
    sql: sqlx::SqlStr,
    count_max: u64,
) -> Result<u64> {
    let counted: i64 = sqlx::query_scalar(sql)
        .bind(i64::try_from(count_max).unwrap_or(i64::MAX))
        .fetch_one(&store.pool)
        .await
        .map_err(store.pool_error(operation))?;
    Ok(u64::try_from(counted).unwrap_or(0))
}

fn standing_of((live, place): (i64, i64)) -> Standing {
    Standing {
        live: usize::try_from(live).unwrap_or(1),
        place: usize::try_from(place).unwrap_or(0),
    }
}

fn leases_of(rows: Vec<(Lane, i64)>) -> Vec<Lease> {
    let mut leases: Vec<Lease> = rows
        .into_iter()
        .map(|(lane, token)| Lease { lane, token })
        .collect();
    leases.sort_by_key(|lease| lease.lane);
    leases
}

fn rows_of(leases: &[Lease]) -> String {
    json(
        leases
            .iter()
            .map(|lease| Value::from(vec![i64::from(lease.lane), lease.token])),
    )
}

/// Reads every lane from its first row: with one writer there is no late commit, and no dead row to pass.
struct Reader {
    store: SqliteStore,
    /// Which lane goes first when there are more lanes than rows allowed.
    turn: usize,
}

impl OutboxReader for Reader {
    fn fetch<'a>(&'a mut self, request: &'a FetchRequest) -> BoxFuture<'a, Result<Page>> {
        async move {
            let count = request.leases.len();
            if count == 0 || request.rows_max == 0 {
                return Ok(Page::default());
            }
            let mut leases = request.leases.clone();
            leases.rotate_left(self.turn % count);
            self.turn = (self.turn + 1) % count;
            let lane_rows = (request.rows_max / count).max(1);
            let lane_bytes = i64::try_from(request.bytes_max / count).unwrap_or(i64::MAX);
            let failed = self.store.pool_error("fetch");
            let rows = sqlx::query(self.store.sql.fetch.clone())
                .bind(rows_of(&leases))
                .bind(i64::try_from(lane_rows).unwrap_or(i64::MAX))
                .bind(json(request.closed.iter().map(|d| Value::from(d.as_str()))))
                .bind(lane_bytes)
                .bind(i64::try_from(request.rows_max).unwrap_or(i64::MAX))
                .fetch_all(&self.store.pool)
                .await
                .map_err(&failed)?;
            let mut page = Page {
                full: rows.len() >= request.rows_max,
                ..Page::default()
            };
            let mut found = Vec::with_capacity(rows.len());
            for row in &rows {
                let lane: Lane = row.try_get(0).map_err(&failed)?;
                let position: i64 = row.try_get(1).map_err(&failed)?;
                let size: i64 = row.try_get(11).map_err(&failed)?;
                found.push((lane, position, size, row));
            }
            // The statement promises no order; in practice this finds its input sorted by lane.
            found.sort_by_key(|(lane, position, ..)| (*lane, *position));
            for in_lane in found.chunk_by(|a, b| a.0 == b.0) {
                page.full |= in_lane.len() >= lane_rows;
                let mut bytes = 0_i64;
                for (place, (lane, position, size, row)) in in_lane.iter().enumerate() {
                    bytes = bytes.saturating_add(*size);
                    if place > 0 && bytes > lane_bytes {
                        page.full = true;
                        break;
                    }
                    match read_message(row, 2) {
                        Ok(message) => page.rows.push(PendingMessage {
                            lane: *lane,
                            position: *position,
                            message,
                        }),
                        Err(error) => page.unreadable.push((*lane, *position, error)),
                    }
                }
            }
            Ok(page)
        }
        .boxed()
    }

    fn settle<'a>(&'a mut self, batch: &'a SettlementBatch) -> BoxFuture<'a, Result<Settled>> {
        async move {
            if batch.verdicts.is_empty() {
                return Ok(Settled::default());
            }
            let (mut confirmed, mut parked) = (Vec::new(), Vec::new());
            for (lane, position, verdict) in &batch.verdicts {
                // A row of a lane without a lease has no token that could be current.
                let token = batch.leases.iter().find(|lease| lease.lane == *lane);
                let Some(token) = token.map(|lease| lease.token) else {
                    continue;
                };
                let mut row = vec![
                    Value::from(*lane),
                    Value::from(*position),
                    Value::from(token),
                ];
                match verdict {
                    Verdict::Confirmed => confirmed.push(Value::from(row)),
                    Verdict::Parked { reason, error } => {
                        row.push(Value::from(reason.as_str()));
                        row.push(Value::from(without_nul(error)));
                        parked.push(Value::from(row));
                    }
                }
            }
            let store = &self.store;
            let mut transaction = store.begin_immediate("settle").await?;
            let failed = store.pool_error("settle");
            let parked = json(parked.into_iter());
            let statements = [
                (&store.sql.confirm, json(confirmed.into_iter()), true),
                (&store.sql.set_aside, parked.clone(), false),
                (&store.sql.confirm, parked, true),
            ];
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
