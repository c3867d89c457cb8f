//! The services of a run: two schemas in one database, and one broker.

use std::sync::Arc;
use std::time::Duration;

use relaybox::broker::Broker;
use relaybox::ladder::Ladder;
use relaybox::store::Prefix;
use relaybox::store::postgres::PostgresStore;
use sqlx::postgres::{PgPool, PgPoolOptions};

use super::bank;
use super::broker::{Place, Product};

pub type Anyhow<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

pub const POSTGRES: &str = "RELAYBOX_POSTGRES_URL";

/// At least twice the publish deadline and two seconds.
pub const LEASE: Duration = Duration::from_secs(8);

pub fn ladder() -> Ladder {
    Ladder::rungs(bank::RUNGS.map(Duration::from_secs))
}

pub fn rungs() -> Vec<String> {
    let rungs = ladder().rungs_of(bank::TOPIC, bank::CONSUMER);
    rungs.into_iter().map(|rung| rung.destination).collect()
}

pub fn dead_letters() -> String {
    format!("{}.{}.DLQ", bank::TOPIC, bank::CONSUMER)
}

/// The database of a run. Connections are made when they are needed, so that it can be away.
#[derive(Clone)]
pub struct World {
    pub pool: PgPool,
    /// Attempts are noted outside the handler's transaction, so that those that fail are seen too.
    pub notebook: PgPool,
    pub bank: PostgresStore,
    pub replica: PostgresStore,
    pub place: Place,
}

impl World {
    pub fn from_environment(product: Product) -> Anyhow<Self> {
        let variable = |name: &str| std::env::var(name).map_err(|_| format!("{name} is not set"));
        Self::new(
            &variable(POSTGRES)?,
            product,
            &variable(product.variable())?,
        )
    }

    pub fn new(url: &str, product: Product, address: &str) -> Anyhow<Self> {
        let pool = |connections| {
            PgPoolOptions::new()
                .acquire_timeout(Duration::from_secs(5))
                .max_connections(connections)
                .connect_lazy(url)
        };
        let shared = pool(16)?;
        let store = |prefix| -> Anyhow<_> {
            Ok(PostgresStore::new(shared.clone()).with_prefix(Prefix::new(prefix)?))
        };
        Ok(Self {
            bank: store("bank.relaybox_")?,
            replica: store("replica.relaybox_")?,
            notebook: pool(4)?,
            pool: shared,
            place: Place {
                product,
                address: address.to_owned(),
            },
        })
    }

    /// Where the bank's messages are sent to.
    pub fn destination(&self) -> String {
        self.place.product.destination(bank::TOPIC)
    }

    pub async fn broker(&self) -> relaybox::Result<Arc<dyn Broker>> {
        self.place.connect(bank::TOPIC).await
    }

    /// Makes everything that must be there before the first role starts.
    pub async fn prepare(&self) -> Anyhow<()> {
        sqlx::raw_sql(
            "CREATE SCHEMA bank;
             CREATE TABLE bank.account (id bigint PRIMARY KEY, balance bigint NOT NULL, version bigint NOT NULL);
             CREATE TABLE bank.transfer (number bigint PRIMARY KEY);
             CREATE TABLE bank.history (message_id text PRIMARY KEY, transfer bigint NOT NULL, account bigint NOT NULL,
                version bigint NOT NULL, delta bigint NOT NULL, balance bigint NOT NULL, digest bigint NOT NULL);
             CREATE SCHEMA replica;
             CREATE TABLE replica.account (id bigint PRIMARY KEY, balance bigint NOT NULL, applied bigint NOT NULL);
             CREATE TABLE replica.applied (n bigserial PRIMARY KEY, message_id text NOT NULL, account bigint NOT NULL,
                version bigint NOT NULL, retries bigint NOT NULL, digest bigint NOT NULL);
             CREATE TABLE replica.attempt (n bigserial PRIMARY KEY, message_id text NOT NULL, account bigint NOT NULL,
                version bigint NOT NULL, retries bigint NOT NULL);",
        )
        .execute(&self.pool)
        .await?;
        for table in ["bank.account", "replica.account"] {
            let sql = format!("INSERT INTO {table} SELECT n, $2, 0 FROM generate_series(1, $1) n");
            sqlx::query(sqlx::AssertSqlSafe(sql))
                .bind(bank::ACCOUNTS)
                .bind(bank::OPENING)
                .execute(&self.pool)
                .await?;
        }
        self.bank.migrate().await?;
        self.replica.migrate().await?;
        Ok(self.place.prepare(bank::TOPIC, bank::PARTITIONS).await?)
    }
}
