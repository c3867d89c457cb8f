//! Streams: looked at, found by a subject, made.

use std::time::Duration;

use async_nats::jetstream::ErrorCode as Code;
use async_nats::jetstream::context::{
    CreateStreamErrorKind, GetStreamByNameErrorKind, GetStreamErrorKind, StreamsError,
};
use async_nats::jetstream::stream::{self, DiscardPolicy};
use futures_util::{StreamExt, TryStreamExt};
use tokio::time::timeout;

use super::error::{mapped, not_made};
use super::link::Link;
use super::names::{STREAM_RULE, is_stream_name, is_subject};
use crate::broker::DESTINATIONS_MAX;
use crate::error::{Error, ErrorKind, Result};

/// File storage without limits, and should somebody set one: it refuses what is new and never drops what it has.
pub(super) fn unlimited() -> stream::Config {
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
pub(super) async fn make_source(
    link: &Link,
    name: &str,
    subjects: Vec<String>,
    max_age: Duration,
) -> Result<()> {
    if !is_stream_name(name) {
        return Err(Error::configuration("stream", STREAM_RULE, name));
    }
    let settings = stream::Config {
        name: name.to_owned(),
        subjects,
        max_age,
        ..unlimited()
    };
    create(link, "create stream", settings).await
}

pub(super) async fn create(
    link: &Link,
    operation: &'static str,
    settings: stream::Config,
) -> Result<()> {
    let name = settings.name.clone();
    let subjects = settings.subjects.join(", ");
    let error = match timeout(link.answer_deadline, link.context.create_stream(settings)).await {
        Ok(Ok(_)) => return Ok(()),
        Ok(Err(error)) => error,
        Err(_elapsed) => return Err(unanswered(link, operation)),
    };
    let refusal = match error.kind() {
        CreateStreamErrorKind::JetStream(refusal) => Some(refusal),
        _ => None,
    };
    match refusal.as_ref().map(|refusal| refusal.error_code()) {
        // Another member was faster, or it was made with other settings: it is left as it is.
        Some(Code::STREAM_NAME_EXIST) => Ok(()),
        Some(Code::STREAM_SUBJECT_OVERLAP) => {
            let limit = format!("subjects that no other stream holds, for stream {name}");
            Err(Error::configuration("destination", limit, subjects))
        }
        _ => Err(mapped(
            not_made(refusal.as_ref()),
            operation,
            &format!("stream {name} could not be made"),
            error,
        )),
    }
}

pub(super) fn unanswered(link: &Link, operation: &'static str) -> Error {
    let detail = format!(
        "no answer of {} within {:?}",
        link.tried, link.answer_deadline
    );
    Error::new(ErrorKind::Unavailable, operation, detail)
}

/// A stream's settings and state; nothing if there is none.
pub(super) async fn stream_info(
    link: &Link,
    operation: &'static str,
    name: &str,
) -> Result<Option<stream::Info>> {
    let error = match timeout(link.answer_deadline, link.context.get_stream(name)).await {
        Ok(Ok(stream)) => return Ok(Some(stream.cached_info().clone())),
        Ok(Err(error)) => error,
        Err(_elapsed) => return Err(unanswered(link, operation)),
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
            Err(mapped(ErrorKind::Unavailable, operation, &detail, error))
        }
    }
}

/// Subjects that begin with this and have a stream for themselves.
pub(super) async fn named(
    link: &Link,
    operation: &'static str,
    prefix: &str,
) -> Result<Vec<String>> {
    let asked = async {
        let mut named = Vec::new();
        let mut streams = link.context.streams().take(DESTINATIONS_MAX);
        while let Some(info) = streams.try_next().await? {
            if let [subject] = &info.config.subjects[..]
                && subject.starts_with(prefix)
                && is_subject(subject)
            {
                named.push(subject.clone());
            }
        }
        named.sort_unstable();
        Ok::<_, StreamsError>(named)
    };
    match timeout(link.answer_deadline, asked).await {
        Ok(Ok(named)) => Ok(named),
        Ok(Err(error)) => {
            let detail = "streams could not be listed";
            Err(mapped(ErrorKind::Unavailable, operation, detail, error))
        }
        Err(_elapsed) => Err(unanswered(link, operation)),
    }
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
