//! The waiting room. Its statements run on the relay's connections: none of those that handlers use, and with the planner
//! settings and the isolation level that they stand on.

mod borrowed;
mod rows;

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

use self::borrowed::Borrowed;
use self::rows::{both, bound, duration, read_claimed, read_entry, read_story, with_message};
use super::{ACQUIRE_TIMEOUT, PostgresStore, bounded, error, micros};
use crate::error::Result;
use crate::store::header_codec::without_nul;
use crate::store::{
    Claim, Claims, Finished, Line, Noted, ReleaseAs, Waiting, WaitingEntry, WaitingState,
    WaitingStore,
};
use crate::story::Reason;

impl PostgresStore {
    async fn borrow(&self) -> Result<Borrowed, sqlx::Error> {
        Ok(Borrowed::new(self.relay_pool().acquire().await?))
    }

    /// Locks the last of a line, so that it does not end unseen. Whether there is one.
    async fn lock_last(
        &self,
        connection: &mut PgConnection,
        consumer: &str,
        line: Line,
    ) -> Result<Option<i64>, sqlx::Error> {
        sqlx::query_scalar(self.sql.waiting.lock_last.clone())
            .bind(consumer)
            .bind(line.as_bytes().to_vec())
            .fetch_optional(connection)
            .await
    }

    /// Makes the first of a line behind `position` due.
    async fn promote(
        &self,
        connection: &mut PgConnection,
        consumer: &str,
        line: &[u8],
        position: i64,
        park_to: Option<i64>,
    ) -> Result<bool, sqlx::Error> {
        let promoted = sqlx::query(self.sql.waiting.promote.clone())
            .bind(consumer)
            .bind(line)
            .bind(position)
            .bind(park_to)
            .execute(connection)
            .await?;
        Ok(promoted.rows_affected() > 0)
    }

    async fn put_in_line(
        &self,
        consumer: &str,
        waiting: &Waiting,
        line: Line,
        delay: Duration,
    ) -> Result<(), sqlx::Error> {
        let (sql, identity) = (&self.sql.waiting, waiting.identity());
        let story = &waiting.letter.story;
        // One that fails again, which is more often, needs no more than this.
        let replace = sqlx::query(sql.replace.clone());
        let replace = bound(replace, consumer, identity, delay, story);
        if self.borrow().await?.execute(replace).await? > 0 {
            return Ok(());
        }
        let mut transaction = self.relay_transaction().await?;
        let last = self
            .lock_last(transaction.connection(), consumer, line)
            .await?;
        let insert = match last {
            Some(_) => &sql.insert_behind,
            None => &sql.insert,
        };
        let insert = bound(
            sqlx::query(insert.clone()),
            consumer,
            identity,
            delay,
            story,
        );
        with_message(insert, waiting, Some(line))
            .execute(transaction.connection())
            .await?;
        transaction.commit().await
    }
}

impl WaitingStore for PostgresStore {
    fn check(&self) -> BoxFuture<'_, Result<()>> {
        async move {
            let query = sqlx::query(self.sql.waiting.check.clone());
            let pool = self.relay_pool();
            bounded(pool, "check waiting room", ACQUIRE_TIMEOUT, |c| {
                query.execute(c).boxed()
            })
            .await?;
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
        let put = async move {
            if let Some(line) = waiting.line().filter(|_| in_line) {
                return self.put_in_line(consumer, waiting, line, delay).await;
            }
            let story = &waiting.letter.story;
            let insert = sqlx::query(self.sql.waiting.insert.clone());
            let insert = bound(insert, consumer, waiting.identity(), delay, story);
            let insert = with_message(insert, waiting, None);
            self.borrow().await?.execute(insert).await.map(drop)
        };
        self.relayed_together("put waiting", put).boxed()
    }

    fn occupied<'a>(
        &'a self,
        consumer: &'a str,
        lines: &'a [Line],
    ) -> BoxFuture<'a, Result<Vec<Line>>> {
        async move {
            let wanted: Vec<Vec<u8>> = lines.iter().map(|line| line.as_bytes().to_vec()).collect();
            let query = sqlx::query_scalar(self.sql.waiting.occupied.clone())
                .bind(consumer.to_owned())
                .bind(wanted);
            let found: Vec<Vec<u8>> = self
                .relayed("ask the waiting room", |c| query.fetch_all(c).boxed())
                .await?;
            Ok(found
                .iter()
                .filter_map(|line| Line::from_bytes(line))
                .collect())
        }
        .boxed()
    }

    fn follow<'a>(
        &'a self,
        consumer: &'a str,
        waiting: &'a Waiting,
    ) -> BoxFuture<'a, Result<bool>> {
        let follow = async move {
            let Some(line) = waiting.line() else {
                return Ok(false);
            };
            let mut transaction = self.relay_transaction().await?;
            let connection = transaction.connection();
            if self.lock_last(connection, consumer, line).await?.is_none() {
                transaction.rollback().await?;
                return Ok(false);
            }
            let insert = sqlx::query(self.sql.waiting.insert_behind.clone());
            let (identity, story) = (waiting.identity(), &waiting.letter.story);
            let insert = bound(insert, consumer, identity, Duration::ZERO, story);
            with_message(insert, waiting, Some(line))
                .execute(transaction.connection())
                .await?;
            transaction.commit().await?;
            Ok(true)
        };
        self.relayed_together("follow", follow).boxed()
    }

    fn claim<'a>(
        &'a self,
        consumer: &'a str,
        count_max: usize,
        lease: Duration,
    ) -> BoxFuture<'a, Result<Claims>> {
        async move {
            let query = sqlx::query(self.sql.waiting.claim.clone())
                .bind(consumer.to_owned())
                .bind(i64::try_from(count_max).unwrap_or(i64::MAX))
                .bind(micros(lease));
            let rows = self
                .relayed("claim", |c| query.fetch_all(c).boxed())
                .await?;
            let failed = |e| error::of_statement("claim", e);
            let mut claims = Claims::default();
            for row in &rows {
                let next: Option<i64> = row.try_get(25).map_err(failed)?;
                claims.next_in = next.map(duration);
                if let Some(position) = row.try_get(0).map_err(failed)? {
                    match read_claimed(row, position) {
                        Ok(claimed) => claims.rows.push(claimed),
                        Err(error) => claims.unreadable.push((position, error)),
                    }
                }
            }
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
            let (positions, tokens) = both(claims);
            let query = sqlx::query_as(self.sql.waiting.renew.clone())
                .bind(positions)
                .bind(tokens)
                .bind(micros(lease));
            let rows: Vec<(i64, i64)> = self
                .relayed("renew claims", |c| query.fetch_all(c).boxed())
                .await?;
            let claim = |(position, token)| Claim { position, token };
            Ok(rows.into_iter().map(claim).collect())
        }
        .boxed()
    }

    fn give_back<'a>(&'a self, claims: &'a [Claim], delay: Duration) -> BoxFuture<'a, Result<()>> {
        async move {
            let (positions, tokens) = both(claims);
            let query = sqlx::query(self.sql.waiting.give_back.clone())
                .bind(positions)
                .bind(tokens)
                .bind(micros(delay));
            self.relayed("give back", |c| query.execute(c).boxed())
                .await?;
            Ok(())
        }
        .boxed()
    }

    fn finish(&self, claim: Claim) -> BoxFuture<'_, Result<Finished>> {
        let finish = async move {
            let mut transaction = self.relay_transaction().await?;
            let gone: Option<(String, Option<Vec<u8>>, Option<i64>)> =
                sqlx::query_as(self.sql.waiting.finish.clone())
                    .bind(claim.position)
                    .bind(claim.token)
                    .fetch_optional(transaction.connection())
                    .await?;
            let mut finished = Finished {
                held: gone.is_some(),
                promoted: false,
            };
            // A later statement, which sees who came to stand behind while this one waited for the row.
            if let Some((consumer, Some(line), park_to)) = &gone {
                let connection = transaction.connection();
                finished.promoted = self
                    .promote(connection, consumer, line, claim.position, *park_to)
                    .await?;
            }
            transaction.commit().await?;
            Ok(finished)
        };
        self.relayed_together("finish", finish).boxed()
    }

    fn park(&self, claim: Claim) -> BoxFuture<'_, Result<bool>> {
        async move {
            let query = sqlx::query(self.sql.waiting.park.clone())
                .bind(claim.position)
                .bind(claim.token);
            let parked = self.relayed("park", |c| query.execute(c).boxed()).await?;
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
        let hold = async move {
            let (sql, story) = (&self.sql.waiting, &waiting.letter.story);
            let query = match claim {
                Some(claim) => sqlx::query(sql.hold_claimed.clone())
                    .bind(claim.position)
                    .bind(claim.token)
                    .bind(i64::from(story.retry_count))
                    .bind(story.last_error.as_deref().map(without_nul))
                    .bind(story.reason.as_ref().map(Reason::as_str)),
                None => {
                    let hold = sqlx::query(sql.hold.clone());
                    let hold = bound(hold, consumer, waiting.identity(), Duration::ZERO, story);
                    with_message(hold, waiting, waiting.line())
                }
            };
            self.borrow().await?.execute(query).await.map(drop)
        };
        self.relayed_together("hold", hold).boxed()
    }

    fn release<'a>(
        &'a self,
        consumer: &'a str,
        line: Line,
        how: ReleaseAs,
    ) -> BoxFuture<'a, Result<bool>> {
        let release = async move {
            let sql = &self.sql.waiting;
            let mut transaction = self.relay_transaction().await?;
            // In the order in which a put locks and changes: the last of the line, then its head.
            let connection = transaction.connection();
            let last = self.lock_last(connection, consumer, line).await?;
            let held: Option<i64> = sqlx::query_scalar(sql.held.clone())
                .bind(consumer)
                .bind(line.as_bytes().as_slice())
                .fetch_optional(&mut *connection)
                .await?;
            let park_to = last.filter(|_| how == ReleaseAs::Park);
            if let Some(held) = held {
                // Whoever ends a row ahead of it sees it there, and makes nobody due; so that end is waited for.
                sqlx::query(sql.lock_ahead.clone())
                    .bind(consumer)
                    .bind(line.as_bytes().as_slice())
                    .bind(held)
                    .execute(&mut *connection)
                    .await?;
                let end = match how {
                    ReleaseAs::Retry => &sql.retry,
                    ReleaseAs::Skip | ReleaseAs::Park => &sql.delete,
                };
                sqlx::query(end.clone())
                    .bind(held)
                    .execute(&mut *connection)
                    .await?;
            }
            // A later statement, which sees what was waited for.
            let promoted = self
                .promote(connection, consumer, line.as_bytes(), 0, park_to)
                .await?;
            transaction.commit().await?;
            Ok(held.is_some() || promoted)
        };
        self.relayed_together("release", release).boxed()
    }

    fn note<'a>(
        &'a self,
        consumer: &'a str,
        waiting: &'a Waiting,
        delay: Duration,
    ) -> BoxFuture<'a, Result<()>> {
        let note = async move {
            let (identity, story) = (waiting.note_identity(), &waiting.letter.story);
            let note = sqlx::query(self.sql.waiting.note.clone());
            let note = bound(note, consumer, identity, delay, story);
            let note = with_message(note, waiting, None);
            self.borrow().await?.execute(note).await.map(drop)
        };
        self.relayed_together("note", note).boxed()
    }

    fn recall<'a>(
        &'a self,
        consumer: &'a str,
        identities: &'a [[u8; 16]],
    ) -> BoxFuture<'a, Result<Vec<Noted>>> {
        async move {
            let wanted: Vec<Vec<u8>> = identities.iter().map(|one| one.to_vec()).collect();
            let query = sqlx::query(self.sql.waiting.recall.clone())
                .bind(consumer.to_owned())
                .bind(wanted);
            let rows = self
                .relayed("recall", |c| query.fetch_all(c).boxed())
                .await?;
            let read = |row: &PgRow| -> Result<Noted, sqlx::Error> {
                let identity: &[u8] = row.try_get(0)?;
                Ok(Noted {
                    identity: identity.try_into().unwrap_or_default(),
                    story: read_story(row, 2)?,
                    due_in: duration(row.try_get(1)?),
                })
            };
            let read = |row| read(row).map_err(|e| error::of_statement("recall", e));
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
            let query = sqlx::query(self.sql.waiting.forget.clone())
                .bind(consumer.to_owned())
                .bind(identity.to_vec());
            self.relayed("forget note", |c| query.execute(c).boxed())
                .await?;
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
            let query = sqlx::query(self.sql.waiting.clean_up.clone())
                .bind(consumer.to_owned())
                .bind(micros(age))
                .bind(i64::try_from(rows_max).unwrap_or(i64::MAX));
            let deleted = self
                .relayed("clean up notes", |c| query.execute(c).boxed())
                .await?;
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
            let query = sqlx::query(self.sql.waiting.list.clone())
                .bind(consumer.to_owned())
                .bind(after)
                .bind(state.map(WaitingState::as_str))
                .bind(i64::try_from(count_max).unwrap_or(i64::MAX));
            let rows = self
                .relayed("list waiting", |c| query.fetch_all(c).boxed())
                .await?;
            let read = |row| read_entry(row).map_err(|e| error::of_statement("list waiting", e));
            rows.iter().map(read).collect()
        }
        .boxed()
    }

    fn count<'a>(&'a self, consumer: &'a str) -> BoxFuture<'a, Result<Vec<(WaitingState, u64)>>> {
        async move {
            let query = sqlx::query_as(self.sql.waiting.count.clone()).bind(consumer.to_owned());
            let counted: Vec<(String, i64)> = self
                .relayed("count waiting", |c| query.fetch_all(c).boxed())
                .await?;
            let read = |(state, count): (String, i64)| {
                let state = WaitingState::read(&state)?;
                Some((state, u64::try_from(count).unwrap_or(0)))
            };
            Ok(counted.into_iter().filter_map(read).collect())
        }
        .boxed()
    }
}
