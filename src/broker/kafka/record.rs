//! Messages as Kafka records, and back. Kafka keeps every field natively.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bytes::Bytes;
use rdkafka::Message as _;
use rdkafka::message::{BorrowedMessage, Header, Headers as _, OwnedHeaders};
use rdkafka::producer::FutureRecord;
use time::OffsetDateTime;

use crate::envelope::{Outgoing, Received};
use crate::error::{Error, ErrorKind, Result};
use crate::headers::Headers;
use crate::message::Message;
use crate::story::Origin;

/// Whether Kafka can have a topic of this name: 1 to 249 of `a-z A-Z 0-9 . _ -`, and not `.` or `..`.
pub(super) fn is_topic_name(name: &str) -> bool {
    (1..=249).contains(&name.len())
        && !matches!(name, "." | "..")
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// The rule for topic names, in words.
pub(super) const NAME_RULE: &str = "1 to 249 of the characters a-z A-Z 0-9 . _ -";

/// Refuses a destination that can never be a topic.
pub(super) fn refuse(message: &Message) -> Result<()> {
    if is_topic_name(&message.destination) {
        return Ok(());
    }
    Err(Error::invalid(
        "destination",
        NAME_RULE,
        &message.destination,
    ))
}

/// All headers of a message as the client takes them.
///
/// # Errors
/// [`ErrorKind::Rejected`] for a name with NUL: the wire could carry it, but most clients would read it cut short.
pub(super) fn headers(outgoing: &Outgoing) -> Result<OwnedHeaders> {
    let headers = outgoing.to_headers();
    let mut owned = OwnedHeaders::new_with_capacity(headers.len());
    for header in &headers {
        if header.name.contains('\0') {
            return Err(Error::new(
                ErrorKind::Rejected,
                "publish",
                "a header's name holds NUL",
            ));
        }
        owned = owned.insert(Header {
            key: &header.name,
            value: header.value.as_deref(),
        });
    }
    Ok(owned)
}

/// The record of a message.
///
/// Its timestamp is the time of sending: retention goes by it, so the time of the event would let a late message be
/// deleted at once.
pub(super) fn record(outgoing: &Outgoing, headers: OwnedHeaders) -> FutureRecord<'_, [u8], [u8]> {
    FutureRecord {
        topic: &outgoing.message.destination,
        partition: None,
        payload: outgoing.message.payload.as_deref(),
        key: outgoing.message.key.as_deref(),
        timestamp: None,
        headers: Some(headers),
    }
}

/// Reads a record.
///
/// A header whose *name* is not UTF-8 cannot be read through the client, which panics on it. It comes out named U+FFFD
/// without a value, so that the message is neither lost nor stops its partition; our own messages never carry one.
pub(super) fn received(message: &BorrowedMessage<'_>) -> Received {
    let timestamp = message
        .timestamp()
        .to_millis()
        .and_then(|ms| OffsetDateTime::from_unix_timestamp_nanos(i128::from(ms) * 1_000_000).ok())
        .unwrap_or_else(OffsetDateTime::now_utc);
    Received {
        coordinates: Origin {
            topic: message.topic().to_owned(),
            partition: Some(message.partition().to_string()),
            offset: Some(message.offset().to_string()),
        },
        key: message.key().map(Bytes::copy_from_slice),
        headers: read_headers(message),
        payload: message.payload().map(Bytes::copy_from_slice),
        timestamp,
    }
}

fn read_headers(message: &BorrowedMessage<'_>) -> Headers {
    let mut out = Headers::new();
    let Some(headers) = message.headers() else {
        return out;
    };
    for at in 0..headers.count() {
        // The call only reads; nothing is left half-changed behind a panic.
        match catch_unwind(AssertUnwindSafe(|| headers.try_get(at))) {
            Ok(Some(header)) => {
                out.push_optional(header.key, header.value.map(Bytes::copy_from_slice))
            }
            Ok(None) => {}
            Err(_) => {
                tracing::warn!(
                    topic = message.topic(),
                    partition = message.partition(),
                    offset = message.offset(),
                    "a header's name is not UTF-8; name and value cannot be read"
                );
                out.push_optional("\u{fffd}", None);
            }
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn topic_names_follow_kafkas_rule() {
        assert!(is_topic_name("orders.billing.retry.5s"));
        assert!(is_topic_name(&"x".repeat(249)));
        for name in ["", ".", "..", "a b", "a/b", "é", "a\0b"] {
            assert!(!is_topic_name(name), "{name:?}");
        }
        assert!(!is_topic_name(&"x".repeat(250)));
        let refused = refuse(&Message::new("a b", "T")).map_err(|e| e.violation().map(|v| v.field));
        assert_eq!(refused, Err(Some("destination")));
    }

    #[test]
    fn headers_keep_null_empty_and_repetition() {
        let mut message = Message::new("orders", "T")
            .with_header("a", Bytes::new())
            .with_header("a", vec![0xff, 0]);
        message.headers.push_optional("b", None);
        let owned = headers(&Outgoing::from(message)).unwrap();
        let last: Vec<_> = owned
            .as_borrowed()
            .iter()
            .skip(3)
            .map(|h| (h.key.to_owned(), h.value.map(<[u8]>::to_vec)))
            .collect();
        assert_eq!(
            last,
            [
                ("a".to_owned(), Some(vec![])),
                ("a".to_owned(), Some(vec![0xff, 0])),
                ("b".to_owned(), None)
            ]
        );
    }

    #[test]
    fn a_name_with_nul_is_refused_without_a_panic() {
        let message = Message::new("orders", "T").with_header("a\0b", "v");
        let refused = headers(&Outgoing::from(message)).map(|_| ());
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Rejected);
    }
}
