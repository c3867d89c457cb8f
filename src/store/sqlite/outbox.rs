//! Writing in the caller's transaction; leasing, reading and settling for relays.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use serde_json::Value;
use sqlx::query::Query;
use sqlx::sqlite::SqliteArguments;
use sqlx::{Connection, Sqlite, SqliteConnection};

use super::reader::Reader;
use super::{SqliteStore, error, instant, json, micros, size, sql};
use crate::clock::unix_micros;
use crate::error::{Error, Result};
use crate::lane::{LANES, Lane, lane_of_message};
use crate::message::Message;
use crate::store::header_codec::{self, without_nul};
use crate::store::{
    CONTROLS_MAX, DestinationControl, Due, Enqueue, Lease, OutboxAdmin, OutboxReader, OutboxStore,
    Standing,
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

    async fn insert_delayed(
        &self,
        connection: &mut SqliteConnection,
        messages: &[Message],
        delay: Duration,
    ) -> Result<()> {
        for message in messages {
            storable(message)?;
        }
        let failed = |e| error::of_statement("enqueue", e);
        let mut savepoint = connection.begin().await.map_err(failed)?;
        for message in messages {
            bound(sqlx::query(self.sql.delay.clone()), message)
                .bind(micros(delay))
                .execute(&mut *savepoint)
                .await
                .map_err(failed)?;
        }
        savepoint.commit().await.map_err(failed)
    }
}

/// Binds the columns of a message.
fn bound<'q>(
    query: Query<'q, Sqlite, SqliteArguments>,
    message: &'q Message,
) -> Query<'q, Sqlite, SqliteArguments> {
    query
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
        .bind(size(message))
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
        query = bound(query, message);
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
            let (lanes, ..): (i64, i64, i64, i64, i64) =
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
        Box::new(Reader::new(self.clone()))
    }

    fn release_due(&self, count_max: usize) -> BoxFuture<'_, Result<Due>> {
        async move {
            let failed = self.pool_error("release due");
            // Looked at first without the write lock.
            let due: Vec<i64> = sqlx::query_scalar(self.sql.due.clone())
                .bind(i64::try_from(count_max).unwrap_or(i64::MAX))
                .fetch_all(&self.pool)
                .await
                .map_err(&failed)?;
            let mut released = 0;
            if !due.is_empty() {
                let due = json(due.into_iter().map(Value::from));
                let mut transaction = self.begin_immediate("release due").await?;
                for sql in [&self.sql.release_due, &self.sql.forget_due] {
                    released = sqlx::query(sql.clone())
                        .bind(due.as_str())
                        .execute(transaction.connection())
                        .await
                        .map_err(&failed)?
                        .rows_affected();
                }
                transaction.commit().await.map_err(&failed)?;
            }
            let next: Option<i64> = sqlx::query_scalar(self.sql.next_due.clone())
                .fetch_one(&self.pool)
                .await
                .map_err(&failed)?;
            let next = next.map(|next| Duration::from_micros(u64::try_from(next).unwrap_or(0)));
            Ok(Due { released, next })
        }
        .boxed()
    }

    fn controls(&self) -> BoxFuture<'_, Result<Vec<DestinationControl>>> {
        async move {
            let failed = self.pool_error("read controls");
            let rows: Vec<(String, bool, Option<i64>, String, i64)> =
                sqlx::query_as(self.sql.controls.clone())
                    .bind(i64::try_from(CONTROLS_MAX).unwrap_or(i64::MAX))
                    .fetch_all(&self.pool)
                    .await
                    .map_err(&failed)?;
            let control = |row: (String, bool, Option<i64>, String, i64)| {
                Ok(DestinationControl {
                    destination: row.0,
                    paused: row.1,
                    rate_max: row.2.and_then(|rate| u32::try_from(rate).ok()),
                    because: row.3,
                    changed_at: instant(row.4)?,
                })
            };
            rows.into_iter().map(control).collect()
        }
        .boxed()
    }

    fn clean_up_history(&self) -> BoxFuture<'_, Result<bool>> {
        self.forget_published().boxed()
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

pub(super) fn rows_of(leases: &[Lease]) -> String {
    json(
        leases
            .iter()
            .map(|lease| Value::from(vec![i64::from(lease.lane), lease.token])),
    )
}
