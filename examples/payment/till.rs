//! The pattern: an effect outside of the database, exactly once as far as the other side can tell.
//!
//! 1. The handler writes an *intent* in the transaction of the inbox, and calls nobody.
//! 2. A loop takes a committed intent, with no transaction open, and calls with the intent's idempotency key.
//! 3. It writes the *result*, and what others must know of it, in one transaction.
//!
//! Whatever dies in between, the next one finds the intent and calls again with the same key.

use relaybox::store::sqlite::SqliteStore;
use relaybox::{Incoming, Json, Message, Outbox};
use serde::Deserialize;
use sqlx::sqlite::SqliteConnection;

use super::provider::{Answer, Provider};

/// The key is the id of the message that asked for the payment: the same for every copy, attempt and restart. Where an
/// order must be paid once however many messages ask for it, the key is the order's number.
pub const TABLE: &str = "CREATE TABLE payment (
    idempotency_key TEXT    PRIMARY KEY NOT NULL,
    order_id        TEXT    NOT NULL,
    cents           INTEGER NOT NULL,
    state           TEXT    NOT NULL DEFAULT 'intended' CHECK (state IN ('intended', 'taken', 'declined')),
    calls_failed    INTEGER NOT NULL DEFAULT 0
)";

#[derive(Deserialize)]
pub struct OrderPlaced {
    pub order: String,
    pub cents: i64,
}

/// Step 1, the handler.
pub async fn intend(
    _: &(),
    db: &mut SqliteConnection,
    Json(placed): Json<OrderPlaced>,
    incoming: &Incoming,
) -> Result<(), sqlx::Error> {
    sqlx::query("INSERT INTO payment (idempotency_key, order_id, cents) VALUES (?, ?, ?)")
        .bind(incoming.message.id.as_str())
        .bind(&placed.order)
        .bind(placed.cents)
        .execute(db)
        .await?;
    Ok(())
}

type Anyhow<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What came of one look at the intents.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing was left to do.
    Idle,
    /// An intent got its result.
    Settled,
    /// The provider gave no answer, which says nothing about whether it charged. The intent stays.
    Unanswered,
}

/// Makes the calls. More than one of these may run at a time: the key makes their calls one.
pub struct Payer<P> {
    store: SqliteStore,
    outbox: Outbox<SqliteStore>,
    provider: P,
}

impl<P: Provider> Payer<P> {
    pub fn new(store: SqliteStore, provider: P) -> Self {
        let outbox = Outbox::new(store.clone());
        Self {
            store,
            outbox,
            provider,
        }
    }

    /// Steps 2 and 3, for one intent. One that fails goes behind the others.
    pub async fn step(&self) -> Anyhow<Step> {
        let intent: Option<(String, String, i64)> = sqlx::query_as(
            "SELECT idempotency_key, order_id, cents FROM payment WHERE state = 'intended' \
             ORDER BY calls_failed, rowid LIMIT 1",
        )
        .fetch_optional(self.store.pool())
        .await?;
        let Some((key, order, cents)) = intent else {
            return Ok(Step::Idle);
        };
        let Ok(answer) = self.provider.charge(&key, cents).await else {
            sqlx::query(
                "UPDATE payment SET calls_failed = calls_failed + 1 WHERE idempotency_key = ?",
            )
            .bind(&key)
            .execute(self.store.pool())
            .await?;
            return Ok(Step::Unanswered);
        };
        self.settle(&key, &order, cents, answer).await?;
        Ok(Step::Settled)
    }

    async fn settle(&self, key: &str, order: &str, cents: i64, answer: Answer) -> Anyhow<()> {
        let (state, event_type) = match answer {
            Answer::Charged => ("taken", "PaymentTaken"),
            Answer::Declined => ("declined", "PaymentDeclined"),
        };
        let mut tx = self.store.pool().begin().await?;
        let settled = sqlx::query(
            "UPDATE payment SET state = ? WHERE idempotency_key = ? AND state = 'intended'",
        )
        .bind(state)
        .bind(key)
        .execute(&mut *tx)
        .await?;
        // Nothing to tell where another payer was first.
        if settled.rows_affected() == 1 {
            let message = Message::new("payments", event_type)
                .with_key(order)
                .with_json(&cents)?
                .with_causation_id(key);
            self.outbox.enqueue(&mut tx, message).await?;
        }
        tx.commit().await?;
        Ok(())
    }
}
