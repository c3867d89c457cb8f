//! Headers, and the one table of the names that relaybox itself writes.
//!
//! The names are a contract with services in other languages, the same on every broker; no other file spells them.

use bytes::Bytes;

/// Id of the message, the same for every copy: what the inbox remembers.
pub const MESSAGE_ID: &str = "x-message-id";
/// What happened, for routing to a handler.
pub const EVENT_TYPE: &str = "x-event-type";
/// When it happened, RFC 3339 in UTC with microseconds.
pub const OCCURRED_AT: &str = "x-occurred-at";
/// Version of the aggregate, decimal.
pub const VERSION: &str = "x-version";
/// Media type of the payload.
pub const CONTENT_TYPE: &str = "content-type";
/// Reversible encoding of headers that the broker cannot carry natively.
pub const ENCODED_HEADERS: &str = "x-headers";
/// Says that an empty body stands for no payload at all, where the broker cannot tell.
pub const NULL_PAYLOAD: &str = "x-null-payload";
/// The ordering key, where the broker has no field for it.
pub const KEY: &str = "x-key";
/// Where the message first came from: topic, exchange/routing key, or subject.
pub const ORIGINAL_TOPIC: &str = "x-original-topic";
/// The partition, queue or stream it first came from.
pub const ORIGINAL_PARTITION: &str = "x-original-partition";
/// The offset or sequence it first had.
pub const ORIGINAL_OFFSET: &str = "x-original-offset";
/// The consumer that failed it.
pub const CONSUMER: &str = "x-consumer";
/// Failed attempts so far, decimal `u32`.
pub const RETRY_COUNT: &str = "x-retry-count";
/// Instant of the first failure, RFC 3339 in UTC.
pub const FIRST_FAILED_AT: &str = "x-first-failed-at";
/// Instant of the last failure, RFC 3339 in UTC.
pub const LAST_FAILED_AT: &str = "x-last-failed-at";
/// Class and text of the last failure, at most 1 KiB.
pub const LAST_ERROR: &str = "x-last-error";
/// On a rung: not to be handled before this instant, RFC 3339 in UTC.
pub const DUE_AT: &str = "x-due-at";
/// Why the message is a dead letter, as a reason code.
pub const DEAD_LETTER_REASON: &str = "x-dead-letter-reason";
/// Who looks after this dead letter, as the consumer's settings say.
pub const DEAD_LETTER_OWNER: &str = "x-dead-letter-owner";
/// What is to be known about it, as the consumer's settings say.
pub const DEAD_LETTER_NOTE: &str = "x-dead-letter-note";
/// How often an operator sent it back, decimal `u32`.
pub const REDRIVE_COUNT: &str = "x-redrive-count";
/// W3C trace context of the enqueuing span.
pub const TRACE_PARENT: &str = "traceparent";
/// W3C trace state of the enqueuing span.
pub const TRACE_STATE: &str = "tracestate";

/// Id of the message whose handling led to this one. Not reserved: a header like the user's own, which
/// [`Message::caused_by`](crate::Message::caused_by) sets.
pub const CAUSATION_ID: &str = "x-causation-id";

/// Every name above but the last: refused as a user header, whatever its case.
pub const RESERVED: [&str; 23] = [
    MESSAGE_ID,
    EVENT_TYPE,
    OCCURRED_AT,
    VERSION,
    CONTENT_TYPE,
    ENCODED_HEADERS,
    NULL_PAYLOAD,
    KEY,
    ORIGINAL_TOPIC,
    ORIGINAL_PARTITION,
    ORIGINAL_OFFSET,
    CONSUMER,
    RETRY_COUNT,
    FIRST_FAILED_AT,
    LAST_FAILED_AT,
    LAST_ERROR,
    DUE_AT,
    DEAD_LETTER_REASON,
    DEAD_LETTER_OWNER,
    DEAD_LETTER_NOTE,
    REDRIVE_COUNT,
    TRACE_PARENT,
    TRACE_STATE,
];

/// Whether a user header may not have this name.
#[must_use]
pub fn is_reserved(name: &str) -> bool {
    RESERVED
        .iter()
        .any(|reserved| reserved.eq_ignore_ascii_case(name))
}

/// One header: a name and a value of any bytes, or no value (null).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The name, compared by exact bytes.
    pub name: String,
    /// The value; `None` is null and differs from empty.
    pub value: Option<Bytes>,
}

/// Headers in order; a name may repeat.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Headers(Vec<Header>);

impl Headers {
    /// No headers.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a header at the end, keeping earlier ones of the same name.
    pub fn push(&mut self, name: impl Into<String>, value: impl Into<Bytes>) {
        self.push_optional(name, Some(value.into()));
    }

    /// Adds a header with a value or null at the end.
    pub fn push_optional(&mut self, name: impl Into<String>, value: Option<Bytes>) {
        self.0.push(Header {
            name: name.into(),
            value,
        });
    }

    /// The value of the first header of this name; null counts as absent.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Bytes> {
        self.0
            .iter()
            .find(|header| header.name == name)
            .and_then(|header| header.value.as_ref())
    }

    /// The value of the first header of this name as text, if it is UTF-8.
    #[must_use]
    pub fn get_str(&self, name: &str) -> Option<&str> {
        self.get(name)
            .and_then(|value| std::str::from_utf8(value).ok())
    }

    /// Puts one header in the place of all of this name.
    pub(crate) fn replace(&mut self, name: &str, value: impl Into<Bytes>) {
        self.0.retain(|header| header.name != name);
        self.push(name, value);
    }

    /// All headers in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Header> {
        self.0.iter()
    }

    /// How many headers there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Names and values in bytes, without what a broker adds around them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0
            .iter()
            .map(|header| header.name.len() + header.value.as_ref().map_or(0, Bytes::len))
            .sum()
    }
}

impl<'a> IntoIterator for &'a Headers {
    type Item = &'a Header;
    type IntoIter = std::slice::Iter<'a, Header>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl IntoIterator for Headers {
    type Item = Header;
    type IntoIter = std::vec::IntoIter<Header>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl FromIterator<Header> for Headers {
    fn from_iter<I: IntoIterator<Item = Header>>(headers: I) -> Self {
        Self(headers.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_names_are_refused_in_any_case() {
        assert!(is_reserved("X-Message-Id"));
        assert!(is_reserved("TRACEPARENT"));
        assert!(!is_reserved("x-tenant"));
        assert!(
            RESERVED
                .iter()
                .all(|name| name.to_ascii_lowercase() == *name)
        );
    }

    #[test]
    fn order_repeats_null_and_empty_are_kept() {
        let mut headers = Headers::new();
        headers.push("a", "1");
        headers.push_optional("b", None);
        headers.push("a", Bytes::new());
        let names: Vec<_> = headers.iter().map(|h| h.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "a"]);
        assert_eq!(headers.get_str("a"), Some("1"));
        assert_eq!(headers.get("b"), None);
        assert_eq!(headers.bytes(), 4);
    }
}
