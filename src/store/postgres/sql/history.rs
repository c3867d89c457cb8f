//! What was published and kept.

use sqlx::SqlStr;

use super::{MESSAGE, safe};

/// Partitions of the history: one a day in turn, and one for what finds no other.
pub(in super::super) const PARTITIONS: i64 = DAYS + 1;

const DAYS: i64 = 32;

/// What is older than `$1` microseconds, by whole days: the last one of them ended before this instant.
const OVER: &str = "(date_trunc('day', (clock_timestamp() - {age}::bigint * interval '1 microsecond') AT TIME ZONE 'UTC') \
    AT TIME ZONE 'UTC')";

/// Copies rows that were deleted, of which `rows` is the name and `position` the column of it.
///
/// One instant for all of them: a column's default would be asked for each.
pub(super) fn keep(t: &str, position: &str, rows: &str) -> String {
    format!(
        "INSERT INTO {t}outbox_history (published_at, position, lane, {MESSAGE}, size) \
         SELECT statement_timestamp(), {position}, lane, {MESSAGE}, size FROM {rows}"
    )
}

pub(in super::super) struct HistorySql {
    prefix: String,
    pub check: SqlStr,
    pub over: SqlStr,
    pub find: SqlStr,
}

impl HistorySql {
    pub(super) fn new(t: &str) -> Self {
        let ends = (0..PARTITIONS).map(|number| {
            let p = partition(t, number);
            format!(
                "SELECT {number}::bigint AS number, (SELECT min(published_at) FROM {p}) AS first, \
                    (SELECT max(published_at) FROM {p}) AS last"
            )
        });
        let ends = ends.collect::<Vec<_>>().join(" UNION ALL ");
        let over = OVER.replace("{age}", "$1");
        Self {
            prefix: t.to_owned(),
            // Where a right is missing nothing would be settled, or nothing cleaned up.
            check: safe(format!(
                "SELECT has_table_privilege('{t}outbox_history'::regclass, 'INSERT'), \
                    count(*) FILTER (WHERE has_table_privilege(inhrelid, 'SELECT') \
                        AND has_table_privilege(inhrelid, 'UPDATE') AND has_table_privilege(inhrelid, 'DELETE') \
                        AND has_table_privilege(inhrelid, 'TRUNCATE')) \
                 FROM pg_inherits WHERE inhparent = '{t}outbox_history'::regclass"
            )),
            // Partitions with something that is over, and whether all of it is.
            over: safe(format!(
                "SELECT number, last < {over} FROM ({ends}) p WHERE first < {over} ORDER BY first"
            )),
            find: safe(format!(
                "SELECT {MESSAGE}, position, published_at FROM {t}outbox_history \
                 WHERE left(message_id, 64) = left($1, 64) AND message_id = $1 \
                 ORDER BY published_at, position LIMIT $2"
            )),
        }
    }

    /// Empties a partition if all that is in it is over, which is asked again under the lock: the days may have come round.
    /// One statement, so that no lock outlives a process that stops in between.
    ///
    /// Whoever has read the partition and stays in the transaction keeps the lock from us, and while we wait others cannot
    /// read; so the wait is short. Settlements write to the partition of their own day. Where another relay is at it, it may.
    pub(in super::super) fn empty(&self, number: i64, age_micros: i64) -> SqlStr {
        let p = partition(&self.prefix, number);
        let over = OVER.replace("{age}", &age_micros.to_string());
        safe(format!(
            "DO $$ BEGIN \
                IF NOT pg_try_advisory_xact_lock(hashtextextended('{p}', 0)) THEN RETURN; END IF; \
                PERFORM set_config('lock_timeout', '100ms', true); \
                LOCK TABLE {p} IN ACCESS EXCLUSIVE MODE; \
                IF NOT EXISTS (SELECT FROM {p} WHERE published_at >= {over}) THEN TRUNCATE {p}; END IF; \
             END $$"
        ))
    }

    /// Deletes some rows that are over from a partition that holds younger ones too.
    pub(in super::super) fn thin(&self, number: i64) -> SqlStr {
        let p = partition(&self.prefix, number);
        let over = OVER.replace("{age}", "$1");
        safe(format!(
            "DELETE FROM {p} WHERE ctid = ANY (ARRAY( \
                SELECT ctid FROM {p} WHERE published_at < {over} \
                ORDER BY published_at LIMIT $2 FOR UPDATE SKIP LOCKED))"
        ))
    }
}

fn partition(t: &str, number: i64) -> String {
    if number < DAYS {
        format!("{t}outbox_history_{number:02}")
    } else {
        format!("{t}outbox_history_other")
    }
}
