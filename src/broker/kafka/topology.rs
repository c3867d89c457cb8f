//! The topics of a subscription: sources must be there, rungs and dead letters can be made.

use std::sync::Arc;
use std::time::Duration;

use rdkafka::admin::{AdminOptions, NewTopic, TopicReplication};
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use tokio::time::{Instant, sleep};

use super::config::{ENVELOPE_BYTES_MAX, KafkaConfig};
use super::control::{Control, Topic};
use super::error::mapped;
use super::record::{NAME_RULE, is_topic_name};
use super::settings::{self, largest_batch};
use crate::broker::{SubscriptionRequest, TopologyMode};
use crate::error::{Error, ErrorKind, Result};

/// How long a topic that was made may stay unseen.
const SEEN_WITHIN: Duration = Duration::from_secs(15);
const SEEN_POLL: Duration = Duration::from_millis(100);
const FOR_EVER: &str = "-1";

/// A topic that belongs to the consumer.
struct Own {
    name: String,
    /// How long messages wait in it; nothing for dead letters.
    delay: Option<Duration>,
}

pub(super) async fn prepare(
    config: &KafkaConfig,
    control: &Arc<Control>,
    request: &SubscriptionRequest,
) -> Result<()> {
    check(request)?;
    if request.topology == TopologyMode::Unchecked {
        return Ok(());
    }
    let own: Vec<Own> = own(request);
    let names: Vec<String> = request
        .sources
        .iter()
        .chain(own.iter().map(|own| &own.name))
        .cloned()
        .collect();
    let found = control.topics("subscribe", names.clone()).await?;
    let (sources, found_own) = found.split_at(request.sources.len());
    let create = request.topology == TopologyMode::Create;
    let missing: Vec<&str> = names
        .iter()
        .zip(&found)
        .enumerate()
        .filter(|(at, (_, topic))| topic.is_none() && (*at < sources.len() || !create))
        .map(|(_, (name, _))| name.as_str())
        .collect();
    if !missing.is_empty() {
        return Err(Error::new(
            ErrorKind::NotFound,
            "subscribe",
            format!("no such topic: {}", missing.join(", ")),
        ));
    }
    if own.is_empty() {
        return Ok(());
    }
    let settings = settings::read(control, &names).await;
    let of_sources = request.sources.iter().filter_map(|name| settings.get(name));
    let source_bytes_max = largest_batch(of_sources);
    let (there, absent): (Vec<_>, Vec<_>) = own
        .into_iter()
        .zip(found_own)
        .partition(|(_, topic)| topic.is_some());
    if let Some(Some(first)) = sources.first()
        && !absent.is_empty()
    {
        let absent: Vec<Own> = absent.into_iter().map(|(own, _)| own).collect();
        make(config, control, *first, source_bytes_max, &absent).await?;
    }
    for (own, _) in there {
        if let Some(settings) = settings.get(&own.name) {
            settings.suit(&own.name, own.delay, source_bytes_max)?;
        }
    }
    Ok(())
}

fn check(request: &SubscriptionRequest) -> Result<()> {
    if request.consumer.is_empty() || request.consumer.contains('\0') {
        return Err(Error::configuration(
            "consumer",
            "a name without NUL",
            &request.consumer,
        ));
    }
    if request.in_flight_max == 0 {
        return Err(Error::configuration("in_flight_max", "at least 1", "0"));
    }
    if request.sources.is_empty() {
        return Err(Error::configuration(
            "sources",
            "at least one topic",
            "none",
        ));
    }
    let rungs = request.rungs.iter().map(|rung| &rung.destination);
    let all = request.sources.iter().chain(rungs);
    for name in all.chain(&request.dead_letters) {
        if !is_topic_name(name) {
            return Err(Error::configuration("topic", NAME_RULE, name));
        }
    }
    Ok(())
}

/// Rungs and dead letters, each name once.
fn own(request: &SubscriptionRequest) -> Vec<Own> {
    let mut own: Vec<Own> = request
        .rungs
        .iter()
        .map(|rung| Own {
            name: rung.destination.clone(),
            delay: Some(rung.delay),
        })
        .chain(request.dead_letters.iter().map(|name| Own {
            name: name.clone(),
            delay: None,
        }))
        .collect();
    own.sort_by(|a, b| a.name.cmp(&b.name));
    own.dedup_by(|a, b| a.name == b.name);
    own
}

async fn make(
    config: &KafkaConfig,
    control: &Arc<Control>,
    source: Topic,
    source_bytes_max: u64,
    absent: &[Own],
) -> Result<()> {
    // A message of the largest size must fit with its story.
    let bytes_max = (source_bytes_max + ENVELOPE_BYTES_MAX as u64).to_string();
    let dead_letter_retention = config
        .dead_letter_retention
        .map_or(FOR_EVER.to_owned(), |kept| kept.as_millis().to_string());
    // The same number as the source, so that a key's retries spread as its messages do; the partition itself is chosen
    // by the key and never copied.
    let partitions = i32::try_from(source.partitions).unwrap_or(1).max(1);
    let replicas = i32::try_from(source.replicas).unwrap_or(1).max(1);
    let topics: Vec<NewTopic<'_>> = absent
        .iter()
        .map(|own| {
            let retention = match own.delay {
                Some(_) => FOR_EVER,
                None => &dead_letter_retention,
            };
            NewTopic::new(&own.name, partitions, TopicReplication::Fixed(replicas))
                .set("cleanup.policy", "delete")
                .set("retention.ms", retention)
                .set("retention.bytes", FOR_EVER)
                .set("max.message.bytes", &bytes_max)
        })
        .collect();
    create(control, "subscribe", &topics).await?;
    let names = absent.iter().map(|own| own.name.clone()).collect();
    until_seen(control, "subscribe", names).await
}

/// Makes a topic for sources.
pub(super) async fn make_source(control: &Arc<Control>, name: &str, partitions: u16) -> Result<()> {
    const OPERATION: &str = "create topic";
    if !is_topic_name(name) {
        return Err(Error::configuration("topic", NAME_RULE, name));
    }
    let partitions = i32::from(partitions.max(1));
    // -1 is the cluster's default.
    let topic = NewTopic::new(name, partitions, TopicReplication::Fixed(-1));
    create(control, OPERATION, &[topic]).await?;
    until_seen(control, OPERATION, vec![name.to_owned()]).await
}

async fn create(control: &Control, operation: &'static str, topics: &[NewTopic<'_>]) -> Result<()> {
    let options = AdminOptions::new()
        .request_timeout(Some(control.deadline))
        .operation_timeout(Some(control.deadline));
    let made = control
        .admin()?
        .create_topics(topics, &options)
        .await
        .map_err(|source| mapped(operation, "topics could not be made", source))?;
    for result in made {
        match result {
            // Another member was faster.
            Ok(_) | Err((_, Code::TopicAlreadyExists)) => {}
            Err((name, code)) => {
                let detail = format!("topic {name} could not be made");
                return Err(mapped(operation, &detail, KafkaError::AdminOp(code)));
            }
        }
    }
    Ok(())
}

async fn until_seen(
    control: &Arc<Control>,
    operation: &'static str,
    names: Vec<String>,
) -> Result<()> {
    let until = Instant::now() + SEEN_WITHIN;
    loop {
        let found = control.topics(operation, names.clone()).await?;
        let unseen: Vec<&str> = names
            .iter()
            .zip(&found)
            .filter(|(_, topic)| topic.is_none_or(|topic| topic.partitions == 0))
            .map(|(name, _)| name.as_str())
            .collect();
        if unseen.is_empty() {
            return Ok(());
        }
        if Instant::now() >= until {
            let detail = format!("topics were made but are not seen: {}", unseen.join(", "));
            return Err(Error::new(ErrorKind::Timeout, operation, detail));
        }
        sleep(SEEN_POLL).await;
    }
}
