//! The statements of the waiting room.

use sqlx::SqlStr;

use super::{MESSAGE, safe};

/// Columns of a story, in the order in which they are bound and read.
const STORY: &str = "redrive_count, reason, retry_count, first_failed_at, last_failed_at, last_error, origin_topic, \
    origin_partition, origin_offset, failed_by";

/// A token that no claim has had, also if the database is put back to an earlier state.
const NEXT_TOKEN: &str =
    "greatest(w.token + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)";

/// Parameters where a message is stored: 1 consumer, 2 identity, 3 delay, 4 to 13 the story, 14 line, 15 source, 16 to 25
/// message and size.
pub(in crate::store::postgres) struct WaitingSql {
    pub check: SqlStr,
    pub replace: SqlStr,
    pub insert: SqlStr,
    pub insert_behind: SqlStr,
    pub occupied: SqlStr,
    pub lock_last: SqlStr,
    pub claim: SqlStr,
    pub renew: SqlStr,
    pub give_back: SqlStr,
    pub finish: SqlStr,
    pub promote: SqlStr,
    pub park: SqlStr,
    pub hold_claimed: SqlStr,
    pub hold: SqlStr,
    pub held: SqlStr,
    pub lock_ahead: SqlStr,
    pub delete: SqlStr,
    pub retry: SqlStr,
    pub note: SqlStr,
    pub recall: SqlStr,
    pub forget: SqlStr,
    pub clean_up: SqlStr,
    pub list: SqlStr,
    pub count: SqlStr,
}

impl WaitingSql {
    #[expect(clippy::too_many_lines, reason = "one statement after the other")]
    pub(super) fn new(t: &str) -> Self {
        let columns = format!(
            "consumer, identity, state, due_at, visible_at, {STORY}, line, source, {MESSAGE}, size"
        );
        let letter = "$4::bigint, $5::text, $6::bigint, $7::timestamptz, $8::timestamptz, $9::text, $10::text, \
            $11::text, $12::text, $13::text, $14::bytea, $15::text, $16::text, $17::text, $18::bytea, $19::text, \
            $20::text, $21::text, $22::bytea, $23::bigint, $24::timestamptz, $25::int";
        let story = "redrive_count = $4, reason = $5, retry_count = $6, first_failed_at = $7, last_failed_at = $8, \
            last_error = $9, origin_topic = $10, origin_partition = $11, origin_offset = $12, failed_by = $13";
        let after = |parameter: &str| {
            format!("clock_timestamp() + {parameter}::bigint * interval '1 microsecond'")
        };
        let due = after("$3");
        let due_if = format!("CASE w.state WHEN 'due' THEN {due} END");
        // Durable whatever the session says: the message is acknowledged after it.
        let durable = "durable AS MATERIALIZED ( \
            SELECT set_config('synchronous_commit', CASE s WHEN 'off' THEN 'on' ELSE s END, true) \
            FROM current_setting('synchronous_commit') s)";
        let held = "unnest($1::bigint[], $2::bigint[]) AS c(position, token)";
        let replaced = format!(
            "{story}, token = {NEXT_TOKEN}, claims = 0, due_at = {due_if}, visible_at = {due_if}"
        );
        Self {
            check: safe(format!(
                "SELECT consumer, identity, line, state, visible_at, token, claims, park_to FROM {t}waiting LIMIT 0"
            )),
            replace: safe(format!(
                "WITH {durable} UPDATE {t}waiting w SET {replaced} FROM durable \
                 WHERE w.consumer = $1 AND w.identity = $2 AND w.retry_count < $6"
            )),
            insert: safe(format!(
                "WITH {durable} INSERT INTO {t}waiting AS w ({columns}) \
                 SELECT $1, $2, 'due', {due}, {due}, {letter} FROM durable \
                 ON CONFLICT (consumer, identity) DO UPDATE SET {replaced} WHERE w.retry_count < excluded.retry_count"
            )),
            insert_behind: safe(format!(
                "WITH {durable} INSERT INTO {t}waiting AS w ({columns}) \
                 SELECT $1, $2, 'behind', NULL, CASE WHEN $3::bigint IS NULL THEN clock_timestamp() END, {letter} \
                 FROM durable ON CONFLICT DO NOTHING"
            )),
            occupied: safe(format!(
                "SELECT l.line FROM unnest($2::bytea[]) AS l(line) CROSS JOIN LATERAL ( \
                    SELECT 1 FROM {t}waiting w WHERE w.consumer = $1 AND w.line = l.line LIMIT 1) one"
            )),
            lock_last: safe(format!(
                "SELECT position FROM {t}waiting WHERE consumer = $1 AND line = $2 \
                 ORDER BY position DESC LIMIT 1 FOR UPDATE"
            )),
            // A row where nothing was claimed, for the time of what is next.
            claim: safe(format!(
                "WITH due AS MATERIALIZED ( \
                    SELECT position FROM {t}waiting \
                    WHERE consumer = $1 AND state = 'due' AND visible_at <= (SELECT clock_timestamp()) \
                    ORDER BY visible_at, position LIMIT $2 FOR UPDATE SKIP LOCKED), \
                 claimed AS ( \
                    UPDATE {t}waiting w SET token = {NEXT_TOKEN}, claims = w.claims + 1, visible_at = {lease} \
                    FROM due WHERE w.position = due.position \
                    RETURNING w.position, w.token, w.source, coalesce(w.park_to >= w.position, false) AS parked, \
                        w.claims > 1 AS again, \
                        (extract(epoch FROM clock_timestamp() - w.due_at) * 1000000)::bigint AS late, {message}, {told}) \
                 SELECT c.*, ( \
                    SELECT (extract(epoch FROM visible_at - clock_timestamp()) * 1000000)::bigint \
                    FROM {t}waiting \
                    WHERE consumer = $1 AND state = 'due' AND visible_at > (SELECT clock_timestamp()) \
                    ORDER BY visible_at LIMIT 1) \
                 FROM (SELECT 1) one LEFT JOIN claimed c ON true ORDER BY c.late DESC, c.position",
                lease = after("$3"),
                message = of_w(MESSAGE),
                told = of_w(STORY),
            )),
            renew: safe(format!(
                "UPDATE {t}waiting w SET visible_at = {} FROM {held} \
                 WHERE w.position = c.position AND w.token = c.token AND w.state = 'due' \
                 RETURNING w.position, w.token",
                after("$3")
            )),
            give_back: safe(format!(
                "UPDATE {t}waiting w SET token = {NEXT_TOKEN}, claims = 0, visible_at = {} FROM {held} \
                 WHERE w.position = c.position AND w.token = c.token AND w.state = 'due'",
                after("$3")
            )),
            finish: safe(format!(
                "DELETE FROM {t}waiting WHERE position = $1 AND token = $2 AND state = 'due' \
                 RETURNING consumer, line, park_to"
            )),
            promote: safe(format!(
                "UPDATE {t}waiting w SET state = 'due', due_at = clock_timestamp(), visible_at = clock_timestamp(), \
                    claims = 0, token = {NEXT_TOKEN}, park_to = CASE WHEN $4::bigint >= w.position THEN $4::bigint END \
                 WHERE w.state = 'behind' AND w.position = ( \
                    SELECT position FROM {t}waiting WHERE consumer = $1 AND line = $2 AND position > $3 \
                    ORDER BY position LIMIT 1)"
            )),
            park: safe(format!(
                "UPDATE {t}waiting w SET park_to = ( \
                    SELECT x.position FROM {t}waiting x WHERE x.consumer = w.consumer AND x.line = w.line \
                    ORDER BY x.position DESC LIMIT 1) \
                 WHERE w.position = $1 AND w.token = $2 AND w.state = 'due'"
            )),
            hold_claimed: safe(format!(
                "WITH {durable} UPDATE {t}waiting w SET state = 'held', due_at = NULL, visible_at = NULL, \
                    token = {NEXT_TOKEN}, retry_count = $3, last_error = $4, reason = $5 FROM durable \
                 WHERE w.position = $1 AND w.token = $2 AND w.state = 'due' AND w.line IS NOT NULL"
            )),
            hold: safe(format!(
                "WITH {durable} INSERT INTO {t}waiting AS w ({columns}) \
                 SELECT $1, $2, 'held', NULL, CASE WHEN $3::bigint IS NULL THEN clock_timestamp() END, {letter} \
                 FROM durable ON CONFLICT (consumer, identity) DO UPDATE SET state = 'held', due_at = NULL, \
                    visible_at = NULL, token = {NEXT_TOKEN} WHERE w.state = 'due'"
            )),
            held: safe(format!(
                "SELECT position FROM {t}waiting WHERE consumer = $1 AND line = $2 AND state = 'held' \
                 ORDER BY position LIMIT 1 FOR UPDATE"
            )),
            lock_ahead: safe(format!(
                "SELECT position FROM {t}waiting WHERE consumer = $1 AND line = $2 AND position < $3 \
                 ORDER BY position LIMIT 1 FOR UPDATE"
            )),
            delete: safe(format!("DELETE FROM {t}waiting WHERE position = $1")),
            retry: safe(format!(
                "UPDATE {t}waiting w SET state = 'due', due_at = clock_timestamp(), visible_at = clock_timestamp(), \
                    claims = 0, token = {NEXT_TOKEN}, retry_count = 0, reason = NULL, first_failed_at = NULL, \
                    last_failed_at = NULL, last_error = NULL \
                 WHERE w.position = $1"
            )),
            note: safe(format!(
                "WITH {durable} INSERT INTO {t}waiting AS w ({columns}) \
                 SELECT $1, $2, 'noted', {due}, NULL, {letter} FROM durable \
                 ON CONFLICT (consumer, identity) DO UPDATE SET {story}, due_at = excluded.due_at, \
                    stored_at = clock_timestamp() WHERE w.retry_count < excluded.retry_count"
            )),
            recall: safe(format!(
                "SELECT identity, (extract(epoch FROM due_at - clock_timestamp()) * 1000000)::bigint, {STORY} \
                 FROM {t}waiting WHERE consumer = $1 AND identity = ANY ($2) AND state = 'noted'"
            )),
            forget: safe(format!(
                "DELETE FROM {t}waiting WHERE consumer = $1 AND identity = $2 AND state = 'noted'"
            )),
            clean_up: safe(format!(
                "DELETE FROM {t}waiting WHERE ctid = ANY (ARRAY( \
                    SELECT ctid FROM {t}waiting WHERE consumer = $1 AND state = 'noted' \
                        AND stored_at <= clock_timestamp() - $2::bigint * interval '1 microsecond' \
                    ORDER BY stored_at LIMIT $3 FOR UPDATE SKIP LOCKED))"
            )),
            list: safe(format!(
                "SELECT position, state, source, key, message_id, retry_count, last_error, due_at, stored_at \
                 FROM {t}waiting WHERE consumer = $1 AND position > $2 AND ($3::text IS NULL OR state = $3) \
                 ORDER BY position LIMIT $4"
            )),
            count: safe(format!(
                "SELECT state, count(*) FROM {t}waiting WHERE consumer = $1 GROUP BY state"
            )),
        }
    }
}

/// The same columns, said to be those of `w`.
fn of_w(columns: &str) -> String {
    let columns = columns
        .split(',')
        .map(|column| format!("w.{}", column.trim()));
    columns.collect::<Vec<_>>().join(", ")
}
