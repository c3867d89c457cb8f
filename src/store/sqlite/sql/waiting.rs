//! The statements of the waiting room.

use sqlx::SqlStr;

use super::{MESSAGE, NOW, safe};

/// Columns of a story, in the order in which they are bound and read.
const STORY: &str = "redrive_count, reason, retry_count, first_failed_at, last_failed_at, last_error, origin_topic, \
    origin_partition, origin_offset, failed_by";

/// Makes void what was claimed.
const NEXT_TOKEN: &str = "max(token + 1, CAST(unixepoch('subsec') * 1000000 AS INTEGER))";

/// Numbers of parameters where a message is stored: 1 consumer, 2 identity, 3 delay, 4 to 13 the story, 14 line, 15 source,
/// 16 to 25 message and size.
pub(in crate::store::sqlite) struct WaitingSql {
    pub check: SqlStr,
    pub replace: SqlStr,
    pub insert: SqlStr,
    pub insert_behind: SqlStr,
    pub occupied: SqlStr,
    pub is_occupied: SqlStr,
    pub next: SqlStr,
    pub claim: SqlStr,
    pub renew: SqlStr,
    pub give_back: SqlStr,
    pub finish: SqlStr,
    pub promote: SqlStr,
    pub park: SqlStr,
    pub hold_claimed: SqlStr,
    pub hold: SqlStr,
    pub held: SqlStr,
    pub last: SqlStr,
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
    pub(super) fn new(t: &str) -> Self {
        let columns = format!(
            "consumer, identity, state, due_at, visible_at, {STORY}, line, source, {MESSAGE}, size"
        );
        let letter = "?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?23, \
            ?24, ?25";
        let in_line =
            format!("EXISTS (SELECT 1 FROM {t}waiting WHERE consumer = ?1 AND line = ?14)");
        let story = "redrive_count = ?4, reason = ?5, retry_count = ?6, first_failed_at = ?7, last_failed_at = ?8, \
            last_error = ?9, origin_topic = ?10, origin_partition = ?11, origin_offset = ?12, failed_by = ?13";
        Self {
            check: safe(format!(
                "SELECT consumer, identity, line, state, visible_at, token, claims, park_to FROM {t}waiting LIMIT 0"
            )),
            replace: safe(format!(
                "UPDATE {t}waiting SET {story}, token = {NEXT_TOKEN}, claims = 0, \
                    due_at = CASE state WHEN 'due' THEN {NOW} + ?3 END, \
                    visible_at = CASE state WHEN 'due' THEN {NOW} + ?3 END \
                 WHERE consumer = ?1 AND identity = ?2 AND retry_count < ?6"
            )),
            insert: safe(format!(
                "INSERT INTO {t}waiting ({columns}) \
                 SELECT ?1, ?2, iif(behind, 'behind', 'due'), iif(behind, NULL, {NOW} + ?3), \
                    iif(behind, NULL, {NOW} + ?3), {letter} \
                 FROM (SELECT {in_line} AS behind) WHERE true ON CONFLICT DO NOTHING"
            )),
            insert_behind: safe(format!(
                "INSERT INTO {t}waiting ({columns}) \
                 SELECT ?1, ?2, 'behind', NULL, NULL, {letter} \
                 WHERE {in_line} ON CONFLICT DO NOTHING"
            )),
            occupied: safe(format!(
                "SELECT value FROM json_each(?2) WHERE EXISTS ( \
                    SELECT 1 FROM {t}waiting WHERE consumer = ?1 AND line = unhex(value))"
            )),
            is_occupied: safe(format!(
                "SELECT EXISTS (SELECT 1 FROM {t}waiting WHERE consumer = ?1 AND line = ?2)"
            )),
            next: safe(format!(
                "SELECT min(visible_at) - {NOW} FROM {t}waiting WHERE consumer = ?1 AND visible_at IS NOT NULL"
            )),
            claim: safe(format!(
                "UPDATE {t}waiting SET token = {NEXT_TOKEN}, claims = claims + 1, visible_at = {NOW} + ?3 \
                 WHERE position IN ( \
                    SELECT position FROM {t}waiting WHERE consumer = ?1 AND visible_at <= {NOW} \
                    ORDER BY visible_at, position LIMIT ?2) \
                 RETURNING position, token, source, coalesce(park_to >= position, 0), claims > 1, \
                    max({NOW} - due_at, 0), {MESSAGE}, {STORY}"
            )),
            renew: safe(format!(
                "UPDATE {t}waiting SET visible_at = {NOW} + ?2 \
                 WHERE state = 'due' AND (position, token) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?1)) \
                 RETURNING position, token"
            )),
            give_back: safe(format!(
                "UPDATE {t}waiting SET token = {NEXT_TOKEN}, claims = 0, visible_at = {NOW} + ?2 \
                 WHERE state = 'due' AND (position, token) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?1))"
            )),
            finish: safe(format!(
                "DELETE FROM {t}waiting WHERE position = ?1 AND token = ?2 AND state = 'due' \
                 RETURNING consumer, line, park_to"
            )),
            promote: safe(format!(
                "UPDATE {t}waiting SET state = 'due', due_at = {NOW}, visible_at = {NOW}, claims = 0, \
                    token = {NEXT_TOKEN}, park_to = iif(?4 >= position, ?4, NULL) \
                 WHERE state = 'behind' AND position = ( \
                    SELECT position FROM {t}waiting WHERE consumer = ?1 AND line = ?2 AND position > ?3 \
                    ORDER BY position LIMIT 1)"
            )),
            park: safe(format!(
                "UPDATE {t}waiting AS w SET park_to = ( \
                    SELECT max(position) FROM {t}waiting AS x WHERE x.consumer = w.consumer AND x.line = w.line) \
                 WHERE position = ?1 AND token = ?2 AND state = 'due'"
            )),
            hold_claimed: safe(format!(
                "UPDATE {t}waiting SET state = 'held', due_at = NULL, visible_at = NULL, token = {NEXT_TOKEN}, \
                    retry_count = ?3, last_error = ?4, reason = ?5 \
                 WHERE position = ?1 AND token = ?2 AND state = 'due' AND line IS NOT NULL"
            )),
            hold: safe(format!(
                "INSERT INTO {t}waiting ({columns}) \
                 SELECT ?1, ?2, 'held', NULL, NULL, {letter} WHERE true \
                 ON CONFLICT (consumer, identity) DO UPDATE SET state = 'held', due_at = NULL, visible_at = NULL, \
                    token = {NEXT_TOKEN} WHERE state = 'due'"
            )),
            held: safe(format!(
                "SELECT position FROM {t}waiting WHERE consumer = ?1 AND line = ?2 AND state = 'held' \
                 ORDER BY position LIMIT 1"
            )),
            last: safe(format!(
                "SELECT max(position) FROM {t}waiting WHERE consumer = ?1 AND line = ?2"
            )),
            delete: safe(format!("DELETE FROM {t}waiting WHERE position = ?1")),
            retry: safe(format!(
                "UPDATE {t}waiting SET state = 'due', due_at = {NOW}, visible_at = {NOW}, claims = 0, \
                    token = {NEXT_TOKEN}, retry_count = 0, reason = NULL, first_failed_at = NULL, \
                    last_failed_at = NULL, last_error = NULL \
                 WHERE position = ?1"
            )),
            note: safe(format!(
                "INSERT INTO {t}waiting AS w ({columns}) \
                 SELECT ?1, ?2, 'noted', {NOW} + ?3, NULL, {letter} WHERE true \
                 ON CONFLICT (consumer, identity) DO UPDATE SET {story}, due_at = excluded.due_at, \
                    stored_at = {NOW} WHERE w.retry_count < excluded.retry_count"
            )),
            recall: safe(format!(
                "SELECT identity, max(due_at - {NOW}, 0), {STORY} FROM {t}waiting \
                 WHERE consumer = ?1 AND identity IN (SELECT unhex(value) FROM json_each(?2)) AND state = 'noted'"
            )),
            forget: safe(format!(
                "DELETE FROM {t}waiting WHERE consumer = ?1 AND identity = ?2 AND state = 'noted'"
            )),
            clean_up: safe(format!(
                "DELETE FROM {t}waiting WHERE position IN ( \
                    SELECT position FROM {t}waiting \
                    WHERE consumer = ?1 AND state = 'noted' AND stored_at <= {NOW} - ?2 \
                    ORDER BY stored_at LIMIT ?3)"
            )),
            list: safe(format!(
                "SELECT position, state, source, key, message_id, retry_count, last_error, due_at, stored_at \
                 FROM {t}waiting WHERE consumer = ?1 AND position > ?2 AND (?3 IS NULL OR state = ?3) \
                 ORDER BY position LIMIT ?4"
            )),
            count: safe(format!(
                "SELECT state, count(*) FROM {t}waiting WHERE consumer = ?1 GROUP BY state"
            )),
        }
    }
}
