//! Streams and durable consumers: what must be there, what is made, and what is checked.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::jetstream::ErrorCode as Code;
use async_nats::jetstream::consumer::{self, AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::context::{
    ConsumerInfoErrorKind, GetStreamByNameErrorKind, GetStreamErrorKind,
};
use async_nats::jetstream::stream::{self, DiscardPolicy, RetentionPolicy};
use tokio::time::timeout;

use super::config::NatsConfig;
use super::error::{mapped, server_error};
use super::link::Link;
use super::names::{self, STREAM_RULE, SUBJECT_RULE, is_stream_name, is_subject, matches};
use crate::broker::{SubscriptionRequest, TopologyMode};
use crate::error::{Error, ErrorKind, Result};

const OPERATION: &str = "subscribe";
/// Below this a hiccup of the network already looks like a dead member.
const ACK_WAIT_SOUND: Duration = Duration::from_secs(2);
/// Most warnings kept.
const WARNINGS_MAX: usize = 256;
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
    /// Whether the server is asked about it at all.
    pub(super) checked: bool,
}

/// What is not wrong and still likely to lose or repeat messages.
#[derive(Default)]
pub(super) struct Warnings(Mutex<BTreeSet<String>>);

impl Warnings {
    pub(super) fn all(&self) -> Vec<String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().cloned().collect()
    }

    /// Each is told once.
    pub(super) fn add(&self, warning: String) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < WARNINGS_MAX && all.insert(warning.clone()) {
            tracing::warn!("{warning}");
        }
    }

    /// What its settings do to messages of ours.
    pub(super) fn about_stream(&self, config: &NatsConfig, settings: &stream::Config) {
        for warning in stream_warnings(settings, config.resend_horizon) {
            self.add(warning);
        }
    }
}

fn stream_warnings(settings: &stream::Config, horizon: Duration) -> Vec<String> {
    let name = &settings.name;
    let mut warnings = Vec::new();
    let limits: Vec<&str> = [
        ("max_msgs", settings.max_messages > 0),
        ("max_bytes", settings.max_bytes > 0),
        (
            "max_msgs_per_subject",
            settings.max_messages_per_subject > 0,
        ),
    ]
    .into_iter()
    .filter_map(|(limit, set)| set.then_some(limit))
    .collect();
    if settings.discard == DiscardPolicy::Old && !limits.is_empty() {
        let limits = limits.join(", ");
        warnings.push(format!(
            "stream {name} drops its oldest messages unread once {limits} is reached (discard: old)"
        ));
    }
    if !settings.duplicate_window.is_zero() && settings.duplicate_window < horizon {
        warnings.push(format!(
            "stream {name} forgets ids after {:?}, before a relay stops sending again ({horizon:?}): it may store a \
             message twice",
            settings.duplicate_window
        ));
    }
    warnings
}

/// Looks at the names of a request, before anything is asked.
pub(super) fn check(config: &NatsConfig, request: &SubscriptionRequest) -> Result<()> {
    if request.consumer.is_empty() || request.consumer.contains('\0') {
        let limit = "a name without NUL";
        return Err(Error::configuration("consumer", limit, &request.consumer));
    }
    if request.in_flight_max == 0 {
        return Err(Error::configuration("in_flight_max", "at least 1", "0"));
    }
    if request.sources.is_empty() {
        let limit = "at least one stream or alias";
        return Err(Error::configuration("sources", limit, "none"));
    }
    for source in &request.sources {
        if !is_stream_name(source) && alias(config, source).is_none() {
            let limit = format!("an alias, or the name of a stream: {STREAM_RULE}");
            return Err(Error::configuration("sources", limit, source));
        }
    }
    let rungs = request.rungs.iter().map(|rung| &rung.destination);
    for destination in rungs.chain(&request.dead_letters) {
        if !is_subject(destination) {
            return Err(Error::configuration(
                "destination",
                SUBJECT_RULE,
                destination,
            ));
        }
    }
    Ok(())
}

fn alias<'a>(config: &'a NatsConfig, source: &str) -> Option<&'a super::config::Alias> {
    config.aliases.iter().find(|alias| alias.name == source)
}

/// Where the messages of a source come from.
pub(super) fn feed_of(config: &NatsConfig, consumer: &str, source: &str) -> Feed {
    let alias = alias(config, source);
    Feed {
        source: source.to_owned(),
        stream: alias.map_or_else(|| source.to_owned(), |alias| alias.stream.clone()),
        durable: names::durable(consumer, alias.map(|alias| alias.name.as_str())),
        filters: alias.map(|alias| alias.filters.clone()).unwrap_or_default(),
        is_rung: false,
        checked: true,
    }
}

fn feed_of_rung(consumer: &str, destination: &str, stream: String) -> Feed {
    Feed {
        source: destination.to_owned(),
        stream,
        durable: names::durable(consumer, None),
        filters: Vec::new(),
        is_rung: true,
        checked: true,
    }
}

/// Makes or verifies what the request needs, and says where its messages come from.
pub(super) async fn prepare(
    config: &NatsConfig,
    link: &Arc<Link>,
    warnings: &Warnings,
    request: &SubscriptionRequest,
) -> Result<Vec<Feed>> {
    let consumer = request.consumer.as_str();
    let mut feeds: Vec<Feed> = request
        .sources
        .iter()
        .map(|source| feed_of(config, consumer, source))
        .collect();
    if request.topology == TopologyMode::Unchecked {
        // Several sources may share a rung, each with an entry of its own.
        let rungs: BTreeSet<&String> = request.rungs.iter().map(|rung| &rung.destination).collect();
        feeds.extend(
            rungs.into_iter().map(|destination| {
                feed_of_rung(consumer, destination, names::stream_of(destination))
            }),
        );
        for feed in &mut feeds {
            feed.checked = false;
        }
        return Ok(feeds);
    }
    warn_of_settings(config, warnings, request);
    let sources = sources(link, &feeds, request, warnings, config).await?;
    let own = own(link, request, &sources).await?;
    let largest = sources
        .iter()
        .map(|source| source.config.num_replicas)
        .max();
    for own in &own {
        if own.stream.is_none() {
            make(config, link, own, largest.unwrap_or(1).max(1)).await?;
        }
    }
    for own in &own {
        let name = own
            .stream
            .clone()
            .unwrap_or_else(|| names::stream_of(&own.destination));
        let settings = settings(link, &name).await?;
        if let Some(settings) = &settings {
            verify(own, &sources, &feeds, settings)?;
            warnings.about_stream(config, settings);
        }
        if own.is_rung {
            feeds.push(feed_of_rung(consumer, &own.destination, name));
        }
    }
    for feed in &feeds {
        if feed.filters.len() > 1 && !is_from_2_10(&link.client.server_info().version) {
            return Err(Error::configuration(
                "sources",
                format!(
                    "one filter for {}: a server before 2.10 knows no more",
                    feed.source
                ),
                format!(
                    "{} filters, server {}",
                    feed.filters.len(),
                    link.client.server_info().version
                ),
            ));
        }
        ensure_consumer(config, link, feed).await?;
    }
    Ok(feeds)
}

fn warn_of_settings(config: &NatsConfig, warnings: &Warnings, request: &SubscriptionRequest) {
    if config.ack_pending_max < request.in_flight_max {
        warnings.add(format!(
            "ack_pending_max ({}) is below in_flight_max ({}) of consumer {}",
            config.ack_pending_max, request.in_flight_max, request.consumer
        ));
    }
    if config.ack_wait < ACK_WAIT_SOUND {
        warnings.add(format!(
            "ack_wait ({:?}) is below {ACK_WAIT_SOUND:?}: a short hiccup delivers messages twice",
            config.ack_wait
        ));
    }
}

/// The streams of the sources.
async fn sources(
    link: &Link,
    feeds: &[Feed],
    request: &SubscriptionRequest,
    warnings: &Warnings,
    config: &NatsConfig,
) -> Result<Vec<stream::Info>> {
    let mut found = Vec::new();
    let mut missing = BTreeSet::new();
    for feed in feeds {
        match stream_info(link, &feed.stream).await? {
            Some(info) => {
                warnings.about_stream(config, &info.config);
                if info.config.retention == RetentionPolicy::Interest
                    && info.state.consumer_count == 0
                {
                    warnings.add(format!(
                        "stream {} keeps only what a consumer asks for, and had none before {}",
                        feed.stream, request.consumer
                    ));
                }
                found.push(info);
            }
            None => drop(missing.insert(feed.stream.clone())),
        }
    }
    if request.topology == TopologyMode::Verify {
        for destination in destinations(request) {
            if stream_by_subject(link, OPERATION, destination)
                .await?
                .is_none()
            {
                missing.insert(destination.clone());
            }
        }
    }
    if missing.is_empty() {
        return Ok(found);
    }
    let missing: Vec<String> = missing.into_iter().collect();
    let detail = format!("no such stream: {}", missing.join(", "));
    Err(Error::new(ErrorKind::NotFound, OPERATION, detail))
}

fn destinations(request: &SubscriptionRequest) -> impl Iterator<Item = &String> {
    let rungs = request.rungs.iter().map(|rung| &rung.destination);
    rungs.chain(&request.dead_letters)
}

/// A rung or dead letter destination, and the stream that holds its subject.
struct Own {
    destination: String,
    is_rung: bool,
    stream: Option<String>,
}

async fn own(
    link: &Link,
    request: &SubscriptionRequest,
    sources: &[stream::Info],
) -> Result<Vec<Own>> {
    let mut own: Vec<Own> = Vec::new();
    for (at, destination) in destinations(request).enumerate() {
        if own.iter().any(|own| own.destination == *destination) {
            continue;
        }
        let stream = stream_by_subject(link, OPERATION, destination).await?;
        let is_rung = at < request.rungs.len();
        // Said before anything is made, because what is made stays.
        if let Some(source) = sources
            .iter()
            .find(|info| Some(&info.config.name) == stream.as_ref())
            && is_rung
        {
            return Err(overlap(destination, &source.config));
        }
        own.push(Own {
            destination: destination.clone(),
            is_rung,
            stream,
        });
    }
    Ok(own)
}

fn overlap(destination: &str, settings: &stream::Config) -> Error {
    Error::configuration(
        "destination",
        format!(
            "a subject that stream {} ({}) does not hold; set the template of the ladder's names",
            settings.name,
            settings.subjects.join(", ")
        ),
        destination,
    )
}

/// Refuses a stream in which a copy would be delivered at once, to others, or lost before its time.
fn verify(
    own: &Own,
    sources: &[stream::Info],
    feeds: &[Feed],
    settings: &stream::Config,
) -> Result<()> {
    let destination = own.destination.as_str();
    let delivered = feeds.iter().filter(|feed| !feed.is_rung).any(|feed| {
        let mut filters = feed.filters.iter();
        feed.stream == settings.name
            && (feed.filters.is_empty() || filters.any(|filter| matches(filter, destination)))
    });
    let alone = settings.subjects == [destination];
    if delivered || (own.is_rung && !alone) {
        return Err(overlap(destination, settings));
    }
    if settings.no_ack {
        let limit = format!("false on stream {}", settings.name);
        return Err(Error::configuration("no_ack", limit, "true"));
    }
    if own.is_rung && !settings.max_age.is_zero() {
        let limit = format!(
            "none on stream {}: what waits there must not expire",
            settings.name
        );
        return Err(Error::configuration(
            "max_age",
            limit,
            format!("{:?}", settings.max_age),
        ));
    }
    let source = sources
        .iter()
        .map(|info| info.config.max_message_size)
        .max();
    if settings.max_message_size > 0
        && source.is_some_and(|source| source <= 0 || source > settings.max_message_size)
    {
        let limit = format!("at least the source's on stream {}", settings.name);
        return Err(Error::configuration(
            "max_msg_size",
            limit,
            settings.max_message_size.to_string(),
        ));
    }
    Ok(())
}

async fn make(config: &NatsConfig, link: &Link, own: &Own, replicas: usize) -> Result<()> {
    let settings = stream::Config {
        name: names::stream_of(&own.destination),
        subjects: vec![own.destination.clone()],
        retention: if own.is_rung {
            RetentionPolicy::WorkQueue
        } else {
            RetentionPolicy::Limits
        },
        max_age: match own.is_rung {
            true => Duration::ZERO,
            false => config.dead_letter_retention.unwrap_or_default(),
        },
        num_replicas: replicas,
        ..unlimited()
    };
    create(link, OPERATION, settings).await
}

/// File storage without limits, and should somebody set one: it refuses what is new and never drops what it has.
fn unlimited() -> stream::Config {
    stream::Config {
        max_messages: -1,
        max_messages_per_subject: -1,
        max_bytes: -1,
        max_consumers: -1,
        discard: DiscardPolicy::New,
        num_replicas: 1,
        ..stream::Config::default()
    }
}

/// Makes a stream for sources. One that is there already is left as it is.
pub(super) async fn make_source(link: &Link, name: &str, subjects: Vec<String>) -> Result<()> {
    if !is_stream_name(name) {
        return Err(Error::configuration("stream", STREAM_RULE, name));
    }
    let settings = stream::Config {
        name: name.to_owned(),
        subjects,
        ..unlimited()
    };
    create(link, "create stream", settings).await
}

async fn create(link: &Link, operation: &'static str, settings: stream::Config) -> Result<()> {
    let name = settings.name.clone();
    let subjects = settings.subjects.join(", ");
    let error = match timeout(link.answer_deadline, link.context.create_stream(settings)).await {
        Ok(Ok(_)) => return Ok(()),
        Ok(Err(error)) => error,
        Err(_elapsed) => return Err(unanswered(link, operation)),
    };
    match server_error(&error).map(|refusal| refusal.error_code()) {
        // Another member was faster, or it was made with other settings: it is left as it is.
        Some(Code::STREAM_NAME_EXIST) => Ok(()),
        Some(Code::STREAM_SUBJECT_OVERLAP) => {
            let limit = format!("subjects that no other stream holds, for stream {name}");
            Err(Error::configuration("destination", limit, subjects))
        }
        Some(_) => Err(mapped(
            ErrorKind::Rejected,
            operation,
            &format!("stream {name} could not be made"),
            error,
        )),
        None => Err(mapped(
            ErrorKind::Unavailable,
            operation,
            &format!("stream {name} could not be made"),
            error,
        )),
    }
}

fn unanswered(link: &Link, operation: &'static str) -> Error {
    let detail = format!(
        "no answer of {} within {:?}",
        link.tried, link.answer_deadline
    );
    Error::new(ErrorKind::Unavailable, operation, detail)
}

/// A stream's settings and state; nothing if there is none.
pub(super) async fn stream_info(link: &Link, name: &str) -> Result<Option<stream::Info>> {
    let error = match timeout(link.answer_deadline, link.context.get_stream(name)).await {
        Ok(Ok(stream)) => return Ok(Some(stream.cached_info().clone())),
        Ok(Err(error)) => error,
        Err(_elapsed) => return Err(unanswered(link, OPERATION)),
    };
    match error.kind() {
        GetStreamErrorKind::InvalidStreamName | GetStreamErrorKind::EmptyName => Ok(None),
        GetStreamErrorKind::JetStream(refusal)
            if refusal.error_code() == Code::STREAM_NOT_FOUND || refusal.code() == 404 =>
        {
            Ok(None)
        }
        _ => {
            let detail = format!("stream {name} could not be looked at");
            Err(mapped(ErrorKind::Unavailable, OPERATION, &detail, error))
        }
    }
}

async fn settings(link: &Link, name: &str) -> Result<Option<stream::Config>> {
    Ok(stream_info(link, name).await?.map(|info| info.config))
}

/// The stream that holds this subject.
pub(super) async fn stream_by_subject(
    link: &Link,
    operation: &'static str,
    subject: &str,
) -> Result<Option<String>> {
    if !is_subject(subject) {
        return Ok(None);
    }
    match timeout(
        link.answer_deadline,
        link.context.stream_by_subject(subject),
    )
    .await
    {
        Ok(Ok(name)) => Ok(Some(name)),
        Ok(Err(error)) if error.kind() == GetStreamByNameErrorKind::NotFound => Ok(None),
        Ok(Err(error)) => {
            let detail = format!("which stream holds {subject} is not known");
            Err(mapped(ErrorKind::Unavailable, operation, &detail, error))
        }
        Err(_elapsed) => Err(unanswered(link, operation)),
    }
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

/// Finds a durable consumer as it must be, or makes it.
///
/// It is made in [`TopologyMode::Verify`] too: it is this consumer's place in the stream, as a group's offsets are
/// elsewhere, and no part of what others share.
///
/// # Errors
/// [`Configuration`](ErrorKind::Configuration) for one with other settings, naming both values; transient ones for all
/// that may pass.
pub(super) async fn ensure_consumer(
    config: &NatsConfig,
    link: &Arc<Link>,
    feed: &Feed,
) -> Result<()> {
    let Feed {
        stream, durable, ..
    } = feed;
    if !feed.checked {
        return Ok(());
    }
    if let Some(info) = consumer_info(link, OPERATION, stream, durable).await? {
        return verify_consumer(config, feed, &info);
    }
    let made = async {
        let stream = link.context.get_stream_no_info(stream).await;
        let stream = stream.map_err(|error| (None, error.to_string()))?;
        let made = stream.create_consumer(consumer_config(config, feed)).await;
        made.map(drop).map_err(|error| {
            let code = server_error(&error).map(|refusal| refusal.error_code().0);
            (code, error.to_string())
        })
    };
    let (code, text) = match timeout(link.answer_deadline, made).await {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(refusal)) => refusal,
        Err(_elapsed) => return Err(unanswered(link, OPERATION)),
    };
    if code.is_some_and(|code| WORK_QUEUE_TAKEN.contains(&code)) {
        return Err(Error::configuration(
            "destination",
            format!(
                "a rung of one consumer alone ({text}); name the consumer in the template of the ladder"
            ),
            &feed.source,
        ));
    }
    let detail = format!("consumer {durable} of stream {stream} could not be made: {text}");
    Err(Error::new(ErrorKind::Unavailable, OPERATION, detail))
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
    Ok(())
}

/// Whether a server of this version knows more than one filter; older ones ignore the field, which would deliver all.
fn is_from_2_10(version: &str) -> bool {
    let mut parts = version
        .split('.')
        .map(|part| part.parse::<u64>().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) >= (2, 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_filters_need_a_server_that_knows_them() {
        for (version, knows) in [
            ("2.9.25", false),
            ("2.10.0", true),
            ("2.15.3", true),
            ("3.0.0", true),
            ("x", false),
        ] {
            assert_eq!(is_from_2_10(version), knows, "{version}");
        }
    }

    #[test]
    fn what_drops_or_repeats_messages_is_warned_about() {
        let horizon = Duration::from_secs(120);
        let mut settings = stream::Config {
            name: "S".into(),
            duplicate_window: horizon,
            ..unlimited()
        };
        assert!(stream_warnings(&settings, horizon).is_empty());
        settings.max_messages = 10;
        assert!(
            stream_warnings(&settings, horizon).is_empty(),
            "it refuses what is new"
        );
        settings.discard = DiscardPolicy::Old;
        settings.duplicate_window = Duration::from_secs(1);
        let warnings = stream_warnings(&settings, horizon);
        assert_eq!(warnings.len(), 2);
        assert!(
            warnings.iter().any(|text| text.contains("max_msgs")),
            "{warnings:?}"
        );
    }

    #[test]
    fn names_are_looked_at_before_anything_is_asked() {
        let config =
            NatsConfig::new("nats://x").with_source("paid.orders", "ORDERS", ["orders.paid"]);
        let request = |source: &str| SubscriptionRequest::new("c", vec![source.to_owned()]);
        assert!(check(&config, &request("paid.orders")).is_ok());
        assert!(check(&config, &request("ORDERS")).is_ok());
        for bad in ["other.orders", "", "a b"] {
            assert!(check(&config, &request(bad)).is_err(), "{bad:?}");
        }
        let feed = feed_of(&config, "my.billing", "paid.orders");
        assert_eq!(
            (feed.stream.as_str(), feed.durable.as_str()),
            ("ORDERS", "my~billing%@paid~orders")
        );
    }
}
