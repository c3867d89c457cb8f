//! What an operator sees and does.

use futures_util::future::{BoxFuture, FutureExt};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{Postgres, Row, SqlStr};

use super::{PostgresStore, error, micros, read_message};
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

impl OutboxAdmin for PostgresStore {
    fn depth(&self, count_max: u64, destinations_max: usize) -> BoxFuture<'_, Result<Depth>> {
        async move {
            let count_max = i64::try_from(count_max).unwrap_or(i64::MAX).max(1);
            let query = sqlx::query_as(self.sql.admin.depth.clone()).bind(count_max);
            let rows: Vec<Counted> = self
                .relayed("count by destination", |c| query.fetch_all(c).boxed())
                .await?;
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
            let query = matching(sql, filter, filter.range(after, i64::MAX))
                .bind(i64::try_from(count_max).unwrap_or(i64::MAX));
            let rows = self
                .relayed("list aside", |c| query.fetch_all(c).boxed())
                .await?;
            let entries: Result<Vec<_>, _> = rows.iter().map(entry).collect();
            entries.map_err(|e| error::of_statement("list aside", e))
        }
        .boxed()
    }

    fn show_aside(&self, position: i64) -> BoxFuture<'_, Result<Option<AsideMessage>>> {
        async move {
            let query = sqlx::query(self.sql.admin.show.clone()).bind(position);
            let row = self
                .relayed("show aside", |c| query.fetch_optional(c).boxed())
                .await?;
            let whole = |row: &PgRow| {
                Ok(AsideMessage {
                    entry: entry(row)?,
                    message: read_message(row, 11),
                    stored_headers: row.try_get(16)?,
                    payload: row.try_get::<Option<Vec<u8>>, _>(17)?.map(Into::into),
                })
            };
            let shown = row.as_ref().map(whole).transpose();
            shown.map_err(|e| error::of_statement("show aside", e))
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
        self.act("requeue", &self.sql.admin.requeue, filter, None, mode)
            .boxed()
    }

    fn discard<'a>(
        &'a self,
        filter: &'a AsideFilter,
        because: &'a str,
        mode: Mode,
    ) -> BoxFuture<'a, Result<u64>> {
        let sql = &self.sql.admin.discard;
        self.act("discard", sql, filter, Some(because), mode)
            .boxed()
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

impl PostgresStore {
    async fn control(&self, destination: &str, control: Control, because: &str) -> Result<()> {
        let row = control.row(destination, because)?;
        let query = sqlx::query(self.sql.admin.control.clone())
            .bind(destination.to_owned())
            .bind(row.paused)
            .bind(row.limits)
            .bind(row.rate_max)
            .bind(because.to_owned())
            .bind(i64::try_from(CONTROLS_MAX).unwrap_or(i64::MAX));
        let written = self
            .relayed("control", |c| query.execute(c).boxed())
            .await?
            .rows_affected();
        let query = sqlx::query(self.sql.admin.forget_control.clone()).bind(destination.to_owned());
        self.relayed("control", |c| query.execute(c).boxed())
            .await?;
        control.done(destination, because, written)
    }

    /// Each step is one statement, and so one transaction.
    async fn act(
        &self,
        operation: &'static str,
        sql: &SqlStr,
        filter: &AsideFilter,
        because: Option<&str>,
        mode: Mode,
    ) -> Result<u64> {
        filter.validate()?;
        because.map_or(Ok(()), |because| words("because", because))?;
        // What is set aside from here on, perhaps because it was refused again, is not meant.
        let query = sqlx::query_scalar(self.sql.admin.last.clone());
        let last: i64 = self
            .relayed(operation, |c| query.fetch_one(c).boxed())
            .await?;
        in_steps(async |after| match mode {
            Mode::DryRun => {
                let sql = self.sql.admin.count.clone();
                let query = matching(sql, filter, filter.range(after, last)).bind(COUNT_ROWS_MAX);
                let row = self
                    .relayed(operation, |c| query.fetch_one(c).boxed())
                    .await?;
                let read = || Ok((row.try_get(0)?, row.try_get(1)?));
                let (last, count): (_, i64) =
                    read().map_err(|e| error::of_statement(operation, e))?;
                let count = u64::try_from(count).unwrap_or(0);
                Ok(Step { last, count })
            }
            Mode::Apply => {
                let query = matching(sql.clone(), filter, filter.range(after, last))
                    .bind(STEP_ROWS_MAX)
                    .bind(STEP_BYTES_MAX);
                let row = self
                    .relayed(operation, |c| query.fetch_one(c).boxed())
                    .await?;
                let read = || Ok((row.try_get(0)?, row.try_get(1)?));
                let (last, ids): (_, Option<Vec<String>>) =
                    read().map_err(|e| error::of_statement(operation, e))?;
                let ids = ids.unwrap_or_default();
                log(&ids, because);
                let count = ids.len() as u64;
                Ok(Step { last, count })
            }
        })
        .await
    }
}

/// Binds the filter, owned, and the range of positions: `$1` to `$7`.
fn matching(
    sql: SqlStr,
    filter: &AsideFilter,
    (after, last): (i64, i64),
) -> Query<'static, Postgres, PgArguments> {
    let text = |text: &str| text.to_owned();
    sqlx::query(sql)
        .bind(filter.destination.clone())
        .bind(filter.reason.as_ref().map(Reason::as_str).map(text))
        .bind(filter.key.as_ref().map(|key| key.to_vec()))
        .bind(filter.message_id.as_ref().map(MessageId::as_str).map(text))
        .bind(filter.age.map(micros))
        .bind(after)
        .bind(last)
}

fn entry(row: &PgRow) -> Result<AsideEntry, sqlx::Error> {
    let attempts: i32 = row.try_get(4)?;
    let size: i32 = row.try_get(10)?;
    Ok(AsideEntry {
        position: row.try_get(0)?,
        state: row.try_get(1)?,
        reason: Reason::new(row.try_get(2)?),
        error: row.try_get(3)?,
        attempts: u32::try_from(attempts).unwrap_or(0),
        set_aside_at: row.try_get(5)?,
        message_id: MessageId::new(row.try_get::<String, _>(6)?),
        destination: row.try_get(7)?,
        key: row.try_get::<Option<Vec<u8>>, _>(8)?.map(Into::into),
        event_type: row.try_get(9)?,
        size: u64::try_from(size).unwrap_or(0),
    })
}
