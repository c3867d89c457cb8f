//! The role `write`: transfers in their transactions, each with one message per changed account.

use std::time::Duration;

use relaybox::Message;
use relaybox::outbox::Outbox;
use relaybox::store::postgres::PostgresStore;
use sqlx::postgres::PgConnection;
use sqlx::{Acquire, Postgres, Transaction};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::bank::{Change, Ending, Transfer, digest, id_of};
use super::world::{Anyhow, World};

/// Connections that write side by side. Each takes every sixth number.
const WRITERS: i64 = 6;
/// Between two tries while the database is away.
const PAUSE: Duration = Duration::from_millis(200);

/// Writes until told to stop. A writer that was killed goes on after the last number it had committed.
pub async fn write(world: &World, seed: u64, stop: watch::Receiver<bool>) -> Anyhow<()> {
    let mut writers = JoinSet::new();
    for index in 0..WRITERS {
        let writer = Writer {
            seed,
            world: world.clone(),
            outbox: Outbox::new(world.bank.clone()),
        };
        writers.spawn(writer.run(index, stop.clone()));
    }
    while let Some(ended) = writers.join_next().await {
        ended??;
    }
    Ok(())
}

struct Writer {
    seed: u64,
    world: World,
    outbox: Outbox<PostgresStore>,
}

impl Writer {
    async fn run(self, index: i64, mut stop: watch::Receiver<bool>) -> Anyhow<()> {
        let mut number = None;
        while !*stop.borrow() {
            let step = match number {
                None => self.next_after_committed(index).await,
                Some(number) => self.transfer(number).await.map(|()| number + WRITERS),
            };
            match step {
                Ok(next) => {
                    let pause = Transfer::planned(self.seed, next).pause;
                    // A stop may interrupt the pause, never a transaction.
                    let _ = tokio::time::timeout(pause, stop.wait_for(|stop| *stop)).await;
                    number = Some(next);
                }
                // Whether it was committed shows when it is tried again.
                Err(error) if is_outage(&*error) => {
                    eprintln!("the database is away: {error}");
                    tokio::time::sleep(PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn next_after_committed(&self, index: i64) -> Anyhow<i64> {
        let last: Option<i64> =
            sqlx::query_scalar("SELECT max(number) FROM bank.transfer WHERE number % $1 = $2")
                .bind(WRITERS)
                .bind(index)
                .fetch_one(&self.world.pool)
                .await?;
        Ok(last.map_or(index, |last| last + WRITERS))
    }

    /// One transfer to its planned end. Trying it again after an error is safe: its number is recorded in the same
    /// transaction, and recording it waits for another one that still holds it.
    async fn transfer(&self, number: i64) -> Anyhow<()> {
        let plan = Transfer::planned(self.seed, number);
        let mut tx = self.world.pool.begin().await?;
        let recorded =
            sqlx::query("INSERT INTO bank.transfer (number) VALUES ($1) ON CONFLICT DO NOTHING")
                .bind(number)
                .execute(&mut *tx)
                .await?;
        if recorded.rows_affected() == 0 {
            eprintln!("{number} was committed, though nobody said so");
            return Ok(tx.rollback().await?);
        }
        // In the order of ids, so that two transfers never wait for each other.
        sqlx::query("SELECT FROM bank.account WHERE id IN ($1, $2) ORDER BY id FOR UPDATE")
            .bind(plan.from)
            .bind(plan.to)
            .execute(&mut *tx)
            .await?;
        let mut messages = Vec::new();
        for (account, delta) in [(plan.from, -plan.amount), (plan.to, plan.amount)] {
            messages.push(self.change(&mut tx, &plan, account, delta).await?);
        }
        if plan.phantom {
            self.phantom(&mut tx, &plan).await?;
        }
        self.outbox.enqueue_all(&mut tx, &messages).await?;
        match plan.ending {
            Ending::RollBack => tx.rollback().await?,
            Ending::Commit(late) => {
                tokio::time::sleep(late).await;
                tx.commit().await?;
            }
        }
        Ok(())
    }

    /// Changes one account and writes the truth about it beside the message.
    async fn change(
        &self,
        db: &mut PgConnection,
        plan: &Transfer,
        account: i64,
        delta: i64,
    ) -> Anyhow<Message> {
        let (balance, version): (i64, i64) = sqlx::query_as(
            "UPDATE bank.account SET balance = balance + $2, version = version + 1 WHERE id = $1
             RETURNING balance, version",
        )
        .bind(account)
        .bind(delta)
        .fetch_one(&mut *db)
        .await?;
        let change = Change {
            transfer: plan.number,
            account,
            version,
            delta,
            balance,
        };
        let id = id_of(self.seed, plan.number, account);
        let message = self.message(&change, id, plan)?;
        sqlx::query("INSERT INTO bank.history VALUES ($1, $2, $3, $4, $5, $6, $7)")
            .bind(message.id.as_str())
            .bind(plan.number)
            .bind(account)
            .bind(version)
            .bind(delta)
            .bind(balance)
            .bind(digest(&message))
            .execute(db)
            .await?;
        Ok(message)
    }

    fn message(&self, change: &Change, id: String, plan: &Transfer) -> Anyhow<Message> {
        let destination = self.world.destination();
        Ok(change.message(&destination, id, &plan.filler)?)
    }

    /// A message and a change that a savepoint takes back.
    async fn phantom(&self, tx: &mut Transaction<'_, Postgres>, plan: &Transfer) -> Anyhow<()> {
        let mut savepoint = tx.begin().await?;
        let change = Change {
            transfer: plan.number,
            account: plan.from,
            version: i64::MAX,
            delta: 1_000_000,
            balance: 0,
        };
        let message = self.message(&change, format!("phantom-{}", plan.number), plan)?;
        self.outbox.enqueue(&mut savepoint, message).await?;
        sqlx::query("UPDATE bank.account SET balance = 0 WHERE id = $1")
            .bind(plan.from)
            .execute(&mut *savepoint)
            .await?;
        Ok(savepoint.rollback().await?)
    }
}

/// Whether the database is away, and not the writer wrong.
fn is_outage(error: &(dyn std::error::Error + Send + Sync + 'static)) -> bool {
    if let Some(error) = error.downcast_ref::<relaybox::Error>() {
        return error.is_transient();
    }
    match error.downcast_ref::<sqlx::Error>() {
        // Class 57: the server is shutting down or starting up. 53300: too many connections.
        Some(sqlx::Error::Database(error)) => error
            .code()
            .is_some_and(|code| code.starts_with("57") || code == "53300"),
        Some(
            sqlx::Error::Io(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::Protocol(_)
            | sqlx::Error::WorkerCrashed,
        ) => true,
        _ => false,
    }
}
