//! Transactions with an inbox in them.

use std::error::Error as StdError;
use std::time::Duration;

use futures_util::future::FutureExt;
use sqlx::{PgConnection, Postgres};

use super::{ACQUIRE_TIMEOUT, PostgresStore, bounded, error, micros, sql};
use crate::error::{ErrorKind, Result};
use crate::message::MessageId;
use crate::store::{InboxStore, Recorded, StoreTransaction};

impl InboxStore for PostgresStore {
    type Connection = PgConnection;
    type Transaction = StoreTransaction<Postgres>;

    fn name(&self) -> &'static str {
        "postgres"
    }

    async fn check(&self) -> Result<()> {
        let query = sqlx::query(self.sql.check_inbox.clone());
        bounded(&self.pool, "check inbox", ACQUIRE_TIMEOUT, |c| {
            query.execute(c).boxed()
        })
        .await?;
        Ok(())
    }

    async fn begin(&self) -> Result<Self::Transaction> {
        let failed = self.pool_error("begin");
        let connection = self.pool.acquire().await.map_err(&failed)?;
        StoreTransaction::begin(connection, None)
            .await
            .map_err(&failed)
    }

    fn connection(transaction: &mut Self::Transaction) -> &mut PgConnection {
        transaction.connection()
    }

    async fn record(
        &self,
        transaction: &mut Self::Transaction,
        consumer: &str,
        id: &MessageId,
    ) -> Result<Recorded> {
        // 0 would mean to wait for ever.
        let lock_wait = self.lock_wait.as_millis().clamp(1, i32::MAX as u128);
        let (recorded, _): (i64, String) = sqlx::query_as(self.sql.record.clone())
            .bind(consumer)
            .bind(id.as_str())
            .bind(format!("{lock_wait}ms"))
            .fetch_one(transaction.connection())
            .await
            .map_err(|e| error::of_statement("record", e))?;
        Ok(if recorded == 1 {
            Recorded::First
        } else {
            Recorded::Duplicate
        })
    }

    async fn commit(&self, mut transaction: Self::Transaction) -> Result<()> {
        sqlx::raw_sql(sql::COMMIT)
            .execute(transaction.connection())
            .await
            .map_err(|e| error::of_statement("commit", e))?;
        transaction.chained();
        Ok(())
    }

    async fn rollback(&self, transaction: Self::Transaction) -> Result<()> {
        let ended = transaction.rollback().await;
        ended.map_err(|e| error::of_statement("roll back", e))
    }

    fn kind_of(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        error::kind_of(error)
    }

    async fn clean_up(&self, consumer: &str, age: Duration, rows_max: usize) -> Result<u64> {
        let deleted = sqlx::query(self.sql.clean_up.clone())
            .bind(micros(age))
            .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
            .bind(consumer)
            .execute(&self.pool)
            .await
            .map_err(self.pool_error("clean up inbox"))?;
        Ok(deleted.rows_affected())
    }
}
