//! Random trouble over SQLite.

use relaybox::store::sqlite::SqliteStore;
use sqlx::sqlite::SqliteConnection;
use tempfile::TempDir;

use crate::relay_model::{World, cases};

struct Sqlite {
    _directory: TempDir,
    store: SqliteStore,
}

impl World for Sqlite {
    type Connection = SqliteConnection;
    type Store = SqliteStore;

    fn store(&self) -> SqliteStore {
        self.store.clone()
    }

    async fn bury(&self, relay: &str) {
        for sql in [
            "UPDATE relaybox_outbox_lane SET expires_at = 0 WHERE owner = ?",
            "DELETE FROM relaybox_relay WHERE name = ?",
        ] {
            let query = sqlx::query(sql).bind(relay);
            query.execute(self.store.pool()).await.unwrap();
        }
    }

    async fn dump(&self) -> String {
        let sql = "SELECT group_concat(line, char(10)) FROM ( \
            SELECT 'outbox ' || lane || ' ' || position || ' ' || message_id || ' ' || destination AS line \
            FROM relaybox_outbox UNION ALL \
            SELECT lane || ' ' || coalesce(outbox_position, 0) || ' ' || message_id || ' ' || destination || ' ' || \
                state || ' ' || reason FROM relaybox_outbox_aside)";
        let query = sqlx::query_scalar::<_, Option<String>>(sql);
        let lines = query.fetch_one(self.store.pool()).await.unwrap();
        lines.unwrap_or_default()
    }
}

#[tokio::test]
async fn under_random_trouble_nothing_is_lost_stuck_or_out_of_order() {
    cases(32, 24, |_| async {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.db");
        let store = SqliteStore::connect(path).await.unwrap();
        store.migrate().await.unwrap();
        Sqlite {
            _directory: directory,
            store,
        }
    })
    .await;
}
