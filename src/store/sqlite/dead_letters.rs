//! Dead letters in a table.

use futures_util::future::{BoxFuture, FutureExt};
use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Row, SqlStr, Sqlite};

use super::{SqliteStore, error, instant, read_message, size};
use crate::clock::unix_micros;
use crate::envelope::Outgoing;
use crate::error::Result;
use crate::store::header_codec::{self, without_nul};
use crate::store::{DeadLetter, DeadLetterStore};
use crate::story::{Origin, Reason, Story};

impl DeadLetterStore for SqliteStore {
    /// Texts with a NUL, which a text column does not keep whole, are stored with a replacement character in its
    /// place; the types keep theirs beside the headers. `due_at` is not stored: a dead letter waits for nothing.
    fn put<'a>(&'a self, letter: &'a Outgoing) -> BoxFuture<'a, Result<()>> {
        async move {
            bound(&self.sql.put, letter)
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("put dead letter"))?;
            Ok(())
        }
        .boxed()
    }

    fn list<'a>(
        &'a self,
        consumer: &'a str,
        after: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<DeadLetter>>> {
        async move {
            let rows = sqlx::query(self.sql.list.clone())
                .bind(consumer)
                .bind(after)
                .bind(i64::try_from(count_max).unwrap_or(i64::MAX))
                .fetch_all(&self.pool)
                .await
                .map_err(self.pool_error("list dead letters"))?;
            rows.iter().map(read).collect()
        }
        .boxed()
    }

    fn count<'a>(&'a self, consumer: &'a str) -> BoxFuture<'a, Result<u64>> {
        async move {
            let count: i64 = sqlx::query_scalar(self.sql.count.clone())
                .bind(consumer)
                .fetch_one(&self.pool)
                .await
                .map_err(self.pool_error("count dead letters"))?;
            Ok(u64::try_from(count).unwrap_or(0))
        }
        .boxed()
    }

    fn remove(&self, position: i64) -> BoxFuture<'_, Result<bool>> {
        async move {
            let removed = sqlx::query(self.sql.remove.clone())
                .bind(position)
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("remove dead letter"))?;
            Ok(removed.rows_affected() > 0)
        }
        .boxed()
    }
}

/// Binds a letter to an INSERT: the first 23 parameters.
pub(super) fn bound<'q>(sql: &SqlStr, letter: &'q Outgoing) -> Query<'q, Sqlite, SqliteArguments> {
    let Outgoing { message, story } = letter;
    let text = |text: &'q Option<String>| text.as_deref().map(without_nul);
    let origin = story.origin.as_ref();
    sqlx::query(sql.clone())
        // No consumer is stored as an empty one: NULLs would not be equal, and the entry stored twice.
        .bind(text(&story.consumer).unwrap_or_default())
        .bind(i64::from(story.redrive_count))
        .bind(story.reason.as_ref().map(Reason::as_str))
        .bind(i64::from(story.retry_count))
        .bind(story.first_failed_at.map(unix_micros))
        .bind(story.last_failed_at.map(unix_micros))
        .bind(text(&story.last_error))
        .bind(origin.map(|origin| without_nul(&origin.topic)))
        .bind(origin.and_then(|origin| text(&origin.partition)))
        .bind(origin.and_then(|origin| text(&origin.offset)))
        .bind(without_nul(message.id.as_str()))
        .bind(without_nul(&message.destination))
        .bind(message.key.as_deref())
        .bind(without_nul(&message.event_type))
        .bind(text(&message.content_type))
        .bind(header_codec::encode(message))
        .bind(message.payload.as_deref())
        .bind(message.version)
        .bind(unix_micros(message.occurred_at))
        .bind(size(message))
        .bind(message.digest().to_vec())
        .bind(text(&story.owner))
        .bind(text(&story.note))
}

fn read(row: &SqliteRow) -> Result<DeadLetter> {
    let message = read_message(row, 2)?;
    let columns = || -> Result<(i64, Story, [Option<i64>; 3]), sqlx::Error> {
        let count = |count: i64| u32::try_from(count).unwrap_or(u32::MAX);
        let consumer: String = row.try_get(1)?;
        let reason: Option<&str> = row.try_get(12)?;
        let topic: Option<String> = row.try_get(17)?;
        let (partition, offset) = (row.try_get(18)?, row.try_get(19)?);
        let story = Story {
            origin: topic.map(|topic| Origin {
                topic,
                partition,
                offset,
            }),
            consumer: Some(consumer).filter(|consumer| !consumer.is_empty()),
            redrive_count: count(row.try_get(11)?),
            reason: reason.map(Reason::new),
            owner: row.try_get(21)?,
            note: row.try_get(22)?,
            retry_count: count(row.try_get(13)?),
            first_failed_at: None,
            last_failed_at: None,
            last_error: row.try_get(16)?,
            due_at: None,
        };
        let instants = [row.try_get(14)?, row.try_get(15)?, row.try_get(20)?];
        Ok((row.try_get(0)?, story, instants))
    };
    let (position, mut story, [first, last, stored]) =
        columns().map_err(|e| error::of_statement("read dead letter", e))?;
    story.first_failed_at = first.map(instant).transpose()?;
    story.last_failed_at = last.map(instant).transpose()?;
    Ok(DeadLetter {
        position,
        letter: Outgoing { message, story },
        stored_at: instant(stored.unwrap_or_default())?,
    })
}
