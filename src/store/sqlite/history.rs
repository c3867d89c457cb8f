//! What was published: kept by the settlement, found by an operator, and forgotten in bounded steps.

use sqlx::Row;

use super::{SqliteStore, error, instant, micros, read_message};
use crate::error::Result;
use crate::message::MessageId;
use crate::store::PublishedMessage;
use crate::store::admin_steps::{STEP_BYTES_MAX, STEP_ROWS_MAX};

impl SqliteStore {
    /// Only where something is kept.
    pub(super) async fn check_history(&self) -> Result<()> {
        if self.kept.is_some() {
            sqlx::query(self.sql.check_history.clone())
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("check history"))?;
        }
        Ok(())
    }

    pub(super) async fn forget_published(&self) -> Result<bool> {
        let Some(age) = self.kept.map(micros) else {
            return Ok(false);
        };
        let deleted = sqlx::query(self.sql.clean_up_history.clone())
            .bind(age)
            .bind(STEP_ROWS_MAX)
            .bind(STEP_BYTES_MAX)
            .execute(&self.pool)
            .await
            .map_err(self.pool_error("clean up history"))?;
        Ok(deleted.rows_affected() > 0)
    }

    pub(super) async fn published(
        &self,
        id: &MessageId,
        count_max: usize,
    ) -> Result<Vec<PublishedMessage>> {
        let rows = sqlx::query(self.sql.published.clone())
            .bind(id.as_str())
            .bind(i64::try_from(count_max).unwrap_or(i64::MAX))
            .fetch_all(&self.pool)
            .await
            .map_err(self.pool_error("find published"))?;
        let failed = |e| error::of_statement("find published", e);
        let read = rows.iter().map(|row| {
            Ok(PublishedMessage {
                message: read_message(row, 0),
                position: row.try_get(9).map_err(failed)?,
                published_at: instant(row.try_get(10).map_err(failed)?)?,
            })
        });
        read.collect()
    }
}
