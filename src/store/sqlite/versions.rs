//! Last versions of aggregates.

use sqlx::SqliteConnection;

use super::{SqliteStore, error};
use crate::error::Result;
use crate::store::version::check_aggregate;
use crate::store::{Advanced, VersionStore};

impl VersionStore for SqliteStore {
    type Connection = SqliteConnection;

    async fn advance(
        &self,
        connection: &mut SqliteConnection,
        consumer: &str,
        aggregate: &[u8],
        version: i64,
    ) -> Result<Advanced> {
        check_aggregate(aggregate)?;
        let query = sqlx::query(self.sql.advance.clone())
            .bind(consumer)
            .bind(aggregate)
            .bind(version);
        let advanced = query
            .execute(connection)
            .await
            .map_err(|e| error::of_statement("advance version", e))?;
        Ok(match advanced.rows_affected() {
            0 => Advanced::Older,
            _ => Advanced::Newest,
        })
    }
}
