//! Databases with a backlog, each a file copy of a template, so that all runs begin alike.

use std::str::FromStr;

use relaybox::store::postgres::PostgresStore;
use relaybox_testcontainers::Postgres;
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

pub const KEYS: u32 = 20_000;
pub const PAYLOAD_BYTES: usize = 300;
pub const TOPIC: &str = "bench";

pub struct Backlog {
    url: String,
}

impl Backlog {
    pub async fn new(postgres: &Postgres) -> Self {
        Self {
            url: postgres.url(),
        }
    }

    /// A fresh database with `rows` pending messages of 20,000 keys; its template is made at first use.
    pub async fn database(&self, rows: u32, topic: &str) -> String {
        let template = format!("backlog_{rows}");
        let mut admin = PgConnection::connect(&self.url).await.unwrap();
        let there: bool =
            sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM pg_database WHERE datname = $1)")
                .bind(&template)
                .fetch_one(&mut admin)
                .await
                .unwrap();
        if !there {
            run(&mut admin, format!("CREATE DATABASE {template}")).await;
            self.fill(&template, rows, PAYLOAD_BYTES).await;
        }
        let name = relaybox_testcontainers::unique_name("bench");
        run(
            &mut admin,
            format!("CREATE DATABASE {name} TEMPLATE {template}"),
        )
        .await;
        let url = self.url_of(&name);
        if topic != TOPIC {
            let mut connection = PgConnection::connect(&url).await.unwrap();
            run(
                &mut connection,
                format!("UPDATE relaybox_outbox SET destination = '{topic}'"),
            )
            .await;
            run(&mut connection, "VACUUM relaybox_outbox".into()).await;
        }
        run(&mut admin, "CHECKPOINT".into()).await;
        url
    }

    /// A database of its own with `rows` pending messages.
    pub async fn filled(&self, rows: u32, payload_bytes: usize) -> String {
        let name = self.created().await;
        self.fill(&name, rows, payload_bytes).await;
        let mut admin = PgConnection::connect(&self.url).await.unwrap();
        run(&mut admin, "CHECKPOINT".into()).await;
        self.url_of(&name)
    }

    /// A database with empty tables.
    pub async fn migrated(&self) -> String {
        let url = self.url_of(&self.created().await);
        PostgresStore::connect(&url)
            .await
            .unwrap()
            .migrate()
            .await
            .unwrap();
        url
    }

    async fn fill(&self, database: &str, rows: u32, payload_bytes: usize) {
        let pool = PgPool::connect(&self.url_of(database)).await.unwrap();
        PostgresStore::new(pool.clone()).migrate().await.unwrap();
        let size = payload_bytes + 60;
        let mut connection = pool.acquire().await.unwrap();
        // Lane and size as `Outbox::enqueue` writes them.
        run(
            &mut connection,
            format!(
                "INSERT INTO relaybox_outbox (lane, message_id, destination, key, event_type, payload, size, version, occurred_at)
                 SELECT ('x' || substr(md5(k), 1, 4))::bit(16)::int % 16, gen_random_uuid()::text, '{TOPIC}', k::bytea,
                    'Event', decode(repeat('ab', {payload_bytes}), 'hex'), {size}, n, clock_timestamp()
                 FROM (SELECT n, 'key-' || (n::bigint * 7919 % {KEYS}) AS k FROM generate_series(1, {rows}) n ORDER BY n) x"
            ),
        )
        .await;
        run(&mut connection, "VACUUM ANALYZE".into()).await;
        drop(connection);
        pool.close().await;
    }

    /// A database without tables.
    pub async fn empty(&self) -> PgPool {
        let name = self.created().await;
        PgPool::connect(&self.url_of(&name)).await.unwrap()
    }

    async fn created(&self) -> String {
        let mut admin = PgConnection::connect(&self.url).await.unwrap();
        let name = relaybox_testcontainers::unique_name("bench");
        run(&mut admin, format!("CREATE DATABASE {name}")).await;
        name
    }

    fn url_of(&self, database: &str) -> String {
        let (server, _) = self.url.rsplit_once('/').unwrap();
        format!("{server}/{database}")
    }
}

/// A pool like the relay's own: the same planner settings.
pub async fn relay_like_pool(url: &str) -> PgPool {
    let options = PgConnectOptions::from_str(url).unwrap().options([
        ("enable_seqscan", "off"),
        ("enable_bitmapscan", "off"),
        ("enable_hashjoin", "off"),
        ("enable_mergejoin", "off"),
    ]);
    PgPoolOptions::new()
        .max_connections(1)
        .test_before_acquire(false)
        .connect_with(options)
        .await
        .unwrap()
}

pub async fn run(connection: &mut PgConnection, sql: String) {
    sqlx::raw_sql(AssertSqlSafe(sql))
        .execute(connection)
        .await
        .unwrap();
}
