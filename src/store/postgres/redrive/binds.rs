//! Parameters of statements about dead letters.

use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{Postgres, SqlStr};

use crate::error::cut;
use crate::message::MessageId;
use crate::store::header_codec::without_nul;
use crate::store::{LETTERS_MAX, Leaving, LetterFilter, Note};
use crate::story::Reason;

/// Rows of the audit as arrays.
#[derive(Default)]
pub(super) struct Columns {
    pub(super) positions: Vec<i64>,
    pub(super) ids: Vec<String>,
    pub(super) redrives: Vec<i64>,
    pub(super) digests: Vec<Vec<u8>>,
    pub(super) outcomes: Vec<String>,
    pub(super) details: Vec<String>,
}

impl Columns {
    pub(super) fn of(leaving: &[Leaving]) -> Self {
        let mut columns = Self::default();
        for told in leaving {
            columns.positions.push(told.position);
            columns
                .ids
                .push(without_nul(told.message_id.as_str()).into_owned());
            columns.redrives.push(i64::from(told.redrive_count));
            columns.digests.push(told.digest.clone());
            columns.outcomes.push(told.outcome.as_str().to_owned());
            columns.details.push(detail(told));
        }
        columns
    }
}

fn detail(told: &Leaving) -> String {
    without_nul(cut(&told.detail, 1_024)).into_owned()
}

/// Binds six arrays.
pub(super) fn listed(
    query: Query<'static, Postgres, PgArguments>,
    leaving: &[Leaving],
) -> Query<'static, Postgres, PgArguments> {
    let columns = Columns::of(leaving);
    query
        .bind(columns.positions)
        .bind(columns.ids)
        .bind(columns.redrives)
        .bind(columns.digests)
        .bind(columns.outcomes)
        .bind(columns.details)
}

/// Binds one row of the audit: eight parameters.
pub(super) fn noted<'q>(
    query: Query<'q, Postgres, PgArguments>,
    note: &Note<'q>,
    told: &'q Leaving,
) -> Query<'q, Postgres, PgArguments> {
    query
        .bind(note.consumer)
        .bind(note.operator)
        .bind(note.verb)
        .bind(without_nul(told.message_id.as_str()))
        .bind(i64::from(told.redrive_count))
        .bind(&told.digest)
        .bind(told.outcome.as_str())
        .bind(detail(told))
}

/// Binds the filter, the range of positions and the number of rows, owned: `$1` to `$13`.
pub(super) fn matching(
    sql: SqlStr,
    consumer: &str,
    filter: &LetterFilter,
    range: (i64, i64),
    count_max: usize,
) -> Query<'static, Postgres, PgArguments> {
    let (after, last) = filter.range(range);
    let text = |text: &str| text.to_owned();
    sqlx::query(sql)
        .bind(consumer.to_owned())
        .bind(filter.reason.as_ref().map(Reason::as_str).map(text))
        .bind(filter.event_type.clone())
        .bind(filter.key.as_ref().map(|key| key.to_vec()))
        .bind(filter.message_id.as_ref().map(MessageId::as_str).map(text))
        .bind(filter.stored_from)
        .bind(filter.stored_until)
        .bind(i64::from(filter.redrives_min))
        .bind(i64::from(filter.redrives_max))
        .bind(filter.error.clone())
        .bind(after)
        .bind(last)
        .bind(limit(count_max))
}

pub(super) fn limit(count_max: usize) -> i64 {
    i64::try_from(count_max.min(LETTERS_MAX)).unwrap_or(i64::MAX)
}

pub(super) fn number(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
