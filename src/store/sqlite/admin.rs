//! What an operator sees and does.

use std::time::Instant;

use futures_util::future::{BoxFuture, FutureExt};
use serde_json::Value;
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Row, SqlStr, Sqlite};

use super::{SqliteStore, error, instant, json, micros, read_message};
use crate::error::Result;
use crate::message::MessageId;
use crate::store::admin_steps::{
    COUNT_ROWS_MAX, Control, Counted, STEP_BYTES_MAX, STEP_ROWS_MAX, Step, depth_of, in_steps, log,
    words,
};
use crate::store::{
    AsideEntry, AsideFilter, AsideMessage, CONTROLS_MAX, Depth, Mode, OutboxAdmin, PublishedMessage,
};
use crate::story::Reason;

impl OutboxAdmin for SqliteStore {
    fn depth(&self, count_max: u64, destinations_max: usize) -> BoxFuture<'_, Result<Depth>> {
        async move {
            let count_max = i64::try_from(count_max).unwrap_or(i64::MAX).max(1);
            let rows: Vec<Counted> = sqlx::query_as(self.sql.admin.depth.clone())
                .bind(count_max)
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("count by destination"))?;
            Ok(depth_of(rows, count_max, destinations_max))
        }
        .boxed()
    }

    fn list_aside<'a>(
        &'a self,
        filter: &'a AsideFilter,
        after: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<AsideEntry>>> {
        async move {
            filter.validate()?;
            let sql = self.sql.admin.list.clone();
            let rows = matching(sql, filter, filter.range(after, i64::MAX))
                .bind(i64::try_from(count_max).unwrap_or(i64::MAX))
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("list aside"))?;
            rows.iter().map(entry).collect()
        }
        .boxed()
    }

    fn show_aside(&self, position: i64) -> BoxFuture<'_, Result<Option<AsideMessage>>> {
        async move {
            let row = sqlx::query(self.sql.admin.show.clone())
                .bind(position)
                .fetch_optional(&self.pool)
                .await
                .map_err(self.pool_error("show aside"))?;
            let Some(row) = row else { return Ok(None) };
            let read = || Ok((row.try_get(16)?, row.try_get::<Option<Vec<u8>>, _>(17)?));
            let (stored_headers, payload) =
                read().map_err(|e| error::of_statement("show aside", e))?;
            Ok(Some(AsideMessage {
                entry: entry(&row)?,
                message: read_message(&row, 11),
                stored_headers,
                payload: payload.map(Into::into),
            }))
        }
        .boxed()
    }

    fn find_published<'a>(
        &'a self,
        id: &'a MessageId,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<PublishedMessage>>> {
        self.published(id, count_max).boxed()
    }

    fn requeue<'a>(&'a self, filter: &'a AsideFilter, mode: Mode) -> BoxFuture<'a, Result<u64>> {
        self.act("requeue", filter, None, mode).boxed()
    }

    fn discard<'a>(
        &'a self,
        filter: &'a AsideFilter,
        because: &'a str,
        mode: Mode,
    ) -> BoxFuture<'a, Result<u64>> {
        self.act("discard", filter, Some(because), mode).boxed()
    }

    fn pause<'a>(&'a self, destination: &'a str, because: &'a str) -> BoxFuture<'a, Result<()>> {
        let pause = Control::Pause;
        self.control(destination, pause, because).boxed()
    }

    fn resume<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Result<()>> {
        self.control(destination, Control::Resume, "resumed")
            .boxed()
    }

    fn limit<'a>(
        &'a self,
        destination: &'a str,
        rate_max: Option<u32>,
        because: &'a str,
    ) -> BoxFuture<'a, Result<()>> {
        let limit = Control::Limit(rate_max);
        self.control(destination, limit, because).boxed()
    }
}

impl SqliteStore {
    async fn control(&self, destination: &str, control: Control, because: &str) -> Result<()> {
        let row = control.row(destination, because)?;
        let failed = self.pool_error("control");
        let mut transaction = self.begin_immediate("control").await?;
        let others: i64 = sqlx::query_scalar(self.sql.admin.count_controls.clone())
            .bind(destination)
            .fetch_one(transaction.connection())
            .await
            .map_err(&failed)?;
        let room = usize::try_from(others).is_ok_and(|others| others < CONTROLS_MAX);
        if room {
            sqlx::query(self.sql.admin.control.clone())
                .bind(destination)
                .bind(row.paused)
                .bind(row.limits)
                .bind(row.rate_max)
                .bind(because)
                .execute(transaction.connection())
                .await
                .map_err(&failed)?;
        }
        sqlx::query(self.sql.admin.forget_control.clone())
            .bind(destination)
            .execute(transaction.connection())
            .await
            .map_err(&failed)?;
        transaction.commit().await.map_err(&failed)?;
        control.done(destination, because, u64::from(room))
    }

    /// Discards with words that say why, requeues without.
    async fn act(
        &self,
        operation: &'static str,
        filter: &AsideFilter,
        because: Option<&str>,
        mode: Mode,
    ) -> Result<u64> {
        filter.validate()?;
        because.map_or(Ok(()), |because| words("because", because))?;
        let failed = self.pool_error(operation);
        // What is set aside from here on, perhaps because it was refused again, is not meant.
        let last: i64 = sqlx::query_scalar(self.sql.admin.last.clone())
            .fetch_one(&self.pool)
            .await
            .map_err(&failed)?;
        in_steps(async |after| {
            let range = filter.range(after, last);
            if mode == Mode::Apply {
                return self.step(operation, filter, range, because).await;
            }
            let row = matching(self.sql.admin.count.clone(), filter, range)
                .bind(COUNT_ROWS_MAX)
                .fetch_one(&self.pool)
                .await
                .map_err(&failed)?;
            let count: i64 = row.try_get(1).map_err(&failed)?;
            Ok(Step {
                last: row.try_get(0).map_err(&failed)?,
                count: u64::try_from(count).unwrap_or(0),
            })
        })
        .await
    }

    async fn step(
        &self,
        operation: &'static str,
        filter: &AsideFilter,
        range: (i64, i64),
        because: Option<&str>,
    ) -> Result<Step> {
        let failed = self.pool_error(operation);
        let started = Instant::now();
        let mut transaction = self.begin_immediate(operation).await?;
        let rows = matching(self.sql.admin.step.clone(), filter, range)
            .bind(STEP_ROWS_MAX)
            .bind(STEP_BYTES_MAX)
            .fetch_all(transaction.connection())
            .await
            .map_err(&failed)?;
        let found: Result<Vec<(i64, String)>, _> = rows
            .iter()
            .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
            .collect();
        let (positions, ids): (Vec<_>, Vec<_>) = found.map_err(&failed)?.into_iter().unzip();
        let list = json(positions.iter().map(|position| Value::from(*position)));
        let admin = &self.sql.admin;
        let statements = match because {
            Some(_) => &admin.discard[..],
            None => &admin.requeue[..],
        };
        for sql in statements {
            sqlx::query(sql.clone())
                .bind(list.as_str())
                .execute(transaction.connection())
                .await
                .map_err(&failed)?;
        }
        transaction.commit().await.map_err(&failed)?;
        log(&ids, because);
        // Half of the time is left to other writers: waiting for the lock is not fair in this database.
        tokio::time::sleep(started.elapsed()).await;
        Ok(Step {
            last: positions.last().copied(),
            count: ids.len() as u64,
        })
    }
}

/// Binds the filter and the range of positions: `?1` to `?7`.
fn matching(
    sql: SqlStr,
    filter: &AsideFilter,
    (after, last): (i64, i64),
) -> Query<'_, Sqlite, SqliteArguments> {
    sqlx::query(sql)
        .bind(filter.destination.as_deref())
        .bind(filter.reason.as_ref().map(Reason::as_str))
        .bind(filter.key.as_deref())
        .bind(filter.message_id.as_ref().map(MessageId::as_str))
        .bind(filter.age.map(micros))
        .bind(after)
        .bind(last)
}

fn entry(row: &SqliteRow) -> Result<AsideEntry> {
    let read = || -> Result<(AsideEntry, i64), sqlx::Error> {
        let attempts: i64 = row.try_get(4)?;
        let size: i64 = row.try_get(10)?;
        let entry = AsideEntry {
            position: row.try_get(0)?,
            state: row.try_get(1)?,
            reason: Reason::new(row.try_get(2)?),
            error: row.try_get(3)?,
            attempts: u32::try_from(attempts).unwrap_or(0),
            set_aside_at: time::OffsetDateTime::UNIX_EPOCH,
            message_id: MessageId::new(row.try_get::<String, _>(6)?),
            destination: row.try_get(7)?,
            key: row.try_get::<Option<Vec<u8>>, _>(8)?.map(Into::into),
            event_type: row.try_get(9)?,
            size: u64::try_from(size).unwrap_or(0),
        };
        Ok((entry, row.try_get(5)?))
    };
    let (mut entry, set_aside_at) = read().map_err(|e| error::of_statement("read aside", e))?;
    entry.set_aside_at = instant(set_aside_at)?;
    Ok(entry)
}
