//! A transaction that owns its connection.

use std::error::Error as StdError;
use std::fmt;

use sqlx::pool::PoolConnection;
use sqlx::{Database, SqlStr};
use sqlx_core::transaction::TransactionManager;

use crate::error::{Error, ErrorKind};

/// An open transaction of an inbox store, on a connection of its own.
///
/// The driver counts its levels: a handler that begins a transaction inside gets a savepoint. Dropped before its end,
/// or when its end fails, it closes the connection instead of returning it, so that what a cancelled BEGIN, statement
/// or COMMIT left behind is never met by another borrower of the pool.
pub struct StoreTransaction<DB: Database> {
    connection: PoolConnection<DB>,
    clean: bool,
}

impl<DB: Database> StoreTransaction<DB> {
    pub(crate) async fn begin(
        connection: PoolConnection<DB>,
        statement: Option<SqlStr>,
    ) -> Result<Self, sqlx::Error> {
        let mut transaction = Self {
            connection,
            clean: false,
        };
        DB::TransactionManager::begin(&mut transaction.connection, statement).await?;
        Ok(transaction)
    }

    pub(crate) fn connection(&mut self) -> &mut DB::Connection {
        &mut self.connection
    }

    /// Commits by the driver's own statement.
    pub(crate) async fn commit(mut self) -> Result<(), sqlx::Error> {
        DB::TransactionManager::commit(&mut self.connection).await?;
        self.clean = self.levels() == 0;
        Ok(())
    }

    /// Returns the connection after a COMMIT AND CHAIN: the empty transaction that it began is rolled back on the
    /// way to the pool, off the caller's path.
    #[cfg(feature = "postgres")]
    pub(crate) fn chained(mut self) {
        if self.levels() == 1 {
            DB::TransactionManager::start_rollback(&mut self.connection);
            self.clean = true;
        }
    }

    pub(crate) async fn rollback(mut self) -> Result<(), sqlx::Error> {
        // More than one level is left by a handler that leaked a savepoint.
        for _ in 0..self.levels() {
            DB::TransactionManager::rollback(&mut self.connection).await?;
        }
        self.clean = true;
        Ok(())
    }

    fn levels(&self) -> usize {
        DB::TransactionManager::get_transaction_depth(&self.connection)
    }
}

impl<DB: Database> Drop for StoreTransaction<DB> {
    fn drop(&mut self) {
        if !self.clean {
            self.connection.close_on_drop();
        }
    }
}

impl<DB: Database> fmt::Debug for StoreTransaction<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreTransaction").finish_non_exhaustive()
    }
}

/// Kind of the first driver error, or error of ours, in the chain of sources: what a handler's failure means to us.
pub(crate) fn kind_in_chain(
    error: &(dyn StdError + 'static),
    classify: impl Fn(&sqlx::Error) -> ErrorKind,
) -> Option<ErrorKind> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(ours) = error.downcast_ref::<Error>() {
            return Some(ours.kind());
        }
        if let Some(driver) = error.downcast_ref::<sqlx::Error>() {
            return Some(classify(driver));
        }
        next = error.source();
    }
    None
}
