//! Random trouble over PostgreSQL.

use relaybox::store::Prefix;
use relaybox::store::postgres::PostgresStore;
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Executor};

use super::Postgres;
use crate::relay_model::{World, cases};

/// Tables of its own.
struct Tables {
    prefix: String,
    store: PostgresStore,
}

impl World for Tables {
    type Connection = PgConnection;
    type Store = PostgresStore;

    fn store(&self) -> PostgresStore {
        self.store.clone()
    }

    async fn bury(&self, relay: &str) {
        let prefix = &self.prefix;
        let sql = format!(
            "UPDATE {prefix}outbox_lane SET expires_at = '1970-01-01 00:00:00+00' WHERE owner = '{relay}'; \
             DELETE FROM {prefix}relay WHERE name = '{relay}'"
        );
        let sql = sqlx::raw_sql(AssertSqlSafe(sql));
        self.store.pool().execute(sql).await.unwrap();
    }

    async fn dump(&self) -> String {
        let prefix = &self.prefix;
        let sql = format!(
            "SELECT string_agg(line, E'\n') FROM ( \
                SELECT 'outbox ' || lane || ' ' || position || ' ' || message_id || ' ' || destination AS line \
                FROM {prefix}outbox UNION ALL \
                SELECT lane || ' ' || coalesce(outbox_position, 0) || ' ' || message_id || ' ' || destination \
                    || ' ' || state || ' ' || reason FROM {prefix}outbox_aside) left_over"
        );
        let query = sqlx::query_scalar::<_, Option<String>>(AssertSqlSafe(sql));
        let lines = query.fetch_one(self.store.pool()).await.unwrap();
        lines.unwrap_or_default()
    }
}

#[tokio::test]
async fn under_random_trouble_nothing_is_lost_stuck_or_out_of_order() {
    let postgres = Postgres::empty().await;
    let pool = postgres.pool().clone();
    cases(24, 12, |seed| {
        let pool = pool.clone();
        async move {
            let prefix = format!("m{seed}_");
            let store = PostgresStore::new(pool).with_prefix(Prefix::new(&prefix).unwrap());
            store.migrate().await.unwrap();
            Tables { prefix, store }
        }
    })
    .await;
}
