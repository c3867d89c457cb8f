//! What an operator does with dead letters.

mod book;
mod rows;

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use serde_json::Value;
use sqlx::query::Query;
use sqlx::sqlite::SqliteArguments;
use sqlx::{SqlStr, Sqlite};

use self::rows::{audited, entry, run_row};
use super::dead_letters::bound;
use super::{SqliteStore, json, micros, read_message};
use crate::clock::unix_micros;
use crate::envelope::Outgoing;
use crate::error::Result;
use crate::message::MessageId;
use crate::store::header_codec::without_nul;
use crate::store::{
    Arrival, AuditEntry, LETTERS_MAX, Leaving, LetterEntry, LetterFilter, NewRun, Note,
    RedriveStore, RunRow, RunState, RunStep, WholeLetter,
};
use crate::story::Reason;

impl RedriveStore for SqliteStore {
    fn take_in<'a>(&'a self, letter: &'a Outgoing) -> BoxFuture<'a, Result<Arrival>> {
        async move {
            let failed = self.pool_error("take in");
            let mut transaction = self.begin_immediate("take in").await?;
            let consumer = letter.story.consumer.as_deref().unwrap_or_default();
            let left: bool = sqlx::query_scalar(self.sql.redrive.has_left.clone())
                .bind(without_nul(consumer))
                .bind(without_nul(letter.message.id.as_str()))
                .bind(i64::from(letter.story.redrive_count))
                .bind(letter.message.digest().to_vec())
                .fetch_one(transaction.connection())
                .await
                .map_err(&failed)?;
            if left {
                transaction.rollback().await.map_err(&failed)?;
                return Ok(Arrival::Left);
            }
            let stored = bound(&self.sql.redrive.take_in, letter)
                .execute(transaction.connection())
                .await
                .map_err(&failed)?;
            transaction.commit().await.map_err(&failed)?;
            Ok(match stored.rows_affected() {
                0 => Arrival::Known,
                _ => Arrival::Stored,
            })
        }
        .boxed()
    }

    fn entries<'a>(
        &'a self,
        consumer: &'a str,
        filter: &'a LetterFilter,
        range: (i64, i64),
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<LetterEntry>>> {
        async move {
            let sql = self.sql.redrive.entries.of(filter);
            let rows = matching(sql, consumer, filter, range, count_max)
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("list dead letters"))?;
            rows.iter().map(entry).collect()
        }
        .boxed()
    }

    fn letters<'a>(
        &'a self,
        consumer: &'a str,
        filter: &'a LetterFilter,
        range: (i64, i64),
        count_max: usize,
        bytes_max: usize,
    ) -> BoxFuture<'a, Result<Vec<WholeLetter>>> {
        async move {
            let sql = self.sql.redrive.letters.of(filter);
            let rows = matching(sql, consumer, filter, range, count_max)
                .bind(i64::try_from(bytes_max).unwrap_or(i64::MAX))
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("read dead letters"))?;
            let whole = |row| {
                Ok(WholeLetter {
                    entry: entry(row)?,
                    message: read_message(row, 20),
                })
            };
            rows.iter().map(whole).collect()
        }
        .boxed()
    }

    fn last_position(&self) -> BoxFuture<'_, Result<i64>> {
        async move {
            sqlx::query_scalar(self.sql.redrive.last.clone())
                .fetch_one(&self.pool)
                .await
                .map_err(self.pool_error("last dead letter"))
        }
        .boxed()
    }

    fn take_out<'a>(
        &'a self,
        leaving: &'a [Leaving],
        note: &'a Note<'a>,
    ) -> BoxFuture<'a, Result<u64>> {
        async move {
            let mut transaction = self.begin_immediate(OPERATION).await?;
            let mut count = 0;
            for told in leaving {
                if self.free(&mut transaction, note, told).await?
                    && self.remove_entry(&mut transaction, note, told).await?
                {
                    self.note(&mut transaction, None, note, told).await?;
                    count += 1;
                }
            }
            transaction
                .commit()
                .await
                .map_err(self.pool_error(OPERATION))?;
            Ok(count)
        }
        .boxed()
    }

    fn replace<'a>(
        &'a self,
        old: &'a Leaving,
        new: &'a Outgoing,
        note: &'a Note<'a>,
    ) -> BoxFuture<'a, Result<Option<i64>>> {
        async move {
            let mut transaction = self.begin_immediate(OPERATION).await?;
            if !self.free(&mut transaction, note, old).await?
                || !self.remove_entry(&mut transaction, note, old).await?
            {
                transaction
                    .rollback()
                    .await
                    .map_err(self.pool_error(OPERATION))?;
                return Ok(None);
            }
            let position = self.insert_entry(&mut transaction, new).await?;
            self.note(&mut transaction, None, note, old).await?;
            transaction
                .commit()
                .await
                .map_err(self.pool_error(OPERATION))?;
            Ok(Some(position))
        }
        .boxed()
    }

    fn may_have_sent<'a>(
        &'a self,
        consumer: &'a str,
        position: i64,
    ) -> BoxFuture<'a, Result<Option<i64>>> {
        async move {
            sqlx::query_scalar(self.sql.redrive.may_have_sent.clone())
                .bind(consumer)
                .bind(position)
                .fetch_optional(&self.pool)
                .await
                .map_err(self.pool_error("find a run"))
        }
        .boxed()
    }

    fn enter<'a>(
        &'a self,
        new: &'a Outgoing,
        told: &'a Leaving,
        note: &'a Note<'a>,
    ) -> BoxFuture<'a, Result<i64>> {
        async move {
            let mut transaction = self.begin_immediate(OPERATION).await?;
            let entered: Option<i64> = sqlx::query_scalar(self.sql.redrive.entered.clone())
                .bind(note.consumer)
                .bind(without_nul(new.message.id.as_str()))
                .fetch_optional(transaction.connection())
                .await
                .map_err(self.pool_error(OPERATION))?;
            if let Some(position) = entered {
                // An earlier call has done it.
                let rolled_back = transaction.rollback().await;
                rolled_back.map_err(self.pool_error(OPERATION))?;
                return Ok(position);
            }
            let position = self.insert_entry(&mut transaction, new).await?;
            self.note(&mut transaction, None, note, told).await?;
            transaction
                .commit()
                .await
                .map_err(self.pool_error(OPERATION))?;
            Ok(position)
        }
        .boxed()
    }

    fn plan<'a>(&'a self, run: &'a NewRun<'a>) -> BoxFuture<'a, Result<RunRow>> {
        async move {
            let row = sqlx::query(self.sql.redrive.plan.clone())
                .bind(run.consumer)
                .bind(run.operator)
                .bind(run.plan)
                .bind(run.end)
                .fetch_one(&self.pool)
                .await
                .map_err(self.pool_error("plan a redrive"))?;
            run_row(&row)
        }
        .boxed()
    }

    fn find_run<'a>(&'a self, consumer: &'a str, id: i64) -> BoxFuture<'a, Result<Option<RunRow>>> {
        async move {
            let row = sqlx::query(self.sql.redrive.find_run.clone())
                .bind(consumer)
                .bind(id)
                .fetch_optional(&self.pool)
                .await
                .map_err(self.pool_error("find a run"))?;
            row.as_ref().map(run_row).transpose()
        }
        .boxed()
    }

    fn runs<'a>(
        &'a self,
        consumer: &'a str,
        before: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<RunRow>>> {
        async move {
            let rows = sqlx::query(self.sql.redrive.runs.clone())
                .bind(consumer)
                .bind(before)
                .bind(limit(count_max))
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("list runs"))?;
            rows.iter().map(run_row).collect()
        }
        .boxed()
    }

    fn take_run<'a>(
        &'a self,
        consumer: &'a str,
        id: i64,
        from: &'a [RunState],
    ) -> BoxFuture<'a, Result<Option<RunRow>>> {
        async move {
            let states = json(from.iter().map(|state| Value::from(state.as_str())));
            let row = sqlx::query(self.sql.redrive.take_run.clone())
                .bind(consumer)
                .bind(id)
                .bind(states)
                .fetch_optional(&self.pool)
                .await
                .map_err(self.pool_error("take a run"))?;
            row.as_ref().map(run_row).transpose()
        }
        .boxed()
    }

    fn take_in_hand<'a>(
        &'a self,
        run: &'a RunRow,
        positions: &'a [i64],
    ) -> BoxFuture<'a, Result<Option<Vec<i64>>>> {
        async move {
            let failed = self.pool_error("go on with a run");
            let mut transaction = self.begin_immediate("go on with a run").await?;
            let positions = numbers(positions);
            let fenced = sqlx::query(self.sql.redrive.take_in_hand.clone())
                .bind(run.id)
                .bind(run.token)
                .bind(&positions)
                .execute(transaction.connection())
                .await
                .map_err(&failed)?;
            if fenced.rows_affected() == 0 {
                transaction.rollback().await.map_err(&failed)?;
                return Ok(None);
            }
            let there = sqlx::query_scalar(self.sql.redrive.there.clone())
                .bind(&positions)
                .bind(&run.consumer)
                .fetch_all(transaction.connection())
                .await
                .map_err(&failed)?;
            transaction.commit().await.map_err(&failed)?;
            Ok(Some(there))
        }
        .boxed()
    }

    fn settle_run<'a>(&'a self, run: &'a RunRow, step: &'a RunStep) -> BoxFuture<'a, Result<bool>> {
        async move {
            let failed = self.pool_error("settle a redrive");
            let mut transaction = self.begin_immediate("settle a redrive").await?;
            let advanced = sqlx::query(self.sql.redrive.advance.clone())
                .bind(run.id)
                .bind(run.token)
                .bind(step.cursor)
                .bind(number(step.sent))
                .bind(number(step.refused))
                .bind(number(step.rejected))
                .bind(step.proved)
                .bind(numbers(&step.in_hand))
                .execute(transaction.connection())
                .await
                .map_err(&failed)?;
            if advanced.rows_affected() == 0 {
                transaction.rollback().await.map_err(&failed)?;
                return Ok(false);
            }
            let note = Note {
                consumer: &run.consumer,
                operator: &step.operator,
                verb: "redrive",
            };
            for told in &step.leaving {
                if told.outcome.is_leaving() {
                    self.remove_entry(&mut transaction, &note, told).await?;
                }
                self.note(&mut transaction, Some(run.id), &note, told)
                    .await?;
            }
            transaction.commit().await.map_err(&failed)?;
            Ok(true)
        }
        .boxed()
    }

    fn end_run<'a>(
        &'a self,
        run: &'a RunRow,
        state: RunState,
        error: Option<&'a str>,
    ) -> BoxFuture<'a, Result<bool>> {
        async move {
            let ended = sqlx::query(self.sql.redrive.end_run.clone())
                .bind(run.id)
                .bind(run.token)
                .bind(state.as_str())
                .bind(error.map(without_nul))
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("end a run"))?;
            Ok(ended.rows_affected() > 0)
        }
        .boxed()
    }

    fn cancel_run<'a>(
        &'a self,
        consumer: &'a str,
        id: i64,
        because: &'a str,
    ) -> BoxFuture<'a, Result<bool>> {
        async move {
            let cancelled = sqlx::query(self.sql.redrive.cancel_run.clone())
                .bind(consumer)
                .bind(id)
                .bind(without_nul(because))
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("cancel a run"))?;
            Ok(cancelled.rows_affected() > 0)
        }
        .boxed()
    }

    fn audit<'a>(
        &'a self,
        consumer: &'a str,
        after: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<AuditEntry>>> {
        async move {
            let rows = sqlx::query(self.sql.redrive.audit.clone())
                .bind(consumer)
                .bind(after)
                .bind(limit(count_max))
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("list the audit"))?;
            rows.iter().map(audited).collect()
        }
        .boxed()
    }

    fn clean_up_audit<'a>(
        &'a self,
        consumer: &'a str,
        age: Duration,
        rows_max: usize,
    ) -> BoxFuture<'a, Result<u64>> {
        async move {
            let mut most = 0;
            let redrive = &self.sql.redrive;
            for sql in [&redrive.clean_up_audit, &redrive.clean_up_runs] {
                let deleted = sqlx::query(sql.clone())
                    .bind(consumer)
                    .bind(micros(age))
                    .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
                    .execute(&self.pool)
                    .await
                    .map_err(self.pool_error("clean up the audit"))?;
                most = most.max(deleted.rows_affected());
            }
            Ok(most)
        }
        .boxed()
    }
}

const OPERATION: &str = "change dead letters";

/// Binds the filter, the range of positions and the number of rows: `?1` to `?13`.
fn matching<'q>(
    sql: SqlStr,
    consumer: &'q str,
    filter: &'q LetterFilter,
    range: (i64, i64),
    count_max: usize,
) -> Query<'q, Sqlite, SqliteArguments> {
    let (after, last) = filter.range(range);
    sqlx::query(sql)
        .bind(consumer)
        .bind(filter.reason.as_ref().map(Reason::as_str))
        .bind(filter.event_type.as_deref())
        .bind(filter.key.as_deref())
        .bind(filter.message_id.as_ref().map(MessageId::as_str))
        .bind(filter.stored_from.map(unix_micros))
        .bind(filter.stored_until.map(unix_micros))
        .bind(i64::from(filter.redrives_min))
        .bind(i64::from(filter.redrives_max))
        .bind(filter.error.as_deref())
        .bind(after)
        .bind(last)
        .bind(limit(count_max))
}

fn numbers(positions: &[i64]) -> String {
    json(positions.iter().copied().map(Value::from))
}

fn limit(count_max: usize) -> i64 {
    i64::try_from(count_max.min(LETTERS_MAX)).unwrap_or(i64::MAX)
}

fn number(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
