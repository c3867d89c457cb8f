//! How much there is, and how much of it a consumer has dealt with.

use std::sync::Arc;
use std::time::Instant;

use rdkafka::consumer::{BaseConsumer, Consumer, DefaultConsumerContext};
use rdkafka::{Offset, TopicPartitionList};

use super::config::KafkaConfig;
use super::control::{Control, blocking, create_with};
use super::error::mapped;
use crate::broker::Backlog;
use crate::error::Result;

/// Offsets between the oldest and the newest record of all partitions. Transaction markers and compacted records
/// count.
pub(super) async fn depth(control: &Arc<Control>, topic: &str) -> Result<Backlog> {
    let found = control.all_exist("depth", &[topic.to_owned()]).await?;
    let partitions = partitions(found.first().map_or(0, |topic| topic.partitions));
    let (control, topic) = (Arc::clone(control), topic.to_owned());
    blocking("depth", move || {
        let until = Instant::now() + control.deadline;
        let mut depth = 0;
        for partition in partitions {
            let (low, high) = watermarks(&control, "depth", &topic, partition, until)?;
            depth += between(low, high);
        }
        Ok(Backlog::new(depth, None))
    })
    .await
}

/// Offsets that the consumer has not committed yet.
pub(super) async fn lag(
    config: &KafkaConfig,
    control: &Arc<Control>,
    consumer: &str,
    topic: &str,
) -> Result<Backlog> {
    let found = control.all_exist("lag", &[topic.to_owned()]).await?;
    let partitions = partitions(found.first().map_or(0, |topic| topic.partitions));
    // Never subscribed: it only asks what its group has committed.
    let asking: BaseConsumer = create_with(&config.consumer(consumer), DefaultConsumerContext)?;
    let (control, topic) = (Arc::clone(control), topic.to_owned());
    blocking("lag", move || {
        let until = Instant::now() + control.deadline;
        let mut wanted = TopicPartitionList::new();
        for partition in partitions {
            wanted.add_partition(&topic, partition);
        }
        let committed = asking
            .committed_offsets(wanted, control.deadline)
            .map_err(|source| mapped("lag", &topic, source))?;
        let mut lag = 0;
        for element in committed.elements() {
            let (low, high) = watermarks(&control, "lag", &topic, element.partition(), until)?;
            lag += match element.offset() {
                Offset::Offset(offset) => between(offset.max(low), high),
                _ => between(low, high),
            };
        }
        Ok(Backlog::new(lag, None))
    })
    .await
}

fn partitions(count: usize) -> std::ops::Range<i32> {
    0..i32::try_from(count).unwrap_or(i32::MAX)
}

fn watermarks(
    control: &Control,
    operation: &'static str,
    topic: &str,
    partition: i32,
    until: Instant,
) -> Result<(i64, i64)> {
    let left = until.saturating_duration_since(Instant::now());
    control
        .client()
        .fetch_watermarks(topic, partition, left)
        .map_err(|source| mapped(operation, topic, source))
}

fn between(from: i64, to: i64) -> u64 {
    u64::try_from(to.saturating_sub(from)).unwrap_or(0)
}
