//! What keeps dead rows from being removed, and how many there are.

use std::time::Duration;

use futures_util::future::FutureExt;
use time::OffsetDateTime;

use super::{PostgresStore, sql};
use crate::error::Result;

/// Dead rows of relaybox's tables, and who keeps them alive.
///
/// Every sent message is a dead row until vacuum removes it, and vacuum removes none that the oldest snapshot,
/// transaction, replication slot or prepared transaction could still see.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Horizon {
    /// The tables, the one with the most dead rows first.
    pub tables: Vec<TableRows>,
    /// Who holds the horizon back, the oldest first; at most as many as asked for.
    pub holders: Vec<HorizonHolder>,
}

/// Rows of a table, as the server's statistics estimate them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableRows {
    /// Name of the table, without its schema.
    pub table: String,
    /// Rows that are there.
    pub live: u64,
    /// Rows that are gone and not removed yet.
    pub dead: u64,
    /// End of the last vacuum.
    pub vacuumed_at: Option<OffsetDateTime>,
}

/// What a holder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HolderKind {
    /// A session with a snapshot or transaction.
    Session,
    /// A prepared transaction (two-phase commit) that nobody has ended.
    PreparedTransaction,
    /// A replication slot, perhaps of a standby that is gone.
    ReplicationSlot,
}

/// Somebody that holds the horizon back.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HorizonHolder {
    /// What it is.
    pub kind: HolderKind,
    /// Its process at the server, where it has one.
    pub pid: Option<i32>,
    /// The session's `application_name`, the transaction's or the slot's name.
    pub name: String,
    /// The session's state (`idle in transaction`), or whether a slot is `active`. `None` also without the right to
    /// see other users' sessions (`pg_read_all_stats`).
    pub state: Option<String>,
    /// How long the transaction has been open; `None` for slots and without that right.
    pub age: Option<Duration>,
    /// How many transactions began since.
    pub transactions: u64,
}

impl PostgresStore {
    /// Dead rows, and at most `holders_max` of those that keep them from being removed. Shows no text of a query.
    ///
    /// Only on PostgreSQL: no other store keeps dead rows.
    ///
    /// # Errors
    /// As the database's.
    pub async fn horizon(&self, holders_max: usize) -> Result<Horizon> {
        let query = sqlx::query_as(self.sql.admin.dead_rows.clone());
        let tables: Vec<(String, i64, i64, Option<OffsetDateTime>)> = self
            .relayed("count dead rows", |c| query.fetch_all(c).boxed())
            .await?;
        let query =
            sqlx::query_as(sql::HORIZON).bind(i64::try_from(holders_max).unwrap_or(i64::MAX));
        let holders: Vec<Holder> = self
            .relayed("find horizon", |c| query.fetch_all(c).boxed())
            .await?;
        Ok(Horizon {
            tables: tables
                .into_iter()
                .map(|(table, live, dead, vacuumed_at)| TableRows {
                    table,
                    live: unsigned(live),
                    dead: unsigned(dead),
                    vacuumed_at,
                })
                .collect(),
            holders: holders
                .into_iter()
                .map(
                    |(kind, pid, name, state, age, transactions)| HorizonHolder {
                        kind: match kind.as_str() {
                            "prepared" => HolderKind::PreparedTransaction,
                            "slot" => HolderKind::ReplicationSlot,
                            _ => HolderKind::Session,
                        },
                        pid,
                        name: name.unwrap_or_default(),
                        state,
                        age: age.map(|age| Duration::from_micros(unsigned(age))),
                        transactions: unsigned(transactions),
                    },
                )
                .collect(),
        })
    }
}

type Holder = (
    String,
    Option<i32>,
    Option<String>,
    Option<String>,
    Option<i64>,
    i64,
);

fn unsigned(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}
