//! How much there is, how much of it a consumer has dealt with, and how old the oldest of that is.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::{Message as _, Offset, TopicPartitionList};
use time::OffsetDateTime;

use super::config::KafkaConfig;
use super::context::Context;
use super::control::{Control, blocking, create_with, end_aside};
use super::error::{awaits_leader, mapped};
use crate::broker::Backlog;
use crate::error::Result;

/// Between two looks for a partition's leader.
const LEADER_POLL: Duration = Duration::from_millis(100);

/// What is asked about.
struct Question {
    operation: &'static str,
    control: Arc<Control>,
    topic: String,
    until: Instant,
}

/// From where to where a partition is counted.
struct Stretch {
    partition: i32,
    from: i64,
    to: i64,
}

impl Stretch {
    fn offsets(&self) -> u64 {
        u64::try_from(self.to.saturating_sub(self.from)).unwrap_or(0)
    }
}

/// Of all that a topic holds, or only of what the consumer has not committed.
pub(super) async fn backlog(
    config: &KafkaConfig,
    control: &Arc<Control>,
    consumer: Option<&str>,
    topic: &str,
) -> Result<Backlog> {
    let operation = if consumer.is_some() { "lag" } else { "depth" };
    let found = control.all_exist(operation, &[topic.to_owned()]).await?;
    let partitions = found.first().map_or(0, |topic| topic.partitions);
    let partitions = i32::try_from(partitions).unwrap_or(i32::MAX);
    // Never subscribed: it reads what the group has committed, and the records there.
    let reader = create_with(&config.reader(consumer), Context::default())?;
    let question = Question {
        operation,
        control: Arc::clone(control),
        topic: topic.to_owned(),
        until: Instant::now() + control.deadline,
    };
    let is_consumers = consumer.is_some();
    blocking(operation, move || {
        let backlog = question.answer(&reader, partitions, is_consumers);
        end_aside(Some(reader));
        backlog
    })
    .await
}

impl Question {
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    fn failed(&self, source: KafkaError) -> crate::Error {
        mapped(self.operation, &self.topic, source)
    }

    fn answer(
        &self,
        reader: &BaseConsumer<Context>,
        partitions: i32,
        is_consumers: bool,
    ) -> Result<Backlog> {
        let mut list = TopicPartitionList::new();
        for partition in 0..partitions {
            list.add_partition(&self.topic, partition);
        }
        if is_consumers {
            let committed = reader.committed_offsets(list, self.left());
            list = committed.map_err(|source| self.failed(source))?;
        }
        let mut stretches = Vec::new();
        for element in list.elements() {
            let partition = element.partition();
            let (low, to) = self.watermarks(partition)?;
            let from = match element.offset() {
                Offset::Offset(committed) => committed.max(low),
                _ => low,
            };
            if from < to {
                stretches.push(Stretch {
                    partition,
                    from,
                    to,
                });
            }
        }
        self.count(reader, &stretches)
    }

    /// Of one partition. Its leader may be changing, as it is for a moment after its topic was made: asked again then.
    fn watermarks(&self, partition: i32) -> Result<(i64, i64)> {
        let client = self.control.client();
        loop {
            match client.fetch_watermarks(&self.topic, partition, self.left()) {
                Err(source) if awaits_leader(&source) && self.left() > LEADER_POLL => {
                    std::thread::sleep(LEADER_POLL);
                }
                answer => return answer.map_err(|source| self.failed(source)),
            }
        }
    }

    /// Reads the first record of each stretch: its age, and whether there is one at all, because markers of
    /// transactions and what was compacted away have offsets too.
    fn count(&self, reader: &BaseConsumer<Context>, stretches: &[Stretch]) -> Result<Backlog> {
        let mut list = TopicPartitionList::new();
        for stretch in stretches {
            list.add_partition_offset(&self.topic, stretch.partition, Offset::Offset(stretch.from))
                .map_err(|source| self.failed(source))?;
        }
        let mut unread: HashMap<i32, &Stretch> =
            stretches.iter().map(|s| (s.partition, s)).collect();
        if !unread.is_empty() {
            reader.assign(&list).map_err(|source| self.failed(source))?;
        }
        let mut messages = 0;
        let mut first: Option<i64> = None;
        while !unread.is_empty() && !self.left().is_zero() {
            match reader.poll(self.left()) {
                Some(Ok(record)) => {
                    if let Some(stretch) = unread.remove(&record.partition()) {
                        messages += stretch.offsets();
                        let at = record.timestamp().to_millis();
                        first =
                            first.map_or(at, |first| Some(at.map_or(first, |at| at.min(first))));
                    }
                }
                Some(Err(KafkaError::PartitionEOF(partition))) => {
                    unread.remove(&partition);
                }
                // The client mends it or the time runs out.
                Some(Err(_)) | None => {}
            }
        }
        // Not looked at in time: counted all the same.
        messages += unread
            .values()
            .map(|stretch| stretch.offsets())
            .sum::<u64>();
        Ok(Backlog::new(messages, first.map(age)))
    }
}

/// By this machine's clock; the record has the clock of its producer, or of the broker.
fn age(at_millis: i64) -> Duration {
    let now = OffsetDateTime::now_utc().unix_timestamp_nanos() / 1_000_000;
    let age = now.saturating_sub(i128::from(at_millis));
    Duration::from_millis(u64::try_from(age).unwrap_or(0))
}
