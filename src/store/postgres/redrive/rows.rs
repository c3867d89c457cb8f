//! Rows about dead letters, read.

use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::error::{Error, ErrorKind, Result};
use crate::message::MessageId;
use crate::store::postgres::error;
use crate::store::{AuditEntry, LetterEntry, RunRow, RunState};
use crate::story::{Origin, Reason, Story};

fn count64(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}

fn count32(count: i64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

pub(super) fn entry(row: &PgRow) -> Result<LetterEntry> {
    let read = || -> Result<LetterEntry, sqlx::Error> {
        let consumer: String = row.try_get(1)?;
        let topic: Option<String> = row.try_get(11)?;
        let (partition, offset) = (row.try_get(12)?, row.try_get(13)?);
        let size: i32 = row.try_get(15)?;
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
            first_failed_at: row.try_get(8)?,
            last_failed_at: row.try_get(9)?,
            last_error: row.try_get(10)?,
            due_at: None,
            owner: row.try_get(17)?,
            note: row.try_get(18)?,
        };
        Ok(LetterEntry {
            position: row.try_get(0)?,
            message_id: MessageId::new(row.try_get::<String, _>(2)?),
            event_type: row.try_get(3)?,
            key: row.try_get::<Option<Vec<u8>>, _>(4)?.map(Into::into),
            story,
            digest: row.try_get(14)?,
            size: count64(size.into()),
            stored_at: row.try_get(16)?,
            occurred_at: row.try_get(19)?,
        })
    };
    read().map_err(|e| error::of_statement("read dead letter", e))
}

pub(super) fn run_row(row: &PgRow) -> Result<RunRow> {
    let read = || -> Result<(RunRow, String), sqlx::Error> {
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
            planned_at: row.try_get(13)?,
            changed_at: row.try_get(14)?,
            in_hand: row.try_get(15)?,
        };
        Ok((run, row.try_get(5)?))
    };
    let (mut run, word) = read().map_err(|e| error::of_statement("read run", e))?;
    run.state = RunState::read(&word).ok_or_else(|| {
        let detail = format!("{word:?} is no state of a run");
        Error::new(ErrorKind::Corrupt, "read run", detail)
    })?;
    Ok(run)
}

pub(super) fn audited(row: &PgRow) -> Result<AuditEntry> {
    let read = || -> Result<AuditEntry, sqlx::Error> {
        Ok(AuditEntry {
            position: row.try_get(0)?,
            at: row.try_get(1)?,
            run: row.try_get(2)?,
            operator: row.try_get(3)?,
            verb: row.try_get(4)?,
            message_id: MessageId::new(row.try_get::<String, _>(5)?),
            redrive_count: count32(row.try_get(6)?),
            digest: row.try_get(7)?,
            outcome: row.try_get(8)?,
            detail: row.try_get(9)?,
        })
    };
    read().map_err(|e| error::of_statement("read audit", e))
}
