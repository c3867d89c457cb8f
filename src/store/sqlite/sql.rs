//! Every statement, built once from the validated prefix.

mod redrive;
mod waiting;

use std::sync::Arc;

use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

use self::redrive::RedriveSql;
use self::waiting::WaitingSql;
use crate::store::Prefix;

/// Columns of a message, in the order in which rows are read.
const MESSAGE: &str = "message_id, destination, key, event_type, content_type, headers, payload, \
    version, occurred_at";

/// Takes the write lock at once: a transaction that reads first and writes later is refused, without any waiting, when
/// another one wrote in between.
pub(super) const BEGIN: SqlStr = SqlStr::from_static("BEGIN IMMEDIATE");

/// The database's clock in whole microseconds.
const NOW: &str = "CAST(unixepoch('subsec') * 1000000 AS INTEGER)";

/// Most rows of one INSERT: 11 parameters each, of 32,766 that a statement may have.
pub(super) const INSERT_ROWS_MAX: usize = 500;

/// Rows set aside that go by themselves, or block: a line is those of one scope and key.
const IN_LINE: &str = "state IN ('waiting', 'held', 'blocking')";

pub(super) struct Sql {
    insert: String,
    pub delay: SqlStr,
    pub release_due: SqlStr,
    pub forget_due: SqlStr,
    pub next_due: SqlStr,
    pub due: SqlStr,
    pub controls: SqlStr,
    pub heartbeat: SqlStr,
    pub forget: SqlStr,
    pub standing: SqlStr,
    pub leave: SqlStr,
    pub lease: SqlStr,
    pub renew: SqlStr,
    pub release: SqlStr,
    pub fetch: SqlStr,
    pub any_aside: SqlStr,
    pub freeable: SqlStr,
    pub free: SqlStr,
    pub drain: SqlStr,
    pub confirm: SqlStr,
    pub keep: SqlStr,
    pub set_aside: SqlStr,
    pub confirm_aside: SqlStr,
    pub keep_aside: SqlStr,
    pub change_aside: SqlStr,
    pub pending: SqlStr,
    pub aside: SqlStr,
    pub check_outbox: SqlStr,
    pub check_inbox: SqlStr,
    pub check_history: SqlStr,
    pub clean_up_history: SqlStr,
    pub published: SqlStr,
    pub record: SqlStr,
    pub record_all: SqlStr,
    pub is_recorded: SqlStr,
    pub note_start: SqlStr,
    pub forget_start: SqlStr,
    pub clean_up_starts: SqlStr,
    pub clean_up: SqlStr,
    pub advance: SqlStr,
    pub clean_up_versions: SqlStr,
    pub put: SqlStr,
    pub list: SqlStr,
    pub count: SqlStr,
    pub remove: SqlStr,
    pub admin: AdminSql,
    pub redrive: RedriveSql,
    pub waiting: WaitingSql,
}

impl Sql {
    pub(super) fn new(prefix: &Prefix) -> Self {
        let t = prefix.as_str();
        Self {
            insert: format!("INSERT INTO {t}outbox (lane, {MESSAGE}, size) VALUES "),
            delay: safe(format!(
                "INSERT INTO {t}outbox_aside (state, reason, due_at, lane, {MESSAGE}, size) \
                 VALUES ('delayed', 'delayed', {NOW} + ?12, ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)"
            )),
            due: safe(format!(
                "SELECT position FROM {t}outbox_aside WHERE state = 'delayed' AND due_at <= {NOW} \
                 ORDER BY due_at, position LIMIT ?1"
            )),
            release_due: safe(format!(
                "INSERT INTO {t}outbox (lane, {MESSAGE}, size) \
                 SELECT lane, {MESSAGE}, size FROM {t}outbox_aside \
                 WHERE position IN (SELECT value FROM json_each(?1)) ORDER BY due_at, position"
            )),
            forget_due: safe(format!(
                "DELETE FROM {t}outbox_aside WHERE position IN (SELECT value FROM json_each(?1))"
            )),
            next_due: safe(format!(
                "SELECT min(due_at) - {NOW} FROM {t}outbox_aside WHERE state = 'delayed'"
            )),
            controls: safe(format!(
                "SELECT destination, paused, rate_max, because, changed_at \
                 FROM {t}outbox_destination ORDER BY destination LIMIT ?1"
            )),
            heartbeat: safe(format!(
                "INSERT INTO {t}relay (id, name, expires_at) VALUES (?1, ?2, {NOW} + ?3) \
                 ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at"
            )),
            forget: safe(format!(
                "DELETE FROM {t}relay WHERE id IN ( \
                    SELECT id FROM {t}relay WHERE expires_at <= {NOW} AND id <> ?1 LIMIT ?2)"
            )),
            standing: safe(format!(
                "SELECT count(*) + 1, count(*) FILTER (WHERE id < ?1) \
                 FROM {t}relay WHERE id <> ?1 AND expires_at > {NOW}"
            )),
            leave: safe(format!("DELETE FROM {t}relay WHERE id = ?1")),
            // The token is the instant: one more than the last could be given twice, once to a relay that goes on
            // running while the database is put back to an earlier state.
            lease: safe(format!(
                "UPDATE {t}outbox_lane \
                 SET token = max(token + 1, {NOW}), owner = ?1, expires_at = {NOW} + ?3 \
                 WHERE lane IN (SELECT lane FROM {t}outbox_lane WHERE expires_at <= {NOW} \
                    ORDER BY expires_at, lane LIMIT ?2) \
                 RETURNING lane, token"
            )),
            // A released lane has no owner and cannot be revived by a late renewal.
            renew: safe(format!(
                "UPDATE {t}outbox_lane SET expires_at = {NOW} + ?2 \
                 WHERE owner IS NOT NULL AND (lane, token) IN ( \
                    SELECT value ->> 0, value ->> 1 FROM json_each(?1)) \
                 RETURNING lane, token"
            )),
            release: safe(format!(
                "UPDATE {t}outbox_lane SET owner = NULL, expires_at = 0 \
                 WHERE (lane, token) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?1))"
            )),
            // json_each is wrapped because it has a column `key` of its own.
            // CROSS JOIN keeps the order of the tables: first the lanes, then each lane's page.
            // A page ends with the first row beyond the byte limit, so that the reader sees that there is one.
            // The last LIMIT only bites where there are more lanes than rows allowed, so never inside a lane.
            fetch: safe(format!(
                "SELECT o.lane, o.position, {MESSAGE}, o.size, \
                    CASE WHEN ?3 THEN ( \
                        SELECT json_group_array(json_array(blocked, last, scope)) FROM ( \
                            SELECT scope, max(outbox_position) AS last, state <> 'waiting' AS blocked \
                            FROM {t}outbox_aside a \
                            WHERE a.lane = o.lane AND a.key = o.key AND {IN_LINE} GROUP BY scope)) END \
                 FROM (SELECT value FROM json_each(?1)) l \
                 CROSS JOIN {t}outbox_lane z ON z.lane = l.value ->> 0 AND z.token = l.value ->> 1 \
                 CROSS JOIN {t}outbox o ON o.position IN ( \
                    SELECT position FROM ( \
                        SELECT position, sum(size) OVER w - size AS before, row_number() OVER w AS place \
                        FROM (SELECT position, size FROM {t}outbox \
                            WHERE lane = z.lane AND position > 0 ORDER BY position LIMIT ?2) \
                        WINDOW w AS (ORDER BY position)) \
                    WHERE before <= ?4 OR place <= 2) \
                 LIMIT ?5"
            )),
            any_aside: safe(format!(
                "SELECT EXISTS (SELECT 1 FROM {t}outbox_aside WHERE {IN_LINE})"
            )),
            // Rows of a key that nothing blocks any more.
            freeable: safe(format!(
                "SELECT h.position FROM (SELECT value FROM json_each(?1)) l \
                 CROSS JOIN {t}outbox_lane z ON z.lane = l.value ->> 0 AND z.token = l.value ->> 1 \
                 CROSS JOIN {t}outbox_aside h ON h.lane = z.lane AND h.state = 'held' \
                 WHERE NOT EXISTS (SELECT 1 FROM {t}outbox_aside b \
                    WHERE b.lane = h.lane AND b.key = h.key AND b.scope = h.scope AND b.state = 'blocking' \
                        AND b.outbox_position < h.outbox_position) \
                 ORDER BY h.outbox_position LIMIT ?2"
            )),
            free: safe(format!(
                "UPDATE {t}outbox_aside SET state = 'waiting' \
                 WHERE state = 'held' AND position IN (SELECT value FROM json_each(?1))"
            )),
            // What is ahead of a row in its scope and key and has to wait keeps it back too.
            drain: safe(format!(
                "SELECT a.lane, a.outbox_position, {MESSAGE}, a.size \
                 FROM (SELECT value FROM json_each(?1)) l \
                 CROSS JOIN {t}outbox_lane z ON z.lane = l.value ->> 0 AND z.token = l.value ->> 1 \
                 CROSS JOIN {t}outbox_aside a ON a.position IN ( \
                    SELECT w.position FROM {t}outbox_aside w \
                    WHERE w.lane = z.lane AND w.state = 'waiting' \
                        AND w.destination NOT IN (SELECT value FROM json_each(?3)) \
                        AND NOT EXISTS (SELECT 1 FROM {t}outbox_aside e \
                            WHERE e.lane = w.lane AND e.key = w.key AND e.scope = w.scope \
                                AND e.{IN_LINE} AND e.outbox_position < w.outbox_position \
                                AND (e.state <> 'waiting' \
                                    OR e.destination IN (SELECT value FROM json_each(?3)))) \
                    ORDER BY w.outbox_position LIMIT ?2)"
            )),
            confirm: safe(format!(
                "DELETE FROM {t}outbox WHERE position IN ( \
                    SELECT o.position FROM (SELECT value FROM json_each(?1)) d \
                    CROSS JOIN {t}outbox_lane z ON z.lane = d.value ->> 0 AND z.token = d.value ->> 2 \
                    CROSS JOIN {t}outbox o ON o.position = d.value ->> 1 AND o.lane = z.lane)"
            )),
            keep: safe(format!(
                "INSERT INTO {t}outbox_history (published_at, position, lane, {MESSAGE}, size) \
                 SELECT {NOW}, o.position, o.lane, {MESSAGE}, o.size \
                 FROM (SELECT value FROM json_each(?1)) d \
                 CROSS JOIN {t}outbox_lane z ON z.lane = d.value ->> 0 AND z.token = d.value ->> 2 \
                 CROSS JOIN {t}outbox o ON o.position = d.value ->> 1 AND o.lane = z.lane"
            )),
            keep_aside: safe(format!(
                "INSERT INTO {t}outbox_history (published_at, position, lane, {MESSAGE}, size) \
                 SELECT {NOW}, a.outbox_position, a.lane, {MESSAGE}, a.size \
                 FROM (SELECT value FROM json_each(?1)) d \
                 CROSS JOIN {t}outbox_lane z ON z.lane = d.value ->> 0 AND z.token = d.value ->> 2 \
                 CROSS JOIN {t}outbox_aside a ON a.lane = z.lane AND a.outbox_position = d.value ->> 1 \
                 WHERE a.state = 'waiting'"
            )),
            check_history: safe(format!(
                "SELECT count(*) FROM (SELECT xx.published_at, xx.position, xx.lane FROM {t}outbox_history xx LIMIT 1)"
            )),
            clean_up_history: safe(format!(
                "DELETE FROM {t}outbox_history WHERE number IN ( \
                    SELECT number FROM ( \
                        SELECT number, sum(size) OVER (ORDER BY published_at, number) - size AS before FROM ( \
                            SELECT number, published_at, size FROM {t}outbox_history \
                            WHERE published_at < {NOW} - ?1 ORDER BY published_at, number LIMIT ?2)) \
                    WHERE before < ?3)"
            )),
            published: safe(format!(
                "SELECT {MESSAGE}, position, published_at FROM {t}outbox_history WHERE message_id = ?1 \
                 ORDER BY published_at, number LIMIT ?2"
            )),
            set_aside: safe(format!(
                "INSERT INTO {t}outbox_aside (state, reason, error, scope, outbox_position, lane, {MESSAGE}, size) \
                 SELECT d.value ->> 3, d.value ->> 4, nullif(d.value ->> 5, ''), d.value ->> 6, o.position, \
                    o.lane, {MESSAGE}, o.size \
                 FROM (SELECT value FROM json_each(?1)) d \
                 CROSS JOIN {t}outbox_lane z ON z.lane = d.value ->> 0 AND z.token = d.value ->> 2 \
                 CROSS JOIN {t}outbox o ON o.position = d.value ->> 1 AND o.lane = z.lane \
                 ORDER BY o.position"
            )),
            confirm_aside: safe(format!(
                "DELETE FROM {t}outbox_aside WHERE position IN ( \
                    SELECT a.position FROM (SELECT value FROM json_each(?1)) d \
                    CROSS JOIN {t}outbox_lane z ON z.lane = d.value ->> 0 AND z.token = d.value ->> 2 \
                    CROSS JOIN {t}outbox_aside a ON a.lane = z.lane AND a.outbox_position = d.value ->> 1 \
                    WHERE a.state = 'waiting')"
            )),
            change_aside: safe(format!(
                "UPDATE {t}outbox_aside AS a SET state = d.value ->> 3, reason = d.value ->> 4, \
                    error = nullif(d.value ->> 5, ''), attempts = a.attempts + 1 \
                 FROM json_each(?1) d \
                 JOIN {t}outbox_lane z ON z.lane = d.value ->> 0 AND z.token = d.value ->> 2 \
                 WHERE a.lane = z.lane AND a.outbox_position = d.value ->> 1 AND a.state = 'waiting'"
            )),
            pending: safe(format!(
                "SELECT count(*) FROM (SELECT 1 FROM {t}outbox LIMIT ?1)"
            )),
            aside: safe(format!(
                "SELECT count(*) FROM (SELECT 1 FROM {t}outbox_aside LIMIT ?1)"
            )),
            check_outbox: safe(format!(
                "SELECT (SELECT count(*) FROM {t}outbox_lane), \
                    (SELECT count(*) FROM (SELECT xx.lane, xx.position, xx.size FROM {t}outbox xx LIMIT 1)), \
                    (SELECT count(*) FROM (SELECT xx.state, xx.scope FROM {t}outbox_aside xx LIMIT 1)), \
                    (SELECT count(*) FROM (SELECT xx.paused, xx.rate_max FROM {t}outbox_destination xx LIMIT 1)), \
                    (SELECT count(*) FROM (SELECT xx.id, xx.expires_at FROM {t}relay xx LIMIT 1))"
            )),
            check_inbox: safe(format!(
                "SELECT 1 FROM {t}inbox UNION ALL SELECT 1 FROM {t}inbox_start \
                 UNION ALL SELECT 1 FROM {t}aggregate_version LIMIT 1"
            )),
            record: safe(format!(
                "INSERT INTO {t}inbox (consumer, message_id) VALUES (?1, ?2) ON CONFLICT DO NOTHING"
            )),
            record_all: safe(format!(
                "INSERT INTO {t}inbox (consumer, message_id) SELECT ?1, value FROM json_each(?2) WHERE true \
                 ON CONFLICT DO NOTHING RETURNING message_id"
            )),
            is_recorded: safe(format!(
                "SELECT EXISTS (SELECT 1 FROM {t}inbox WHERE consumer = ?1 AND message_id = ?2)"
            )),
            // The note of another run stays as it is, and is what is returned.
            note_start: safe(format!(
                "INSERT INTO {t}inbox_start (consumer, message_id, run) VALUES (?1, ?2, ?3) \
                 ON CONFLICT (consumer, message_id) DO UPDATE SET run = run RETURNING run"
            )),
            forget_start: safe(format!(
                "DELETE FROM {t}inbox_start WHERE consumer = ?1 AND message_id = ?2"
            )),
            clean_up_starts: safe(format!(
                "DELETE FROM {t}inbox_start WHERE (consumer, message_id) IN ( \
                    SELECT consumer, message_id FROM {t}inbox_start \
                    WHERE consumer = ?3 AND started_at <= {NOW} - ?1 \
                    ORDER BY started_at LIMIT ?2)"
            )),
            clean_up: safe(format!(
                "DELETE FROM {t}inbox WHERE (consumer, message_id) IN ( \
                    SELECT consumer, message_id FROM {t}inbox \
                    WHERE consumer = ?3 AND recorded_at <= {NOW} - ?1 \
                    ORDER BY recorded_at LIMIT ?2)"
            )),
            advance: safe(format!(
                "INSERT INTO {t}aggregate_version AS known (consumer, aggregate, version) VALUES (?1, ?2, ?3) \
                 ON CONFLICT (consumer, aggregate) DO UPDATE \
                 SET version = excluded.version, updated_at = excluded.updated_at \
                 WHERE known.version <= excluded.version"
            )),
            clean_up_versions: safe(format!(
                "DELETE FROM {t}aggregate_version WHERE (consumer, aggregate) IN ( \
                    SELECT consumer, aggregate FROM {t}aggregate_version \
                    WHERE consumer = ?3 AND updated_at <= {NOW} - ?1 \
                    ORDER BY updated_at LIMIT ?2)"
            )),
            put: safe(format!("{} ON CONFLICT DO NOTHING", put(t))),
            list: safe(format!(
                "SELECT position, consumer, {MESSAGE}, redrive_count, reason, retry_count, first_failed_at, \
                    last_failed_at, last_error, origin_topic, origin_partition, origin_offset, stored_at, owner, note \
                 FROM {t}dead_letter WHERE consumer = ?1 AND position > ?2 ORDER BY position LIMIT ?3"
            )),
            count: safe(format!(
                "SELECT count(*) FROM {t}dead_letter WHERE consumer = ?1"
            )),
            remove: safe(format!("DELETE FROM {t}dead_letter WHERE position = ?1")),
            admin: AdminSql::new(t),
            redrive: RedriveSql::new(t),
            waiting: WaitingSql::new(t),
        }
    }

    /// The INSERT of that many rows. Positions are drawn in the order of VALUES.
    pub(super) fn insert(&self, rows: usize) -> SqlStr {
        const ROW: &str = "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)";
        let mut text = String::with_capacity(self.insert.len() + rows * (ROW.len() + 1));
        text.push_str(&self.insert);
        for row in 0..rows {
            text.push_str(if row == 0 { "" } else { "," });
            text.push_str(ROW);
        }
        safe(text)
    }
}

/// The INSERT of a dead letter.
fn put(t: &str) -> String {
    format!(
        "INSERT INTO {t}dead_letter (consumer, redrive_count, reason, retry_count, first_failed_at, \
            last_failed_at, last_error, origin_topic, origin_partition, origin_offset, {MESSAGE}, size, digest, \
            owner, note) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?23)"
    )
}

/// Safe because [`Prefix`] is: nothing else that a caller chose is in the text. Shared, so that a use costs no copy.
fn safe(text: String) -> SqlStr {
    AssertSqlSafe(Arc::<str>::from(text)).into_sql_str()
}

/// The migrations under this prefix, counted in a table of our own.
pub(super) fn migrator(prefix: &Prefix) -> Migrator {
    let tables = include_str!("../../../migrations/sqlite/0001_relaybox.sql")
        .replace(Prefix::DEFAULT, prefix.as_str());
    let migration = Migration::new(
        1,
        "relaybox".into(),
        MigrationType::Simple,
        safe(tables),
        false,
    );
    let mut migrator = Migrator::with_migrations(vec![migration]);
    migrator.dangerous_set_table_name(format!("{}migrations", prefix.as_str()));
    // An older process that starts beside a newer one must not fail at what it does not know.
    migrator.set_ignore_missing(true);
    migrator
}

/// What an operator asks for. All but `depth` touch only rows set aside, along their primary key.
pub(super) struct AdminSql {
    pub depth: SqlStr,
    pub list: SqlStr,
    pub show: SqlStr,
    pub last: SqlStr,
    pub count: SqlStr,
    pub step: SqlStr,
    pub requeue: [SqlStr; 3],
    pub discard: [SqlStr; 1],
    pub count_controls: SqlStr,
    pub control: SqlStr,
    pub forget_control: SqlStr,
}

impl AdminSql {
    fn new(t: &str) -> Self {
        const ENTRY: &str = "position, state, reason, error, attempts, set_aside_at, message_id, destination, key, \
            event_type, size";
        let matches = format!(
            "(?1 IS NULL OR destination = ?1) AND (?2 IS NULL OR reason = ?2) AND (?3 IS NULL OR key = ?3) \
             AND (?4 IS NULL OR message_id = ?4) AND (?5 IS NULL OR set_aside_at <= {NOW} - ?5) \
             AND position > ?6 AND position <= ?7"
        );
        Self {
            // The limit stands inside each lane: a long lane must not hide the others.
            depth: safe(format!(
                "SELECT z.lane, o.destination, NULL, count(*), {NOW} - min(o.enqueued_at) \
                 FROM {t}outbox_lane z \
                 CROSS JOIN {t}outbox o ON o.position IN ( \
                    SELECT position FROM {t}outbox WHERE lane = z.lane ORDER BY position LIMIT ?1) \
                 GROUP BY z.lane, o.destination \
                 UNION ALL \
                 SELECT NULL, destination, reason, count(*), NULL \
                 FROM (SELECT destination, reason FROM {t}outbox_aside ORDER BY position LIMIT ?1) \
                 GROUP BY destination, reason"
            )),
            list: safe(format!(
                "SELECT {ENTRY} FROM {t}outbox_aside WHERE {matches} ORDER BY position LIMIT ?8"
            )),
            show: safe(format!(
                "SELECT {ENTRY}, {MESSAGE} FROM {t}outbox_aside WHERE position = ?1"
            )),
            last: safe(format!(
                "SELECT coalesce(max(position), 0) FROM {t}outbox_aside"
            )),
            count: safe(format!(
                "SELECT max(position), count(*) FROM ( \
                    SELECT position FROM {t}outbox_aside WHERE {matches} AND state IN ('parked', 'blocking') \
                    ORDER BY position LIMIT ?8)"
            )),
            step: safe(format!(
                "SELECT position, message_id FROM ( \
                    SELECT position, message_id, sum(size) OVER (ORDER BY position) - size AS before FROM ( \
                        SELECT position, message_id, size FROM {t}outbox_aside \
                        WHERE {matches} AND state IN ('parked', 'blocking') ORDER BY position LIMIT ?8)) \
                 WHERE before < ?9 ORDER BY position"
            )),
            // One that blocks its key keeps its place.
            requeue: [
                safe(format!(
                    "INSERT INTO {t}outbox (lane, {MESSAGE}, size) \
                     SELECT lane, {MESSAGE}, size FROM {t}outbox_aside \
                     WHERE position IN (SELECT value FROM json_each(?1)) AND state = 'parked' ORDER BY position"
                )),
                safe(format!(
                    "DELETE FROM {t}outbox_aside \
                     WHERE position IN (SELECT value FROM json_each(?1)) AND state = 'parked'"
                )),
                safe(format!(
                    "UPDATE {t}outbox_aside SET state = 'waiting', reason = 'requeued' \
                     WHERE position IN (SELECT value FROM json_each(?1)) AND state = 'blocking'"
                )),
            ],
            discard: [safe(format!(
                "DELETE FROM {t}outbox_aside WHERE position IN (SELECT value FROM json_each(?1))"
            ))],
            count_controls: safe(format!(
                "SELECT count(*) FROM {t}outbox_destination WHERE destination <> ?1"
            )),
            // Nothing is kept of a destination that is neither paused nor limited.
            control: safe(format!(
                "INSERT INTO {t}outbox_destination AS d (destination, paused, rate_max, because) \
                 VALUES (?1, coalesce(?2, 0), CASE WHEN ?3 THEN ?4 END, ?5) \
                 ON CONFLICT (destination) DO UPDATE SET paused = coalesce(?2, d.paused), \
                    rate_max = CASE WHEN ?3 THEN ?4 ELSE d.rate_max END, because = ?5, changed_at = {NOW}"
            )),
            forget_control: safe(format!(
                "DELETE FROM {t}outbox_destination WHERE destination = ?1 AND NOT paused AND rate_max IS NULL"
            )),
        }
    }
}
