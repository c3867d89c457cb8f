//! The message a service writes, and the limits it must keep.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::clock::{to_micros, to_rfc3339};
use crate::codec::unfit;
use crate::error::{Error, ErrorKind, Result};
use crate::headers::{Headers, is_reserved};

/// Identity of a message: the same for every copy, resend, rung, dead letter and redrive.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MessageId(String);

impl MessageId {
    /// A new, time-ordered id (UUIDv7).
    #[must_use]
    pub fn generate() -> Self {
        Self(Uuid::now_v7().to_string())
    }

    /// Takes an id from outside. Its length is checked at enqueue; see [`Limits`].
    pub fn new(id: impl Into<String>) -> Self {
        Self(id.into())
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl From<&str> for MessageId {
    fn from(id: &str) -> Self {
        Self::new(id)
    }
}

impl From<String> for MessageId {
    fn from(id: String) -> Self {
        Self(id)
    }
}

/// W3C trace context of the span that enqueued the message; carried unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    /// Value of `traceparent`.
    pub parent: String,
    /// Value of `tracestate`, if there is one.
    pub state: Option<String>,
}

/// A business fact on its way to other services.
///
/// ```
/// use relaybox::Message;
///
/// let message = Message::new("orders", "OrderPlaced")
///     .with_key("order-17")
///     .with_payload(r#"{"total":42}"#)
///     .with_header("tenant", "acme");
/// assert_eq!(message.destination, "orders");
/// ```
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct Message {
    /// Made once, at construction.
    pub id: MessageId,
    /// Where it goes: a topic, exchange and routing key, or subject.
    pub destination: String,
    /// Messages of one key keep their order; `None` has no order. An empty key is a key.
    pub key: Option<Bytes>,
    /// What happened, for example `OrderPlaced`. Empty only on messages that came from elsewhere without one.
    pub event_type: String,
    /// Media type of the payload.
    pub content_type: Option<String>,
    /// The user's headers, in order.
    pub headers: Headers,
    /// The bytes; `None` is a tombstone and differs from empty.
    pub payload: Option<Bytes>,
    /// When it happened, in whole microseconds.
    pub occurred_at: OffsetDateTime,
    /// Version of the aggregate, for consumers that skip older ones.
    pub version: Option<i64>,
    /// Trace context of the enqueuing span.
    pub trace: Option<TraceContext>,
}

impl Message {
    /// A message with a new id, no key, no headers and no payload, that occurred now.
    pub fn new(destination: impl Into<String>, event_type: impl Into<String>) -> Self {
        Self::existing(
            MessageId::generate(),
            destination.into(),
            event_type.into(),
            OffsetDateTime::now_utc(),
        )
    }

    /// A message that was made elsewhere or earlier: neither a new id nor the clock is asked for, which would be most of
    /// the cost of reading one.
    pub(crate) fn existing(
        id: MessageId,
        destination: String,
        event_type: String,
        occurred_at: OffsetDateTime,
    ) -> Self {
        Self {
            id,
            destination,
            key: None,
            event_type,
            content_type: None,
            headers: Headers::new(),
            payload: None,
            occurred_at: to_micros(occurred_at),
            version: None,
            trace: None,
        }
    }

    /// Sets an id made elsewhere, for example a business key.
    #[must_use]
    pub fn with_id(mut self, id: impl Into<MessageId>) -> Self {
        self.id = id.into();
        self
    }

    /// Sets the ordering key.
    #[must_use]
    pub fn with_key(mut self, key: impl AsRef<[u8]>) -> Self {
        self.key = Some(Bytes::copy_from_slice(key.as_ref()));
        self
    }

    /// Sets the payload's bytes.
    #[must_use]
    pub fn with_payload(mut self, payload: impl Into<Bytes>) -> Self {
        self.payload = Some(payload.into());
        self
    }

    /// Sets the payload to `value` as JSON and the content type to `application/json`.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when `value` has no JSON form (for example a map with keys that are not strings).
    pub fn with_json<T: Serialize + ?Sized>(self, value: &T) -> Result<Self> {
        let json = serde_json::to_vec(value).map_err(|e| {
            Error::new(ErrorKind::Invalid, "encode", "payload has no JSON form").with_source(e)
        })?;
        Ok(self
            .with_payload(json)
            .with_content_type("application/json"))
    }

    /// The payload read as JSON.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] when there is none or it does not read as a `T`: no retry will change that, so a handler
    /// does well to answer [`Permanent`](crate::consumer::Outcome::Permanent).
    pub fn json<'a, T: Deserialize<'a>>(&'a self) -> Result<T> {
        let Some(payload) = &self.payload else {
            return Err(Error::new(
                ErrorKind::Corrupt,
                "decode",
                "there is no payload",
            ));
        };
        serde_json::from_slice(payload).map_err(|e| {
            Error::new(ErrorKind::Corrupt, "decode", "payload is not as expected")
                .with_source(unfit(&e))
        })
    }

    /// The key as text; `None` without one, or where it is not UTF-8.
    #[must_use]
    pub fn key_str(&self) -> Option<&str> {
        self.key
            .as_deref()
            .and_then(|key| std::str::from_utf8(key).ok())
    }

    /// Sets the media type of the payload.
    #[must_use]
    pub fn with_content_type(mut self, content_type: impl Into<String>) -> Self {
        self.content_type = Some(content_type.into());
        self
    }

    /// Adds a header; a name may repeat.
    #[must_use]
    pub fn with_header(mut self, name: impl Into<String>, value: impl Into<Bytes>) -> Self {
        self.headers.push(name, value);
        self
    }

    /// Sets when it happened; cut to whole microseconds.
    #[must_use]
    pub fn with_occurred_at(mut self, instant: OffsetDateTime) -> Self {
        self.occurred_at = to_micros(instant);
        self
    }

    /// Sets the aggregate's version.
    #[must_use]
    pub const fn with_version(mut self, version: i64) -> Self {
        self.version = Some(version);
        self
    }

    /// Sets the trace context that consumers will continue.
    #[must_use]
    pub fn with_trace(mut self, parent: impl Into<String>, state: Option<String>) -> Self {
        self.trace = Some(TraceContext {
            parent: parent.into(),
            state,
        });
        self
    }

    /// Size that counts against [`Limits::message_bytes_max`]: id, destination, key, types, headers and payload.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.id.0.len()
            + self.destination.len()
            + self.key.as_ref().map_or(0, Bytes::len)
            + self.event_type.len()
            + self.content_type.as_ref().map_or(0, String::len)
            + self.headers.bytes()
            + self.payload.as_ref().map_or(0, Bytes::len)
            + self.trace.as_ref().map_or(0, |t| {
                t.parent.len() + t.state.as_ref().map_or(0, String::len)
            })
    }

    /// Checks every field against `limits`.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] naming the first field that breaks a limit, the limit and the value.
    pub fn validate(&self, limits: &Limits) -> Result<()> {
        let id = self.id.as_str();
        text("id", id, 1, limits.id_bytes_max)?;
        if id.trim().is_empty() {
            return Err(Error::invalid("id", "not blank", id));
        }
        text(
            "destination",
            &self.destination,
            1,
            limits.destination_bytes_max,
        )?;
        text("event_type", &self.event_type, 1, limits.name_bytes_max)?;
        if let Some(content_type) = &self.content_type {
            text("content_type", content_type, 1, limits.name_bytes_max)?;
        }
        if let Some(key) = &self.key {
            size("key", key.len(), limits.key_bytes_max)?;
        }
        if to_rfc3339(self.occurred_at).is_none() {
            return Err(Error::invalid(
                "occurred_at",
                "in the years 0 to 9999, in UTC",
                self.occurred_at.to_string(),
            ));
        }
        if let Some(trace) = &self.trace {
            text("traceparent", &trace.parent, 1, limits.name_bytes_max)?;
            if let Some(state) = &trace.state {
                text("tracestate", state, 0, 512)?;
            }
        }
        for header in &self.headers {
            text("header name", &header.name, 1, limits.name_bytes_max)?;
            if is_reserved(&header.name) {
                return Err(Error::invalid(
                    "header name",
                    "a name that relaybox does not write itself",
                    &header.name,
                ));
            }
        }
        size("headers", self.headers.bytes(), limits.headers_bytes_max)?;
        size("message", self.bytes(), limits.message_bytes_max)
    }
}

/// Text that must fit `least..=most` bytes and hold no NUL, which no database and few clients keep.
fn text(field: &'static str, value: &str, least: usize, most: usize) -> Result<()> {
    if value.len() < least || value.len() > most {
        return Err(Error::invalid(
            field,
            format!("{least} to {most} bytes"),
            value,
        ));
    }
    if value.contains('\0') {
        return Err(Error::invalid(field, "text without NUL", value));
    }
    Ok(())
}

fn size(field: &'static str, bytes: usize, bytes_max: usize) -> Result<()> {
    if bytes <= bytes_max {
        return Ok(());
    }
    Err(Error::invalid(
        field,
        format!("at most {bytes_max} bytes"),
        format!("{bytes} bytes"),
    ))
}

/// Payload and header values never reach logs: they are shown by size.
impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("id", &self.id)
            .field("destination", &self.destination)
            .field("event_type", &self.event_type)
            .field("key_bytes", &self.key.as_ref().map(Bytes::len))
            .field("headers", &self.headers.len())
            .field("payload_bytes", &self.payload.as_ref().map(Bytes::len))
            .field("occurred_at", &self.occurred_at)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// What a message may be at most. A publisher's capabilities carry the limits of its broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest id (default 255).
    pub id_bytes_max: usize,
    /// Longest destination (default 249, the longest Kafka topic).
    pub destination_bytes_max: usize,
    /// Longest key (default 1,024).
    pub key_bytes_max: usize,
    /// Longest event type, content type, trace parent and header name (default 255).
    pub name_bytes_max: usize,
    /// All header names and values together (default 32 KiB).
    pub headers_bytes_max: usize,
    /// [`Message::bytes`] as a whole (default 900,000: a broker's usual megabyte, less its framing and our 4 KiB).
    pub message_bytes_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            id_bytes_max: 255,
            destination_bytes_max: 249,
            key_bytes_max: 1_024,
            name_bytes_max: 255,
            headers_bytes_max: 32 * 1_024,
            message_bytes_max: 900_000,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn good() -> Message {
        Message::new("orders", "OrderPlaced")
            .with_key("k")
            .with_payload("p")
    }

    fn refused(message: &Message) -> (&'static str, String, String) {
        let error = message.validate(&Limits::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let violation = error.violation().unwrap().clone();
        (violation.field, violation.limit, violation.value)
    }

    #[test]
    fn a_plain_message_passes() {
        good().validate(&Limits::default()).unwrap();
    }

    #[test]
    fn empty_overlong_and_reserved_values_are_refused_by_name() {
        let long = "x".repeat(256);
        assert_eq!(refused(&good().with_id("")).0, "id");
        assert_eq!(refused(&good().with_id(" \t")).1, "not blank");
        assert_eq!(refused(&good().with_id(long.as_str())).1, "1 to 255 bytes");
        assert_eq!(refused(&Message::new("", "T")).0, "destination");
        assert_eq!(refused(&Message::new(long.clone(), "T")).0, "destination");
        assert_eq!(refused(&Message::new("d\0", "T")).1, "text without NUL");
        assert_eq!(refused(&Message::new("d", "")).0, "event_type");
        assert_eq!(refused(&good().with_key([7; 1025])).2, "1025 bytes");
        assert_eq!(refused(&good().with_header("", "v")).0, "header name");
        assert_eq!(refused(&good().with_header(long, "v")).0, "header name");
        let beyond = time::macros::datetime!(9999-12-31 23:59:59 -1);
        assert_eq!(refused(&good().with_occurred_at(beyond)).0, "occurred_at");
        let (field, _, value) = refused(&good().with_header("X-Message-ID", "v"));
        assert_eq!((field, value.as_str()), ("header name", "X-Message-ID"));
        assert_eq!(
            refused(&good().with_header("h", vec![0; 40_000])).0,
            "headers"
        );
        let (field, limit, value) = refused(&good().with_payload(vec![0; 1_000_000]));
        assert_eq!((field, limit.as_str()), ("message", "at most 900000 bytes"));
        assert!(value.ends_with(" bytes"));
    }

    #[test]
    fn debug_shows_no_payload_key_or_header_value() {
        let message = good()
            .with_payload("secret")
            .with_header("h", "secret")
            .with_key("secret");
        assert!(!format!("{message:?}").contains("secret"));
    }

    #[test]
    fn json_sets_payload_and_content_type() {
        let message = good().with_json(&[1, 2]).unwrap();
        assert_eq!(message.payload.as_deref(), Some(b"[1,2]".as_slice()));
        assert_eq!(message.content_type.as_deref(), Some("application/json"));
        assert_eq!(message.json::<[u8; 2]>().unwrap(), [1, 2]);
        assert_eq!(
            message.json::<String>().unwrap_err().kind(),
            ErrorKind::Corrupt
        );
        assert_eq!(message.with_key("k").key_str(), Some("k"));
    }
}
