//! Writing in the caller's transaction, and leasing lanes for relays.

use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, FutureExt};
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row};
use time::OffsetDateTime;

use super::listener::Listener;
use super::reader::Reader;
use super::statement::Statement;
use super::{ACQUIRE_TIMEOUT, PostgresStore, bounded, error, micros};
use crate::error::{Error, Result};
use crate::lane::{LANES, Lane};
use crate::message::Message;
use crate::store::header_codec::without_nul;
use crate::store::{
    CONTROLS_MAX, DestinationControl, Due, Enqueue, EnqueueStatement, Lease, OutboxAdmin,
    OutboxReader, OutboxStore, Standing, WakeUps,
};

/// Registrations that have ended and that one heartbeat removes at most.
const FORGOTTEN_MAX: i64 = 100;

impl Enqueue for PostgresStore {
    type Connection = PgConnection;

    /// One statement of any number of messages, also with a notification beside them.
    async fn insert(&self, connection: &mut PgConnection, messages: &[Message]) -> Result<()> {
        if messages.is_empty() {
            return Ok(());
        }
        let sql = match self.wake_up {
            None => &self.sql.insert,
            Some(_) => &self.sql.insert_and_notify,
        };
        let query = bound(sqlx::query(sql.clone()), self.statement(messages)?);
        let failed = |e| error::of_statement("enqueue", e);
        let Some(window) = &self.wake_up else {
            query.execute(connection).await.map_err(failed)?;
            return Ok(());
        };
        let turn = window.enter(Instant::now(), self.wake_up_pause);
        let query = query.bind(&turn.earlier);
        if let Some(notified) = query.fetch_optional(connection).await.map_err(failed)? {
            window.notified(&turn, notified.try_get(0).map_err(failed)?);
        }
        Ok(())
    }

    async fn insert_delayed(
        &self,
        connection: &mut PgConnection,
        messages: &[Message],
        delay: Duration,
    ) -> Result<()> {
        let query = sqlx::query(self.sql.insert_delayed.clone());
        bound(query, self.statement(messages)?)
            .bind(micros(delay))
            .execute(connection)
            .await
            .map_err(|e| error::of_statement("enqueue", e))?;
        Ok(())
    }
}
/// Binds the columns of a statement, `$1` to `$11`.
fn bound<'q>(
    query: Query<'q, Postgres, PgArguments>,
    statement: Statement<'q>,
) -> Query<'q, Postgres, PgArguments> {
    query
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
            self.check_history().await
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
        Box::new(Reader::new(self.clone()))
    }

    fn release_due(&self, count_max: usize) -> BoxFuture<'_, Result<Due>> {
        async move {
            let query = sqlx::query_as(self.sql.release_due.clone())
                .bind(i64::try_from(count_max).unwrap_or(i64::MAX));
            let (released, next): (i64, Option<i64>) = self
                .relayed("release due", |c| query.fetch_one(c).boxed())
                .await?;
            let next = next.map(|next| Duration::from_micros(u64::try_from(next).unwrap_or(0)));
            Ok(Due {
                released: u64::try_from(released).unwrap_or(0),
                next,
            })
        }
        .boxed()
    }

    fn controls(&self) -> BoxFuture<'_, Result<Vec<DestinationControl>>> {
        async move {
            let query = sqlx::query_as(self.sql.controls.clone())
                .bind(i64::try_from(CONTROLS_MAX).unwrap_or(i64::MAX));
            let rows: Vec<(String, bool, Option<i32>, String, OffsetDateTime)> = self
                .relayed("read controls", |c| query.fetch_all(c).boxed())
                .await?;
            let controls = rows.into_iter().map(|row| DestinationControl {
                destination: row.0,
                paused: row.1,
                rate_max: row.2.and_then(|rate| u32::try_from(rate).ok()),
                because: row.3,
                changed_at: row.4,
            });
            Ok(controls.collect())
        }
        .boxed()
    }

    fn clean_up_history(&self) -> BoxFuture<'_, Result<bool>> {
        self.forget_published().boxed()
    }

    fn wake_ups(&self) -> Option<Box<dyn WakeUps>> {
        let listener = || Box::new(Listener::new(self.clone())) as Box<dyn WakeUps>;
        self.wake_up.as_ref().map(|_| listener())
    }

    fn admin(&self) -> Option<&dyn OutboxAdmin> {
        Some(self)
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

pub(super) fn columns_of(leases: &[Lease]) -> (Vec<Lane>, Vec<i64>) {
    leases.iter().map(|lease| (lease.lane, lease.token)).unzip()
}
