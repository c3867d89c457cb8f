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

/// Whether the whole connection ends with this.
pub(super) fn ends_connection(error: &lapin::Error) -> bool {
    match error.kind() {
        ClientKind::ProtocolError(_) => error.is_amqp_hard_error(),
        ClientKind::IOError(_)
        | ClientKind::RuntimeShutdownError(_)
        | ClientKind::InvalidConnectionState(_)
        | ClientKind::ParsingError(_)
        | ClientKind::SerialisationError(_)
        | ClientKind::MissingHeartbeatError => true,
        _ => false,
    }
}

/// Whether the client met something that it cannot read. It ends the connection, and with the message that it was in it
/// comes again on the next.
pub(super) fn is_unreadable(error: &Error) -> bool {
    let source = std::error::Error::source(error);
    source
        .and_then(|source| source.downcast_ref::<lapin::Error>())
        .is_some_and(|error| matches!(error.kind(), ClientKind::ParsingError(_)))
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

/// The mismatch of an argument as a refused setting, as far as the broker's text tells.
///
/// `PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': received the value '30000' of type
/// 'signedint' but current is the value '10000' of type 'signedint'`; without the words in between where the types agree.
pub(super) fn inequivalent(name: &str, text: &str) -> Error {
    let quoted = |text: &str| text.split('\'').nth(1).map(str::to_owned);
    let told = text
        .split_once("inequivalent arg ")
        .and_then(|(_, rest)| rest.split_once(": received "))
        .and_then(|(argument, rest)| {
            let (wanted, found) = rest.split_once(" but current is ")?;
            Some((quoted(argument)?, quoted(wanted), quoted(found)))
        });
    match told {
        Some((argument, wanted, found)) => {
            let none = || "none".to_owned();
            let limit = format!("{argument}={} on {name}", wanted.unwrap_or_else(none));
            Error::configuration("argument", limit, found.unwrap_or_else(none))
        }
        None => Error::configuration("queue", format!("as {name} is"), text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lapin::protocol::{AMQPError, AMQPHardError, AMQPSoftError};

    #[test]
    fn what_ends_a_connection_is_told_from_what_ends_a_channel() {
        let protocol = |error| lapin::Error::from(ClientKind::ProtocolError(error));
        let forced = AMQPError::new(AMQPHardError::CONNECTIONFORCED.into(), "bye".into());
        let missing = AMQPError::new(AMQPSoftError::NOTFOUND.into(), "no exchange".into());
        let reset = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        assert!(ends_connection(&protocol(forced.clone())));
        assert!(ends_connection(&lapin::Error::from(reset)));
        assert!(ends_connection(&lapin::Error::from(
            ClientKind::MissingHeartbeatError
        )));
        assert!(!ends_connection(&protocol(missing.clone())));
        assert_eq!(blame(&protocol(missing)), Blame::Exchange);
        assert_eq!(blame(&protocol(forced)), Blame::Nobody);
    }

    #[test]
    fn a_mismatch_names_queue_argument_and_both_values() {
        for (told, wanted, found) in [
            (
                "received the value '30000' of type 'signedint' but current is the value '10000' of type 'signedint'",
                "30000",
                "10000",
            ),
            ("received '30000' but current is '10000'", "30000", "10000"),
            (
                "received none but current is the value '1' of type 'long'",
                "none",
                "1",
            ),
            (
                "received the value '1' of type 'long' but current is none",
                "1",
                "none",
            ),
        ] {
            let text = format!(
                "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': {told}"
            );
            let error = inequivalent("orders.retry", &text);
            let violation = error
                .violation()
                .map(|v| (v.limit.clone(), v.value.clone()));
            let limit = format!("x-message-ttl={wanted} on orders.retry");
            assert_eq!(violation, Some((limit, found.to_owned())));
        }
        let other = inequivalent("q", "PRECONDITION_FAILED - something else").to_string();
        assert!(other.contains("something else"), "{other}");
    }
}
