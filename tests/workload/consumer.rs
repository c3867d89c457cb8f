//! The role `consume`: an effect that must not happen twice, and a handler that fails by rule.

use std::time::Duration;

use relaybox::consumer::{Consumer, ConsumerConfig, Failure, Outcome, handler_fn};
use relaybox::envelope::Incoming;
use sqlx::postgres::PgConnection;

use super::bank::{self, CONSUMER, Change, Fate, TOPIC, Trouble, digest};
use super::world::{self, World};

pub async fn consume(world: &World, stop: impl Future<Output = ()> + Send) -> relaybox::Result<()> {
    let broker = world.broker().await?;
    Consumer::new(CONSUMER, TOPIC, broker, world.replica.clone())
        .with_ladder(world::ladder())
        .with_config(ConsumerConfig::default().with_concurrency(8))
        .run_until(handler_fn(world.clone(), handle), stop)
        .await
}

async fn handle(world: &World, db: &mut PgConnection, incoming: &Incoming) -> Outcome {
    match try_to_handle(world, db, incoming).await {
        Ok(outcome) => outcome,
        Err(error) => Outcome::Retry(error.into()),
    }
}

#[allow(clippy::panic, reason = "a handler that panics is a part of the plan")]
async fn try_to_handle(
    world: &World,
    db: &mut PgConnection,
    incoming: &Incoming,
) -> Result<Outcome, sqlx::Error> {
    let message = &incoming.message;
    let Ok(change) = Change::read(message) else {
        return Ok(Outcome::Permanent(Failure::new("not a change")));
    };
    let retries = incoming.story.retry_count;
    note(world, message.id.as_str(), &change, retries).await;
    sqlx::query(
        "UPDATE replica.account SET balance = balance + $2, applied = applied + 1 WHERE id = $1",
    )
    .bind(change.account)
    .bind(change.delta)
    .execute(&mut *db)
    .await?;
    // Between two statements, so that the second one meets what happened meanwhile.
    tokio::time::sleep(bank::effort(message.id.as_str())).await;
    sqlx::query(
        "INSERT INTO replica.applied (message_id, account, version, retries, digest) VALUES ($1, $2, $3, $4, $5)",
    )
    .bind(message.id.as_str())
    .bind(change.account)
    .bind(change.version)
    .bind(i64::from(retries))
    .bind(digest(message))
    .execute(&mut *db)
    .await?;
    let nonsense = "SELECT 1 / 0";
    Ok(match Fate::of(message.id.as_str()).trouble(retries) {
        None => Outcome::Done,
        Some(Trouble::Error) => Outcome::Retry(Failure::new("the branch is closed")),
        Some(Trouble::Permanent) => Outcome::Permanent(Failure::new("no such account")),
        Some(Trouble::Panic) => panic!("as planned"),
        Some(Trouble::Sql) => {
            sqlx::query(nonsense).execute(db).await?;
            Outcome::Done
        }
        Some(Trouble::SwallowedSql) => {
            let _ = sqlx::query(nonsense).execute(db).await;
            Outcome::Done
        }
    })
}

/// Notes an attempt, through a pool of its own, before anything can fail: an attempt without a note would look like a
/// message that was overtaken.
async fn note(world: &World, id: &str, change: &Change, retries: u32) {
    loop {
        let noted = sqlx::query(
            "INSERT INTO replica.attempt (message_id, account, version, retries) VALUES ($1, $2, $3, $4)",
        )
        .bind(id)
        .bind(change.account)
        .bind(change.version)
        .bind(i64::from(retries))
        .execute(&world.notebook)
        .await;
        match noted {
            Ok(_) => return,
            Err(error) => eprintln!("the notebook is away: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
