//! Transactions with an inbox in them.

use std::error::Error as StdError;
use std::time::Duration;

use sqlx::{Sqlite, SqliteConnection};

use super::{SqliteStore, error, micros};
use crate::error::{ErrorKind, Result};
use crate::message::MessageId;
use crate::store::{InboxStore, Recorded, StoreTransaction};

impl InboxStore for SqliteStore {
    type Connection = SqliteConnection;
    type Transaction = StoreTransaction<Sqlite>;

    fn name(&self) -> &'static str {
        "sqlite"
    }

    /// One: a transaction of ours holds SQLite's only write lock from its first statement to its last.
    fn concurrency_max(&self) -> usize {
        1
    }

    async fn check(&self) -> Result<()> {
        sqlx::query(self.sql.check_inbox.clone())
            .execute(&self.pool)
            .await
            .map_err(self.pool_error("check inbox"))?;
        Ok(())
    }

    /// Holds the write lock from here on: the wait for another transaction that holds the same id happens here, at
    /// most the connection's `busy_timeout`.
    async fn begin(&self) -> Result<Self::Transaction> {
        self.begin_immediate("begin").await
    }

    fn connection(transaction: &mut Self::Transaction) -> &mut SqliteConnection {
        transaction.connection()
    }

    async fn record(
        &self,
        transaction: &mut Self::Transaction,
        consumer: &str,
        id: &MessageId,
    ) -> Result<Recorded> {
        let inserted = sqlx::query(self.sql.record.clone())
            .bind(consumer)
            .bind(id.as_str())
            .execute(transaction.connection())
            .await
            .map_err(|e| error::of_statement("record", e))?;
        Ok(if inserted.rows_affected() == 1 {
            Recorded::First
        } else {
            Recorded::Duplicate
        })
    }

    async fn commit(&self, transaction: Self::Transaction) -> Result<()> {
        let ended = transaction.commit().await;
        ended.map_err(|e| error::of_statement("commit", e))
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
