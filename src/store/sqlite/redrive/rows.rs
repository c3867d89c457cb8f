//! Rows about dead letters, read.

use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use crate::error::{Error, ErrorKind, Result};
use crate::message::MessageId;
use crate::store::sqlite::{error, instant};
use crate::store::{AuditEntry, LetterEntry, RunRow, RunState};
use crate::story::{Origin, Reason, Story};

fn count64(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}

fn count32(count: i64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

pub(super) fn entry(row: &SqliteRow) -> Result<LetterEntry> {
    let read = || -> Result<(LetterEntry, [Option<i64>; 4]), sqlx::Error> {
        let consumer: String = row.try_get(1)?;
        let topic: Option<String> = row.try_get(11)?;
        let (partition, offset) = (row.try_get(12)?, row.try_get(13)?);
        let story = Story {
            origin: topic.map(|topic| Origin {
                topic,
                partition,
                offset,
            }),
            consumer: Some(consumer).filter(|consumer| !consumer.is_empty()),
            redrive_count: count32(row.try_get(5)?),
            reason: row.try_get::<Option<&str>, _>(6)?.map(Reason::new),
            retry_count: count32(row.try_get(7)?),
            first_failed_at: None,
            last_failed_at: None,
            last_error: row.try_get(10)?,
            due_at: None,
            owner: row.try_get(17)?,
            note: row.try_get(18)?,
        };
        let entry = LetterEntry {
            position: row.try_get(0)?,
            message_id: MessageId::new(row.try_get::<String, _>(2)?),
            event_type: row.try_get(3)?,
            key: row.try_get::<Option<Vec<u8>>, _>(4)?.map(Into::into),
            story,
            digest: row.try_get(14)?,
            size: count64(row.try_get(15)?),
            stored_at: time::OffsetDateTime::UNIX_EPOCH,
            occurred_at: time::OffsetDateTime::UNIX_EPOCH,
        };
        let instants = [8, 9, 16, 19].map(|at| row.try_get(at));
        let [first, last, stored, occurred] = instants;
        let instants = [first?, last?, stored?, occurred?];
        Ok((entry, instants))
    };
    let (mut entry, [first, last, stored, occurred]) =
        read().map_err(|e| error::of_statement("read dead letter", e))?;
    entry.story.first_failed_at = first.map(instant).transpose()?;
    entry.story.last_failed_at = last.map(instant).transpose()?;
    entry.stored_at = instant(stored.unwrap_or_default())?;
    entry.occurred_at = occurred.map_or(Ok(entry.stored_at), instant)?;
    Ok(entry)
}

pub(super) fn run_row(row: &SqliteRow) -> Result<RunRow> {
    let read = || -> Result<(RunRow, String, [i64; 2]), sqlx::Error> {
        let run = RunRow {
            id: row.try_get(0)?,
            consumer: row.try_get(1)?,
            operator: row.try_get(2)?,
            plan: row.try_get(3)?,
            end: row.try_get(4)?,
            state: RunState::Planned,
            cursor: row.try_get(6)?,
            token: row.try_get(7)?,
            sent: count64(row.try_get(8)?),
            refused: count64(row.try_get(9)?),
            rejected: count64(row.try_get(10)?),
            proved: row.try_get(11)?,
            error: row.try_get(12)?,
            planned_at: time::OffsetDateTime::UNIX_EPOCH,
            changed_at: time::OffsetDateTime::UNIX_EPOCH,
            in_hand: positions(row.try_get(15)?),
        };
        Ok((run, row.try_get(5)?, [row.try_get(13)?, row.try_get(14)?]))
    };
    let (mut run, word, [planned, changed]) =
        read().map_err(|e| error::of_statement("read run", e))?;
    run.state = RunState::read(&word).ok_or_else(|| {
        let detail = format!("{word:?} is no state of a run");
        Error::new(ErrorKind::Corrupt, "read run", detail)
    })?;
    run.planned_at = instant(planned)?;
    run.changed_at = instant(changed)?;
    Ok(run)
}

pub(super) fn audited(row: &SqliteRow) -> Result<AuditEntry> {
    let read = || -> Result<(AuditEntry, i64), sqlx::Error> {
        let entry = AuditEntry {
            position: row.try_get(0)?,
            at: time::OffsetDateTime::UNIX_EPOCH,
            run: row.try_get(2)?,
            operator: row.try_get(3)?,
            verb: row.try_get(4)?,
            message_id: MessageId::new(row.try_get::<String, _>(5)?),
            redrive_count: count32(row.try_get(6)?),
            digest: row.try_get(7)?,
            outcome: row.try_get(8)?,
            detail: row.try_get(9)?,
        };
        Ok((entry, row.try_get(1)?))
    };
    let (mut entry, at) = read().map_err(|e| error::of_statement("read audit", e))?;
    entry.at = instant(at)?;
    Ok(entry)
}

/// Of a JSON array. What cannot be read holds nothing.
fn positions(json: &str) -> Vec<i64> {
    serde_json::from_str(json).unwrap_or_default()
}
