//! Writing in the caller's transaction; leasing, reading and settling for relays.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use sqlx::{PgConnection, Row};

use super::{ACQUIRE_TIMEOUT, PostgresStore, bounded, error, micros, read_message};
use crate::error::{Error, Result};
use crate::lane::{LANES, Lane};
use crate::message::Message;
use crate::store::header_codec::without_nul;
use crate::store::{
    Enqueue, EnqueueStatement, FetchRequest, Lease, OutboxReader, OutboxStore, Page,
    PendingMessage, Settled, SettlementBatch, Standing, Verdict,
};

/// Registrations that have ended and that one heartbeat removes at most.
const FORGOTTEN_MAX: i64 = 100;

impl Enqueue for PostgresStore {
    type Connection = PgConnection;

    /// One statement of any number of messages.
    async fn insert(&self, connection: &mut PgConnection, messages: &[Message]) -> Result<()> {
        if messages.is_empty() {
            return Ok(());
        }
        let statement = self.statement(messages)?;
        sqlx::query(self.sql.insert.clone())
            .bind(statement.lanes)
            .bind(statement.ids)
            .bind(statement.destinations)
            .bind(statement.keys)
            .bind(statement.event_types)
            .bind(statement.content_types)
            .bind(statement.headers)
            .bind(statement.payloads)
            .bind(statement.versions)
            .bind(statement.occurred_at)
            .bind(statement.sizes)
            .execute(connection)
            .await
            .map_err(|e| error::of_statement("enqueue", e))?;
        Ok(())
    }
}

impl OutboxStore for PostgresStore {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn check(&self) -> BoxFuture<'_, Result<()>> {
        async move {
            let query = sqlx::query(self.sql.check_outbox.clone());
            let row = bounded(self.relay_pool(), "check outbox", ACQUIRE_TIMEOUT, |c| {
                query.fetch_one(c).boxed()
            })
            .await?;
            let failed = |e| error::of_statement("check outbox", e);
            let lanes: i64 = row.try_get(0).map_err(failed)?;
            let in_order: bool = row.try_get(1).map_err(failed)?;
            let gapless: bool = row.try_get(2).map_err(failed)?;
            let encoding: String = row.try_get(3).map_err(failed)?;
            if lanes != i64::from(LANES) {
                return Err(Error::configuration(
                    "rows of outbox_lane",
                    LANES.to_string(),
                    lanes.to_string(),
                ));
            }
            if !(in_order && gapless) {
                return Err(Error::configuration(
                    "outbox.position",
                    "an identity (GENERATED ALWAYS, CACHE 1, NO CYCLE) behind column xid",
                    "another definition",
                ));
            }
            if encoding != "UTF8" {
                return Err(Error::configuration("server_encoding", "UTF8", encoding));
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
            let query = sqlx::query_as(self.sql.heartbeat.clone())
                .bind(id.to_owned())
                .bind(without_nul(name).into_owned())
                .bind(micros(duration))
                .bind(FORGOTTEN_MAX);
            let counted = self
                .relayed("heartbeat", |c| query.fetch_one(c).boxed())
                .await?;
            Ok(standing_of(counted))
        }
        .boxed()
    }

    fn standing<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<Standing>> {
        async move {
            let query = sqlx::query_as(self.sql.standing.clone()).bind(id.to_owned());
            let counted = self
                .relayed("count relays", |c| query.fetch_one(c).boxed())
                .await?;
            Ok(standing_of(counted))
        }
        .boxed()
    }

    fn leave<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<()>> {
        async move {
            let query = sqlx::query(self.sql.leave.clone()).bind(id);
            self.relayed("leave", |c| query.execute(c).boxed()).await?;
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
            let query = sqlx::query_as(self.sql.lease.clone())
                .bind(without_nul(relay).into_owned())
                .bind(i64::try_from(count_max).unwrap_or(i64::MAX))
                .bind(micros(duration));
            let rows: Vec<(Lane, i64)> = self
                .relayed("lease lanes", |c| query.fetch_all(c).boxed())
                .await?;
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
            let (lanes, tokens) = columns_of(leases);
            let query = sqlx::query_as(self.sql.renew.clone())
                .bind(lanes)
                .bind(tokens)
                .bind(micros(duration));
            let rows: Vec<(Lane, i64)> = self
                .relayed("renew leases", |c| query.fetch_all(c).boxed())
                .await?;
            Ok(leases_of(rows))
        }
        .boxed()
    }

    fn release<'a>(&'a self, leases: &'a [Lease]) -> BoxFuture<'a, Result<()>> {
        async move {
            let (lanes, tokens) = columns_of(leases);
            let query = sqlx::query(self.sql.release.clone())
                .bind(lanes)
                .bind(tokens);
            self.relayed("release leases", |c| query.execute(c).boxed())
                .await?;
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
    store: &PostgresStore,
    operation: &'static str,
    sql: sqlx::SqlStr,
    count_max: u64,
) -> Result<u64> {
    let query = sqlx::query_scalar(sql).bind(i64::try_from(count_max).unwrap_or(i64::MAX));
    let counted: i64 = store
        .relayed(operation, |c| query.fetch_one(c).boxed())
        .await?;
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

fn columns_of(leases: &[Lease]) -> (Vec<Lane>, Vec<i64>) {
    leases.iter().map(|lease| (lease.lane, lease.token)).unzip()
}

/// Reads every lane from its first row. Its private state is where a floor of the scan belongs.
struct Reader {
    store: PostgresStore,
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
            let (lanes, tokens) = columns_of(&leases);
            let lane_rows = (request.rows_max / count).max(1);
            let lane_bytes = request.bytes_max / count;
            let query = sqlx::query(self.store.sql.fetch.clone())
                .bind(lanes)
                .bind(tokens)
                .bind(vec![0_i64; count])
                .bind(i64::try_from(lane_rows).unwrap_or(i64::MAX))
                .bind(request.closed.clone())
                .bind(i64::try_from(lane_bytes).unwrap_or(i64::MAX))
                .bind(i64::try_from(request.rows_max).unwrap_or(i64::MAX));
            let rows = self
                .store
                .relayed("fetch", |c| query.fetch_all(c).boxed())
                .await?;
            let failed = |e| error::of_statement("fetch", e);
            let mut page = Page {
                full: rows.len() >= request.rows_max,
                ..Page::default()
            };
            let mut read = [0_usize; LANES as usize];
            for row in &rows {
                let lane: Lane = row.try_get(0).map_err(failed)?;
                let position: i64 = row.try_get(1).map_err(failed)?;
                let cut: bool = row.try_get(11).map_err(failed)?;
                let in_lane = usize::try_from(lane)
                    .ok()
                    .and_then(|lane| read.get_mut(lane));
                let count = in_lane.map_or(0, |count| {
                    *count += 1;
                    *count
                });
                page.full |= cut || count >= lane_rows;
                match read_message(row, 2) {
                    Ok(message) => page.rows.push(PendingMessage {
                        lane,
                        position,
                        message,
                    }),
                    Err(error) => page.unreadable.push((lane, position, error)),
                }
            }
            // The statement promises no order; in practice this finds its input sorted by lane.
            page.rows.sort_by_key(|row| (row.lane, row.position));
            Ok(page)
        }
        .boxed()
    }

    fn settle<'a>(&'a mut self, batch: &'a SettlementBatch) -> BoxFuture<'a, Result<Settled>> {
        async move {
            if batch.verdicts.is_empty() {
                return Ok(Settled::default());
            }
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
            let query = sqlx::query_scalar(self.store.sql.settle.clone())
                .bind(lanes)
                .bind(tokens)
                .bind(confirmed.0)
                .bind(confirmed.1)
                .bind(parked.0)
                .bind(parked.1)
                .bind(reasons)
                .bind(errors);
            let applied: i64 = self
                .store
                .relayed("settle", |c| query.fetch_one(c).boxed())
                .await?;
            let applied = usize::try_from(applied).unwrap_or(0);
            Ok(Settled {
                applied,
                fenced: batch.verdicts.len().saturating_sub(applied),
            })
        }
        .boxed()
    }
}
