//! A connection for one statement.

use sqlx::Postgres;
use sqlx::pool::PoolConnection;

use super::rows::Bound;

/// A connection that is closed, and not returned to its pool, unless its last statement was answered.
pub(super) struct Borrowed {
    connection: PoolConnection<Postgres>,
    answered: bool,
}

impl Borrowed {
    pub(super) const fn new(connection: PoolConnection<Postgres>) -> Self {
        Self {
            connection,
            answered: false,
        }
    }

    /// Runs a statement; how many rows it changed.
    pub(super) async fn execute(mut self, query: Bound<'_>) -> Result<u64, sqlx::Error> {
        let done = query.execute(&mut *self.connection).await?;
        self.answered = true;
        Ok(done.rows_affected())
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if !self.answered {
            self.connection.close_on_drop();
        }
    }
}
