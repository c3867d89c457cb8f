//! Transactions with an inbox in them.

use std::error::Error as StdError;
use std::future::Future;
use std::time::Duration;

use futures_util::future::FutureExt;
use sqlx::{PgConnection, Postgres};

use super::{ACQUIRE_TIMEOUT, PostgresStore, STATEMENT_TIMEOUT, bounded, error, micros, sql};
use crate::error::{Error, ErrorKind, Result};
use crate::message::MessageId;
use crate::store::{InboxStore, Recorded, StoreTransaction};

impl InboxStore for PostgresStore {
    type Connection = PgConnection;
    type Transaction = StoreTransaction<Postgres>;

    fn name(&self) -> &'static str {
        "postgres"
    }

    async fn check(&self) -> Result<()> {
        let query = sqlx::query_scalar(self.sql.check_inbox.clone());
        let encoding: String = bounded(&self.pool, "check inbox", ACQUIRE_TIMEOUT, |c| {
            query.fetch_one(c).boxed()
        })
        .await?;
        if encoding != "UTF8" {
            // An id with a character that it lacks could never be recorded, and so never be settled.
            return Err(Error::configuration("server_encoding", "UTF8", encoding));
        }
        Ok(())
    }

    async fn begin(&self) -> Result<Self::Transaction> {
        let failed = self.pool_error("begin");
        let connection = self.pool.acquire().await.map_err(&failed)?;
        self.answered("begin", STATEMENT_TIMEOUT, async {
            StoreTransaction::begin(connection, None)
                .await
                .map_err(&failed)
        })
        .await
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
        let query = sqlx::query_as(self.sql.record.clone())
            .bind(consumer)
            .bind(id.as_str())
            .bind(format!("{lock_wait}ms"));
        let wait = STATEMENT_TIMEOUT.saturating_add(self.lock_wait);
        let (recorded, _): (i64, String) = self
            .answered("record", wait, async {
                query
                    .fetch_one(transaction.connection())
                    .await
                    .map_err(|e| error::of_statement("record", e))
            })
            .await?;
        Ok(if recorded == 1 {
            Recorded::First
        } else {
            Recorded::Duplicate
        })
    }

    async fn commit(&self, mut transaction: Self::Transaction) -> Result<()> {
        self.answered("commit", STATEMENT_TIMEOUT, async {
            sqlx::raw_sql(sql::COMMIT)
                .execute(transaction.connection())
                .await
                .map_err(|e| error::of_statement("commit", e))
        })
        .await?;
        transaction.chained();
        Ok(())
    }

    async fn rollback(&self, transaction: Self::Transaction) -> Result<()> {
        self.answered("roll back", STATEMENT_TIMEOUT, async {
            let ended = transaction.rollback().await;
            ended.map_err(|e| error::of_statement("roll back", e))
        })
        .await
    }

    fn kind_of(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        error::kind_of(error)
    }

    async fn clean_up(&self, consumer: &str, age: Duration, rows_max: usize) -> Result<u64> {
        let query = sqlx::query(self.sql.clean_up.clone())
            .bind(micros(age))
            .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
            .bind(consumer);
        let deleted = bounded(&self.pool, "clean up inbox", STATEMENT_TIMEOUT, |c| {
            query.execute(c).boxed()
        })
        .await?;
        Ok(deleted.rows_affected())
    }
}

impl PostgresStore {
    /// Waits at most so long for an answer inside a transaction. Whose server went silent is given up by dropping the
    /// transaction, which closes its connection.
    async fn answered<T>(
        &self,
        operation: &'static str,
        wait: Duration,
        statement: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let answer = tokio::time::timeout(wait, statement).await;
        answer.unwrap_or_else(|_| Err(error::of_silence(operation, &self.pool, wait)))
    }
}
