//! What a worker reads at once: pending rows from the floor on, and those set aside that may go.

use super::MESSAGE;

/// Types of the columns of a message.
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

/// Rows that block their key, or wait behind one that does. Says exactly what the index does.
pub(super) const BLOCKED: &str = "e.state IN ('held', 'blocking') AND e.key IS NOT NULL";
/// ... or wait for another reason.
const IN_LINE: &str = "e.state IN ('waiting', 'held', 'blocking') AND e.key IS NOT NULL";

/// Reads lanes from their floors, at most so many rows each, where nothing is set aside. Headers and payload of a row that
/// is larger than its part of the bytes stay behind, and it is marked: so the limit holds without a sum over the rows.
pub(super) fn plain_page(t: &str) -> String {
    const SMALL: &str = "o.size <= l.bytes_max / l.rows_max";
    let message = MESSAGE.replace(
        "headers, payload",
        &format!("CASE WHEN {SMALL} THEN headers END, CASE WHEN {SMALL} THEN payload END"),
    );
    let view = view("ARRAY[]::int[], ARRAY[]::int[]");
    let rows = pending(t, "true");
    format!(
        "{view} UNION ALL SELECT {}, NULL, NULL, NULL FROM {LANES}) \
            AS l(lane, token, floor, known, rows_max, bytes_max) {} CROSS JOIN LATERAL ({rows}) o",
        columns(&message, &format!("NOT ({SMALL})")),
        held(t),
    )
}

/// Reads lanes from their floors, at most so many rows and bytes each, and says what is ahead of a row.
///
/// A lane's first row, whose size is the sum so far, comes however large it is. The mark: the byte limit ends the lane
/// here though a next row is known. What is ahead is found by walking from scope to scope along the index: of a key, few.
pub(super) fn page(t: &str, condition: &str) -> String {
    let of_key = format!("e.lane = o.lane AND md5(e.key) = md5(o.key) AND {IN_LINE}");
    let lanes = "unnest($1::int[], $7::bool[]) AS l(lane, aside)";
    // Not EXISTS: that may be answered from a hash of all rows of all lanes.
    let some = |rows: &str, order: &str| {
        format!(
            "(SELECT true FROM {t}outbox_aside e WHERE e.lane = l.lane AND {rows} ORDER BY {order} LIMIT 1)"
        )
    };
    let waiting = some("e.state = 'waiting'", "e.destination, e.outbox_position");
    let blocked = some(BLOCKED, "md5(e.key), e.scope, e.outbox_position");
    let view = view(&format!(
        "ARRAY(SELECT l.lane FROM {lanes} WHERE l.aside AND ({waiting} OR {blocked})), \
         ARRAY(SELECT l.lane FROM {lanes} WHERE l.aside AND {blocked})"
    ));
    let rows = pending(t, condition);
    format!(
        "{view} UNION ALL SELECT {}, \
            CASE WHEN l.aside AND o.key IS NOT NULL THEN ARRAY( \
                WITH RECURSIVE s(scope) AS ( \
                    (SELECT e.scope FROM {t}outbox_aside e WHERE {of_key} ORDER BY e.scope LIMIT 1) \
                    UNION ALL \
                    SELECT (SELECT e.scope FROM {t}outbox_aside e WHERE {of_key} AND e.scope > s.scope \
                        ORDER BY e.scope LIMIT 1) \
                    FROM s WHERE s.scope IS NOT NULL) \
                SELECT x.text FROM s CROSS JOIN LATERAL ( \
                    SELECT (e.state <> 'waiting')::int || ' ' || e.outbox_position || ' ' || e.scope AS text \
                    FROM {t}outbox_aside e WHERE {of_key} AND e.scope = s.scope \
                    ORDER BY e.outbox_position DESC LIMIT 1) x) END, \
            NULL, NULL \
         FROM {LANES}, $7::bool[]) AS l(lane, token, floor, known, rows_max, bytes_max, aside) {} \
         CROSS JOIN LATERAL ( \
            SELECT p.*, sum(p.size) OVER w AS bytes, lead(p.size) OVER w AS next_size \
            FROM ({rows}) p WINDOW w AS (ORDER BY p.position ROWS UNBOUNDED PRECEDING)) o \
         WHERE o.bytes <= l.bytes_max OR o.bytes = o.size",
        columns(MESSAGE, "o.bytes + coalesce(o.next_size, 0) > l.bytes_max"),
        held(t),
    )
}

/// What is asked of each lane, up to the byte limit.
const LANES: &str =
    "unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[]";

/// The one row without a lane. It says which view of the data this is, since when the server runs, or nothing of a
/// standby's, and of the lanes where something may be set aside, in which it is so, and in which something blocks.
fn view(aside: &str) -> String {
    let nothing = MESSAGE_TYPES.map(|sql| format!("NULL::{sql}")).join(", ");
    format!(
        "SELECT NULL::int, NULL::bigint, {nothing}, NULL::int, NULL::bool, NULL::text, \
            pg_current_snapshot()::text, \
            CASE WHEN NOT pg_is_in_recovery() THEN pg_postmaster_start_time() END, \
            NULL::text[], {aside}"
    )
}

/// Those of a pending row. The writing transaction is told of rows that should not be there: those up to the position
/// that was `known` to be settled.
fn columns(message: &str, mark: &str) -> String {
    format!(
        "o.lane, o.position, {message}, o.size, {mark}, CASE WHEN o.position <= l.known THEN o.xid::text END, NULL, NULL"
    )
}

/// Only lanes under a current token.
fn held(t: &str) -> String {
    format!("JOIN {t}outbox_lane z ON z.lane = l.lane AND z.token = l.token")
}

fn pending(t: &str, condition: &str) -> String {
    format!(
        "SELECT * FROM {t}outbox o \
         WHERE o.lane = l.lane AND o.position > l.floor AND {condition} \
         ORDER BY o.position LIMIT l.rows_max"
    )
}

/// Reads what is set aside and may go, in the columns of [`page`] but for the mark, which is NULL: at most half of the
/// limits, so that pending rows are never left out altogether.
///
/// Walks from destination to destination along the index, past those that are closed, and leaves out what has a row
/// ahead of it that blocks, or waits for a closed destination of the same scope. These are looked for only in scopes
/// where something waits for a closed destination: it costs the square of the line's length.
pub(super) fn drain(t: &str) -> String {
    let ahead = format!(
        "SELECT 1 FROM {t}outbox_aside e WHERE e.lane = a.lane AND md5(e.key) = md5(a.key) AND e.scope = a.scope \
            AND e.outbox_position < a.outbox_position"
    );
    let next = |condition: &str| {
        format!(
            "SELECT e.destination FROM {t}outbox_aside e WHERE e.lane = l.lane AND e.state = 'waiting' {condition} \
             ORDER BY e.destination LIMIT 1"
        )
    };
    format!(
        "SELECT a.lane, a.outbox_position, {MESSAGE}, a.size, NULL, NULL, NULL, NULL, NULL, NULL, NULL \
         FROM unnest($1::int[], $2::bigint[], $5::bigint[], $6::bigint[], $7::bool[]) \
            AS l(lane, token, rows_max, bytes_max, aside) {} \
         CROSS JOIN LATERAL (SELECT ARRAY( \
            SELECT w.scope FROM unnest($8::text[]) AS c(name) CROSS JOIN LATERAL ( \
                SELECT e.scope FROM {t}outbox_aside e \
                WHERE e.lane = l.lane AND e.state = 'waiting' AND e.destination = c.name \
                ORDER BY e.outbox_position LIMIT 1) w \
            WHERE l.aside AND w.scope IS NOT NULL) AS scopes OFFSET 0) shut \
         CROSS JOIN LATERAL ( \
            SELECT p.*, sum(p.size) OVER (ORDER BY p.outbox_position ROWS UNBOUNDED PRECEDING) AS bytes \
            FROM (WITH RECURSIVE d(name) AS ( \
                    ({first}) UNION ALL SELECT ({following}) FROM d WHERE d.name IS NOT NULL) \
                SELECT m.* FROM d CROSS JOIN LATERAL ( \
                    SELECT * FROM {t}outbox_aside a \
                    WHERE a.lane = l.lane AND a.state = 'waiting' AND a.destination = d.name AND (a.key IS NULL \
                        OR (NOT EXISTS ({ahead} AND {BLOCKED}) \
                            AND (a.scope <> ALL (shut.scopes) \
                                OR NOT EXISTS ({ahead} AND {IN_LINE} AND e.destination = ANY ($8::text[]))))) \
                    ORDER BY a.outbox_position LIMIT l.rows_max / 2 + 1) m \
                WHERE d.name <> ALL ($8::text[]) \
                ORDER BY m.outbox_position LIMIT l.rows_max / 2 + 1) p) a \
         WHERE l.aside AND (a.bytes <= l.bytes_max / 2 OR a.bytes = a.size)",
        held(t),
        first = next(""),
        following = next("AND e.destination > d.name"),
    )
}
