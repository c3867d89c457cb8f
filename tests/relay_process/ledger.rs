//! A broker made of one table, `sent`: what was sent, in which order, and when by the sender's clock.

use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::broker::{
    FailureScope, PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder, Stored,
};
use relaybox::envelope::Outgoing;
use relaybox::{Error, ErrorKind, Result};
use sqlx::postgres::PgPool;
use time::OffsetDateTime;

const PUBLISH_DEADLINE: Duration = Duration::from_secs(2);

/// Publishes by inserting into the table.
pub struct Ledger {
    pool: PgPool,
}

impl Ledger {
    pub const fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    /// A batch is one statement: all of it is there, or nothing.
    async fn insert(&self, batch: &[Outgoing]) -> Result<(), sqlx::Error> {
        let text = |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into();
        let messages = || batch.iter().map(|sent| &sent.message);
        let ids: Vec<String> = messages().map(|m| m.id.to_string()).collect();
        let keys: Vec<String> = messages().map(|m| text(m.key.as_deref())).collect();
        let payloads: Vec<String> = messages().map(|m| text(m.payload.as_deref())).collect();
        sqlx::query(
            "INSERT INTO sent (message_id, key, payload, wall) \
             SELECT id, key, payload, $4 \
             FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS m(id, key, payload, place) \
             ORDER BY place",
        )
        .bind(ids)
        .bind(keys)
        .bind(payloads)
        .bind(OffsetDateTime::now_utc())
        .execute(&self.pool)
        .await?;
        Ok(())
    }
}

impl Publisher for Ledger {
    fn capabilities(&self) -> PublisherCapabilities {
        let mut capabilities = PublisherCapabilities::new("ledger");
        capabilities.order = PublisherOrder::Prefix;
        capabilities.publish_deadline = PUBLISH_DEADLINE;
        capabilities
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            let inserted = self.insert(batch).await;
            let outcome = |_| match &inserted {
                Ok(()) => PublishOutcome::Confirmed,
                Err(error) => PublishOutcome::Failed {
                    scope: FailureScope::Broker,
                    stored: Stored::Unknown,
                    error: Error::new(ErrorKind::Unavailable, "publish", error.to_string()),
                },
            };
            batch.iter().map(outcome).collect()
        })
    }

    fn health(&self) -> relaybox::broker::Health {
        relaybox::broker::Health::up()
    }

    fn check<'a>(&'a self, _: &'a [String]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn close(&self, _: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}
