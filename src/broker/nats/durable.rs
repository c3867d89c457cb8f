//! Durable consumers: each consumer's place in a stream.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::consumer::{self, AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::context::ConsumerInfoErrorKind;
use async_nats::jetstream::stream::ConsumerErrorKind;
use tokio::time::timeout;

use super::config::NatsConfig;
use super::link::Link;
use super::names::matches;
use super::streams::unanswered;
#[cfg(doc)]
use crate::broker::TopologyMode;
use crate::error::{Error, ErrorKind, Result};

const OPERATION: &str = "subscribe";
/// How long a question stands at the server, in heartbeats.
const EXPIRES_HEARTBEATS: u32 = 6;
/// Two consumers of one work queue would each need a part of it for themselves.
const WORK_QUEUE_TAKEN: [u64; 2] = [10_099, 10_100];

/// What a durable consumer gives us.
#[derive(Debug, Clone)]
pub(super) struct Feed {
    /// The name by which the request asked for it.
    pub(super) source: String,
    pub(super) stream: String,
    pub(super) durable: String,
    /// Patterns of its subjects; none means all of the stream's.
    pub(super) filters: Vec<String>,
    pub(super) is_rung: bool,
    /// Most messages held, and so asked for at a time.
    pub(super) quota: usize,
    /// Whether the server is asked about it at all.
    pub(super) checked: bool,
}

/// How long a question for messages stands at the server.
pub(super) fn expires(config: &NatsConfig) -> Duration {
    config.heartbeat * EXPIRES_HEARTBEATS
}

/// A durable consumer as it is now; nothing if there is none.
pub(super) async fn consumer_info(
    link: &Link,
    operation: &'static str,
    stream: &str,
    durable: &str,
) -> Result<Option<consumer::Info>> {
    let asked = async {
        let stream = match link.context.get_stream_no_info(stream).await {
            Ok(stream) => stream,
            Err(error) => return Err(error.to_string()),
        };
        match stream.consumer_info(durable).await {
            Ok(info) => Ok(Some(info)),
            Err(error) if error.kind() == ConsumerInfoErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    };
    match timeout(link.answer_deadline, asked).await {
        Ok(Ok(info)) => Ok(info),
        Ok(Err(text)) => {
            let detail =
                format!("consumer {durable} of stream {stream} could not be looked at: {text}");
            Err(Error::new(ErrorKind::Unavailable, operation, detail))
        }
        Err(_elapsed) => Err(unanswered(link, operation)),
    }
}

impl Feed {
    /// Whether messages of this subject are among it.
    pub(super) fn takes(&self, subject: &str) -> bool {
        let mut filters = self.filters.iter();
        self.filters.is_empty() || filters.any(|filter| matches(filter, subject))
    }
}

/// Finds a durable consumer as it must be, or makes it.
///
/// It is made in [`TopologyMode::Verify`] too: it is this consumer's place in the stream, as a group's offsets are
/// elsewhere, and no part of what others share.
///
/// # Errors
/// [`Configuration`](ErrorKind::Configuration) for one with other settings, naming both values; transient ones for all
/// that may pass.
pub(super) async fn ensure_consumer(config: &NatsConfig, link: &Link, feed: &Feed) -> Result<()> {
    if !feed.checked {
        return Ok(());
    }
    match consumer_info(link, OPERATION, &feed.stream, &feed.durable).await? {
        Some(info) => verify_consumer(config, feed, &info),
        None => make_consumer(config, link, feed).await,
    }
}

/// The same for one that was there when the subscription began.
///
/// # Errors
/// As [`ensure_consumer`]; [`NotFound`](ErrorKind::NotFound) when somebody deleted it and it is not to be made anew.
pub(super) async fn restore_consumer(
    config: &NatsConfig,
    link: Arc<Link>,
    feed: &Feed,
) -> Result<()> {
    let Feed {
        stream, durable, ..
    } = feed;
    if !feed.checked {
        return Ok(());
    }
    if let Some(info) = consumer_info(&link, OPERATION, stream, durable).await? {
        return verify_consumer(config, feed, &info);
    }
    let detail = format!("consumer {durable} of stream {stream} was deleted");
    if !config.recreate_consumers {
        return Err(Error::new(ErrorKind::NotFound, "receive", detail));
    }
    tracing::error!(
        stream,
        durable,
        "a consumer was deleted; it is made anew and begins at the oldest message of the stream"
    );
    make_consumer(config, &link, feed).await
}

async fn make_consumer(config: &NatsConfig, link: &Link, feed: &Feed) -> Result<()> {
    let Feed {
        stream, durable, ..
    } = feed;
    let made = async {
        let stream = link.context.get_stream_no_info(stream).await;
        let stream = stream.map_err(|error| (None, error.to_string()))?;
        let made = stream.create_consumer(consumer_config(config, feed)).await;
        made.map(drop).map_err(|error| {
            let refusal = match error.kind() {
                ConsumerErrorKind::JetStream(refusal) => Some(refusal),
                _ => None,
            };
            (refusal, error.to_string())
        })
    };
    let (refusal, text) = match timeout(link.answer_deadline, made).await {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(refusal)) => refusal,
        Err(_elapsed) => return Err(unanswered(link, OPERATION)),
    };
    let code = refusal.as_ref().map(|refusal| refusal.error_code().0);
    if code.is_some_and(|code| WORK_QUEUE_TAKEN.contains(&code)) {
        return Err(Error::configuration(
            "destination",
            format!(
                "a rung of one consumer alone ({text}); name the consumer in the template of the ladder"
            ),
            &feed.source,
        ));
    }
    // The stream may come back, and what the server lacks may come; what it does not allow stays.
    let kind = match refusal.map(|refusal| refusal.code()) {
        Some(400..=403) => ErrorKind::Rejected,
        _ => ErrorKind::Unavailable,
    };
    let detail = format!("consumer {durable} of stream {stream} could not be made: {text}");
    Err(Error::new(kind, OPERATION, detail))
}

fn consumer_config(config: &NatsConfig, feed: &Feed) -> pull::Config {
    let mut settings = pull::Config {
        durable_name: Some(feed.durable.clone()),
        ack_policy: AckPolicy::Explicit,
        deliver_policy: DeliverPolicy::All,
        ack_wait: config.ack_wait,
        max_ack_pending: i64::try_from(config.ack_pending_max).unwrap_or(i64::MAX),
        // Attempts are counted by the consumer: at a limit of its own the server would deliver no more and tell nobody.
        max_deliver: -1,
        ..pull::Config::default()
    };
    match feed.filters.as_slice() {
        [] => {}
        [filter] => settings.filter_subject.clone_from(filter),
        several => settings.filter_subjects = several.to_vec(),
    }
    settings
}

fn verify_consumer(config: &NatsConfig, feed: &Feed, info: &consumer::Info) -> Result<()> {
    let found = &info.config;
    let wanted = consumer_config(config, feed);
    let name = format!("consumer {} of stream {}", feed.durable, feed.stream);
    let filters = |one: &str, several: &[String]| -> BTreeSet<String> {
        let one = Some(one.to_owned()).filter(|one| !one.is_empty());
        one.into_iter().chain(several.iter().cloned()).collect()
    };
    let wanted_filters = filters(&wanted.filter_subject, &wanted.filter_subjects);
    let found_filters = filters(&found.filter_subject, &found.filter_subjects);
    let pairs = [
        (
            "kind",
            "pull".to_owned(),
            if found.deliver_subject.is_some() {
                "push"
            } else {
                "pull"
            }
            .to_owned(),
        ),
        (
            "ack_policy",
            format!("{:?}", wanted.ack_policy),
            format!("{:?}", found.ack_policy),
        ),
        (
            "deliver_policy",
            format!("{:?}", wanted.deliver_policy),
            format!("{:?}", found.deliver_policy),
        ),
        (
            "ack_wait",
            format!("{:?}", wanted.ack_wait),
            format!("{:?}", found.ack_wait),
        ),
        (
            "max_ack_pending",
            wanted.max_ack_pending.to_string(),
            found.max_ack_pending.to_string(),
        ),
        (
            "max_deliver",
            wanted.max_deliver.to_string(),
            found.max_deliver.to_string(),
        ),
        ("backoff", "[]".to_owned(), format!("{:?}", found.backoff)),
        (
            "headers_only",
            wanted.headers_only.to_string(),
            found.headers_only.to_string(),
        ),
        (
            "inactive_threshold",
            format!("{:?}", wanted.inactive_threshold),
            format!("{:?}", found.inactive_threshold),
        ),
        (
            "replay_policy",
            format!("{:?}", wanted.replay_policy),
            format!("{:?}", found.replay_policy),
        ),
        (
            "filter_subjects",
            format!("{wanted_filters:?}"),
            format!("{found_filters:?}"),
        ),
    ];
    for (field, wanted, found) in pairs {
        if wanted != found {
            return Err(Error::configuration(
                field,
                format!("{wanted} for {name}"),
                found,
            ));
        }
    }
    // Less than what is asked for would refuse every question.
    let batch = u64::try_from(found.max_batch).unwrap_or(0);
    let asked = u64::try_from(feed.quota).unwrap_or(u64::MAX);
    if batch > 0 && batch < asked {
        let limit = format!("none or at least {asked} for {name}");
        return Err(Error::configuration("max_batch", limit, batch.to_string()));
    }
    let (kept, asked) = (found.max_expires, expires(config));
    if !kept.is_zero() && kept < asked {
        let limit = format!("none or at least {asked:?} for {name}");
        return Err(Error::configuration(
            "max_expires",
            limit,
            format!("{kept:?}"),
        ));
    }
    Ok(())
}
