//! Every statement, built once from the validated prefix.

use std::sync::Arc;

use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

use crate::lane::LANES;
use crate::store::Prefix;

use super::wake_up::{OPEN_MAX, channel};

/// Columns of a message, in the order in which rows are read.
const MESSAGE: &str = "message_id, destination, key, event_type, content_type, headers, payload, \
    version, occurred_at";

/// ... and their types.
const MESSAGE_TYPES: [&str; 9] = [
    "text",
    "text",
    "bytea",
    "text",
    "text",
    "text",
    "bytea",
    "bigint",
    "timestamptz",
];

/// Planner settings of the relay's connections.
///
/// Statistics of an outbox are stale by nature: analysed when empty, it makes the planner prefer a scan and a sort of
/// the whole table for each lane. Only index plans cost the same at every size.
pub(super) const RELAY_SETTINGS: [(&str, &str); 8] = [
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    // The plan is the same whatever the values, and making it anew costs as much as a third of the fetch.
    ("plan_cache_mode", "force_generic_plan"),
    // A plan with something switched off counts as so dear that it would be compiled, anew each time.
    ("jit", "off"),
    // The fence re-reads a lane row that it had to wait for: a property of this level.
    ("default_transaction_isolation", "read committed"),
    ("lock_timeout", "5s"),
];

/// Ends a transaction in one round trip, and tells whether it really was committed.
///
/// COMMIT in an aborted transaction rolls back and reports success. The SELECT fails there, and COMMIT AND CHAIN fails
/// where the handler ended the transaction by itself; a failing part keeps the rest of the text from running.
/// The transaction that AND CHAIN begins is there for the driver to end: only so does its nesting count return to 0.
pub(super) const COMMIT: &str = "SELECT 1; COMMIT AND CHAIN";

/// Whether there is no schema of this name.
pub(super) const SCHEMA_IS_MISSING: &str = "SELECT to_regnamespace($1) IS NULL";

pub(super) struct Sql {
    pub insert: SqlStr,
    pub insert_and_notify: SqlStr,
    pub notify: SqlStr,
    pub listen: SqlStr,
    pub heartbeat: SqlStr,
    pub standing: SqlStr,
    pub leave: SqlStr,
    pub lease: SqlStr,
    pub renew: SqlStr,
    pub release: SqlStr,
    pub fetch: SqlStr,
    pub refetch: SqlStr,
    pub settle: SqlStr,
    pub pending: SqlStr,
    pub aside: SqlStr,
    pub check_outbox: SqlStr,
    pub check_inbox: SqlStr,
    pub record: SqlStr,
    pub clean_up: SqlStr,
    pub put: SqlStr,
    pub list: SqlStr,
    pub count: SqlStr,
    pub remove: SqlStr,
    pub admin: AdminSql,
}

impl Sql {
    pub(super) fn new(prefix: &Prefix) -> Self {
        let t = prefix.as_str();
        // Positions are drawn in the order of the sub-select.
        let insert = format!(
            "INSERT INTO {t}outbox (lane, {MESSAGE}, size) \
             SELECT lane, {MESSAGE}, size \
             FROM unnest($1::int[], $2::text[], $3::text[], $4::bytea[], $5::text[], $6::text[], \
                $7::text[], $8::bytea[], $9::bigint[], $10::timestamptz[], $11::int[]) \
                WITH ORDINALITY AS m(lane, {MESSAGE}, size, place) \
             ORDER BY place"
        );
        // No payload, so that its size can refuse no commit.
        let channel = channel(prefix);
        let notify = format!("pg_notify('{channel}', '')");
        Self {
            // A row where it notified. The status of a transaction that this server has not seen yet would be an error
            // in the caller's transaction, so the snapshot is asked before.
            insert_and_notify: safe(format!(
                "WITH written AS ({insert}), \
                 earlier AS ( \
                    SELECT CASE WHEN xid < pg_snapshot_xmax(pg_current_snapshot()) \
                        THEN pg_xact_status(xid) ELSE 'in progress' END AS status \
                    FROM unnest($12::text[]::xid8[]) AS e(xid) WHERE xid <> pg_current_xact_id()) \
                 SELECT pg_current_xact_id()::text, {notify} \
                 FROM (SELECT count(*) FILTER (WHERE status = 'committed') AS committed, \
                    count(*) FILTER (WHERE status = 'in progress') AS open FROM earlier) counted \
                 WHERE committed = 0 AND open < {OPEN_MAX}"
            )),
            insert: safe(insert),
            notify: safe(format!("SELECT {notify}")),
            listen: safe(format!("LISTEN \"{channel}\"")),
            // `gone` reads `beat`, and so comes after it: two that found each other's registration ended, and locked
            // that before their own, would wait for each other. The count sees the state before this statement.
            heartbeat: safe(format!(
                "WITH beat AS ( \
                    INSERT INTO {t}relay (id, name, expires_at) \
                    VALUES ($1, $2, clock_timestamp() + $3::bigint * interval '1 microsecond') \
                    ON CONFLICT (id) DO UPDATE SET expires_at = excluded.expires_at \
                    RETURNING id), \
                 gone AS ( \
                    DELETE FROM {t}relay WHERE ctid = ANY (ARRAY( \
                        SELECT ctid FROM {t}relay \
                        WHERE expires_at <= clock_timestamp() AND id <> (SELECT id FROM beat) \
                        LIMIT $4 FOR UPDATE SKIP LOCKED))) \
                 SELECT count(*) + 1, count(*) FILTER (WHERE id < $1) \
                 FROM {t}relay WHERE id <> $1 AND expires_at > clock_timestamp()"
            )),
            standing: safe(format!(
                "SELECT count(*) + 1, count(*) FILTER (WHERE id < $1) \
                 FROM {t}relay WHERE id <> $1 AND expires_at > clock_timestamp()"
            )),
            leave: safe(format!("DELETE FROM {t}relay WHERE id = $1")),
            // MATERIALIZED: planned as the inner side of a join, the sub-select could lock more than its LIMIT.
            lease: safe(format!(
                "WITH free AS MATERIALIZED ( \
                    SELECT lane FROM {t}outbox_lane WHERE expires_at <= clock_timestamp() \
                    ORDER BY expires_at, lane LIMIT $2 FOR UPDATE SKIP LOCKED) \
                 UPDATE {t}outbox_lane z SET token = z.token + 1, owner = $1, \
                    expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond' \
                 FROM free WHERE z.lane = free.lane \
                 RETURNING z.lane, z.token"
            )),
            // A released lane has no owner and cannot be revived by a late renewal.
            renew: safe(format!(
                "UPDATE {t}outbox_lane z \
                 SET expires_at = clock_timestamp() + $3::bigint * interval '1 microsecond' \
                 FROM unnest($1::int[], $2::bigint[]) AS l(lane, token) \
                 WHERE z.lane = l.lane AND z.token = l.token AND z.owner IS NOT NULL \
                 RETURNING z.lane, z.token"
            )),
            release: safe(format!(
                "UPDATE {t}outbox_lane z SET owner = NULL, expires_at = '1970-01-01 00:00:00+00' \
                 FROM unnest($1::int[], $2::bigint[]) AS l(lane, token) \
                 WHERE z.lane = l.lane AND z.token = l.token"
            )),
            fetch: safe(page(t, "true")),
            // Of transactions that had ended when the page was read, below the floor: exactly what that view lacks.
            refetch: safe(page(
                t,
                "o.position <= l.known AND o.xid = ANY ($8::text[]::xid8[])",
            )),
            // `held` locks the lanes against a change of hands until the end of this statement, and re-reads a row
            // that changed while it waited. The rows are deleted by ctid because a join on (lane, position) was seen
            // to flip into a scan of the whole index.
            settle: safe(format!(
                "WITH held AS MATERIALIZED ( \
                    SELECT z.lane FROM {t}outbox_lane z \
                    JOIN unnest($1::int[], $2::bigint[]) AS l(lane, token) \
                        ON z.lane = l.lane AND z.token = l.token \
                    FOR KEY SHARE OF z), \
                 confirmed AS ( \
                    DELETE FROM {t}outbox WHERE ctid = ANY (ARRAY( \
                        SELECT x.ctid FROM unnest($3::int[], $4::bigint[]) AS d(lane, position) \
                        CROSS JOIN LATERAL (SELECT o.ctid FROM {t}outbox o \
                            WHERE o.lane = d.lane AND o.position = d.position LIMIT 1) x \
                        WHERE d.lane = ANY (ARRAY(SELECT lane FROM held)))) \
                    RETURNING 1), \
                 parked AS ( \
                    DELETE FROM {t}outbox WHERE ctid = ANY (ARRAY( \
                        SELECT x.ctid FROM unnest($5::int[], $6::bigint[]) AS d(lane, position) \
                        CROSS JOIN LATERAL (SELECT o.ctid FROM {t}outbox o \
                            WHERE o.lane = d.lane AND o.position = d.position LIMIT 1) x \
                        WHERE d.lane = ANY (ARRAY(SELECT lane FROM held)))) \
                    RETURNING *), \
                 moved AS ( \
                    INSERT INTO {t}outbox_aside (state, reason, error, lane, {MESSAGE}, size) \
                    SELECT 'parked', v.reason, v.error, p.lane, {MESSAGE}, p.size \
                    FROM parked p \
                    JOIN unnest($5::int[], $6::bigint[], $7::text[], $8::text[]) \
                        AS v(lane, position, reason, error) \
                        ON v.lane = p.lane AND v.position = p.position \
                    ORDER BY p.lane, p.position \
                    RETURNING 1) \
                 SELECT (SELECT count(*) FROM confirmed) + (SELECT count(*) FROM moved)"
            )),
            pending: safe(format!(
                "SELECT count(*) FROM (SELECT 1 FROM {t}outbox LIMIT $1) counted"
            )),
            aside: safe(format!(
                "SELECT count(*) FROM (SELECT 1 FROM {t}outbox_aside LIMIT $1) counted"
            )),
            // Names the tables it needs, so that a missing one is an error that says which.
            check_outbox: safe(format!(
                "SELECT (SELECT count(*) FROM {t}outbox_lane), \
                    coalesce(x.attnum < p.attnum AND p.attidentity = 'a', false), \
                    coalesce(s.seqcache = 1 AND NOT s.seqcycle, false), \
                    current_setting('server_encoding') \
                 FROM pg_class c \
                 LEFT JOIN pg_attribute x ON x.attrelid = c.oid AND x.attname = 'xid' \
                 LEFT JOIN pg_attribute p ON p.attrelid = c.oid AND p.attname = 'position' \
                 LEFT JOIN pg_sequence s \
                    ON s.seqrelid = pg_get_serial_sequence('{t}outbox', 'position')::regclass \
                 WHERE c.oid = '{t}outbox'::regclass AND '{t}outbox_aside'::regclass IS NOT NULL \
                    AND '{t}relay'::regclass IS NOT NULL"
            )),
            check_inbox: safe(format!(
                "SELECT current_setting('server_encoding') \
                 FROM (SELECT count(*) FROM (SELECT 1 FROM {t}inbox LIMIT 1) one) all_there"
            )),
            // One round trip: bounds the wait for another transaction's id, inserts, and puts the bound back, so that
            // the handler's statements keep the session's own.
            record: safe(format!(
                "WITH bound AS MATERIALIZED ( \
                    SELECT current_setting('lock_timeout') AS before, \
                        set_config('lock_timeout', $3, true) AS now), \
                 recorded AS ( \
                    INSERT INTO {t}inbox (consumer, message_id) SELECT $1, $2 FROM bound \
                    ON CONFLICT DO NOTHING RETURNING 1) \
                 SELECT count(*), set_config('lock_timeout', (SELECT before FROM bound), true) \
                 FROM recorded"
            )),
            clean_up: safe(format!(
                "DELETE FROM {t}inbox WHERE ctid = ANY (ARRAY( \
                    SELECT ctid FROM {t}inbox \
                    WHERE consumer = $3 \
                        AND recorded_at <= clock_timestamp() - $1::bigint * interval '1 microsecond' \
                    ORDER BY recorded_at LIMIT $2 FOR UPDATE SKIP LOCKED))"
            )),
            put: safe(format!(
                "INSERT INTO {t}dead_letter (consumer, redrive_count, reason, retry_count, first_failed_at, \
                    last_failed_at, last_error, origin_topic, origin_partition, origin_offset, {MESSAGE}, size) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20) \
                 ON CONFLICT DO NOTHING"
            )),
            list: safe(format!(
                "SELECT position, consumer, {MESSAGE}, redrive_count, reason, retry_count, first_failed_at, \
                    last_failed_at, last_error, origin_topic, origin_partition, origin_offset, stored_at \
                 FROM {t}dead_letter WHERE consumer = $1 AND position > $2 ORDER BY position LIMIT $3"
            )),
            count: safe(format!(
                "SELECT count(*) FROM {t}dead_letter WHERE consumer = $1"
            )),
            remove: safe(format!("DELETE FROM {t}dead_letter WHERE position = $1")),
            admin: AdminSql::new(t),
        }
    }
}

/// Reads lanes from their floors, at most so many rows and bytes each.
///
/// The one row without a lane says which view of the data this is, and since when the server runs, or nothing of a
/// standby's. A lane's first row, whose size is the sum so far, comes however large it is. `cut`: the byte limit ends
/// the lane here though a next row is known. The writing transaction is told of rows that should not be there: those up
/// to the position that was `known` to be settled.
fn page(t: &str, condition: &str) -> String {
    let nothing = MESSAGE_TYPES.map(|sql| format!("NULL::{sql}")).join(", ");
    format!(
        "SELECT NULL::int, NULL::bigint, {nothing}, NULL::int, NULL::bool, NULL::text, \
            pg_current_snapshot()::text, \
            CASE WHEN NOT pg_is_in_recovery() THEN pg_postmaster_start_time() END \
         UNION ALL \
         SELECT o.lane, o.position, {MESSAGE}, o.size, o.bytes + coalesce(o.next_size, 0) > l.bytes_max, \
            CASE WHEN o.position <= l.known THEN o.xid::text END, NULL, NULL \
         FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[]) \
            AS l(lane, token, floor, known, rows_max, bytes_max) \
         JOIN {t}outbox_lane z ON z.lane = l.lane AND z.token = l.token \
         CROSS JOIN LATERAL ( \
            SELECT p.*, sum(p.size) OVER w AS bytes, lead(p.size) OVER w AS next_size \
            FROM (SELECT * FROM {t}outbox o \
                WHERE o.lane = l.lane AND o.position > l.floor AND o.destination <> ALL ($7::text[]) \
                    AND {condition} \
                ORDER BY o.position LIMIT l.rows_max) p \
            WINDOW w AS (ORDER BY p.position ROWS UNBOUNDED PRECEDING)) o \
         WHERE o.bytes <= l.bytes_max OR o.bytes = o.size"
    )
}

/// Safe because [`Prefix`] is: nothing else that a caller chose is in the text. Shared, so that a use costs no copy.
fn safe(text: String) -> SqlStr {
    AssertSqlSafe(Arc::<str>::from(text)).into_sql_str()
}

/// The migrations under this prefix, counted in a table of our own.
pub(super) fn migrator(prefix: &Prefix) -> Migrator {
    let tables = include_str!("../../../migrations/postgres/0001_relaybox.sql")
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

/// What an operator asks for. All but `depth` and `horizon` touch only rows set aside, along their primary key.
pub(super) struct AdminSql {
    pub depth: SqlStr,
    pub list: SqlStr,
    pub show: SqlStr,
    pub last: SqlStr,
    pub count: SqlStr,
    pub requeue: SqlStr,
    pub discard: SqlStr,
    pub dead_rows: SqlStr,
}

impl AdminSql {
    fn new(t: &str) -> Self {
        const ENTRY: &str = "position, state, reason, error, attempts, set_aside_at, message_id, destination, key, \
            event_type, size";
        const MATCHES: &str = "($1::text IS NULL OR destination = $1) AND ($2::text IS NULL OR reason = $2) \
            AND ($3::bytea IS NULL OR key = $3) AND ($4::text IS NULL OR message_id = $4) \
            AND ($5::bigint IS NULL OR set_aside_at <= clock_timestamp() - $5 * interval '1 microsecond') \
            AND position > $6 AND position <= $7";
        // The rows of one step. DELETE waits for whoever has a row and passes over it when it is gone then; the array
        // is read along the index, so that all lock in one order.
        let taken = format!(
            "WITH step AS MATERIALIZED ( \
                SELECT position FROM ( \
                    SELECT position, sum(size::bigint) OVER (ORDER BY position) - size AS before FROM ( \
                        SELECT position, size FROM {t}outbox_aside WHERE {MATCHES} AND state = 'parked' \
                        ORDER BY position LIMIT $8) page) measured \
                WHERE before < $9), \
             taken AS ( \
                DELETE FROM {t}outbox_aside \
                WHERE position = ANY (ARRAY(SELECT position FROM step ORDER BY position)) AND state = 'parked' \
                RETURNING *)"
        );
        Self {
            // The limit stands inside each lane: a long lane must not hide the others.
            depth: safe(format!(
                "SELECT l.lane::bigint, o.destination, NULL::text, count(*), \
                    (extract(epoch FROM clock_timestamp() - min(o.enqueued_at)) * 1000000)::bigint \
                 FROM generate_series(0, {}) AS l(lane) \
                 CROSS JOIN LATERAL (SELECT destination, enqueued_at FROM {t}outbox \
                    WHERE lane = l.lane ORDER BY position LIMIT $1) o \
                 GROUP BY l.lane, o.destination \
                 UNION ALL \
                 SELECT NULL, destination, reason, count(*), NULL \
                 FROM (SELECT destination, reason FROM {t}outbox_aside ORDER BY position LIMIT $1) a \
                 GROUP BY destination, reason",
                LANES - 1
            )),
            list: safe(format!(
                "SELECT {ENTRY} FROM {t}outbox_aside WHERE {MATCHES} ORDER BY position LIMIT $8"
            )),
            show: safe(format!(
                "SELECT {ENTRY}, {MESSAGE} FROM {t}outbox_aside WHERE position = $1"
            )),
            last: safe(format!(
                "SELECT coalesce(max(position), 0) FROM {t}outbox_aside"
            )),
            count: safe(format!(
                "SELECT max(position), count(*) FROM ( \
                    SELECT position FROM {t}outbox_aside WHERE {MATCHES} AND state = 'parked' \
                    ORDER BY position LIMIT $8) page"
            )),
            // Positions are drawn in the order of the sub-select, after the transaction's id: the DELETE took it.
            requeue: safe(format!(
                "{taken}, moved AS ( \
                    INSERT INTO {t}outbox (lane, {MESSAGE}, size) \
                    SELECT lane, {MESSAGE}, size FROM taken ORDER BY position \
                    RETURNING position, message_id) \
                 SELECT (SELECT max(position) FROM step), array_agg(message_id ORDER BY position) FROM moved"
            )),
            discard: safe(format!(
                "{taken} SELECT (SELECT max(position) FROM step), array_agg(message_id ORDER BY position) \
                 FROM taken"
            )),
            dead_rows: safe(format!(
                "SELECT s.relname::text, s.n_live_tup, s.n_dead_tup, greatest(s.last_vacuum, s.last_autovacuum) \
                 FROM unnest(ARRAY['outbox', 'outbox_aside', 'outbox_lane', 'relay', 'inbox', 'dead_letter']) AS t(name) \
                 JOIN pg_stat_user_tables s ON s.relid = to_regclass('{t}' || t.name) \
                 ORDER BY s.n_dead_tup DESC"
            )),
        }
    }
}

/// Whoever keeps dead rows of this database from being removed, the oldest first.
///
/// Sessions of other databases do not; a standby's do through its walsender or slot. A vacuum's own snapshot does not
/// count. Names and ages only: a query's text may hold secrets.
pub(super) const HORIZON: &str = "SELECT kind, pid, name, state, \
        (extract(epoch FROM clock_timestamp() - since) * 1000000)::bigint, xids::bigint \
     FROM ( \
        SELECT 'session' AS kind, pid, application_name AS name, state, xact_start AS since, \
            greatest(age(backend_xid), age(backend_xmin)) AS xids \
        FROM pg_stat_activity \
        WHERE pid <> pg_backend_pid() AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL) \
            AND backend_type IS DISTINCT FROM 'autovacuum worker' \
            AND (datname = current_database() OR datname IS NULL) \
        UNION ALL \
        SELECT 'prepared', NULL, gid, NULL, prepared, age(transaction) \
        FROM pg_prepared_xacts WHERE database = current_database() \
        UNION ALL \
        SELECT 'slot', active_pid, slot_name::text, CASE WHEN active THEN 'active' ELSE 'inactive' END, NULL, age(xmin) \
        FROM pg_replication_slots WHERE xmin IS NOT NULL) holders \
     ORDER BY xids DESC, since LIMIT $1";

#[cfg(test)]
mod tests {
    use super::*;

    /// A process whose clock is wrong must neither take a live lease nor keep a dead one: statements that judge or set
    /// an expiry take durations, and the instant is the database's at that moment, not at the start of a transaction.
    #[test]
    fn no_statement_about_leases_or_relays_takes_an_instant_from_the_client() {
        let sql = Sql::new(&Prefix::default());
        for text in [
            &sql.heartbeat,
            &sql.standing,
            &sql.leave,
            &sql.lease,
            &sql.renew,
            &sql.release,
            &sql.settle,
        ] {
            let text = text.as_str();
            for instant in ["timestamptz", "now()", "current_", "epoch"] {
                assert!(!text.contains(instant), "{instant}: {text}");
            }
            let judged = text.split("expires_at").skip(1);
            for judged in judged.filter(|rest| rest.contains(['<', '>', '='])) {
                let judged = judged.trim_start();
                assert!(
                    [
                        "<= clock_timestamp()",
                        "> clock_timestamp()",
                        "= clock_timestamp() + $3::bigint * interval '1 microsecond'",
                        "= '1970-01-01 00:00:00+00'",
                        "= excluded.",
                        // A column's name in a list
                        ", lane LIMIT",
                        ") VALUES ($1, $2, clock_timestamp() + $3::bigint * interval '1 microsecond')",
                        "RETURNING",
                    ]
                    .iter()
                    .any(|known| judged.starts_with(known)),
                    "{judged}"
                );
            }
        }
    }
}
