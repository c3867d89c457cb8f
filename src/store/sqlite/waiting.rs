//! The waiting room.

mod rows;

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, Sqlite};

use self::rows::{bound, duration, hex, pairs, read_claimed, read_entry, read_story, with_message};
use super::{SqliteStore, error, json, micros};
use crate::error::Result;
use crate::store::header_codec::without_nul;
use crate::store::{
    Claim, Claims, Finished, Line, Noted, ReleaseAs, StoreTransaction, Waiting, WaitingEntry,
    WaitingState, WaitingStore,
};
use crate::story::Reason;

impl SqliteStore {
    /// Makes the first of a line behind `position` due.
    async fn promote(
        &self,
        transaction: &mut StoreTransaction<Sqlite>,
        consumer: &str,
        line: &[u8],
        position: i64,
        park_to: Option<i64>,
    ) -> Result<bool> {
        let promoted = sqlx::query(self.sql.waiting.promote.clone())
            .bind(consumer)
            .bind(line)
            .bind(position)
            .bind(park_to)
            .execute(transaction.connection())
            .await
            .map_err(self.pool_error("promote"))?;
        Ok(promoted.rows_affected() > 0)
    }
}

impl WaitingStore for SqliteStore {
    fn check(&self) -> BoxFuture<'_, Result<()>> {
        async move {
            sqlx::query(self.sql.waiting.check.clone())
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("check waiting room"))?;
            Ok(())
        }
        .boxed()
    }

    fn put<'a>(
        &'a self,
        consumer: &'a str,
        waiting: &'a Waiting,
        in_line: bool,
        delay: Duration,
    ) -> BoxFuture<'a, Result<()>> {
        async move {
            let failed = self.pool_error("put waiting");
            let (sql, identity) = (&self.sql.waiting, waiting.identity());
            let story = &waiting.letter.story;
            let mut transaction = self.begin_immediate("put waiting").await?;
            let replace = sqlx::query(sql.replace.clone());
            let replaced = bound(replace, consumer, identity, delay, story)
                .execute(transaction.connection())
                .await
                .map_err(&failed)?;
            if replaced.rows_affected() == 0 {
                let insert = sqlx::query(sql.insert.clone());
                let insert = bound(insert, consumer, identity, delay, story);
                with_message(insert, waiting, waiting.line().filter(|_| in_line))
                    .execute(transaction.connection())
                    .await
                    .map_err(&failed)?;
            }
            transaction.commit().await.map_err(&failed)
        }
        .boxed()
    }

    fn occupied<'a>(
        &'a self,
        consumer: &'a str,
        lines: &'a [Line],
    ) -> BoxFuture<'a, Result<Vec<Line>>> {
        async move {
            let list = json(lines.iter().map(|line| hex(line.as_bytes()).into()));
            let found: Vec<String> = sqlx::query_scalar(self.sql.waiting.occupied.clone())
                .bind(consumer)
                .bind(list)
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("ask the waiting room"))?;
            let is_found = |line: &&Line| found.contains(&hex(line.as_bytes()));
            Ok(lines.iter().filter(is_found).copied().collect())
        }
        .boxed()
    }

    fn follow<'a>(
        &'a self,
        consumer: &'a str,
        waiting: &'a Waiting,
    ) -> BoxFuture<'a, Result<bool>> {
        async move {
            let failed = self.pool_error("follow");
            let Some(line) = waiting.line() else {
                return Ok(false);
            };
            let mut transaction = self.begin_immediate("follow").await?;
            let occupied: bool = sqlx::query_scalar(self.sql.waiting.is_occupied.clone())
                .bind(consumer)
                .bind(line.as_bytes().as_slice())
                .fetch_one(transaction.connection())
                .await
                .map_err(&failed)?;
            if occupied {
                let insert = sqlx::query(self.sql.waiting.insert_behind.clone());
                let (identity, story) = (waiting.identity(), &waiting.letter.story);
                let insert = bound(insert, consumer, identity, Duration::ZERO, story);
                with_message(insert, waiting, Some(line))
                    .execute(transaction.connection())
                    .await
                    .map_err(&failed)?;
            }
            transaction.commit().await.map_err(&failed)?;
            Ok(occupied)
        }
        .boxed()
    }

    fn claim<'a>(
        &'a self,
        consumer: &'a str,
        count_max: usize,
        lease: Duration,
    ) -> BoxFuture<'a, Result<Claims>> {
        async move {
            let failed = self.pool_error("claim");
            let sql = &self.sql.waiting;
            let mut claims = Claims::default();
            // A look first: nobody is to hold the only write lock for nothing.
            let next = || {
                let next = sqlx::query_scalar(sql.next.clone()).bind(consumer);
                next.fetch_one(&self.pool)
            };
            let due_in: Option<i64> = next().await.map_err(&failed)?;
            if due_in.is_none_or(|micros| micros > 0) {
                claims.next_in = due_in.map(duration);
                return Ok(claims);
            }
            let rows = sqlx::query(sql.claim.clone())
                .bind(consumer)
                .bind(i64::try_from(count_max).unwrap_or(i64::MAX))
                .bind(micros(lease))
                .fetch_all(&self.pool)
                .await
                .map_err(&failed)?;
            for row in &rows {
                match read_claimed(row) {
                    Ok(claimed) => claims.rows.push(claimed),
                    Err(unreadable) => claims.unreadable.push(unreadable),
                }
            }
            claims
                .rows
                .sort_by_key(|row| (std::cmp::Reverse(row.late), row.claim.position));
            let due_in: Option<i64> = next().await.map_err(&failed)?;
            claims.next_in = due_in.map(duration);
            Ok(claims)
        }
        .boxed()
    }

    fn renew<'a>(
        &'a self,
        claims: &'a [Claim],
        lease: Duration,
    ) -> BoxFuture<'a, Result<Vec<Claim>>> {
        async move {
            let rows: Vec<(i64, i64)> = sqlx::query_as(self.sql.waiting.renew.clone())
                .bind(pairs(claims))
                .bind(micros(lease))
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("renew claims"))?;
            let claim = |(position, token)| Claim { position, token };
            Ok(rows.into_iter().map(claim).collect())
        }
        .boxed()
    }

    fn give_back<'a>(&'a self, claims: &'a [Claim], delay: Duration) -> BoxFuture<'a, Result<()>> {
        async move {
            sqlx::query(self.sql.waiting.give_back.clone())
                .bind(pairs(claims))
                .bind(micros(delay))
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("give back"))?;
            Ok(())
        }
        .boxed()
    }

    fn finish(&self, claim: Claim) -> BoxFuture<'_, Result<Finished>> {
        async move {
            let failed = self.pool_error("finish");
            let mut transaction = self.begin_immediate("finish").await?;
            let gone: Option<(String, Option<Vec<u8>>, Option<i64>)> =
                sqlx::query_as(self.sql.waiting.finish.clone())
                    .bind(claim.position)
                    .bind(claim.token)
                    .fetch_optional(transaction.connection())
                    .await
                    .map_err(&failed)?;
            let mut finished = Finished {
                held: gone.is_some(),
                promoted: false,
            };
            if let Some((consumer, Some(line), park_to)) = &gone {
                let transaction = &mut transaction;
                finished.promoted = self
                    .promote(transaction, consumer, line, claim.position, *park_to)
                    .await?;
            }
            transaction.commit().await.map_err(&failed)?;
            Ok(finished)
        }
        .boxed()
    }

    fn park(&self, claim: Claim) -> BoxFuture<'_, Result<bool>> {
        async move {
            let parked = sqlx::query(self.sql.waiting.park.clone())
                .bind(claim.position)
                .bind(claim.token)
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("park"))?;
            Ok(parked.rows_affected() > 0)
        }
        .boxed()
    }

    fn hold<'a>(
        &'a self,
        consumer: &'a str,
        waiting: &'a Waiting,
        claim: Option<Claim>,
    ) -> BoxFuture<'a, Result<()>> {
        async move {
            let story = &waiting.letter.story;
            let held = match claim {
                Some(claim) => {
                    sqlx::query(self.sql.waiting.hold_claimed.clone())
                        .bind(claim.position)
                        .bind(claim.token)
                        .bind(i64::from(story.retry_count))
                        .bind(story.last_error.as_deref().map(without_nul))
                        .bind(story.reason.as_ref().map(Reason::as_str))
                        .execute(&self.pool)
                        .await
                }
                None => {
                    let hold = sqlx::query(self.sql.waiting.hold.clone());
                    let hold = bound(hold, consumer, waiting.identity(), Duration::ZERO, story);
                    let hold = with_message(hold, waiting, waiting.line());
                    hold.execute(&self.pool).await
                }
            };
            held.map(drop).map_err(self.pool_error("hold"))
        }
        .boxed()
    }

    fn release<'a>(
        &'a self,
        consumer: &'a str,
        line: Line,
        how: ReleaseAs,
    ) -> BoxFuture<'a, Result<bool>> {
        async move {
            let failed = self.pool_error("release");
            let sql = &self.sql.waiting;
            let line = line.as_bytes().as_slice();
            let mut transaction = self.begin_immediate("release").await?;
            let held: Option<i64> = sqlx::query_scalar(sql.held.clone())
                .bind(consumer)
                .bind(line)
                .fetch_optional(transaction.connection())
                .await
                .map_err(&failed)?;
            let last: Option<i64> = sqlx::query_scalar(sql.last.clone())
                .bind(consumer)
                .bind(line)
                .fetch_one(transaction.connection())
                .await
                .map_err(&failed)?;
            let park_to = last.filter(|_| how == ReleaseAs::Park);
            if let Some(held) = held {
                let end = match how {
                    ReleaseAs::Retry => &sql.retry,
                    ReleaseAs::Skip | ReleaseAs::Park => &sql.delete,
                };
                sqlx::query(end.clone())
                    .bind(held)
                    .execute(transaction.connection())
                    .await
                    .map_err(&failed)?;
            }
            let promoted = self
                .promote(&mut transaction, consumer, line, 0, park_to)
                .await?;
            transaction.commit().await.map_err(&failed)?;
            Ok(held.is_some() || promoted)
        }
        .boxed()
    }

    fn note<'a>(
        &'a self,
        consumer: &'a str,
        waiting: &'a Waiting,
        delay: Duration,
    ) -> BoxFuture<'a, Result<()>> {
        async move {
            let note = sqlx::query(self.sql.waiting.note.clone());
            let (identity, story) = (waiting.note_identity(), &waiting.letter.story);
            let note = bound(note, consumer, identity, delay, story);
            with_message(note, waiting, None)
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("note"))?;
            Ok(())
        }
        .boxed()
    }

    fn recall<'a>(
        &'a self,
        consumer: &'a str,
        identities: &'a [[u8; 16]],
    ) -> BoxFuture<'a, Result<Vec<Noted>>> {
        async move {
            let rows = sqlx::query(self.sql.waiting.recall.clone())
                .bind(consumer)
                .bind(json(identities.iter().map(|identity| hex(identity).into())))
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("recall"))?;
            let read = |row: &SqliteRow| {
                let failed = |e| error::of_statement("recall", e);
                let identity: &[u8] = row.try_get(0).map_err(failed)?;
                Ok(Noted {
                    identity: identity.try_into().unwrap_or_default(),
                    story: read_story(row, 2)?,
                    due_in: duration(row.try_get(1).map_err(failed)?),
                })
            };
            rows.iter().map(read).collect()
        }
        .boxed()
    }

    fn forget<'a>(
        &'a self,
        consumer: &'a str,
        identity: &'a [u8; 16],
    ) -> BoxFuture<'a, Result<()>> {
        async move {
            sqlx::query(self.sql.waiting.forget.clone())
                .bind(consumer)
                .bind(identity.as_slice())
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("forget note"))?;
            Ok(())
        }
        .boxed()
    }

    fn clean_up<'a>(
        &'a self,
        consumer: &'a str,
        age: Duration,
        rows_max: usize,
    ) -> BoxFuture<'a, Result<u64>> {
        async move {
            let deleted = sqlx::query(self.sql.waiting.clean_up.clone())
                .bind(consumer)
                .bind(micros(age))
                .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("clean up notes"))?;
            Ok(deleted.rows_affected())
        }
        .boxed()
    }

    fn list<'a>(
        &'a self,
        consumer: &'a str,
        state: Option<WaitingState>,
        after: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<WaitingEntry>>> {
        async move {
            let rows = sqlx::query(self.sql.waiting.list.clone())
                .bind(consumer)
                .bind(after)
                .bind(state.map(WaitingState::as_str))
                .bind(i64::try_from(count_max).unwrap_or(i64::MAX))
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("list waiting"))?;
            rows.iter().map(read_entry).collect()
        }
        .boxed()
    }

    fn count<'a>(&'a self, consumer: &'a str) -> BoxFuture<'a, Result<Vec<(WaitingState, u64)>>> {
        async move {
            let counted: Vec<(String, i64)> = sqlx::query_as(self.sql.waiting.count.clone())
                .bind(consumer)
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("count waiting"))?;
            let read = |(state, count): (String, i64)| {
                let state = WaitingState::read(&state)?;
                Some((state, u64::try_from(count).unwrap_or(0)))
            };
            Ok(counted.into_iter().filter_map(read).collect())
        }
        .boxed()
    }
}
