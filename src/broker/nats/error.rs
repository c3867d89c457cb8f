//! What the client's errors mean: the one place where they are judged.

use std::error::Error as StdError;

use async_nats::connection::State;
use async_nats::jetstream::Error as ServerError;
use async_nats::jetstream::ErrorCode as Code;
use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::{ConnectError, ConnectErrorKind};

use crate::broker::{FailureScope, PublishOutcome, RejectionScope, Stored};
use crate::error::{Error, ErrorKind};

/// The status of what passes by waiting.
const TOO_MANY_REQUESTS: usize = 429;

/// What an answer says about one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The message itself is refused.
    Message,
    /// Its stream is another one or takes nothing any more.
    Destination,
    /// Nobody listens on the subject: no stream, or one without a leader.
    NoResponders,
    /// Not stored, for a reason that passes.
    NotStored,
    /// Perhaps stored.
    Unknown,
}

/// The verdict on a message that was sent.
pub(super) fn verdict(error: &PublishError) -> Verdict {
    match error.kind() {
        PublishErrorKind::MaxPayloadExceeded => Verdict::Message,
        PublishErrorKind::StreamNotFound => Verdict::NoResponders,
        PublishErrorKind::MaxAckPending => Verdict::NotStored,
        PublishErrorKind::Other => server_error(error).map_or(Verdict::Unknown, |refusal| {
            verdict_on_code(refusal.error_code(), refusal.code())
        }),
        _ => Verdict::Unknown,
    }
}

/// Codes without a name in the client are written as numbers, in the order of the server's list.
fn verdict_on_code(code: Code, status: usize) -> Verdict {
    match code {
        Code::STREAM_MESSAGE_EXCEEDS_MAXIMUM | Code::STREAM_HEADER_EXCEEDS_MAXIMUM => {
            Verdict::Message
        }
        Code::STREAM_NOT_MATCH | Code::STREAM_SEALED | Code::STREAM_NOT_FOUND => {
            Verdict::Destination
        }
        // The server refused before it stored: limits with `discard: new`, resources, no leader, too many at a time.
        Code::STREAM_STORE_FAILED
        | Code::ACCOUNT_RESOURCES_EXCEEDED
        | Code::STORAGE_RESOURCES_EXCEEDED
        | Code::MEMORY_RESOURCES_EXCEEDED
        | Code::INSUFFICIENT_RESOURCES
        | Code::CLUSTER_NOT_AVAILABLE
        | Code::CLUSTER_NOT_LEADER
        | Code::STREAM_OFFLINE
        | Code::STREAM_TOO_MANY_REQUESTS => Verdict::NotStored,
        // The first of its kind is still on its way to the disk.
        Code::STREAM_DUPLICATE_MESSAGE_CONFLICT => Verdict::Unknown,
        _ if status == TOO_MANY_REQUESTS => Verdict::NotStored,
        // Of what is not known, no message is blamed: parked it would not come back by itself.
        _ if (400..500).contains(&status) => Verdict::Destination,
        _ => Verdict::Unknown,
    }
}

/// Whether there is no JetStream, or only none for now, for example because a cluster has no leader.
pub(super) fn without_jetstream(refusal: &ServerError) -> ErrorKind {
    match refusal.error_code() {
        Code::JETSTREAM_NOT_ENABLED | Code::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT => {
            ErrorKind::Configuration
        }
        _ => ErrorKind::Unavailable,
    }
}

/// What a refusal of something to be made means: whether the server may think otherwise later.
pub(super) fn not_made(refusal: Option<&ServerError>) -> ErrorKind {
    match refusal.map(ServerError::code) {
        Some(status) if status < 500 && status != TOO_MANY_REQUESTS => ErrorKind::Rejected,
        _ => ErrorKind::Unavailable,
    }
}

/// What the server said, if it was the server who said it.
fn server_error<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a ServerError> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<ServerError>() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// The error of one message or one question, with the client's as its source.
pub(super) fn mapped(
    kind: ErrorKind,
    operation: &'static str,
    detail: &str,
    source: impl StdError + Send + Sync + 'static,
) -> Error {
    Error::new(kind, operation, format!("{detail}: {source}")).with_source(source)
}

/// The error of an attempt to connect. The client's own text stays out of it: it may hold an address with a password.
pub(super) fn not_connected(tried: &str, error: &ConnectError) -> Error {
    let kind = match error.kind() {
        ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
            ErrorKind::Rejected
        }
        ConnectErrorKind::ServerParse => ErrorKind::Configuration,
        _ => ErrorKind::Unavailable,
    };
    let detail = format!("none of {tried} took the connection: {}", error.kind());
    Error::new(kind, "connect", detail)
}

/// There is no connection to send over.
pub(super) fn disconnected(operation: &'static str, tried: &str, state: &State) -> Error {
    let detail = format!("no connection to {tried} ({state})");
    Error::new(ErrorKind::Unavailable, operation, detail)
}

/// Wraps an error as the outcome of one message.
pub(super) fn rejected(scope: RejectionScope, error: Error) -> PublishOutcome {
    PublishOutcome::Rejected { scope, error }
}

/// Wraps an error as the outcome of one message.
pub(super) fn failed(scope: FailureScope, stored: Stored, error: Error) -> PublishOutcome {
    PublishOutcome::Failed {
        scope,
        stored,
        error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server_said(status: usize, code: u64) -> ServerError {
        let text = format!(r#"{{"code":{status},"err_code":{code},"description":"x"}}"#);
        serde_json::from_str(&text).unwrap_or_else(|_| unreachable!())
    }

    fn said(code: u64) -> PublishError {
        PublishError::with_source(PublishErrorKind::Other, server_said(400, code))
    }

    #[test]
    fn too_large_is_the_messages_fault() {
        let error = PublishError::new(PublishErrorKind::MaxPayloadExceeded);
        assert_eq!(verdict(&error), Verdict::Message);
        for code in [10_054, 10_097] {
            assert_eq!(verdict(&said(code)), Verdict::Message, "{code}");
        }
    }

    #[test]
    fn another_or_a_sealed_stream_is_the_destinations_fault() {
        for code in [10_060, 10_109] {
            assert_eq!(verdict(&said(code)), Verdict::Destination, "{code}");
        }
    }

    #[test]
    fn an_unknown_refusal_parks_no_message() {
        for (status, expected) in [
            (400, Verdict::Destination),
            (403, Verdict::Destination),
            (429, Verdict::NotStored),
            (500, Verdict::Unknown),
        ] {
            let error =
                PublishError::with_source(PublishErrorKind::Other, server_said(status, 19_999));
            assert_eq!(verdict(&error), expected, "{status}");
        }
    }

    #[test]
    fn what_passes_is_not_told_as_permanent() {
        for (status, code, expected) in [
            (503, 10_039, ErrorKind::Configuration),
            (503, 10_076, ErrorKind::Configuration),
            (503, 10_008, ErrorKind::Unavailable),
        ] {
            let kind = without_jetstream(&server_said(status, code));
            assert_eq!(kind, expected, "{code}");
        }
        for (status, expected) in [
            (400, ErrorKind::Rejected),
            (429, ErrorKind::Unavailable),
            (500, ErrorKind::Unavailable),
            (503, ErrorKind::Unavailable),
        ] {
            let kind = not_made(Some(&server_said(status, 10_047)));
            assert_eq!(kind, expected, "{status}");
        }
        assert_eq!(not_made(None), ErrorKind::Unavailable);
    }

    #[test]
    fn a_full_or_absent_stream_has_stored_nothing() {
        for code in [
            10_077, 10_047, 10_023, 10_028, 10_008, 10_009, 10_118, 10_167,
        ] {
            assert_eq!(verdict(&said(code)), Verdict::NotStored, "{code}");
        }
        let error = PublishError::new(PublishErrorKind::StreamNotFound);
        assert_eq!(verdict(&error), Verdict::NoResponders);
    }

    #[test]
    fn without_an_answer_it_may_be_stored() {
        for kind in [
            PublishErrorKind::TimedOut,
            PublishErrorKind::BrokenPipe,
            PublishErrorKind::Other,
        ] {
            assert_eq!(verdict(&PublishError::new(kind)), Verdict::Unknown);
        }
        assert_eq!(verdict(&said(10_158)), Verdict::Unknown);
    }
}
