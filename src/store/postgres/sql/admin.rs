//! What an operator asks.

use sqlx::SqlStr;

use super::{MESSAGE, safe};
use crate::lane::LANES;

/// What an operator asks for. All but `depth` and `horizon` touch only rows set aside, along their primary key.
pub(in super::super) struct AdminSql {
    pub depth: SqlStr,
    pub list: SqlStr,
    pub show: SqlStr,
    pub last: SqlStr,
    pub count: SqlStr,
    pub requeue: SqlStr,
    pub discard: SqlStr,
    pub control: SqlStr,
    pub forget_control: SqlStr,
    pub dead_rows: SqlStr,
}

impl AdminSql {
    pub(super) fn new(t: &str) -> Self {
        const ENTRY: &str = "position, state, reason, error, attempts, set_aside_at, message_id, destination, key, \
            event_type, size";
        const MATCHES: &str = "($1::text IS NULL OR destination = $1) AND ($2::text IS NULL OR reason = $2) \
            AND ($3::bytea IS NULL OR key = $3) AND ($4::text IS NULL OR message_id = $4) \
            AND ($5::bigint IS NULL OR set_aside_at <= clock_timestamp() - $5 * interval '1 microsecond') \
            AND position > $6 AND position <= $7";
        // The rows of one step, locked in one order by all: whoever has a row is waited for, and it is passed over when it
        // is gone then.
        let taken = format!(
            "WITH step AS MATERIALIZED ( \
                SELECT position FROM ( \
                    SELECT position, sum(size::bigint) OVER (ORDER BY position) - size AS before FROM ( \
                        SELECT position, size FROM {t}outbox_aside WHERE {MATCHES} AND state IN ('parked', 'blocking') \
                        ORDER BY position LIMIT $8) page) measured \
                WHERE before < $9), \
             locked AS MATERIALIZED ( \
                SELECT position FROM {t}outbox_aside WHERE position = ANY (ARRAY(SELECT position FROM step)) \
                ORDER BY position FOR UPDATE), \
             taken AS ( \
                DELETE FROM {t}outbox_aside \
                WHERE position = ANY (ARRAY(SELECT position FROM locked)) AND state {{state}} \
                RETURNING *)"
        );
        let taken = |state: &str| taken.replace("{state}", state);
        let (parked, any) = (taken("= 'parked'"), taken("IN ('parked', 'blocking')"));
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
                    SELECT position FROM {t}outbox_aside WHERE {MATCHES} AND state IN ('parked', 'blocking') \
                    ORDER BY position LIMIT $8) page"
            )),
            // Positions are drawn in the order of the sub-select, after the transaction's id: the DELETE took it.
            requeue: safe(format!(
                "{parked}, moved AS ( \
                    INSERT INTO {t}outbox (lane, {MESSAGE}, size) \
                    SELECT lane, {MESSAGE}, size FROM taken ORDER BY position \
                    RETURNING message_id), \
                 freed AS ( \
                    UPDATE {t}outbox_aside SET state = 'waiting', reason = 'requeued' \
                    WHERE position = ANY (ARRAY(SELECT position FROM locked)) AND state = 'blocking' \
                    RETURNING message_id) \
                 SELECT (SELECT max(position) FROM step), array_agg(message_id) \
                 FROM (SELECT message_id FROM moved UNION ALL SELECT message_id FROM freed) both_of"
            )),
            discard: safe(format!(
                "{any} SELECT (SELECT max(position) FROM step), array_agg(message_id ORDER BY position) \
                 FROM taken"
            )),
            // Nothing is kept of a destination that is neither paused nor limited.
            control: safe(format!(
                "INSERT INTO {t}outbox_destination AS d (destination, paused, rate_max, because) \
                 SELECT $1, coalesce($2, false), CASE WHEN $3 THEN $4::int END, $5 \
                 WHERE EXISTS (SELECT 1 FROM {t}outbox_destination WHERE destination = $1) \
                    OR (SELECT count(*) FROM {t}outbox_destination) < $6 \
                 ON CONFLICT (destination) DO UPDATE SET paused = coalesce($2, d.paused), \
                    rate_max = CASE WHEN $3 THEN $4::int ELSE d.rate_max END, because = $5, \
                    changed_at = clock_timestamp()"
            )),
            forget_control: safe(format!(
                "DELETE FROM {t}outbox_destination WHERE destination = $1 AND NOT paused AND rate_max IS NULL"
            )),
            dead_rows: safe(format!(
                "SELECT s.relname::text, s.n_live_tup, s.n_dead_tup, greatest(s.last_vacuum, s.last_autovacuum) \
                 FROM unnest(ARRAY['outbox', 'outbox_aside', 'outbox_destination', 'outbox_lane', 'relay', \
                    'inbox', 'dead_letter']) AS t(name) \
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
pub(in super::super) const HORIZON: &str = "SELECT kind, pid, name, state, \
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
