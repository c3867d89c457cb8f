//! What an operator does with dead letters: most calls are one statement, and so one transaction.

mod binds;
mod rows;

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use sqlx::{Postgres, Row};

use self::binds::{Columns, limit, listed, matching, noted, number};
use self::rows::{audited, entry, run_row};
use super::dead_letters::bound;
use super::{PostgresStore, error, micros, read_message};
use crate::envelope::Outgoing;
use crate::error::Result;
use crate::store::header_codec::without_nul;
use crate::store::{
    Arrival, AuditEntry, Leaving, LetterEntry, LetterFilter, NewRun, Note, RedriveStore, RunRow,
    RunState, RunStep, StoreTransaction, WholeLetter,
};

const OPERATION: &str = "change dead letters";

impl RedriveStore for PostgresStore {
    fn take_in<'a>(&'a self, letter: &'a Outgoing) -> BoxFuture<'a, Result<Arrival>> {
        async move {
            let failed = self.pool_error("take in");
            let mut transaction = self.pool.begin().await.map_err(&failed)?;
            let row = bound(&self.sql.redrive.take_in, letter)
                .fetch_one(&mut *transaction)
                .await
                .map_err(&failed)?;
            let read = || Ok((row.try_get(0)?, row.try_get(1)?));
            let (stored, left): (Option<i64>, bool) =
                read().map_err(|e| error::of_statement("take in", e))?;
            let Some(position) = stored else {
                transaction.rollback().await.map_err(&failed)?;
                return Ok(if left { Arrival::Left } else { Arrival::Known });
            };
            // It may have waited for the same letter to leave, which its own view of the audit is too old to know.
            let left_again = sqlx::query(self.sql.redrive.leave_again.clone())
                .bind(position)
                .execute(&mut *transaction)
                .await
                .map_err(&failed)?;
            transaction.commit().await.map_err(&failed)?;
            Ok(match left_again.rows_affected() {
                0 => Arrival::Stored,
                _ => Arrival::Left,
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
            let query = matching(sql, consumer, filter, range, count_max);
            let rows = self
                .relayed("list dead letters", |c| query.fetch_all(c).boxed())
                .await?;
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
            let query = matching(sql, consumer, filter, range, count_max)
                .bind(i64::try_from(bytes_max).unwrap_or(i64::MAX));
            let rows = self
                .relayed("read dead letters", |c| query.fetch_all(c).boxed())
                .await?;
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
            let query = sqlx::query_scalar(self.sql.redrive.last.clone());
            self.relayed("last dead letter", |c| query.fetch_one(c).boxed())
                .await
        }
        .boxed()
    }

    fn take_out<'a>(
        &'a self,
        leaving: &'a [Leaving],
        note: &'a Note<'a>,
    ) -> BoxFuture<'a, Result<u64>> {
        let take_out = async move {
            let query = sqlx::query(self.sql.redrive.take_out.clone())
                .bind(note.consumer.to_owned())
                .bind(note.operator.to_owned())
                .bind(note.verb.to_owned());
            let query = listed(query, leaving);
            let mut transaction = self.alone(note.consumer).await?;
            let left = query.execute(transaction.connection()).await?;
            transaction.commit().await?;
            Ok(left.rows_affected())
        };
        self.relayed_together(OPERATION, take_out).boxed()
    }

    fn replace<'a>(
        &'a self,
        old: &'a Leaving,
        new: &'a Outgoing,
        note: &'a Note<'a>,
    ) -> BoxFuture<'a, Result<Option<i64>>> {
        let replace = async move {
            let query = bound(&self.sql.redrive.replace, new).bind(old.position);
            let mut transaction = self.alone(note.consumer).await?;
            let row = noted(query, note, old)
                .fetch_optional(transaction.connection())
                .await?;
            transaction.commit().await?;
            row.map(|row| row.try_get(0)).transpose()
        };
        self.relayed_together(OPERATION, replace).boxed()
    }

    fn may_have_sent<'a>(
        &'a self,
        consumer: &'a str,
        position: i64,
    ) -> BoxFuture<'a, Result<Option<i64>>> {
        async move {
            let query = sqlx::query_scalar(self.sql.redrive.may_have_sent.clone())
                .bind(consumer.to_owned())
                .bind(position);
            self.relayed("find a run", |c| query.fetch_optional(c).boxed())
                .await
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
            let failed = self.pool_error(OPERATION);
            let row = noted(bound(&self.sql.redrive.enter, new), note, told)
                .fetch_optional(&self.pool)
                .await
                .map_err(&failed)?;
            if let Some(row) = row {
                let position = row.try_get(0);
                return position.map_err(|e| error::of_statement(OPERATION, e));
            }
            // An earlier call has done it.
            sqlx::query_scalar(self.sql.redrive.entered.clone())
                .bind(note.consumer)
                .bind(without_nul(new.message.id.as_str()))
                .fetch_one(&self.pool)
                .await
                .map_err(&failed)
        }
        .boxed()
    }

    fn plan<'a>(&'a self, run: &'a NewRun<'a>) -> BoxFuture<'a, Result<RunRow>> {
        async move {
            let query = sqlx::query(self.sql.redrive.plan.clone())
                .bind(run.consumer.to_owned())
                .bind(run.operator.to_owned())
                .bind(run.plan.to_owned())
                .bind(run.end);
            let row = self
                .relayed("plan a redrive", |c| query.fetch_one(c).boxed())
                .await?;
            run_row(&row)
        }
        .boxed()
    }

    fn find_run<'a>(&'a self, consumer: &'a str, id: i64) -> BoxFuture<'a, Result<Option<RunRow>>> {
        async move {
            let query = sqlx::query(self.sql.redrive.find_run.clone())
                .bind(consumer.to_owned())
                .bind(id);
            let row = self
                .relayed("find a run", |c| query.fetch_optional(c).boxed())
                .await?;
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
            let query = sqlx::query(self.sql.redrive.runs.clone())
                .bind(consumer.to_owned())
                .bind(before)
                .bind(limit(count_max));
            let rows = self
                .relayed("list runs", |c| query.fetch_all(c).boxed())
                .await?;
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
            let states: Vec<String> = from.iter().map(|state| state.as_str().to_owned()).collect();
            let query = sqlx::query(self.sql.redrive.take_run.clone())
                .bind(consumer.to_owned())
                .bind(id)
                .bind(states);
            let row = self
                .relayed("take a run", |c| query.fetch_optional(c).boxed())
                .await?;
            row.as_ref().map(run_row).transpose()
        }
        .boxed()
    }

    fn take_in_hand<'a>(
        &'a self,
        run: &'a RunRow,
        positions: &'a [i64],
    ) -> BoxFuture<'a, Result<Option<Vec<i64>>>> {
        let take_in_hand = async move {
            let mut transaction = self.alone(&run.consumer).await?;
            let fenced = sqlx::query(self.sql.redrive.take_in_hand.clone())
                .bind(run.id)
                .bind(run.token)
                .bind(positions)
                .execute(transaction.connection())
                .await?;
            if fenced.rows_affected() == 0 {
                transaction.rollback().await?;
                return Ok(None);
            }
            let there = sqlx::query_scalar(self.sql.redrive.there.clone())
                .bind(positions)
                .bind(&run.consumer)
                .fetch_all(transaction.connection())
                .await?;
            transaction.commit().await?;
            Ok(Some(there))
        };
        self.relayed_together(OPERATION, take_in_hand).boxed()
    }

    fn settle_run<'a>(&'a self, run: &'a RunRow, step: &'a RunStep) -> BoxFuture<'a, Result<bool>> {
        async move {
            let query = sqlx::query_scalar(self.sql.redrive.settle.clone())
                .bind(run.id)
                .bind(run.token)
                .bind(step.cursor)
                .bind(number(step.sent))
                .bind(number(step.refused))
                .bind(number(step.rejected))
                .bind(step.proved);
            let Columns {
                positions,
                ids,
                redrives,
                digests,
                outcomes,
                details,
            } = Columns::of(&step.leaving);
            let query = query
                .bind(positions)
                .bind(ids)
                .bind(redrives)
                .bind(digests)
                .bind(outcomes)
                .bind(details)
                .bind(step.operator.clone())
                .bind(step.in_hand.clone());
            let fenced: i64 = self
                .relayed("settle a redrive", |c| query.fetch_one(c).boxed())
                .await?;
            Ok(fenced > 0)
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
            let query = sqlx::query(self.sql.redrive.end_run.clone())
                .bind(run.id)
                .bind(run.token)
                .bind(state.as_str())
                .bind(error.map(|error| without_nul(error).into_owned()));
            let ended = self
                .relayed("end a run", |c| query.execute(c).boxed())
                .await?;
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
            let query = sqlx::query(self.sql.redrive.cancel_run.clone())
                .bind(consumer.to_owned())
                .bind(id)
                .bind(without_nul(because).into_owned());
            let cancelled = self
                .relayed("cancel a run", |c| query.execute(c).boxed())
                .await?;
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
            let query = sqlx::query(self.sql.redrive.audit.clone())
                .bind(consumer.to_owned())
                .bind(after)
                .bind(limit(count_max));
            let rows = self
                .relayed("list the audit", |c| query.fetch_all(c).boxed())
                .await?;
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
                let query = sqlx::query(sql.clone())
                    .bind(consumer.to_owned())
                    .bind(micros(age))
                    .bind(i64::try_from(rows_max).unwrap_or(i64::MAX));
                let deleted = self
                    .relayed("clean up the audit", |c| query.execute(c).boxed())
                    .await?;
                most = most.max(deleted.rows_affected());
            }
            Ok(most)
        }
        .boxed()
    }
}

impl PostgresStore {
    /// A transaction in which nobody else takes entries of this consumer in hand, or changes them.
    async fn alone(&self, consumer: &str) -> Result<StoreTransaction<Postgres>, sqlx::Error> {
        let mut transaction = self.relay_transaction().await?;
        sqlx::query(self.sql.redrive.lock.clone())
            .bind(consumer)
            .execute(transaction.connection())
            .await?;
        Ok(transaction)
    }
}
