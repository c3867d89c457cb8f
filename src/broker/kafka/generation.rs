//! Generations of producers: one is used until the first failure, then a new one takes its place.
//!
//! # Why first appearances per topic and key keep the order of the batch
//!
//! Claim: *each generation appends, per topic and key, a gapless run in order, which begins at or before the first
//! message that was not confirmed when it began.* Then whatever message appears in the log for the first time, all
//! earlier ones of its key are there already: confirmed before the generation began, or appended by it before. Late
//! appends of an old generation are duplicates or the next of its own run, so several generations may even mix.
//!
//! A generation's run has no gaps because
//!
//! - records never expire inside the client, and retries are unbounded, so the client itself skips nothing;
//! - a broker appends a batch only if its sequence number follows the last one of that producer id. When a batch is
//!   refused for good, the ones behind it fail with `OUT_OF_ORDER_SEQUENCE_NUMBER`;
//! - `enable.gapless.guarantee` turns such a refusal into a fatal error: the producer sends nothing more with fresh
//!   numbers. Its queue stays as it is, so we purge it;
//! - one hole is left: a broker that knows *nothing* of a producer id in a partition accepts any sequence number, and
//!   the client has up to five messages of a partition under way. If the very first batch of a generation is refused,
//!   one right behind it would be stored (seen with Kafka 4: the service tests fail without what follows). So messages
//!   that share a key are pipelined only in a topic that [is open](Generation::is_open): this generation had a
//!   confirmation from each of its partitions within [`OPEN_FOR`]. Before, a call sends the first message of each key,
//!   waits, and then sends the rest.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::producer::{DeliveryFuture, FutureProducer, Producer, PurgeConfig};

use super::context::Context;
use super::control::{create_with, end_aside};
use crate::clock::at_most_a_day;
use crate::error::{Error, ErrorKind, Result};

/// How long a confirmation counts; brokers forget a silent producer after `producer.id.expiration.ms` (a day).
const OPEN_FOR: Duration = Duration::from_secs(3_600);

/// One producer and what is known about it.
pub(super) struct Generation {
    /// `None` only while it is dropped.
    producer: Option<FutureProducer<Context>>,
    pub(super) context: Context,
    /// When each partition of a topic last confirmed something.
    opened: Mutex<HashMap<String, HashMap<i32, Instant>>>,
}

impl Generation {
    pub(super) fn new(config: &rdkafka::ClientConfig) -> Result<Self> {
        let context = Context::default();
        let producer = create_with(config, context.clone())?;
        Ok(Self {
            producer: Some(producer),
            context,
            opened: Mutex::default(),
        })
    }

    /// Puts a record into the client's queue.
    #[expect(
        clippy::result_large_err,
        reason = "the record comes back to be tried again"
    )]
    pub(super) fn enqueue<'a>(
        &self,
        record: Record<'a>,
    ) -> Result<DeliveryFuture, (rdkafka::error::KafkaError, Record<'a>)> {
        match &self.producer {
            Some(producer) => producer.send_result(record),
            None => Err((rdkafka::error::KafkaError::Canceled, record)),
        }
    }

    /// Whether the client refuses all further work.
    pub(super) fn is_fatal(&self) -> bool {
        self.producer
            .as_ref()
            .is_none_or(|producer| producer.client().fatal_error().is_some())
    }

    pub(super) fn confirmed(&self, topic: &str, partition: i32) {
        self.context.succeeded();
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(partitions) = opened.get_mut(topic) {
            partitions.insert(partition, now);
        } else {
            opened.insert(topic.to_owned(), HashMap::from([(partition, now)]));
        }
    }

    pub(super) fn has_confirmed(&self) -> bool {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        !opened.is_empty()
    }

    /// Whether every partition of the topic is opened.
    pub(super) fn is_open(&self, topic: &str, partitions: usize) -> bool {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        partitions > 0
            && opened.get(topic).is_some_and(|opened| {
                opened.len() >= partitions && opened.values().all(|at| at.elapsed() < OPEN_FOR)
            })
    }

    /// Gives up everything that is queued or unanswered. Blocks until the client's threads did it.
    pub(super) fn purge(&self) {
        if let Some(producer) = &self.producer {
            producer.purge(PurgeConfig::default().queue().inflight());
        }
    }

    /// Waits until everything is answered. Blocks.
    fn flush(&self, within: Duration) -> Result<()> {
        let Some(producer) = &self.producer else {
            return Ok(());
        };
        producer.flush(at_most_a_day(within)).map_err(|source| {
            Error::new(
                ErrorKind::Timeout,
                "close",
                "some messages were still unconfirmed",
            )
            .with_source(source)
        })
    }
}

/// The end of a producer joins threads and waits for purged records: nothing for an async thread.
impl Drop for Generation {
    fn drop(&mut self) {
        end_aside(self.producer.take());
    }
}

/// The one generation in use, if there is one.
pub(super) struct Generations {
    config: rdkafka::ClientConfig,
    slot: Mutex<Slot>,
}

enum Slot {
    Open(Option<Arc<Generation>>),
    Closed,
}

impl Generations {
    pub(super) fn new(config: rdkafka::ClientConfig) -> Self {
        Self {
            config,
            slot: Mutex::new(Slot::Open(None)),
        }
    }

    /// The generation in use, if there is one.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`].
    pub(super) fn in_use(&self) -> Result<Option<Arc<Generation>>> {
        match &*self.slot.lock().unwrap_or_else(PoisonError::into_inner) {
            Slot::Closed => Err(closed()),
            Slot::Open(slot) => Ok(slot.clone()),
        }
    }

    /// The generation in use; makes one if there is none.
    pub(super) fn current(&self) -> Result<Arc<Generation>> {
        match &mut *self.slot.lock().unwrap_or_else(PoisonError::into_inner) {
            Slot::Closed => Err(closed()),
            Slot::Open(Some(generation)) => Ok(Arc::clone(generation)),
            Slot::Open(slot) => {
                let generation = Arc::new(Generation::new(&self.config)?);
                *slot = Some(Arc::clone(&generation));
                Ok(generation)
            }
        }
    }

    /// Takes a generation out of use. Calls that still wait on it may finish; the last one to let go ends it.
    pub(super) fn retire(&self, generation: &Arc<Generation>) {
        if let Slot::Open(slot) = &mut *self.slot.lock().unwrap_or_else(PoisonError::into_inner)
            && slot
                .as_ref()
                .is_some_and(|current| Arc::ptr_eq(current, generation))
        {
            *slot = None;
        }
    }

    /// Refuses further work and waits until what is under way is answered.
    pub(super) async fn close(&self, deadline: Duration) -> Result<()> {
        let slot = std::mem::replace(
            &mut *self.slot.lock().unwrap_or_else(PoisonError::into_inner),
            Slot::Closed,
        );
        let Slot::Open(Some(generation)) = slot else {
            return Ok(());
        };
        super::control::blocking("close", move || generation.flush(deadline)).await
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "publish", "the publisher is closed")
}

/// A record as this adapter sends it.
pub(super) type Record<'a> = rdkafka::producer::FutureRecord<'a, [u8], [u8]>;
