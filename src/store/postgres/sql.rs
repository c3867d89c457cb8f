//! Every statement, built once from the validated prefix.

mod admin;
mod history;
mod page;
mod redrive;
mod waiting;

use std::sync::Arc;

use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

use crate::store::Prefix;

pub(super) use self::admin::{AdminSql, HORIZON};
use self::history::keep;
pub(super) use self::history::{HistorySql, PARTITIONS};
use self::page::{BLOCKED, drain, page, plain_page};
use self::redrive::{RedriveSql, put};
use self::waiting::WaitingSql;
use super::wake_up::{OPEN_MAX, channel};

/// Columns of a message, in the order in which rows are read.
const MESSAGE: &str = "message_id, destination, key, event_type, content_type, headers, payload, \
    version, occurred_at";

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

/// Ends a transaction in one round trip, tells whether it really was committed, and begins the next.
///
/// COMMIT in an aborted transaction rolls back and reports success. SAVEPOINT fails there, and where the handler ended the
/// transaction by itself; a failing part keeps the rest of the text from running. Of all statements that do so it is the
/// cheapest: it is neither planned nor does it return a row.
/// AND CHAIN, because the driver's nesting count returns to 0 only by a statement of its own, which needs a transaction.
pub(super) const COMMIT: &str = "SAVEPOINT relaybox; COMMIT AND CHAIN";

/// Whether there is no schema of this name.
pub(super) const SCHEMA_IS_MISSING: &str = "SELECT to_regnamespace($1) IS NULL";

pub(super) struct Sql {
    pub insert: SqlStr,
    pub insert_delayed: SqlStr,
    pub release_due: SqlStr,
    pub controls: SqlStr,
    pub insert_and_notify: SqlStr,
    pub notify: SqlStr,
    pub listen: SqlStr,
    pub heartbeat: SqlStr,
    pub standing: SqlStr,
    pub leave: SqlStr,
    pub lease: SqlStr,
    pub renew: SqlStr,
    pub release: SqlStr,
    pub fetch_plain: SqlStr,
    pub fetch: SqlStr,
    pub refetch: SqlStr,
    pub confirm: SqlStr,
    pub confirm_and_keep: SqlStr,
    pub settle: SqlStr,
    pub settle_and_keep: SqlStr,
    pub free: SqlStr,
    pub pending: SqlStr,
    pub aside: SqlStr,
    pub check_outbox: SqlStr,
    pub check_inbox: SqlStr,
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
    pub history: HistorySql,
    pub redrive: RedriveSql,
    pub waiting: WaitingSql,
}

impl Sql {
    pub(super) fn new(prefix: &Prefix) -> Self {
        let t = prefix.as_str();
        // Locks the lanes against a change of hands until the end of the statement, and re-reads a row that changed while
        // it waited.
        let held = format!(
            "SELECT z.lane FROM {t}outbox_lane z \
             JOIN unnest($1::int[], $2::bigint[]) AS l(lane, token) ON z.lane = l.lane AND z.token = l.token \
             FOR KEY SHARE OF z"
        );
        // By ctid, because a join on (lane, position) was seen to flip into a scan of the whole index.
        let confirmed = format!(
            "DELETE FROM {t}outbox WHERE ctid = ANY (ARRAY( \
                SELECT x.ctid FROM unnest($3::int[], $4::bigint[]) AS d(lane, position) \
                CROSS JOIN LATERAL (SELECT o.ctid FROM {t}outbox o \
                    WHERE o.lane = d.lane AND o.position = d.position LIMIT 1) x \
                WHERE d.lane = ANY (ARRAY(SELECT lane FROM held))))"
        );
        // A row that is set aside already changes where it stands.
        let settle = |returning: &str, kept: &str| {
            safe(format!(
                "WITH held AS MATERIALIZED ({held}), confirmed AS ({confirmed} RETURNING {returning}), \
                 moving AS MATERIALIZED ( \
                    SELECT v.state, v.reason, v.error, v.scope, o.* \
                    FROM unnest($5::int[], $6::bigint[], $7::text[], $8::text[], $9::text[], $10::text[]) \
                        AS v(of_lane, at, state, reason, error, scope) \
                    CROSS JOIN LATERAL (SELECT o.ctid AS row, o.* FROM {t}outbox o \
                        WHERE o.lane = v.of_lane AND o.position = v.at LIMIT 1) o \
                    WHERE v.of_lane = ANY (ARRAY(SELECT lane FROM held))), \
                 gone AS (DELETE FROM {t}outbox WHERE ctid = ANY (ARRAY(SELECT row FROM moving))), \
                 moved AS ( \
                    INSERT INTO {t}outbox_aside (state, reason, error, scope, outbox_position, lane, {MESSAGE}, size) \
                    SELECT state, reason, nullif(error, ''), scope, position, lane, {MESSAGE}, size \
                    FROM moving ORDER BY lane, position \
                    RETURNING 1), \
                 sent AS ( \
                    DELETE FROM {t}outbox_aside WHERE ctid = ANY (ARRAY( \
                        SELECT x.ctid FROM unnest($11::int[], $12::bigint[]) AS d(lane, position) \
                        CROSS JOIN LATERAL (SELECT a.ctid FROM {t}outbox_aside a \
                            WHERE a.lane = d.lane AND a.outbox_position = d.position LIMIT 1) x \
                        WHERE d.lane = ANY (ARRAY(SELECT lane FROM held)))) \
                        AND state = 'waiting' \
                    RETURNING {returning}), \
                 changed AS ( \
                    UPDATE {t}outbox_aside a SET state = v.state, reason = v.reason, error = nullif(v.error, ''), \
                        attempts = a.attempts + 1 \
                    FROM unnest($13::int[], $14::bigint[], $15::text[], $16::text[], $17::text[]) \
                        AS v(lane, position, state, reason, error) \
                    WHERE a.lane = v.lane AND a.outbox_position = v.position AND a.state = 'waiting' \
                        AND v.lane = ANY (ARRAY(SELECT lane FROM held)) \
                    RETURNING 1){kept} \
                 SELECT (SELECT count(*) FROM confirmed) + (SELECT count(*) FROM moved) \
                    + (SELECT count(*) FROM sent) + (SELECT count(*) FROM changed)"
            ))
        };
        let kept = format!(
            ", kept AS ({}), kept_aside AS ({})",
            keep(t, "position", "confirmed"),
            keep(t, "outbox_position", "sent")
        );
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
            insert_delayed: safe(format!(
                "INSERT INTO {t}outbox_aside (state, reason, due_at, lane, {MESSAGE}, size) \
                 SELECT 'delayed', 'delayed', clock_timestamp() + $12::bigint * interval '1 microsecond', \
                    lane, {MESSAGE}, size \
                 FROM unnest($1::int[], $2::text[], $3::text[], $4::bytea[], $5::text[], $6::text[], \
                    $7::text[], $8::bytea[], $9::bigint[], $10::timestamptz[], $11::int[]) \
                    WITH ORDINALITY AS m(lane, {MESSAGE}, size, place) \
                 ORDER BY place"
            )),
            // What is left is looked at as it was before: a relay that finds nothing due sleeps until then.
            release_due: safe(format!(
                "WITH due AS MATERIALIZED ( \
                    SELECT ctid, due_at FROM {t}outbox_aside \
                    WHERE state = 'delayed' AND due_at <= clock_timestamp() \
                    ORDER BY due_at LIMIT $1 FOR UPDATE SKIP LOCKED), \
                 taken AS ( \
                    DELETE FROM {t}outbox_aside WHERE ctid = ANY (ARRAY(SELECT ctid FROM due)) RETURNING *), \
                 moved AS ( \
                    INSERT INTO {t}outbox (lane, {MESSAGE}, size) \
                    SELECT lane, {MESSAGE}, size FROM taken ORDER BY due_at, position \
                    RETURNING 1) \
                 SELECT (SELECT count(*) FROM moved), ( \
                    SELECT (extract(epoch FROM due_at - clock_timestamp()) * 1000000)::bigint \
                    FROM {t}outbox_aside WHERE state = 'delayed' AND due_at > clock_timestamp() \
                    ORDER BY due_at LIMIT 1)"
            )),
            controls: safe(format!(
                "SELECT destination, paused, rate_max, because, changed_at \
                 FROM {t}outbox_destination ORDER BY destination COLLATE \"C\" LIMIT $1"
            )),
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
            // The token is the instant: one more than the last could be given twice, once to a relay that goes on
            // running while the database is put back to an earlier state.
            // MATERIALIZED: planned as the inner side of a join, the sub-select could lock more than its LIMIT.
            lease: safe(format!(
                "WITH free AS MATERIALIZED ( \
                    SELECT lane FROM {t}outbox_lane WHERE expires_at <= clock_timestamp() \
                    ORDER BY expires_at, lane LIMIT $2 FOR UPDATE SKIP LOCKED) \
                 UPDATE {t}outbox_lane z SET owner = $1, token = greatest(z.token + 1, \
                        (extract(epoch FROM clock_timestamp()) * 1000000)::bigint), \
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
            fetch_plain: safe(plain_page(t)),
            fetch: safe(format!("{} UNION ALL {}", page(t, "true"), drain(t))),
            // Of transactions that had ended when the page was read, below the floor: exactly what that view lacks.
            refetch: safe(page(
                t,
                "o.position <= l.known AND o.xid = ANY ($8::text[]::xid8[])",
            )),
            confirm: safe(format!("WITH held AS MATERIALIZED ({held}) {confirmed}")),
            confirm_and_keep: safe(format!(
                "WITH held AS MATERIALIZED ({held}), gone AS ({confirmed} RETURNING *) {}",
                keep(t, "position", "gone")
            )),
            settle: settle("1", ""),
            settle_and_keep: settle("*", &kept),
            // A line is what is set aside of one key in one scope. Where its first row is held, what blocked it is gone.
            // Walks from line to line along the index. Rows freed too early would wait all the same.
            free: safe(format!(
                "WITH RECURSIVE line AS ( \
                    SELECT f.* FROM unnest($1::int[], $2::bigint[]) AS l(lane, token) \
                    JOIN {t}outbox_lane z ON z.lane = l.lane AND z.token = l.token \
                    CROSS JOIN LATERAL (SELECT e.lane, md5(e.key) AS hash, e.scope, e.state \
                        FROM {t}outbox_aside e WHERE e.lane = l.lane AND {BLOCKED} \
                        ORDER BY md5(e.key), e.scope, e.outbox_position LIMIT 1) f \
                    UNION ALL \
                    SELECT n.* FROM line CROSS JOIN LATERAL (SELECT e.lane, md5(e.key), e.scope, e.state \
                        FROM {t}outbox_aside e WHERE e.lane = line.lane AND {BLOCKED} \
                            AND (md5(e.key), e.scope) > (line.hash, line.scope) \
                        ORDER BY md5(e.key), e.scope, e.outbox_position LIMIT 1) n), \
                 freed AS ( \
                    UPDATE {t}outbox_aside SET state = 'waiting' WHERE ctid = ANY (ARRAY( \
                        SELECT h.ctid FROM line CROSS JOIN LATERAL (SELECT e.ctid FROM {t}outbox_aside e \
                            WHERE e.lane = line.lane AND md5(e.key) = line.hash AND e.scope = line.scope AND {BLOCKED} \
                            ORDER BY e.outbox_position LIMIT $3) h \
                        WHERE line.state = 'held' LIMIT $3)) AND state = 'held' \
                    RETURNING 1) \
                 SELECT count(*) FROM freed"
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
                    AND '{t}outbox_destination'::regclass IS NOT NULL AND '{t}relay'::regclass IS NOT NULL"
            )),
            check_inbox: safe(format!(
                "SELECT current_setting('server_encoding'), current_setting('synchronous_commit') \
                 FROM (SELECT count(*) FROM (SELECT 1 FROM {t}inbox LIMIT 1) one) all_there \
                 WHERE '{t}inbox_start'::regclass IS NOT NULL AND '{t}aggregate_version'::regclass IS NOT NULL"
            )),
            // One round trip: bounds the wait for another transaction's key, inserts, and puts the bound back, so that
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
            // The same for several. Sorted, and by bytes whatever the database's collation, so that two batches with the same
            // keys meet at the first of them and never wait for each other.
            record_all: safe(format!(
                "WITH bound AS MATERIALIZED ( \
                    SELECT current_setting('lock_timeout') AS before, \
                        set_config('lock_timeout', $3, true) AS now), \
                 recorded AS ( \
                    INSERT INTO {t}inbox (consumer, message_id) \
                    SELECT $1, k.key FROM bound, (SELECT DISTINCT u.key COLLATE \"C\" AS key FROM unnest($2::text[]) u(key) \
                        ORDER BY 1) k ON CONFLICT DO NOTHING RETURNING message_id) \
                 SELECT coalesce(array_agg(message_id), '{{}}'), \
                    set_config('lock_timeout', (SELECT before FROM bound), true) \
                 FROM recorded"
            )),
            is_recorded: safe(format!(
                "SELECT EXISTS (SELECT 1 FROM {t}inbox WHERE consumer = $1 AND message_id = $2)"
            )),
            // The note of another run stays as it is, and is what is returned.
            note_start: safe(format!(
                "INSERT INTO {t}inbox_start AS s (consumer, message_id, run) VALUES ($1, $2, $3) \
                 ON CONFLICT (consumer, message_id) DO UPDATE SET run = s.run RETURNING run"
            )),
            forget_start: safe(format!(
                "DELETE FROM {t}inbox_start WHERE consumer = $1 AND message_id = $2"
            )),
            clean_up_starts: safe(format!(
                "DELETE FROM {t}inbox_start WHERE ctid = ANY (ARRAY( \
                    SELECT ctid FROM {t}inbox_start \
                    WHERE consumer = $3 \
                        AND started_at <= clock_timestamp() - $1::bigint * interval '1 microsecond' \
                    ORDER BY started_at LIMIT $2 FOR UPDATE SKIP LOCKED))"
            )),
            clean_up: safe(format!(
                "DELETE FROM {t}inbox WHERE ctid = ANY (ARRAY( \
                    SELECT ctid FROM {t}inbox \
                    WHERE consumer = $3 \
                        AND recorded_at <= clock_timestamp() - $1::bigint * interval '1 microsecond' \
                    ORDER BY recorded_at LIMIT $2 FOR UPDATE SKIP LOCKED))"
            )),
            // A rewrite that leaves the hour as it is touches no index.
            advance: safe(format!(
                "INSERT INTO {t}aggregate_version AS known (consumer, aggregate, version, updated_at) \
                 VALUES ($1, $2, $3, date_trunc('hour', clock_timestamp())) \
                 ON CONFLICT (consumer, aggregate) DO UPDATE \
                 SET version = excluded.version, updated_at = excluded.updated_at \
                 WHERE known.version <= excluded.version"
            )),
            clean_up_versions: safe(format!(
                "DELETE FROM {t}aggregate_version WHERE ctid = ANY (ARRAY( \
                    SELECT ctid FROM {t}aggregate_version \
                    WHERE consumer = $3 AND updated_at <= \
                        clock_timestamp() - interval '1 hour' - $1::bigint * interval '1 microsecond' \
                    ORDER BY updated_at LIMIT $2 FOR UPDATE SKIP LOCKED))"
            )),
            put: safe(format!("{} ON CONFLICT DO NOTHING", put(t, ""))),
            list: safe(format!(
                "SELECT position, consumer, {MESSAGE}, redrive_count, reason, retry_count, first_failed_at, \
                    last_failed_at, last_error, origin_topic, origin_partition, origin_offset, stored_at, owner, note \
                 FROM {t}dead_letter WHERE consumer = $1 AND position > $2 ORDER BY position LIMIT $3"
            )),
            count: safe(format!(
                "SELECT count(*) FROM {t}dead_letter WHERE consumer = $1"
            )),
            remove: safe(format!("DELETE FROM {t}dead_letter WHERE position = $1")),
            admin: AdminSql::new(t),
            history: HistorySql::new(t),
            redrive: RedriveSql::new(t),
            waiting: WaitingSql::new(t),
        }
    }
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
            &sql.confirm,
            &sql.settle,
            &sql.confirm_and_keep,
            &sql.settle_and_keep,
        ] {
            let text = text
                .as_str()
                .replace("extract(epoch FROM clock_timestamp())", "");
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
