//! How much there is, and how much of it a consumer has not settled.

use std::time::Duration;

use async_nats::jetstream::message::StreamMessage;
use futures_util::TryStreamExt as _;
use time::OffsetDateTime;
use tokio::time::timeout;

use super::config::NatsConfig;
use super::durable::consumer_info;
use super::link::Link;
use super::streams::{stream_by_subject, stream_info};
use super::topology::feed_of;
use crate::broker::Backlog;
use crate::error::{Error, ErrorKind, Result};

const DEPTH: &str = "read depth";
const LAG: &str = "read lag";

/// What a subject or a source holds.
pub(super) async fn depth(config: &NatsConfig, link: &Link, destination: &str) -> Result<Backlog> {
    if let Some(stream) = stream_by_subject(link, DEPTH, destination).await? {
        return of_subjects(link, &stream, &[destination.to_owned()]).await;
    }
    let feed = feed_of(config, "", destination, 0);
    of_subjects(link, &feed.stream, &feed.filters).await
}

/// What a consumer has not settled of a source.
pub(super) async fn lag(
    config: &NatsConfig,
    link: &Link,
    consumer: &str,
    source: &str,
) -> Result<Backlog> {
    let mut feed = feed_of(config, consumer, source, 0);
    if stream_info(link, LAG, &feed.stream).await?.is_none() {
        // A rung is asked for by its subject.
        match stream_by_subject(link, LAG, source).await? {
            Some(stream) => feed.stream = stream,
            None => return Err(missing(LAG, source)),
        }
    }
    let Some(info) = consumer_info(link, LAG, &feed.stream, &feed.durable).await? else {
        // It has not begun, and will begin at the oldest.
        return of_subjects(link, &feed.stream, &feed.filters).await;
    };
    let pending = u64::try_from(info.num_ack_pending).unwrap_or(u64::MAX);
    let messages = info.num_pending.saturating_add(pending);
    let oldest = match messages {
        0 => None,
        _ => {
            let first = info.ack_floor.stream_sequence.saturating_add(1);
            first_from(link, &feed.stream, first, &feed.filters).await?
        }
    };
    Ok(Backlog::new(messages, oldest))
}

async fn of_subjects(link: &Link, stream: &str, filters: &[String]) -> Result<Backlog> {
    let Some(info) = stream_info(link, DEPTH, stream).await? else {
        return Err(missing(DEPTH, stream));
    };
    let messages = if filters.is_empty() {
        info.state.messages
    } else {
        let mut sum = 0_u64;
        for filter in filters {
            let handle = link
                .ask(DEPTH, "no stream", link.context.get_stream_no_info(stream))
                .await?;
            let asked = handle.info_builder().subjects(filter.clone()).fetch();
            let counted = link
                .ask(DEPTH, "subjects could not be counted", asked)
                .await?;
            let counts = counted.try_fold(0_u64, |sum, (_, count)| {
                let count = u64::try_from(count).unwrap_or(u64::MAX);
                std::future::ready(Ok(sum.saturating_add(count)))
            });
            let of_filter = link
                .ask(DEPTH, "subjects could not be counted", counts)
                .await?;
            sum = sum.saturating_add(of_filter);
        }
        sum
    };
    let oldest = match messages {
        0 => None,
        _ => first_from(link, stream, info.state.first_sequence, filters).await?,
    };
    Ok(Backlog::new(messages, oldest))
}

fn missing(operation: &'static str, name: &str) -> Error {
    Error::new(
        ErrorKind::NotFound,
        operation,
        format!("no such stream: {name}"),
    )
}

/// The age of the first message from a sequence on.
async fn first_from(
    link: &Link,
    stream: &str,
    sequence: u64,
    filters: &[String],
) -> Result<Option<Duration>> {
    let mut oldest: Option<Duration> = None;
    let all = [">".to_owned()];
    let filters = if filters.is_empty() {
        &all[..]
    } else {
        filters
    };
    for filter in filters {
        let handle = link
            .ask(LAG, "no stream", link.context.get_stream_no_info(stream))
            .await?;
        let asked = handle
            .raw_message_builder()
            .sequence(sequence.max(1))
            .next_by_subject(filter.clone())
            .send();
        // Settled or removed meanwhile, or not told: the age is a hint beside the number.
        if let Ok(Ok(message)) = timeout(link.answer_deadline, asked).await {
            oldest = oldest.max(Some(age(&message)));
        }
    }
    Ok(oldest)
}

fn age(message: &StreamMessage) -> Duration {
    let age = OffsetDateTime::now_utc() - message.time;
    Duration::try_from(age).unwrap_or(Duration::ZERO)
}
