//! What was published: kept by the settlement, found by an operator, and forgotten by whole days.

use futures_util::future::FutureExt;
use sqlx::Row;

use super::sql::PARTITIONS;
use super::{ACQUIRE_TIMEOUT, PostgresStore, bounded, error, micros, read_message};
use crate::error::{Error, ErrorKind, Result};
use crate::message::MessageId;
use crate::store::PublishedMessage;
use crate::store::admin_steps::STEP_ROWS_MAX;

impl PostgresStore {
    /// Only where something is kept.
    pub(super) async fn check_history(&self) -> Result<()> {
        if self.kept.is_none() {
            return Ok(());
        }
        let query = sqlx::query_as(self.sql.history.check.clone());
        let (insert, usable): (bool, i64) =
            bounded(self.relay_pool(), "check history", ACQUIRE_TIMEOUT, |c| {
                query.fetch_one(c).boxed()
            })
            .await?;
        if insert && usable == PARTITIONS {
            return Ok(());
        }
        Err(Error::configuration(
            "rights on outbox_history",
            format!(
                "INSERT, and SELECT, UPDATE, DELETE and TRUNCATE on its {PARTITIONS} partitions"
            ),
            format!("INSERT: {insert}; the others on {usable} partitions"),
        ))
    }

    /// Younger rows beside what is over mean that the days came round before the partition was emptied.
    pub(super) async fn forget_published(&self) -> Result<bool> {
        const OPERATION: &str = "clean up history";
        let Some(age) = self.kept.map(micros) else {
            return Ok(false);
        };
        let query = sqlx::query_as(self.sql.history.over.clone()).bind(age);
        let over: Vec<(i64, bool)> = self
            .relayed(OPERATION, |c| query.fetch_all(c).boxed())
            .await?;
        let (whole, mixed): (Vec<_>, Vec<_>) = over.into_iter().partition(|(_, whole)| *whole);
        let mut deleted = 0;
        for (number, _) in mixed {
            let query = sqlx::query(self.sql.history.thin(number))
                .bind(age)
                .bind(STEP_ROWS_MAX);
            deleted += self
                .relayed(OPERATION, |c| query.execute(c).boxed())
                .await?
                .rows_affected();
        }
        if deleted > 0 {
            return Ok(true);
        }
        let mut read = None;
        for (number, _) in whole {
            let query = sqlx::raw_sql(self.sql.history.empty(number, age));
            let emptied = self.relayed(OPERATION, |c| query.execute(c).boxed()).await;
            match emptied {
                Ok(_) => {}
                // Its turn comes again; the other days need not wait for it.
                Err(error) if error.kind() == ErrorKind::Busy => read = Some(error),
                Err(error) => return Err(error),
            }
        }
        read.map_or(Ok(false), Err)
    }

    pub(super) async fn published(
        &self,
        id: &MessageId,
        count_max: usize,
    ) -> Result<Vec<PublishedMessage>> {
        let query = sqlx::query(self.sql.history.find.clone())
            .bind(id.as_str().to_owned())
            .bind(i64::try_from(count_max).unwrap_or(i64::MAX));
        let rows = self
            .relayed("find published", |c| query.fetch_all(c).boxed())
            .await?;
        let read = rows.iter().map(|row| {
            Ok(PublishedMessage {
                message: read_message(row, 0),
                position: row.try_get(9)?,
                published_at: row.try_get(10)?,
            })
        });
        let found: Result<_, _> = read.collect();
        found.map_err(|e| error::of_statement("find published", e))
    }
}
