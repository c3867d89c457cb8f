//! PostgreSQL under the store contracts, and what only it does.

mod admin;
mod behaviour;
mod cost;
mod floor;
mod floor_load;
mod guarding;
mod history;
mod in_a_row;
mod listening;
mod model;
mod notifying;
mod proxy;
mod redriving;
mod room;
mod silence;
mod trouble;

use std::time::Duration;

use relaybox::store::OutboxStore;
use relaybox::store::postgres::PostgresStore;
use relaybox::testing::eventually;
use relaybox_testcontainers::shared_postgres;
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use crate::store_contract;
use crate::store_contract::Harness;

/// Longest wait for anything that must happen; only a failing test waits that long.
const DEADLINE: Duration = Duration::from_secs(60);

pub struct Postgres {
    pub url: String,
    pub store: PostgresStore,
}

impl Postgres {
    pub async fn empty() -> Self {
        let url = shared_postgres()
            .await
            .create_database("store")
            .await
            .unwrap();
        let store = PostgresStore::connect(&url).await.unwrap();
        Self { url, store }
    }

    /// For what other sessions do.
    pub fn pool(&self) -> &PgPool {
        self.store.pool()
    }

    pub async fn number(&self, sql: &str) -> i64 {
        let mut connection = self.pool().acquire().await.unwrap();
        <Self as Harness>::number(&mut connection, sql).await
    }

    /// Repeats a question until the answer is 0.
    pub async fn until_none(&self, sql: &str) {
        eventually(DEADLINE, sql, || async { self.number(sql).await == 0 }).await;
    }

    pub async fn terminate_others(&self) {
        let mut connection = self.pool().acquire().await.unwrap();
        let others =
            "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
        let kill = format!("SELECT pg_terminate_backend(pid) {others}");
        assert!(Self::execute(&mut connection, &kill).await);
        let left = format!("SELECT count(*) {others}");
        while <Self as Harness>::number(&mut connection, &left).await != 0 {
            tokio::task::yield_now().await;
        }
        // What this session counted so far is to be in the statistics too.
        let flush = "SELECT pg_stat_force_next_flush()";
        assert!(Self::execute(&mut connection, flush).await);
    }
}

/// Makes all connections that a relay's pool may have, because a new one later on makes readers forget their floors.
pub async fn fill_relay_pool(store: &PostgresStore) {
    for _ in 0..2 {
        let ask =
            |store: PostgresStore| tokio::spawn(async move { store.pending(1).await.is_ok() });
        let asked: Vec<_> = (0..8).map(|_| ask(store.clone())).collect();
        for answer in asked {
            answer.await.unwrap();
        }
    }
}

impl Harness for Postgres {
    type Connection = PgConnection;
    type Store = PostgresStore;

    async fn start() -> Self {
        let this = Self::empty().await;
        this.store.migrate().await.unwrap();
        let create = "CREATE TABLE work (id int PRIMARY KEY)";
        this.pool().execute(create).await.unwrap();
        this
    }

    fn store(&self) -> PostgresStore {
        self.store.clone()
    }

    async fn impatient(&self) -> PostgresStore {
        self.store().with_lock_wait(Duration::from_millis(100))
    }

    async fn single(&self) -> PostgresStore {
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(Duration::from_secs(5));
        PostgresStore::new(pool.connect(&self.url).await.unwrap())
    }

    async fn execute(connection: &mut PgConnection, sql: &str) -> bool {
        let sql = AssertSqlSafe(sql.to_owned());
        connection.execute(sqlx::raw_sql(sql)).await.is_ok()
    }

    async fn number(connection: &mut PgConnection, sql: &str) -> i64 {
        let query = sqlx::query_scalar(AssertSqlSafe(sql.to_owned()));
        query.fetch_one(connection).await.unwrap()
    }

    async fn nested(connection: &mut PgConnection, sql: &str) {
        let mut savepoint = connection.begin().await.unwrap();
        assert!(Self::execute(&mut savepoint, sql).await);
        savepoint.commit().await.unwrap();
    }

    async fn autocommit(store: &PostgresStore, sql: &'static str) {
        store.pool().execute(sql).await.unwrap();
    }

    async fn blocked(&self) {
        self.until_none(
            "SELECT 1 - least(count(*), 1) FROM pg_stat_activity \
             WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
        .await;
    }
}

store_contract!(Postgres);
