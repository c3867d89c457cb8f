//! The services of a run: a schema of its own in PostgreSQL, a topic of its own at the broker.

use std::sync::Arc;
use std::time::Duration;

use relaybox::broker::Broker;
use relaybox::ladder::Ladder;
use relaybox::store::Prefix;
use relaybox::store::postgres::PostgresStore;
use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgPool, PgPoolOptions};

use super::broker::{self, Place, Product};

pub type Anyhow<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

pub const CONSUMER: &str = "index";

pub fn ladder() -> Ladder {
    Ladder::rungs([1, 3].map(Duration::from_secs))
}

#[derive(Clone)]
pub struct World {
    schema: String,
    pub topic: String,
    pub store: PostgresStore,
    pub notebook: PgPool,
    pub broker: Arc<dyn Broker>,
    place: Place,
}

impl World {
    pub async fn connect(product: Product, run: &str) -> Anyhow<Self> {
        let variable = |name: &str| {
            std::env::var(name).map_err(|_| format!("set {name} to the service to use"))
        };
        let url = variable("RELAYBOX_POSTGRES_URL")?;
        let place = Place {
            product,
            address: variable(product.variable())?,
        };
        let topic = format!("webhooks.{run}");
        let schema = format!("webhooks_{run}");
        let prefix = Prefix::new(&format!("{schema}.relaybox_"))?;
        let store = PostgresStore::connect(&url).await?.with_prefix(prefix);
        let notebook = PgPoolOptions::new()
            .max_connections(4)
            .connect(&url)
            .await?;
        Ok(Self {
            broker: place.connect(&topic).await?,
            place,
            topic,
            schema,
            store,
            notebook,
        })
    }

    /// A statement of this run. The schema's name was validated as part of the prefix.
    pub fn sql(&self, template: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(template.replace("{schema}", &self.schema))
    }

    pub async fn prepare(&self) -> Anyhow<()> {
        let tables = self.sql(
            "CREATE SCHEMA {schema};
             CREATE TABLE {schema}.fact (number bigint PRIMARY KEY, key text NOT NULL, digest text NOT NULL);
             CREATE TABLE {schema}.effect (message_id text NOT NULL, number bigint NOT NULL, key text NOT NULL, digest text NOT NULL);
             CREATE TABLE {schema}.attempt (n bigserial PRIMARY KEY, key text NOT NULL, number bigint NOT NULL,
                retries bigint NOT NULL);",
        );
        sqlx::raw_sql(tables).execute(self.store.pool()).await?;
        self.store.migrate().await?;
        Ok(self.place.prepare(&self.topic, 3).await?)
    }

    /// Where messages are sent to.
    pub fn destination(&self) -> String {
        self.place.product.destination(&self.topic)
    }

    /// Where a copy of everything sent can be read.
    pub fn wire(&self) -> String {
        self.place.product.wire(&self.topic)
    }

    fn rungs(&self) -> Vec<String> {
        let rungs = ladder().rungs_of(&self.topic, CONSUMER);
        rungs.into_iter().map(|rung| rung.destination).collect()
    }

    pub fn dead_letters(&self) -> String {
        format!("{}.{CONSUMER}.DLQ", self.topic)
    }

    pub async fn count(&self, template: &str) -> Anyhow<u64> {
        let count: i64 = sqlx::query_scalar(self.sql(template))
            .fetch_one(&self.notebook)
            .await?;
        Ok(count.try_into()?)
    }

    /// Deliveries that came to their end.
    pub async fn settled(&self) -> Anyhow<u64> {
        let effects = self.count("SELECT count(*) FROM {schema}.effect").await?;
        Ok(effects + broker::depth(&*self.broker, &self.dead_letters()).await?)
    }

    /// Whether the outbox is empty, nothing is set aside for the broker to come round, and the consumer has committed
    /// everything there is on topic and rungs.
    pub async fn is_drained(&self) -> Anyhow<bool> {
        let unsent = "SELECT (SELECT count(*) FROM {schema}.relaybox_outbox) \
            + (SELECT count(*) FROM {schema}.relaybox_outbox_aside WHERE state = 'waiting')";
        if self.count(unsent).await? > 0 {
            return Ok(false);
        }
        for topic in std::iter::once(self.topic.clone()).chain(self.rungs()) {
            if self.broker.lag(CONSUMER, &topic).await?.messages > 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
