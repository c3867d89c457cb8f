//! Transactions with an inbox in them.

use std::error::Error as StdError;
use std::time::Duration;

use sqlx::{Sqlite, SqliteConnection};

use super::{SqliteStore, error, json, micros};
use crate::error::{ErrorKind, Result};
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
        keys: &[&str],
    ) -> Result<Vec<Recorded>> {
        let connection = transaction.connection();
        let recorded = match keys {
            [key] => {
                let query = sqlx::query(self.sql.record.clone());
                let inserted = query.bind(consumer).bind(key).execute(connection).await;
                inserted.map(|inserted| vec![Recorded::first(inserted.rows_affected() == 1)])
            }
            keys => {
                let query = sqlx::query_scalar(self.sql.record_all.clone());
                let query = query.bind(consumer);
                let list = json(keys.iter().map(|key| (*key).into()));
                let inserted: Result<Vec<String>, _> = query.bind(list).fetch_all(connection).await;
                inserted.map(|new| Recorded::among(keys, &new))
            }
        };
        recorded.map_err(|e| error::of_statement("record", e))
    }

    async fn is_recorded(&self, consumer: &str, key: &str) -> Result<bool> {
        sqlx::query_scalar(self.sql.is_recorded.clone())
            .bind(consumer)
            .bind(key)
            .fetch_one(&self.pool)
            .await
            .map_err(self.pool_error("ask the inbox"))
    }

    async fn note_start(&self, consumer: &str, key: &str, run: &str) -> Result<bool> {
        let noted: String = sqlx::query_scalar(self.sql.note_start.clone())
            .bind(consumer)
            .bind(key)
            .bind(run)
            .fetch_one(&self.pool)
            .await
            .map_err(self.pool_error("note start"))?;
        Ok(noted != run)
    }

    async fn forget_start(&self, consumer: &str, key: &str) -> Result<()> {
        sqlx::query(self.sql.forget_start.clone())
            .bind(consumer)
            .bind(key)
            .execute(&self.pool)
            .await
            .map_err(self.pool_error("forget start"))?;
        Ok(())
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
        let mut deleted = 0;
        let sql = &self.sql;
        for statement in [&sql.clean_up_starts, &sql.clean_up, &sql.clean_up_versions] {
            let done = sqlx::query(statement.clone())
                .bind(micros(age))
                .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
                .bind(consumer)
                .execute(&self.pool)
                .await
                .map_err(self.pool_error("clean up inbox"))?;
            deleted = done.rows_affected().max(deleted);
        }
        Ok(deleted)
    }
}
