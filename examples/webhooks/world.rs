//! The services of a run: a schema of its own in PostgreSQL, a topic of its own in Kafka.

use std::time::Duration;

use relaybox::broker::kafka::{Kafka, KafkaConfig};
use relaybox::broker::{Settlement, Subscriber, SubscriptionRequest};
use relaybox::envelope::Incoming;
use relaybox::ladder::Ladder;
use relaybox::store::Prefix;
use relaybox::store::postgres::PostgresStore;
use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgPool, PgPoolOptions};

pub type Anyhow<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

pub const CONSUMER: &str = "index";
/// Short, so that a killed relay's lanes are free after a few seconds.
pub const PUBLISH_DEADLINE: Duration = Duration::from_secs(3);

pub fn ladder() -> Ladder {
    Ladder::rungs([1, 3].map(Duration::from_secs))
}

#[derive(Clone)]
pub struct World {
    schema: String,
    pub topic: String,
    pub store: PostgresStore,
    pub notebook: PgPool,
    pub kafka: Kafka,
}

impl World {
    pub async fn connect(run: &str) -> Anyhow<Self> {
        let variable = |name: &str| {
            std::env::var(name).map_err(|_| format!("set {name} to the service to use"))
        };
        let url = variable("RELAYBOX_POSTGRES_URL")?;
        let brokers = variable("RELAYBOX_KAFKA_BROKERS")?;
        let schema = format!("webhooks_{run}");
        let prefix = Prefix::new(&format!("{schema}.relaybox_"))?;
        let store = PostgresStore::connect(&url).await?.with_prefix(prefix);
        let notebook = PgPoolOptions::new()
            .max_connections(4)
            .connect(&url)
            .await?;
        let config = KafkaConfig::new(brokers)
            .with_publish_deadline(PUBLISH_DEADLINE)
            // A killed member's partitions are free after this long.
            .with_session_timeout(Duration::from_secs(6));
        let kafka = Kafka::connect(config).await?;
        Ok(Self {
            topic: format!("webhooks.{run}"),
            schema,
            store,
            notebook,
            kafka,
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
             CREATE TABLE {schema}.attempt (n bigserial PRIMARY KEY, key text NOT NULL, number bigint NOT NULL);",
        );
        sqlx::raw_sql(tables).execute(self.store.pool()).await?;
        self.store.migrate().await?;
        self.kafka.create_topic(&self.topic, 3).await?;
        Ok(())
    }

    pub fn rungs(&self) -> Vec<String> {
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
        Ok(effects + self.depth(&self.dead_letters()).await?)
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
            if self.kafka.lag(CONSUMER, &topic).await?.messages > 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Records on a topic; none while the consumer has not made it yet.
    pub async fn depth(&self, topic: &str) -> Anyhow<u64> {
        match self.kafka.depth(topic).await {
            Ok(depth) => Ok(depth.messages),
            Err(error) if error.kind() == relaybox::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    /// Everything on a topic, read as an auditor that belongs to nobody's group.
    pub async fn read(&self, topic: &str) -> Anyhow<Vec<Incoming>> {
        let depth = usize::try_from(self.depth(topic).await?)?;
        let mut records = Vec::with_capacity(depth);
        if depth == 0 {
            return Ok(records);
        }
        let auditor = format!("auditor-{:08x}", fastrand::u32(..));
        let request = SubscriptionRequest::new(auditor, vec![topic.to_owned()]);
        let mut subscription = self.kafka.subscribe(request).await?;
        while records.len() < depth {
            for delivery in subscription.receive(depth - records.len()).await? {
                delivery.receipt.settle(Settlement::Acknowledge).await?;
                records.push(delivery.incoming);
            }
        }
        subscription.close(Duration::from_secs(10)).await?;
        Ok(records)
    }
}
