//! What the client's errors mean: the one place where they are judged.

use lapin::ErrorKind as ClientKind;

use crate::error::{Error, ErrorKind};

/// Whom a channel's error blames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blame {
    /// The exchange does not exist: nothing can go through it.
    Exchange,
    /// This destination is forbidden.
    Destination,
    /// The message itself.
    Message,
    /// None of them: the channel or connection is gone for another reason.
    Nobody,
}

const ACCESS_REFUSED: u16 = 403;
const NOT_FOUND: u16 = 404;
const RESOURCE_LOCKED: u16 = 405;
const PRECONDITION_FAILED: u16 = 406;
const CONTENT_TOO_LARGE: u16 = 311;

/// The broker's code, where it sent one that closes a channel and no more.
pub(super) fn channel_code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ClientKind::ProtocolError(protocol) if error.is_amqp_soft_error() => {
            Some(protocol.get_id())
        }
        _ => None,
    }
}

pub(super) fn blame(error: &lapin::Error) -> Blame {
    match channel_code(error) {
        Some(NOT_FOUND) => Blame::Exchange,
        Some(ACCESS_REFUSED | RESOURCE_LOCKED) => Blame::Destination,
        Some(PRECONDITION_FAILED | CONTENT_TOO_LARGE) => Blame::Message,
        _ => Blame::Nobody,
    }
}

pub(super) fn is_not_found(error: &lapin::Error) -> bool {
    channel_code(error) == Some(NOT_FOUND)
}

/// The broker's own words on a mismatch of arguments.
pub(super) fn mismatch(error: &lapin::Error) -> Option<String> {
    match error.kind() {
        ClientKind::ProtocolError(protocol) if protocol.get_id() == PRECONDITION_FAILED => {
            Some(protocol.get_message().as_str().to_owned())
        }
        _ => None,
    }
}

/// The error of one call, with the client's as its source.
pub(super) fn mapped(operation: &'static str, detail: &str, source: lapin::Error) -> Error {
    let kind = match channel_code(&source) {
        Some(NOT_FOUND) => ErrorKind::NotFound,
        Some(ACCESS_REFUSED | RESOURCE_LOCKED | PRECONDITION_FAILED | CONTENT_TOO_LARGE) => {
            ErrorKind::Rejected
        }
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, operation, format!("{detail}: {source}")).with_source(source)
}

/// The mismatch of a queue's argument as a refused setting, as far as the broker's text tells.
///
/// `PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received the value '30000' of type
/// 'signedint' but current is the value '10000' of type 'signedint'`
pub(super) fn inequivalent(queue: &str, text: &str) -> Error {
    let quoted: Vec<&str> = text.split('\'').skip(1).step_by(2).collect();
    let argument = quoted.first().copied().unwrap_or("an argument");
    let after = |words: &str| {
        text.split_once(words)
            .and_then(|(_, rest)| rest.split(['\'', '"']).nth(1))
    };
    let wanted = after("received the value").unwrap_or("none");
    let found = after("current is the value").unwrap_or("none");
    if !text.contains("inequivalent") {
        return Error::configuration("queue", format!("as {queue} is"), text);
    }
    Error::configuration(
        "queue argument",
        format!("{argument}={wanted} on {queue}"),
        found,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mismatch_names_queue_argument_and_both_values() {
        let text = "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'orders.retry' in vhost '/': \
                    received the value '30000' of type 'signedint' but current is the value '10000' of type 'signedint'";
        let error = inequivalent("orders.retry", text).to_string();
        for part in ["orders.retry", "x-message-ttl", "30000", "10000"] {
            assert!(error.contains(part), "{part} is not in {error}");
        }
        let text = "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received the \
                    value '30000' of type 'signedint' but current is none";
        let error = inequivalent("q", text).to_string();
        assert!(error.contains("none"), "{error}");
    }
}
