//! What a request needs: looked at, made, and verified.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::stream::{self, RetentionPolicy};

use super::config::{Alias, NatsConfig};
use super::durable::{Feed, ensure_consumer};
use super::link::Link;
use super::names::{self, STREAM_RULE, SUBJECT_RULE, is_stream_name, is_subject};
use super::streams::{create, stream_by_subject, stream_info, unlimited};
use super::warnings::{Warnings, warn_of_settings};
use crate::broker::{SubscriptionRequest, TopologyMode};
use crate::error::{Error, ErrorKind, Result};

const OPERATION: &str = "subscribe";

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
        let is_known = alias(config, source).is_some() || is_stream_name(source);
        if !is_known && !is_subject(source) {
            let limit = format!(
                "an alias, a rung or dead letter destination, or the name of a stream: {STREAM_RULE}"
            );
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

fn alias<'a>(config: &'a NatsConfig, source: &str) -> Option<&'a Alias> {
    config.aliases.iter().find(|alias| alias.name == source)
}

/// Where the messages of a source come from.
pub(super) fn feed_of(config: &NatsConfig, consumer: &str, source: &str, quota: usize) -> Feed {
    let alias = alias(config, source);
    // What is no stream's name may be a dead letter destination, whose stream is named after it.
    let stream = || match is_stream_name(source) {
        true => source.to_owned(),
        false => names::stream_of(source),
    };
    Feed {
        source: source.to_owned(),
        stream: alias.map_or_else(stream, |alias| alias.stream.clone()),
        durable: names::durable(consumer, alias.map(|alias| alias.name.as_str())),
        filters: alias.map(|alias| alias.filters.clone()).unwrap_or_default(),
        is_rung: false,
        quota,
        checked: true,
    }
}

fn feed_of_rung(consumer: &str, destination: &str, stream: String, quota: usize) -> Feed {
    Feed {
        source: destination.to_owned(),
        stream,
        durable: names::durable(consumer, None),
        filters: Vec::new(),
        is_rung: true,
        quota,
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
    // What waits on a rung takes no room from the sources.
    let all = request.in_flight_max.min(config.ack_pending_max);
    let share = (all / request.sources.len().max(1)).max(1);
    let mut feeds: Vec<Feed> = request
        .sources
        .iter()
        .map(|source| feed_of(config, consumer, source, share))
        .collect();
    if request.topology == TopologyMode::Unchecked {
        // Several sources may share a rung, each with an entry of its own.
        let rungs: BTreeSet<&String> = request.rungs.iter().map(|rung| &rung.destination).collect();
        feeds.extend(rungs.into_iter().map(|destination| {
            feed_of_rung(consumer, destination, names::stream_of(destination), all)
        }));
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
        if let Some(info) = stream_info(link, OPERATION, &name).await? {
            verify(own, &sources, &feeds, &info.config)?;
            warnings.about_stream(config, &info);
        }
        if own.is_rung {
            feeds.push(feed_of_rung(consumer, &own.destination, name, all));
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
    feeds.extend(earlier(config, link, request, all).await?);
    Ok(feeds)
}

/// What may still wait on rungs of an earlier ladder. One that somebody else reads is left alone: its name only looks like ours.
async fn earlier(
    config: &NatsConfig,
    link: &Link,
    request: &SubscriptionRequest,
    quota: usize,
) -> Result<Vec<Feed>> {
    let mut feeds = Vec::new();
    for rung in &request.earlier_rungs {
        let destination = &rung.destination;
        let Some(stream) = stream_by_subject(link, OPERATION, destination).await? else {
            continue;
        };
        let feed = feed_of_rung(&request.consumer, destination, stream, quota);
        match ensure_consumer(config, link, &feed).await {
            Ok(()) => feeds.push(feed),
            Err(error) if error.kind() == ErrorKind::Configuration => {
                tracing::warn!(
                    destination, %error,
                    "what may be a rung of an earlier ladder is not this consumer's, and is left alone"
                );
            }
            Err(error) => return Err(error),
        }
    }
    Ok(feeds)
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
        match stream_info(link, OPERATION, &feed.stream).await? {
            Some(info) => {
                warnings.about_stream(config, &info);
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
    let delivered = feeds
        .iter()
        .any(|feed| !feed.is_rung && feed.stream == settings.name && feed.takes(destination));
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
    fn names_are_looked_at_before_anything_is_asked() {
        let config =
            NatsConfig::new("nats://x").with_source("paid.orders", "ORDERS", ["orders.paid"]);
        let request = |source: &str| SubscriptionRequest::new("c", vec![source.to_owned()]);
        assert!(check(&config, &request("paid.orders")).is_ok());
        assert!(check(&config, &request("ORDERS")).is_ok());
        // Dead letters are read by the name they were sent to.
        assert!(check(&config, &request("orders.billing.DLQ")).is_ok());
        assert_eq!(
            feed_of(&config, "c", "orders.billing.DLQ", 1).stream,
            "orders~billing~DLQ"
        );
        for bad in ["", "a b", "orders.*", "a..b"] {
            assert!(check(&config, &request(bad)).is_err(), "{bad:?}");
        }
        let feed = feed_of(&config, "my.billing", "paid.orders", 1);
        assert_eq!(
            (feed.stream.as_str(), feed.durable.as_str()),
            ("ORDERS", "my~billing%@paid~orders")
        );
    }
}
