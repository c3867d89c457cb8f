//! Single steps of what becomes of entries, inside of a transaction.

use sqlx::{Row, Sqlite};

use super::super::SqliteStore;
use super::super::dead_letters::bound;
use super::OPERATION;
use crate::envelope::Outgoing;
use crate::error::{Result, cut};
use crate::store::header_codec::without_nul;
use crate::store::{Leaving, Note, StoreTransaction};

impl SqliteStore {
    /// Whether no run may have sent an entry.
    pub(super) async fn free(
        &self,
        transaction: &mut StoreTransaction<Sqlite>,
        note: &Note<'_>,
        told: &Leaving,
    ) -> Result<bool> {
        let run: Option<i64> = sqlx::query_scalar(self.sql.redrive.may_have_sent.clone())
            .bind(note.consumer)
            .bind(told.position)
            .fetch_optional(transaction.connection())
            .await
            .map_err(self.pool_error(OPERATION))?;
        Ok(run.is_none())
    }

    pub(super) async fn remove_entry(
        &self,
        transaction: &mut StoreTransaction<Sqlite>,
        note: &Note<'_>,
        told: &Leaving,
    ) -> Result<bool> {
        let removed = sqlx::query(self.sql.redrive.remove.clone())
            .bind(told.position)
            .bind(note.consumer)
            .execute(transaction.connection())
            .await
            .map_err(self.pool_error(OPERATION))?;
        Ok(removed.rows_affected() > 0)
    }

    pub(super) async fn insert_entry(
        &self,
        transaction: &mut StoreTransaction<Sqlite>,
        letter: &Outgoing,
    ) -> Result<i64> {
        let row = bound(&self.sql.redrive.insert, letter)
            .fetch_one(transaction.connection())
            .await
            .map_err(self.pool_error(OPERATION))?;
        row.try_get(0).map_err(self.pool_error(OPERATION))
    }

    pub(super) async fn note(
        &self,
        transaction: &mut StoreTransaction<Sqlite>,
        run: Option<i64>,
        note: &Note<'_>,
        told: &Leaving,
    ) -> Result<()> {
        sqlx::query(self.sql.redrive.note.clone())
            .bind(run)
            .bind(note.consumer)
            .bind(note.operator)
            .bind(note.verb)
            .bind(without_nul(told.message_id.as_str()))
            .bind(i64::from(told.redrive_count))
            .bind(&told.digest)
            .bind(told.outcome.as_str())
            .bind(without_nul(cut(&told.detail, 1_024)))
            .execute(transaction.connection())
            .await
            .map_err(self.pool_error(OPERATION))?;
        Ok(())
    }
}
