//! What is bound and read.

use std::time::Duration;

use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Row, Sqlite};

use crate::clock::unix_micros;
use crate::envelope::Outgoing;
use crate::error::Result;
use crate::message::MessageId;
use crate::store::header_codec::{self, without_nul};
use crate::store::sqlite::{error, instant, json, micros, read_message, size};
use crate::store::{Claim, Claimed, Line, Waiting, WaitingEntry, WaitingState};
use crate::story::{Origin, Reason, Story};

pub(super) type Bound<'q> = Query<'q, Sqlite, SqliteArguments>;

/// Binds the parameters 1 to 13.
pub(super) fn bound<'q>(
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
pub(super) fn with_message<'q>(
    query: Bound<'q>,
    waiting: &'q Waiting,
    line: Option<Line>,
) -> Bound<'q> {
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

pub(super) fn pairs(claims: &[Claim]) -> String {
    json(
        claims
            .iter()
            .map(|claim| vec![claim.position, claim.token].into()),
    )
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads the columns of a story, of which the first has number `first`.
pub(super) fn read_story(row: &SqliteRow, first: usize) -> Result<Story> {
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

pub(super) fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

pub(super) fn read_claimed(row: &SqliteRow) -> Result<Claimed, (i64, crate::Error)> {
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

pub(super) fn read_entry(row: &SqliteRow) -> Result<WaitingEntry> {
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
