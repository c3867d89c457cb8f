//! Random trouble over SQLite.

use std::time::Duration;

use relaybox::store::sqlite::SqliteStore;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous,
};
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
    const PATIENCE: Duration = Duration::from_secs(120);
    cases(24, 6, |_| async {
        let directory = tempfile::tempdir().unwrap();
        // No machine fails here, so nothing waits for the disk; and one writer at a time may mean a long queue.
        let options = SqliteConnectOptions::new()
            .filename(directory.path().join("model.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Off)
            .busy_timeout(PATIENCE);
        let pool = SqlitePoolOptions::new()
            .acquire_timeout(PATIENCE)
            .connect_lazy_with(options);
        let store = SqliteStore::new(pool);
        store.migrate().await.unwrap();
        Sqlite {
            _directory: directory,
            store,
        }
    })
    .await;
}
