//! What an operator asks about dead letters, and the book of their leaving.

use sqlx::SqlStr;

use crate::store::LetterFilter;

use super::{MESSAGE, safe};

/// Each is one statement and so one transaction.
pub(in super::super) struct RedriveSql {
    pub take_in: SqlStr,
    pub leave_again: SqlStr,
    pub entries: ByFilter,
    pub letters: ByFilter,
    pub last: SqlStr,
    pub lock: SqlStr,
    pub take_out: SqlStr,
    pub replace: SqlStr,
    pub may_have_sent: SqlStr,
    pub enter: SqlStr,
    pub entered: SqlStr,
    pub plan: SqlStr,
    pub find_run: SqlStr,
    pub runs: SqlStr,
    pub take_run: SqlStr,
    pub take_in_hand: SqlStr,
    pub there: SqlStr,
    pub settle: SqlStr,
    pub end_run: SqlStr,
    pub cancel_run: SqlStr,
    pub audit: SqlStr,
    pub clean_up_audit: SqlStr,
    pub clean_up_runs: SqlStr,
}

/// What a list shows, in the order in which rows are read.
const ENTRY: &str = "d.position, d.consumer, d.message_id, d.event_type, d.key, d.redrive_count, d.reason, \
    d.retry_count, d.first_failed_at, d.last_failed_at, d.last_error, d.origin_topic, d.origin_partition, \
    d.origin_offset, d.digest, d.size, d.stored_at, d.owner, d.note, d.occurred_at";
const RUN: &str = "id, consumer, operator, plan, end_position, state, cursor, token, sent, refused, rejected, proved, \
    error, planned_at, changed_at, in_hand";
const MATCHES: &str = "d.consumer = $1 AND ($2::text IS NULL OR d.reason = $2) \
    AND ($3::text IS NULL OR d.event_type = $3) AND ($4::bytea IS NULL OR d.key = $4) \
    AND ($5::text IS NULL OR d.message_id = $5) AND ($6::timestamptz IS NULL OR d.stored_at >= $6) \
    AND ($7::timestamptz IS NULL OR d.stored_at < $7) AND d.redrive_count >= $8 AND d.redrive_count <= $9 \
    AND ($10::text IS NULL OR strpos(d.last_error, $10) > 0) AND d.position > $11 AND d.position <= $12";
const LEFT: &str = "outcome IN ('sent', 'discarded', 'replaced')";
const AUDIT: &str =
    "run, consumer, operator, verb, message_id, redrive_count, digest, outcome, detail";

/// The INSERT of a dead letter, perhaps inside of a larger statement that `around` begins. Durable whatever the session
/// says: the message is acknowledged after it.
pub(super) fn put(t: &str, around: &str) -> String {
    format!(
        "WITH durable AS MATERIALIZED ( \
            SELECT set_config('synchronous_commit', CASE s WHEN 'off' THEN 'on' ELSE s END, true) \
            FROM current_setting('synchronous_commit') s){around} \
         INSERT INTO {t}dead_letter (consumer, redrive_count, reason, retry_count, first_failed_at, \
            last_failed_at, last_error, origin_topic, origin_partition, origin_offset, {MESSAGE}, size, digest, \
            owner, note) \
         SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23 \
         FROM durable"
    )
}

/// A condition of any filter, and the one of a filter by id: with that alone the planner finds the index.
pub(in super::super) struct ByFilter {
    any: SqlStr,
    one_id: SqlStr,
}

impl ByFilter {
    fn new(sql: impl Fn(&str) -> String) -> Self {
        let one_id = MATCHES.replace(
            "($5::text IS NULL OR d.message_id = $5)",
            "d.message_id = $5",
        );
        Self {
            any: safe(sql(MATCHES)),
            one_id: safe(sql(&one_id)),
        }
    }

    pub fn of(&self, filter: &LetterFilter) -> SqlStr {
        match &filter.message_id {
            None => self.any.clone(),
            Some(_) => self.one_id.clone(),
        }
    }
}

impl RedriveSql {
    pub(super) fn new(t: &str) -> Self {
        let message = MESSAGE
            .split(", ")
            .map(|column| format!("d.{}", column.trim()))
            .collect::<Vec<_>>()
            .join(", ");
        let in_no_hand = format!(
            "NOT EXISTS (SELECT 1 FROM {t}redrive_run r WHERE r.consumer = d.consumer AND d.position = ANY (r.in_hand))"
        );
        let has_left = format!(
            "EXISTS (SELECT 1 FROM {t}redrive_audit WHERE consumer = $1 AND message_id = $11 AND redrive_count = $2 \
                AND digest = $21 AND {LEFT})"
        );
        Self {
            take_in: safe(format!(
                "{} WHERE NOT {has_left} ON CONFLICT DO NOTHING RETURNING position) \
                 SELECT (SELECT position FROM stored), {has_left}",
                put(t, ", stored AS (")
            )),
            leave_again: safe(format!(
                "DELETE FROM {t}dead_letter d WHERE d.position = $1 AND EXISTS (SELECT 1 FROM {t}redrive_audit a \
                    WHERE a.consumer = d.consumer AND a.message_id = d.message_id AND a.redrive_count = d.redrive_count \
                        AND a.digest = d.digest AND {LEFT})"
            )),
            entries: ByFilter::new(|matches| {
                format!(
                    "SELECT {ENTRY} FROM {t}dead_letter d WHERE {matches} ORDER BY d.position LIMIT $13"
                )
            }),
            letters: ByFilter::new(|matches| {
                format!(
                    "SELECT {ENTRY}, {message} FROM ( \
                    SELECT at, bytes, sum(bytes) OVER (ORDER BY at) AS through FROM ( \
                        SELECT d.position AS at, d.size::bigint AS bytes FROM {t}dead_letter d WHERE {matches} \
                        ORDER BY d.position LIMIT $13) found) page \
                 JOIN {t}dead_letter d ON d.position = page.at \
                 WHERE page.through <= $14 OR page.through = page.bytes ORDER BY d.position"
                )
            }),
            last: safe(format!(
                "SELECT coalesce(max(position), 0) FROM {t}dead_letter"
            )),
            // Whoever takes entries in hand or changes them does it alone, and sees in the next statement what was done before.
            lock: safe(
                "SELECT pg_advisory_xact_lock(hashtextextended('relaybox redrive ' || $1, 0))"
                    .to_owned(),
            ),
            take_out: safe(format!(
                "WITH told AS ( \
                    SELECT * FROM unnest($4::bigint[], $5::text[], $6::bigint[], $7::bytea[], $8::text[], $9::text[]) \
                        AS l(position, message_id, redrive_count, digest, outcome, detail)), \
                 gone AS ( \
                    DELETE FROM {t}dead_letter d WHERE d.position = ANY ($4) AND d.consumer = $1 AND {in_no_hand} \
                    RETURNING d.position) \
                 INSERT INTO {t}redrive_audit ({AUDIT}) \
                 SELECT NULL, $1, $2, $3, message_id, redrive_count, digest, outcome, detail \
                 FROM told JOIN gone USING (position) ORDER BY position"
            )),
            replace: safe(format!(
                "{} WHERE EXISTS (SELECT 1 FROM gone) RETURNING position), \
                 noted AS ( \
                    INSERT INTO {t}redrive_audit ({AUDIT}) \
                    SELECT NULL, $25, $26, $27, $28, $29, $30, $31, $32 FROM gone) \
                 SELECT position FROM stored",
                put(
                    t,
                    &format!(
                        ", gone AS (DELETE FROM {t}dead_letter d WHERE d.position = $24 AND d.consumer = $25 \
                            AND {in_no_hand} RETURNING d.position), stored AS ("
                    )
                )
            )),
            may_have_sent: safe(format!(
                "SELECT id FROM {t}redrive_run WHERE consumer = $1 AND $2 = ANY (in_hand) ORDER BY id LIMIT 1"
            )),
            enter: safe(format!(
                "{} ON CONFLICT DO NOTHING RETURNING position), \
                 noted AS ( \
                    INSERT INTO {t}redrive_audit ({AUDIT}) \
                    SELECT NULL, $24, $25, $26, $27, $28, $29, $30, $31 FROM stored) \
                 SELECT position FROM stored",
                put(t, ", stored AS (")
            )),
            entered: safe(format!(
                "SELECT position FROM {t}dead_letter WHERE consumer = $1 AND message_id = $2 AND redrive_count = 0"
            )),
            plan: safe(format!(
                "INSERT INTO {t}redrive_run (consumer, operator, plan, end_position) VALUES ($1, $2, $3, $4) \
                 RETURNING {RUN}"
            )),
            find_run: safe(format!(
                "SELECT {RUN} FROM {t}redrive_run WHERE consumer = $1 AND id = $2"
            )),
            runs: safe(format!(
                "SELECT {RUN} FROM {t}redrive_run WHERE consumer = $1 AND id < $2 ORDER BY id DESC LIMIT $3"
            )),
            // As large as the clock, so that none comes twice even if the database is put back to an earlier state.
            take_run: safe(format!(
                "UPDATE {t}redrive_run SET state = 'running', error = NULL, changed_at = clock_timestamp(), \
                    token = greatest(token + 1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) \
                 WHERE consumer = $1 AND id = $2 AND state = ANY ($3::text[]) RETURNING {RUN}"
            )),
            take_in_hand: safe(format!(
                "UPDATE {t}redrive_run SET in_hand = ARRAY(SELECT DISTINCT unnest(in_hand || $3::bigint[])), \
                    changed_at = clock_timestamp() \
                 WHERE id = $1 AND token = $2 AND state = 'running'"
            )),
            there: safe(format!(
                "SELECT position FROM {t}dead_letter WHERE position = ANY ($1) AND consumer = $2"
            )),
            // A repeated settlement finds its rows of the audit there.
            settle: safe(format!(
                "WITH fenced AS ( \
                    UPDATE {t}redrive_run SET cursor = $3, sent = $4, refused = $5, rejected = $6, proved = $7, \
                        in_hand = $15, changed_at = clock_timestamp() \
                    WHERE id = $1 AND token = $2 AND state = 'running' RETURNING consumer), \
                 told AS ( \
                    SELECT * FROM unnest($8::bigint[], $9::text[], $10::bigint[], $11::bytea[], $12::text[], $13::text[]) \
                        AS l(position, message_id, redrive_count, digest, outcome, detail)), \
                 gone AS ( \
                    DELETE FROM {t}dead_letter WHERE consumer = (SELECT consumer FROM fenced) \
                        AND position = ANY (ARRAY(SELECT position FROM told WHERE {LEFT}))), \
                 noted AS ( \
                    INSERT INTO {t}redrive_audit ({AUDIT}) \
                    SELECT $1, f.consumer, $14, 'redrive', l.message_id, l.redrive_count, l.digest, l.outcome, l.detail \
                    FROM fenced f CROSS JOIN told l \
                    WHERE NOT EXISTS (SELECT 1 FROM {t}redrive_audit a WHERE a.consumer = f.consumer \
                        AND a.message_id = l.message_id AND a.redrive_count = l.redrive_count AND a.digest = l.digest \
                        AND a.outcome = l.outcome AND a.run = $1) \
                    ORDER BY l.position) \
                 SELECT count(*) FROM fenced"
            )),
            end_run: safe(format!(
                "UPDATE {t}redrive_run SET state = $3, error = $4, changed_at = clock_timestamp() \
                 WHERE id = $1 AND token = $2 AND state = 'running'"
            )),
            cancel_run: safe(format!(
                "UPDATE {t}redrive_run SET state = 'cancelled', error = $3, token = token + 1, \
                    changed_at = clock_timestamp() \
                 WHERE consumer = $1 AND id = $2 AND state IN ('planned', 'running', 'paused', 'stopped')"
            )),
            audit: safe(format!(
                "SELECT position, at, run, operator, verb, message_id, redrive_count, digest, outcome, detail \
                 FROM {t}redrive_audit WHERE consumer = $1 AND position > $2 ORDER BY position LIMIT $3"
            )),
            clean_up_audit: safe(format!(
                "DELETE FROM {t}redrive_audit WHERE position IN ( \
                    SELECT position FROM {t}redrive_audit \
                    WHERE consumer = $1 AND at <= clock_timestamp() - $2 * interval '1 microsecond' \
                    ORDER BY at LIMIT $3)"
            )),
            clean_up_runs: safe(format!(
                "DELETE FROM {t}redrive_run WHERE id IN ( \
                    SELECT id FROM {t}redrive_run WHERE consumer = $1 AND state IN ('done', 'cancelled') \
                        AND changed_at <= clock_timestamp() - $2 * interval '1 microsecond' ORDER BY id LIMIT $3)"
            )),
        }
    }
}
