//! What an operator asks about dead letters, and the book of their leaving.

use sqlx::SqlStr;

use crate::store::LetterFilter;

use super::{MESSAGE, NOW, put, safe};

pub(in super::super) struct RedriveSql {
    pub take_in: SqlStr,
    pub has_left: SqlStr,
    pub entries: ByFilter,
    pub letters: ByFilter,
    pub last: SqlStr,
    pub remove: SqlStr,
    pub may_have_sent: SqlStr,
    pub insert: SqlStr,
    pub entered: SqlStr,
    pub note: SqlStr,
    pub plan: SqlStr,
    pub find_run: SqlStr,
    pub runs: SqlStr,
    pub take_run: SqlStr,
    pub take_in_hand: SqlStr,
    pub there: SqlStr,
    pub advance: SqlStr,
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
const MATCHES: &str = "d.consumer = ?1 AND (?2 IS NULL OR d.reason = ?2) AND (?3 IS NULL OR d.event_type = ?3) \
    AND (?4 IS NULL OR d.key = ?4) AND (?5 IS NULL OR d.message_id = ?5) AND (?6 IS NULL OR d.stored_at >= ?6) \
    AND (?7 IS NULL OR d.stored_at < ?7) AND d.redrive_count >= ?8 AND d.redrive_count <= ?9 \
    AND (?10 IS NULL OR instr(d.last_error, ?10) > 0) AND d.position > ?11 AND d.position <= ?12";
const LEFT: &str = "outcome IN ('sent', 'discarded', 'replaced')";

/// A condition of any filter, and the one of a filter by id: with that alone the planner finds the index.
pub(in super::super) struct ByFilter {
    any: SqlStr,
    one_id: SqlStr,
}

impl ByFilter {
    fn new(sql: impl Fn(&str) -> String) -> Self {
        let one_id = MATCHES.replace("(?5 IS NULL OR d.message_id = ?5)", "d.message_id = ?5");
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
        Self {
            take_in: safe(format!("{} ON CONFLICT DO NOTHING", put(t))),
            has_left: safe(format!(
                "SELECT EXISTS (SELECT 1 FROM {t}redrive_audit WHERE consumer = ?1 AND message_id = ?2 \
                    AND redrive_count = ?3 AND digest = ?4 AND {LEFT})"
            )),
            entries: ByFilter::new(|matches| {
                format!(
                    "SELECT {ENTRY} FROM {t}dead_letter d WHERE {matches} ORDER BY d.position LIMIT ?13"
                )
            }),
            letters: ByFilter::new(|matches| {
                format!(
                    "SELECT {ENTRY}, {message} FROM ( \
                    SELECT at, bytes, sum(bytes) OVER (ORDER BY at) AS through FROM ( \
                        SELECT d.position AS at, d.size AS bytes FROM {t}dead_letter d WHERE {matches} \
                        ORDER BY d.position LIMIT ?13)) page \
                 JOIN {t}dead_letter d ON d.position = page.at \
                 WHERE page.through <= ?14 OR page.through = page.bytes ORDER BY d.position"
                )
            }),
            last: safe(format!(
                "SELECT coalesce(max(position), 0) FROM {t}dead_letter"
            )),
            remove: safe(format!(
                "DELETE FROM {t}dead_letter WHERE position = ?1 AND consumer = ?2"
            )),
            may_have_sent: safe(format!(
                "SELECT id FROM {t}redrive_run WHERE consumer = ?1 \
                    AND EXISTS (SELECT 1 FROM json_each(in_hand) WHERE value = ?2) ORDER BY id LIMIT 1"
            )),
            insert: safe(format!("{} RETURNING position", put(t))),
            entered: safe(format!(
                "SELECT position FROM {t}dead_letter WHERE consumer = ?1 AND message_id = ?2 AND redrive_count = 0"
            )),
            // A repeated settlement finds its rows there.
            note: safe(format!(
                "INSERT INTO {t}redrive_audit (run, consumer, operator, verb, message_id, redrive_count, digest, outcome, \
                    detail) \
                 SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9 \
                 WHERE ?1 IS NULL OR NOT EXISTS (SELECT 1 FROM {t}redrive_audit WHERE consumer = ?2 AND message_id = ?5 \
                    AND redrive_count = ?6 AND digest = ?7 AND outcome = ?8 AND run = ?1)"
            )),
            plan: safe(format!(
                "INSERT INTO {t}redrive_run (consumer, operator, plan, end_position) VALUES (?1, ?2, ?3, ?4) \
                 RETURNING {RUN}"
            )),
            find_run: safe(format!(
                "SELECT {RUN} FROM {t}redrive_run WHERE consumer = ?1 AND id = ?2"
            )),
            runs: safe(format!(
                "SELECT {RUN} FROM {t}redrive_run WHERE consumer = ?1 AND id < ?2 ORDER BY id DESC LIMIT ?3"
            )),
            // As large as the clock, so that none comes twice even if the database is put back to an earlier state.
            take_run: safe(format!(
                "UPDATE {t}redrive_run SET state = 'running', token = max(token + 1, {NOW}), error = NULL, \
                    changed_at = {NOW} \
                 WHERE consumer = ?1 AND id = ?2 AND state IN (SELECT value FROM json_each(?3)) RETURNING {RUN}"
            )),
            take_in_hand: safe(format!(
                "UPDATE {t}redrive_run SET changed_at = {NOW}, in_hand = (SELECT json_group_array(value) FROM ( \
                    SELECT value FROM json_each(in_hand) UNION SELECT value FROM json_each(?3))) \
                 WHERE id = ?1 AND token = ?2 AND state = 'running'"
            )),
            there: safe(format!(
                "SELECT position FROM {t}dead_letter WHERE position IN (SELECT value FROM json_each(?1)) AND consumer = ?2"
            )),
            advance: safe(format!(
                "UPDATE {t}redrive_run SET cursor = ?3, sent = ?4, refused = ?5, rejected = ?6, proved = ?7, \
                    in_hand = ?8, changed_at = {NOW} WHERE id = ?1 AND token = ?2 AND state = 'running'"
            )),
            end_run: safe(format!(
                "UPDATE {t}redrive_run SET state = ?3, error = ?4, changed_at = {NOW} \
                 WHERE id = ?1 AND token = ?2 AND state = 'running'"
            )),
            cancel_run: safe(format!(
                "UPDATE {t}redrive_run SET state = 'cancelled', error = ?3, token = token + 1, changed_at = {NOW} \
                 WHERE consumer = ?1 AND id = ?2 AND state IN ('planned', 'running', 'paused', 'stopped')"
            )),
            audit: safe(format!(
                "SELECT position, at, run, operator, verb, message_id, redrive_count, digest, outcome, detail \
                 FROM {t}redrive_audit WHERE consumer = ?1 AND position > ?2 ORDER BY position LIMIT ?3"
            )),
            clean_up_audit: safe(format!(
                "DELETE FROM {t}redrive_audit WHERE position IN ( \
                    SELECT position FROM {t}redrive_audit WHERE consumer = ?1 AND at <= {NOW} - ?2 ORDER BY at LIMIT ?3)"
            )),
            clean_up_runs: safe(format!(
                "DELETE FROM {t}redrive_run WHERE id IN ( \
                    SELECT id FROM {t}redrive_run WHERE consumer = ?1 AND state IN ('done', 'cancelled') \
                        AND changed_at <= {NOW} - ?2 ORDER BY id LIMIT ?3)"
            )),
        }
    }
}
