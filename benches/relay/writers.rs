//! A service that commits at a steady rate, and when each of its messages was committed and confirmed.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use relaybox::broker::{PublishOutcome, Publisher, PublisherCapabilities};
use relaybox::envelope::Outgoing;
use relaybox::outbox::Outbox;
use relaybox::store::postgres::PostgresStore;
use relaybox::{Message, Result};
use sqlx::Connection;
use sqlx::postgres::PgConnection;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::backlog::{KEYS, PAYLOAD_BYTES};
use super::checked::Checked;

const WRITERS: u32 = 4;

/// How much is written.
#[derive(Clone, Copy)]
pub struct Load {
    pub messages_a_second: u32,
    pub messages_a_transaction: u32,
    pub lasts: Duration,
}

impl Load {
    fn transactions_of_a_writer(&self) -> u32 {
        let messages = f64::from(self.messages_a_second) * self.lasts.as_secs_f64();
        messages as u32 / self.messages_a_transaction / WRITERS
    }

    pub fn messages(&self) -> u32 {
        self.transactions_of_a_writer() * self.messages_a_transaction * WRITERS
    }
}

/// When each message was committed and when it was confirmed, by its number.
pub struct Times {
    committed: Mutex<Vec<Option<Instant>>>,
    confirmed: Mutex<Vec<Option<Instant>>>,
}

impl Times {
    pub fn new(messages: u32) -> Arc<Self> {
        let none = || Mutex::new(vec![None; messages as usize]);
        Arc::new(Self {
            committed: none(),
            confirmed: none(),
        })
    }

    pub fn confirm(&self, numbers: impl Iterator<Item = i64>) {
        let now = Instant::now();
        let mut confirmed = self.confirmed.lock().unwrap();
        for number in numbers {
            confirmed[number as usize].get_or_insert(now);
        }
    }

    /// From commit to confirm, of each message. A confirm may come before the writer knows that it has committed.
    pub fn delays(&self) -> Vec<Duration> {
        let committed = self.committed.lock().unwrap();
        let confirmed = self.confirmed.lock().unwrap();
        let pairs = committed.iter().zip(confirmed.iter());
        pairs
            .map(|(from, to)| to.unwrap().saturating_duration_since(from.unwrap()))
            .collect()
    }
}

/// Writes the whole load. Each writer has keys of its own, so numbers of a key are committed in order.
pub async fn write(url: &str, destination: &str, load: Load, times: &Arc<Times>) {
    let mut writers = JoinSet::new();
    let store = PostgresStore::connect(url).await.unwrap();
    for writer in 0..WRITERS {
        let connection = PgConnection::connect(url).await.unwrap();
        let one = Writer {
            outbox: Outbox::new(store.clone()),
            connection,
            writer,
            destination: destination.to_owned(),
            times: times.clone(),
        };
        writers.spawn(one.run(load));
    }
    while let Some(ended) = writers.join_next().await {
        ended.unwrap();
    }
}

struct Writer {
    outbox: Outbox<PostgresStore>,
    connection: PgConnection,
    writer: u32,
    destination: String,
    times: Arc<Times>,
}

impl Writer {
    async fn run(mut self, load: Load) {
        let pause = f64::from(load.messages_a_transaction * WRITERS);
        let pause = Duration::from_secs_f64(pause / f64::from(load.messages_a_second));
        let mut ticks = interval(pause);
        // What a slow commit kept waiting is made up for.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut numbers = (self.writer..).step_by(WRITERS as usize);
        for _ in 0..load.transactions_of_a_writer() {
            ticks.tick().await;
            let taken = numbers.by_ref().take(load.messages_a_transaction as usize);
            let taken: Vec<u32> = taken.collect();
            let messages: Vec<_> = taken
                .iter()
                .map(|n| message(&self.destination, *n))
                .collect();
            let mut tx = self.connection.begin().await.unwrap();
            self.outbox.enqueue_all(&mut tx, &messages).await.unwrap();
            tx.commit().await.unwrap();
            let now = Instant::now();
            let mut committed = self.times.committed.lock().unwrap();
            for number in taken {
                committed[number as usize] = Some(now);
            }
        }
    }
}

/// Numbers of one key come from one writer, because the number of keys is a multiple of theirs.
fn message(destination: &str, number: u32) -> Message {
    Message::new(destination, "Event")
        .with_key(format!("key-{}", number % KEYS))
        .with_payload(vec![0xab; PAYLOAD_BYTES])
        .with_version(i64::from(number))
}

/// A publisher whose confirmed messages are checked and timed.
pub struct Watched<P> {
    pub inner: P,
    pub checked: Arc<Checked>,
    pub times: Arc<Times>,
}

impl<P: Publisher> Publisher for Watched<P> {
    fn capabilities(&self) -> PublisherCapabilities {
        self.inner.capabilities()
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            let outcomes = self.inner.publish(batch).await;
            assert!(outcomes.iter().all(PublishOutcome::is_confirmed));
            let messages = || batch.iter().map(|sent| &sent.message);
            self.times
                .confirm(messages().map(|message| message.version.unwrap()));
            let seen = messages()
                .map(|message| (message.key.as_deref().unwrap(), message.version.unwrap()));
            self.checked.see(seen);
            outcomes
        })
    }

    fn scope<'a>(&'a self, destination: &'a str) -> &'a str {
        self.inner.scope(destination)
    }

    fn health(&self) -> relaybox::broker::Health {
        self.inner.health()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        self.inner.close(deadline)
    }
}
