//! Topics and what is stored in them.

use std::hash::{DefaultHasher, Hash, Hasher};

use bytes::Bytes;
use time::OffsetDateTime;

use crate::envelope::{Incoming, Outgoing, Received};
use crate::headers::Headers;
use crate::story::Origin;

/// What a record costs beside its bytes, so that empty ones are bounded too.
const RECORD_OVERHEAD_BYTES: usize = 128;

/// A message as a broker keeps it: bytes, not fields, so that a delivery reads what a foreign client would.
pub(super) struct Record {
    key: Option<Bytes>,
    headers: Headers,
    payload: Option<Bytes>,
    pub(super) timestamp: OffsetDateTime,
    /// `x-due-at`, read once.
    pub(super) due_at: Option<OffsetDateTime>,
}

impl Record {
    pub(super) fn new(outgoing: &Outgoing, now: OffsetDateTime) -> Self {
        Self {
            key: outgoing.message.key.clone(),
            headers: outgoing.to_headers(),
            payload: outgoing.message.payload.clone(),
            timestamp: now,
            due_at: outgoing.story.due_at,
        }
    }

    /// Key, headers and payload.
    pub(super) fn bytes(&self) -> usize {
        let len = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, Bytes::len);
        len(&self.key) + self.headers.bytes() + len(&self.payload)
    }

    /// What it counts against the bound of the broker.
    pub(super) fn cost(&self) -> usize {
        self.bytes() + RECORD_OVERHEAD_BYTES
    }

    pub(super) fn received(&self, topic: &str, partition: usize, offset: u64) -> Received {
        Received {
            coordinates: Origin {
                topic: topic.to_owned(),
                partition: Some(partition.to_string()),
                offset: Some(offset.to_string()),
            },
            key: self.key.clone(),
            headers: self.headers.clone(),
            payload: self.payload.clone(),
            timestamp: self.timestamp,
        }
    }
}

pub(super) struct Topic {
    partitions: Vec<Vec<Record>>,
    /// Where the next record without a key goes.
    turn: usize,
}

impl Topic {
    pub(super) fn new(partitions: usize) -> Self {
        Self {
            partitions: (0..partitions).map(|_| Vec::new()).collect(),
            turn: 0,
        }
    }

    pub(super) fn partitions(&self) -> usize {
        self.partitions.len()
    }

    pub(super) fn partition(&self, partition: usize) -> &[Record] {
        self.partitions.get(partition).map_or(&[], Vec::as_slice)
    }

    /// A key always goes to the same partition; records without one take turns.
    pub(super) fn append(&mut self, record: Record) {
        let place = match &record.key {
            Some(key) => {
                let mut hasher = DefaultHasher::new();
                key.hash(&mut hasher);
                // Only the remainder counts, so losing high bits on a 32-bit machine is harmless.
                #[allow(clippy::cast_possible_truncation)]
                let hash = hasher.finish() as usize;
                hash
            }
            None => {
                self.turn = self.turn.wrapping_add(1);
                self.turn
            }
        };
        let count = self.partitions.len().max(1);
        if let Some(partition) = self.partitions.get_mut(place % count) {
            partition.push(record);
        }
    }

    pub(super) fn read_all(&self, topic: &str) -> Vec<Incoming> {
        let mut all = Vec::new();
        for (number, records) in self.partitions.iter().enumerate() {
            for (offset, record) in (0u64..).zip(records) {
                all.push(record.received(topic, number, offset).read());
            }
        }
        all
    }
}
