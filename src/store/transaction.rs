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
/// or COMMIT left behind is never met by another borrower of the pool. One that a commit began and nobody used returns it.
pub struct StoreTransaction<DB: Database> {
    connection: PoolConnection<DB>,
    state: State,
    /// How many were committed on this connection since it was borrowed.
    #[cfg(feature = "postgres")]
    committed: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Perhaps something of it is under way.
    Open,
    /// A commit began it, and nothing was done in it.
    #[cfg(feature = "postgres")]
    Unused,
    Ended,
}

impl<DB: Database> StoreTransaction<DB> {
    pub(crate) async fn begin(
        connection: PoolConnection<DB>,
        statement: Option<SqlStr>,
    ) -> Result<Self, sqlx::Error> {
        let mut transaction = Self {
            connection,
            state: State::Open,
            #[cfg(feature = "postgres")]
            committed: 0,
        };
        DB::TransactionManager::begin(&mut transaction.connection, statement).await?;
        Ok(transaction)
    }

    pub(crate) fn connection(&mut self) -> &mut DB::Connection {
        self.state = State::Open;
        &mut self.connection
    }

    /// Commits by the driver's own statement.
    pub(crate) async fn commit(mut self) -> Result<(), sqlx::Error> {
        DB::TransactionManager::commit(&mut self.connection).await?;
        if self.levels() == 0 {
            self.state = State::Ended;
        }
        Ok(())
    }

    /// The transaction that a COMMIT AND CHAIN began. `None`, and the connection closed, after a handler that leaked a
    /// savepoint: the driver still counts it.
    #[cfg(feature = "postgres")]
    pub(crate) fn chained(mut self) -> Option<Self> {
        (self.levels() == 1).then(|| {
            self.state = State::Unused;
            self.committed += 1;
            self
        })
    }

    /// How many were committed on its connection since that was borrowed from the pool.
    #[cfg(feature = "postgres")]
    pub(crate) const fn committed(&self) -> u32 {
        self.committed
    }

    pub(crate) async fn rollback(mut self) -> Result<(), sqlx::Error> {
        // More than one level is left by a handler that leaked a savepoint.
        for _ in 0..self.levels() {
            DB::TransactionManager::rollback(&mut self.connection).await?;
        }
        self.state = State::Ended;
        Ok(())
    }

    fn levels(&self) -> usize {
        DB::TransactionManager::get_transaction_depth(&self.connection)
    }
}

impl<DB: Database> Drop for StoreTransaction<DB> {
    fn drop(&mut self) {
        match self.state {
            State::Open => self.connection.close_on_drop(),
            // Sent on the connection's way to the pool, off everybody's path.
            #[cfg(feature = "postgres")]
            State::Unused => DB::TransactionManager::start_rollback(&mut self.connection),
            State::Ended => {}
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
