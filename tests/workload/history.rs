//! What happened, as the database and the broker tell it: the facts that the checker judges.

use relaybox::broker::Broker;
use relaybox::envelope::Incoming;
use serde::{Deserialize, Serialize};
use sqlx::FromRow;
use sqlx::postgres::{PgPool, PgRow};

use super::bank::{CONSUMER, End, Fate, PARTITIONS, TOPIC, digest};
use super::broker::{depth, read};
use super::world::{self, Anyhow, World};

/// Everything that was recorded in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    pub seed: u64,
    /// Whether the broker gives all messages of an account to one member at a time: only then are they handled in order.
    pub key_affinity: bool,
    /// What every account had before.
    pub opening: i64,
    pub bank: Vec<Account>,
    pub replica: Vec<Account>,
    pub committed: Vec<Committed>,
    /// The topic, in the order of partitions and offsets.
    pub wire: Vec<Record>,
    /// In the order in which they were made.
    pub attempts: Vec<Attempt>,
    /// In the order in which they were made.
    pub applied: Vec<Applied>,
    pub dead: Vec<Dead>,
    pub left: Left,
    pub disturbed: Disturbed,
    /// What went wrong with the processes themselves.
    pub faults: Vec<String>,
}

/// At the bank `count` is the version, in the replica how many changes were applied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    pub id: i64,
    pub balance: i64,
    pub count: i64,
}

/// A message, written in the transaction that enqueued it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Committed {
    pub message_id: String,
    pub transfer: i64,
    pub account: i64,
    pub version: i64,
    pub delta: i64,
    pub balance: i64,
    pub digest: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub partition: i32,
    pub offset: i64,
    pub message_id: String,
    pub digest: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    pub message_id: String,
    pub retries: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    pub message_id: String,
    /// Failures that were counted before.
    pub retries: i64,
    pub digest: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dead {
    pub message_id: String,
    pub reason: Option<String>,
    pub retries: i64,
    pub consumer: Option<String>,
    pub error: Option<String>,
    pub origin: Option<String>,
    pub digest: i64,
}

/// What has not come to its end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    pub outbox: u64,
    pub aside: u64,
    /// Records that the consumer has not settled, on the topic and its rungs.
    pub lag: u64,
    /// Messages with neither the effect nor the dead letter that their ids ask for, counted once nothing else is left: some
    /// brokers do not tell what their members hold.
    #[serde(default)]
    pub open: u64,
}

impl Left {
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Asked in the order in which messages move, so that one on its way is seen somewhere.
    pub async fn now(world: &World, broker: &dyn Broker) -> Anyhow<Self> {
        let count = |sql: &'static str| async move {
            let count: i64 = sqlx::query_scalar(sql).fetch_one(&world.notebook).await?;
            Anyhow::Ok(u64::try_from(count)?)
        };
        let outbox = count("SELECT count(*) FROM bank.relaybox_outbox").await?;
        let aside = count("SELECT count(*) FROM bank.relaybox_outbox_aside").await?;
        let mut lag = 0;
        for topic in std::iter::once(TOPIC.to_owned()).chain(world::rungs()) {
            lag += broker.lag(CONSUMER, &topic).await?.messages;
        }
        let mut left = Self {
            outbox,
            aside,
            lag,
            open: 0,
        };
        if left.is_nothing() {
            left.open = open(&world.notebook, broker).await?;
        }
        Ok(left)
    }
}

async fn open(db: &PgPool, broker: &dyn Broker) -> Anyhow<u64> {
    let without_effect: Vec<(String,)> = rows(
        db,
        "SELECT h.message_id FROM bank.history h LEFT JOIN replica.applied a USING (message_id)
         WHERE a.message_id IS NULL",
    )
    .await?;
    let ends = without_effect.iter().map(|(id,)| Fate::of(id).end());
    let (dead, open): (Vec<_>, Vec<_>) = ends.partition(|end| matches!(end, End::Dead { .. }));
    let letters = depth(broker, &world::dead_letters()).await?;
    Ok((open.len() as u64) + (dead.len() as u64).saturating_sub(letters))
}

/// How often the nemesis did what may put a batch on the wire twice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disturbed {
    /// A relay was killed or frozen: its batch may come twice.
    pub relays: u64,
    /// A server was killed, restarted or frozen: the batch of every relay may come twice.
    pub servers: u64,
    /// How many relays there are, and rows in a batch.
    pub relay_count: u64,
    pub batch: u64,
}

impl Disturbed {
    /// Most copies beyond the first that the topic may hold.
    pub fn duplicates_max(self) -> u64 {
        self.batch * self.batches()
    }

    /// Most blocks that those copies may come in: a batch that is sent again is one block in every partition.
    pub fn bursts_max(self) -> u64 {
        u64::from(PARTITIONS) * self.batches()
    }

    fn batches(self) -> u64 {
        self.relays + self.servers * self.relay_count
    }
}

impl Facts {
    /// Reads it all, after everything has stopped.
    pub async fn read(
        world: &World,
        seed: u64,
        disturbed: Disturbed,
        faults: Vec<String>,
    ) -> Anyhow<Self> {
        let broker = world.broker().await?;
        let db = &world.notebook;
        // Before the letters are read, which takes them away from a queue.
        let left = Left::now(world, &*broker).await?;
        let wire = read(&*broker, &world.place.product.wire(TOPIC)).await?;
        let letters = read(&*broker, &world::dead_letters()).await?;
        Ok(Self {
            seed,
            key_affinity: broker.key_affinity(TOPIC),
            opening: super::bank::OPENING,
            bank: accounts(
                db,
                "SELECT id, balance, version FROM bank.account ORDER BY id",
            )
            .await?,
            replica: accounts(
                db,
                "SELECT id, balance, applied FROM replica.account ORDER BY id",
            )
            .await?,
            committed: committed(db).await?,
            wire: wire.into_iter().map(record).collect(),
            attempts: rows(
                db,
                "SELECT message_id, retries FROM replica.attempt ORDER BY n",
            )
            .await?
            .into_iter()
            .map(|(message_id, retries)| Attempt {
                message_id,
                retries,
            })
            .collect(),
            applied: rows(
                db,
                "SELECT message_id, retries, digest FROM replica.applied ORDER BY n",
            )
            .await?
            .into_iter()
            .map(|(message_id, retries, digest)| Applied {
                message_id,
                retries,
                digest,
            })
            .collect(),
            dead: letters.into_values().map(dead).collect(),
            left,
            disturbed,
            faults,
        })
    }
}

async fn rows<Row>(db: &PgPool, sql: &'static str) -> Anyhow<Vec<Row>>
where
    Row: for<'r> FromRow<'r, PgRow> + Send + Unpin,
{
    Ok(sqlx::query_as(sql).fetch_all(db).await?)
}

async fn accounts(db: &PgPool, sql: &'static str) -> Anyhow<Vec<Account>> {
    let account = |(id, balance, count)| Account { id, balance, count };
    Ok(rows(db, sql).await?.into_iter().map(account).collect())
}

async fn committed(db: &PgPool) -> Anyhow<Vec<Committed>> {
    let sql =
        "SELECT message_id, transfer, account, version, delta, balance, digest FROM bank.history
         ORDER BY account, version";
    let row = |(message_id, transfer, account, version, delta, balance, digest)| Committed {
        message_id,
        transfer,
        account,
        version,
        delta,
        balance,
        digest,
    };
    Ok(rows(db, sql).await?.into_iter().map(row).collect())
}

fn record(((partition, offset), incoming): ((i32, i64), Incoming)) -> Record {
    Record {
        partition,
        offset,
        digest: digest(&incoming.message),
        message_id: incoming.message.id.as_str().to_owned(),
    }
}

fn dead(letter: Incoming) -> Dead {
    let digest = digest(&letter.message);
    let story = letter.story;
    Dead {
        message_id: letter.message.id.as_str().to_owned(),
        reason: story.reason.map(|reason| reason.as_str().to_owned()),
        retries: story.retry_count.into(),
        consumer: story.consumer,
        error: story.last_error,
        origin: story.origin.map(|origin| origin.topic),
        digest,
    }
}
