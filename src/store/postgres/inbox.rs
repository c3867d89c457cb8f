//! Transactions with an inbox in them.

use std::error::Error as StdError;
use std::future::Future;
use std::time::Duration;

use futures_util::future::FutureExt;
use sqlx::{PgConnection, PgPool, Postgres};

use super::{ACQUIRE_TIMEOUT, PostgresStore, STATEMENT_TIMEOUT, bounded, error, micros, sql};
use crate::error::{Error, ErrorKind, Result};
use crate::store::{InboxStore, Recorded, StoreTransaction};

impl InboxStore for PostgresStore {
    type Connection = PgConnection;
    type Transaction = StoreTransaction<Postgres>;

    fn name(&self) -> &'static str {
        "postgres"
    }

    async fn check(&self) -> Result<()> {
        let query = sqlx::query_as(self.sql.check_inbox.clone());
        let (encoding, durability): (String, String) =
            bounded(&self.pool, "check inbox", ACQUIRE_TIMEOUT, |c| {
                query.fetch_one(c).boxed()
            })
            .await?;
        if encoding != "UTF8" {
            // An id with a character that it lacks could never be recorded, and so never be settled.
            return Err(Error::configuration("server_encoding", "UTF8", encoding));
        }
        if durability == "off" {
            // A message is acknowledged after the commit, which a crash of the server could then take back.
            let limit = "local, remote_write, on or remote_apply";
            return Err(Error::configuration(
                "synchronous_commit",
                limit,
                durability,
            ));
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
        keys: &[&str],
    ) -> Result<Vec<Recorded>> {
        // 0 would mean to wait for ever.
        let lock_wait = self.lock_wait.as_millis().clamp(1, i32::MAX as u128);
        let lock_wait = format!("{lock_wait}ms");
        let wait = STATEMENT_TIMEOUT.saturating_add(self.lock_wait);
        let connection = transaction.connection();
        let recorded = async {
            match keys {
                [key] => {
                    let query = sqlx::query_as(self.sql.record.clone());
                    let query = query.bind(consumer).bind(key).bind(lock_wait);
                    let (new, _): (i64, String) = query.fetch_one(connection).await?;
                    Ok(vec![Recorded::first(new == 1)])
                }
                keys => {
                    let query = sqlx::query_as(self.sql.record_all.clone());
                    let query = query.bind(consumer).bind(keys).bind(lock_wait);
                    let (new, _): (Vec<String>, String) = query.fetch_one(connection).await?;
                    Ok(Recorded::among(keys, &new))
                }
            }
        };
        let of_statement = |e| error::of_statement("record", e);
        self.answered("record", wait, async {
            recorded.await.map_err(of_statement)
        })
        .await
    }

    async fn is_recorded(&self, consumer: &str, key: &str) -> Result<bool> {
        let query = sqlx::query_scalar(self.sql.is_recorded.clone())
            .bind(consumer.to_owned())
            .bind(key.to_owned());
        bounded(&self.pool, "ask the inbox", STATEMENT_TIMEOUT, |c| {
            query.fetch_one(c).boxed()
        })
        .await
    }

    async fn note_start(&self, consumer: &str, key: &str, run: &str) -> Result<bool> {
        let query = sqlx::query_scalar(self.sql.note_start.clone())
            .bind(consumer.to_owned())
            .bind(key.to_owned())
            .bind(run.to_owned());
        let noted: String = bounded(&self.pool, "note start", STATEMENT_TIMEOUT, |c| {
            query.fetch_one(c).boxed()
        })
        .await?;
        Ok(noted != run)
    }

    async fn forget_start(&self, consumer: &str, key: &str) -> Result<()> {
        let query = sqlx::query(self.sql.forget_start.clone())
            .bind(consumer.to_owned())
            .bind(key.to_owned());
        bounded(&self.pool, "forget start", STATEMENT_TIMEOUT, |c| {
            query.execute(c).boxed()
        })
        .await?;
        Ok(())
    }

    async fn commit(&self, transaction: Self::Transaction) -> Result<()> {
        self.committed(transaction).await.map(drop)
    }

    async fn commit_and_begin(
        &self,
        transaction: Self::Transaction,
    ) -> Result<Option<Self::Transaction>> {
        let next = self.committed(transaction).await?;
        let in_a_row = |next: &Self::Transaction| next.committed() < self.in_a_row_max;
        Ok(next.filter(|next| in_a_row(next) && has_room(&self.pool)))
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
        let mut deleted = 0;
        let sql = &self.sql;
        for statement in [&sql.clean_up_starts, &sql.clean_up, &sql.clean_up_versions] {
            let query = sqlx::query(statement.clone())
                .bind(micros(age))
                .bind(i64::try_from(rows_max).unwrap_or(i64::MAX))
                .bind(consumer);
            let done = bounded(&self.pool, "clean up inbox", STATEMENT_TIMEOUT, |c| {
                query.execute(c).boxed()
            });
            deleted = done.await?.rows_affected().max(deleted);
        }
        Ok(deleted)
    }
}

impl PostgresStore {
    /// Commits, and returns the transaction that it began in the same round trip.
    async fn committed(
        &self,
        mut transaction: StoreTransaction<Postgres>,
    ) -> Result<Option<StoreTransaction<Postgres>>> {
        self.answered("commit", STATEMENT_TIMEOUT, async {
            sqlx::raw_sql(sql::COMMIT)
                .execute(transaction.connection())
                .await
                .map_err(|e| error::of_statement("commit", e))
        })
        .await?;
        Ok(transaction.chained())
    }

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

/// Whether somebody else could borrow a connection now.
fn has_room(pool: &PgPool) -> bool {
    let can_grow = pool.size() < pool.options().get_max_connections();
    !pool.is_closed() && (pool.num_idle() > 0 || can_grow)
}
