//! The waiting room.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Row, Sqlite};

use super::{SqliteStore, error, instant, json, micros, read_message, size};
use crate::clock::unix_micros;
use crate::envelope::Outgoing;
use crate::error::Result;
use crate::message::MessageId;
use crate::store::header_codec::{self, without_nul};
use crate::store::{
    Claim, Claimed, Claims, Finished, Line, Noted, ReleaseAs, StoreTransaction, Waiting,
    WaitingEntry, WaitingState, WaitingStore,
};
use crate::story::{Origin, Reason, Story};

type Bound<'q> = Query<'q, Sqlite, SqliteArguments>;

/// Binds the parameters 1 to 13.
fn bound<'q>(
    query: Bound<'q>,
    consumer: &'q str,
    identity: [u8; 16],
    delay: Duration,
    story: &'q Story,
) -> Bound<'q> {
    let text = |text: &'q Option<String>| text.as_deref().map(without_nul);
    let origin = story.origin.as_ref();
    query
        .bind(consumer)
        .bind(identity.to_vec())
        .bind(micros(delay))
        .bind(i64::from(story.redrive_count))
        .bind(story.reason.as_ref().map(Reason::as_str))
        .bind(i64::from(story.retry_count))
        .bind(story.first_failed_at.map(unix_micros))
        .bind(story.last_failed_at.map(unix_micros))
        .bind(text(&story.last_error))
        .bind(origin.map(|origin| without_nul(&origin.topic)))
        .bind(origin.and_then(|origin| text(&origin.partition)))
        .bind(origin.and_then(|origin| text(&origin.offset)))
        .bind(text(&story.consumer))
}

/// Binds the parameters 14 to 25.
fn with_message<'q>(query: Bound<'q>, waiting: &'q Waiting, line: Option<Line>) -> Bound<'q> {
    let message = &waiting.letter.message;
    query
        .bind(line.map(|line| line.as_bytes().to_vec()))
        .bind(without_nul(&waiting.source))
        .bind(without_nul(message.id.as_str()))
        .bind(without_nul(&message.destination))
        .bind(message.key.as_deref())
        .bind(without_nul(&message.event_type))
        .bind(message.content_type.as_deref().map(without_nul))
        .bind(header_codec::encode(message))
        .bind(message.payload.as_deref())
        .bind(message.version)
        .bind(unix_micros(message.occurred_at))
        .bind(size(message))
}

fn pairs(claims: &[Claim]) -> String {
    json(
        claims
            .iter()
            .map(|claim| vec![claim.position, claim.token].into()),
    )
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads the columns of a story, of which the first has number `first`.
fn read_story(row: &SqliteRow, first: usize) -> Result<Story> {
    let columns = || -> Result<(Story, [Option<i64>; 2]), sqlx::Error> {
        let count = |count: i64| u32::try_from(count).unwrap_or(u32::MAX);
        let reason: Option<&str> = row.try_get(first + 1)?;
        let topic: Option<String> = row.try_get(first + 6)?;
        let (partition, offset) = (row.try_get(first + 7)?, row.try_get(first + 8)?);
        let story = Story {
            origin: topic.map(|topic| Origin {
                topic,
                partition,
                offset,
            }),
            consumer: row.try_get(first + 9)?,
            retry_count: count(row.try_get(first + 2)?),
            last_error: row.try_get(first + 5)?,
            reason: reason.map(Reason::new),
            redrive_count: count(row.try_get(first)?),
            ..Story::default()
        };
        Ok((story, [row.try_get(first + 3)?, row.try_get(first + 4)?]))
    };
    let (mut story, [first, last]) = columns().map_err(|e| error::of_statement("read story", e))?;
    story.first_failed_at = first.map(instant).transpose()?;
    story.last_failed_at = last.map(instant).transpose()?;
    Ok(story)
}

fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

fn read_claimed(row: &SqliteRow) -> Result<Claimed, (i64, crate::Error)> {
    let position = row.try_get(0).unwrap_or_default();
    let read = || -> Result<Claimed> {
        let (message, story) = (read_message(row, 6)?, read_story(row, 15)?);
        let columns = || -> Result<Claimed, sqlx::Error> {
            Ok(Claimed {
                claim: Claim {
                    position,
                    token: row.try_get(1)?,
                },
                source: row.try_get(2)?,
                letter: Outgoing { message, story },
                parked: row.try_get(3)?,
                again: row.try_get(4)?,
                late: duration(row.try_get(5)?),
            })
        };
        columns().map_err(|e| error::of_statement("claim", e))
    };
    read().map_err(|error| (position, error))
}

fn read_entry(row: &SqliteRow) -> Result<WaitingEntry> {
    let failed = |e| error::of_statement("list waiting", e);
    let state: &str = row.try_get(1).map_err(failed)?;
    let id: String = row.try_get(4).map_err(failed)?;
    let retries: i64 = row.try_get(5).map_err(failed)?;
    let due_at: Option<i64> = row.try_get(7).map_err(failed)?;
    Ok(WaitingEntry::new(
        row.try_get(0).map_err(failed)?,
        WaitingState::read(state),
        row.try_get(2).map_err(failed)?,
        row.try_get(3).map_err(failed)?,
        MessageId::new(id),
        u32::try_from(retries).unwrap_or(u32::MAX),
        row.try_get(6).map_err(failed)?,
        due_at.map(instant).transpose()?,
        instant(row.try_get(8).map_err(failed)?)?,
    ))
}

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
            let Some(held) = held else {
                transaction.rollback().await.map_err(&failed)?;
                return Ok(false);
            };
            let end = match how {
                ReleaseAs::Retry => &sql.retry,
                ReleaseAs::Skip | ReleaseAs::Park => &sql.delete,
            };
            let last: Option<i64> = sqlx::query_scalar(sql.last.clone())
                .bind(consumer)
                .bind(line)
                .fetch_one(transaction.connection())
                .await
                .map_err(&failed)?;
            sqlx::query(end.clone())
                .bind(held)
                .execute(transaction.connection())
                .await
                .map_err(&failed)?;
            if how != ReleaseAs::Retry {
                let park_to = last.filter(|_| how == ReleaseAs::Park);
                self.promote(&mut transaction, consumer, line, 0, park_to)
                    .await?;
            }
            transaction.commit().await.map_err(&failed)?;
            Ok(true)
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
