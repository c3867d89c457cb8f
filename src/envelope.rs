//! A message and its story as headers, and back: the one encoding that every adapter uses.

use bytes::Bytes;
use time::OffsetDateTime;

use crate::clock::{from_rfc3339, to_rfc3339};
use crate::headers::{self, Headers};
use crate::message::{Message, MessageId, TraceContext};
use crate::story::{Origin, Reason, Story};

/// A message with its story, as a publisher sends it.
#[derive(Debug, Clone, PartialEq)]
pub struct Outgoing {
    /// What is sent; `message.destination` says where to.
    pub message: Message,
    /// Empty for a message on its first way.
    pub story: Story,
}

impl From<Message> for Outgoing {
    fn from(message: Message) -> Self {
        Self {
            message,
            story: Story::default(),
        }
    }
}

impl Outgoing {
    /// Envelope, trace context and story first, then the user's headers in their order.
    ///
    /// For a broker without fields of its own for any of them.
    #[must_use]
    pub fn to_headers(&self) -> Headers {
        let Self { message, story } = self;
        let mut out = Headers::new();
        let mut put = |name: &'static str, value: Option<String>| {
            if let Some(value) = value {
                out.push(name, value);
            }
        };
        put(headers::MESSAGE_ID, Some(message.id.as_str().to_owned()));
        put(
            headers::EVENT_TYPE,
            Some(message.event_type.clone()).filter(|t| !t.is_empty()),
        );
        put(headers::OCCURRED_AT, to_rfc3339(message.occurred_at));
        put(headers::VERSION, message.version.map(|v| v.to_string()));
        put(headers::CONTENT_TYPE, message.content_type.clone());
        if let Some(trace) = &message.trace {
            put(headers::TRACE_PARENT, Some(trace.parent.clone()));
            put(headers::TRACE_STATE, trace.state.clone());
        }
        story_headers(story, &mut put);
        message
            .headers
            .iter()
            .cloned()
            .fold(out, |mut all, header| {
                all.push_optional(header.name, header.value);
                all
            })
    }
}

fn story_headers(story: &Story, put: &mut impl FnMut(&'static str, Option<String>)) {
    let count = |n: u32| Some(n).filter(|n| *n > 0).map(|n| n.to_string());
    if let Some(origin) = &story.origin {
        put(headers::ORIGINAL_TOPIC, Some(origin.topic.clone()));
        put(headers::ORIGINAL_PARTITION, origin.partition.clone());
        put(headers::ORIGINAL_OFFSET, origin.offset.clone());
    }
    put(headers::CONSUMER, story.consumer.clone());
    put(headers::RETRY_COUNT, count(story.retry_count));
    put(
        headers::FIRST_FAILED_AT,
        story.first_failed_at.and_then(to_rfc3339),
    );
    put(
        headers::LAST_FAILED_AT,
        story.last_failed_at.and_then(to_rfc3339),
    );
    put(headers::LAST_ERROR, story.last_error.clone());
    put(headers::DUE_AT, story.due_at.and_then(to_rfc3339));
    put(
        headers::DEAD_LETTER_REASON,
        story.reason.as_ref().map(|r| r.as_str().to_owned()),
    );
    put(headers::DEAD_LETTER_OWNER, story.owner.clone());
    put(headers::DEAD_LETTER_NOTE, story.note.clone());
    put(headers::REDRIVE_COUNT, count(story.redrive_count));
}

/// What a broker handed over, before its envelope is read.
#[derive(Debug, Clone)]
pub struct Received {
    /// Where it was received from.
    pub coordinates: Origin,
    /// The record's key.
    pub key: Option<Bytes>,
    /// All headers, envelope and user's mixed.
    pub headers: Headers,
    /// The record's bytes.
    pub payload: Option<Bytes>,
    /// The broker's own time of the record, used when the envelope has no `x-occurred-at`.
    pub timestamp: OffsetDateTime,
}

/// A received message, read.
#[derive(Debug, Clone, PartialEq)]
pub struct Incoming {
    /// The message; without a usable id it carries the broker's coordinates as its id.
    pub message: Message,
    /// Its story so far.
    pub story: Story,
    /// Whether the sender gave no usable id (absent, blank, not UTF-8, over 255 bytes, or with NUL).
    pub id_missing: bool,
}

impl Message {
    /// Says which message led to this one: one that a handler enqueues, typically on its own connection, so that it exists
    /// if and only if the handler's work does. It carries the id of `cause`, and its trace context unless it has one.
    ///
    /// ```
    /// use relaybox::{Incoming, Message};
    ///
    /// let order = Incoming::from(Message::new("orders", "OrderPlaced").with_trace("00-aa-bb-01", None));
    /// let payment = Message::new("payments", "PaymentTaken").caused_by(&order);
    /// assert_eq!(payment.causation_id(), Some(order.message.id.as_str()));
    /// assert_eq!(payment.trace, order.message.trace);
    /// ```
    #[must_use]
    pub fn caused_by(mut self, cause: &Incoming) -> Self {
        if self.trace.is_none() {
            self.trace.clone_from(&cause.message.trace);
        }
        self.with_causation_id(cause.message.id.as_str())
    }

    /// The same, where only the id of the cause is known.
    #[must_use]
    pub fn with_causation_id(mut self, id: impl Into<MessageId>) -> Self {
        let id = id.into();
        self.headers
            .replace(headers::CAUSATION_ID, id.as_str().to_owned());
        self
    }

    /// The id of the message that led to this one, if the sender told it.
    #[must_use]
    pub fn causation_id(&self) -> Option<&str> {
        self.headers.get_str(headers::CAUSATION_ID)
    }
}

/// A first delivery, for tests of handlers.
impl From<Message> for Incoming {
    fn from(message: Message) -> Self {
        Self {
            message,
            story: Story::default(),
            id_missing: false,
        }
    }
}

impl Received {
    /// Reads the envelope. Never fails: foreign and broken messages come out as plain ones.
    ///
    /// The first well-formed header of each envelope name is taken. A malformed or repeated one stays with the
    /// user's headers, byte for byte. Story headers are ours alone: a malformed one counts as absent.
    #[must_use]
    pub fn read(self) -> Incoming {
        let mut fields = Fields::default();
        let mut rest = Headers::new();
        for header in self.headers {
            if !fields.take(&header.name, header.value.as_ref()) {
                rest.push_optional(header.name, header.value);
            }
        }
        if fields.trace_parent.is_none()
            && let Some(state) = fields.trace_state.take()
        {
            // A state without its parent is no trace context, but still the sender's bytes.
            rest.push(headers::TRACE_STATE, state);
        }
        let id_missing = fields.id.is_none();
        let id = fields.id.unwrap_or_else(|| self.coordinates.to_string());
        let mut message = Message::existing(
            MessageId::new(id),
            self.coordinates.topic,
            fields.event_type.unwrap_or_default(),
            fields.occurred_at.unwrap_or(self.timestamp),
        );
        message.key = self.key;
        message.payload = self.payload;
        message.headers = rest;
        message.content_type = fields.content_type;
        message.version = fields.version;
        message.trace = fields.trace_parent.map(|parent| TraceContext {
            parent,
            state: fields.trace_state,
        });
        let mut story = fields.story;
        story.origin = fields.original_topic.map(|topic| Origin {
            topic,
            partition: fields.original_partition,
            offset: fields.original_offset,
        });
        Incoming {
            message,
            story,
            id_missing,
        }
    }
}

#[derive(Default)]
struct Fields {
    id: Option<String>,
    event_type: Option<String>,
    occurred_at: Option<OffsetDateTime>,
    version: Option<i64>,
    content_type: Option<String>,
    trace_parent: Option<String>,
    trace_state: Option<String>,
    original_topic: Option<String>,
    original_partition: Option<String>,
    original_offset: Option<String>,
    story: Story,
}

impl Fields {
    /// Whether the header belongs to the envelope or story and was consumed.
    fn take(&mut self, name: &str, value: Option<&Bytes>) -> bool {
        let value = value.and_then(|v| std::str::from_utf8(v).ok());
        let envelope = |slot: &mut Option<String>, usable: bool| match value {
            Some(text) if usable && slot.is_none() => {
                *slot = Some(text.to_owned());
                true
            }
            _ => false,
        };
        match name {
            headers::MESSAGE_ID => envelope(&mut self.id, value.is_some_and(is_usable_id)),
            headers::EVENT_TYPE => envelope(&mut self.event_type, true),
            headers::CONTENT_TYPE => envelope(&mut self.content_type, true),
            headers::TRACE_PARENT => envelope(&mut self.trace_parent, true),
            headers::TRACE_STATE => envelope(&mut self.trace_state, true),
            headers::OCCURRED_AT => fill(&mut self.occurred_at, value.and_then(from_rfc3339)),
            headers::VERSION => fill(&mut self.version, value.and_then(|v| v.parse().ok())),
            _ => self.take_story(name, value),
        }
    }

    fn take_story(&mut self, name: &str, value: Option<&str>) -> bool {
        let story = &mut self.story;
        let text = || value.map(str::to_owned);
        let instant = || value.and_then(from_rfc3339);
        let count = || value.and_then(|v| v.parse().ok()).unwrap_or(0);
        match name {
            headers::ORIGINAL_TOPIC => self.original_topic = text(),
            headers::ORIGINAL_PARTITION => self.original_partition = text(),
            headers::ORIGINAL_OFFSET => self.original_offset = text(),
            headers::CONSUMER => story.consumer = text(),
            headers::RETRY_COUNT => story.retry_count = count(),
            headers::FIRST_FAILED_AT => story.first_failed_at = instant(),
            headers::LAST_FAILED_AT => story.last_failed_at = instant(),
            headers::LAST_ERROR => story.last_error = text(),
            headers::DUE_AT => story.due_at = instant(),
            headers::DEAD_LETTER_REASON => story.reason = value.map(Reason::new),
            headers::DEAD_LETTER_OWNER => story.owner = text(),
            headers::DEAD_LETTER_NOTE => story.note = text(),
            headers::REDRIVE_COUNT => story.redrive_count = count(),
            _ => return false,
        }
        true
    }
}

fn fill<T>(slot: &mut Option<T>, value: Option<T>) -> bool {
    if slot.is_some() || value.is_none() {
        return false;
    }
    *slot = value;
    true
}

/// What an inbox can hold as a key.
pub(crate) fn is_usable_id(id: &str) -> bool {
    !id.trim().is_empty() && id.len() <= 255 && !id.contains('\0')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use time::macros::datetime;

    fn coordinates() -> Origin {
        Origin {
            topic: "orders".into(),
            partition: Some("2".into()),
            offset: Some("41".into()),
        }
    }

    fn receive(outgoing: &Outgoing) -> Incoming {
        Received {
            coordinates: coordinates(),
            key: outgoing.message.key.clone(),
            headers: outgoing.to_headers(),
            payload: outgoing.message.payload.clone(),
            timestamp: datetime!(2020-01-01 0:00 UTC),
        }
        .read()
    }

    fn full() -> Message {
        let mut message = Message::new("orders", "OrderPlaced")
            .with_key("")
            .with_payload("")
            .with_content_type("application/json")
            .with_version(-3)
            .with_trace("00-aa-bb-01", Some("v=1".into()))
            .with_header("a", "1")
            .with_header("a", vec![0xff, 0])
            .with_header("b", Bytes::new());
        message.headers.push_optional("c", None);
        message
    }

    #[test]
    fn a_message_and_its_story_read_back_equal() {
        let at = datetime!(2026-01-05 10:00:00.000001 UTC);
        let story = Story::default()
            .failed("billing", &coordinates(), "handler", "no stock", at)
            .due(at);
        let sent = Outgoing {
            message: full(),
            story,
        };
        let back = receive(&sent);
        assert_eq!(back.message, sent.message);
        assert_eq!(back.story, sent.story);
        assert!(!back.id_missing);

        let mut story = sent.story.dead(Reason::new(Reason::PERMANENT));
        story.owner = Some("team-billing".into());
        story.note = Some("see the runbook".into());
        let dead = Outgoing {
            message: full(),
            story,
        };
        assert_eq!(receive(&dead).story, dead.story);
    }

    #[test]
    fn a_fresh_message_writes_no_story() {
        let plain = Outgoing::from(Message::new("orders", "T"));
        let names: Vec<_> = plain.to_headers().into_iter().map(|h| h.name).collect();
        assert_eq!(names, ["x-message-id", "x-event-type", "x-occurred-at"]);
    }

    #[test]
    fn the_largest_story_stays_below_four_kilobytes() {
        let long = "x".repeat(10_000);
        let origin = Origin {
            topic: long.clone(),
            partition: Some(long.clone()),
            offset: Some(long.clone()),
        };
        let at = datetime!(2026-01-05 10:00:00.000001 UTC);
        let mut story = Story::default()
            .failed(&long, &origin, &long, &long, at)
            .dead(Reason::new(&long));
        story.retry_count = u32::MAX;
        story.redrive_count = u32::MAX;
        story.owner = Some("x".repeat(crate::story::OWNER_BYTES_MAX));
        story.note = Some("x".repeat(crate::story::NOTE_BYTES_MAX));
        let bare = Outgoing::from(Message::new("t", "T"));
        let told = Outgoing {
            message: bare.message.clone(),
            story,
        };
        assert!(told.to_headers().bytes() - bare.to_headers().bytes() < 4_096);
    }

    proptest! {
        #[test]
        fn a_story_stays_below_four_kilobytes_whatever_the_error_says(
            texts in proptest::array::uniform5(("\\PC{1,12}", 0usize..400)), steps in 1u32..40, owner in "\\PC{0,60}",
        ) {
            let [topic, consumer, class, text, reason] = texts.map(|(text, times)| text.repeat(times));
            let origin = Origin { topic: topic.clone(), partition: Some(consumer.clone()), offset: Some(topic) };
            let at = datetime!(2026-01-05 10:00:00.000001 UTC);
            let failed = |story: Story, _| story.failed(&consumer, &origin, &class, &text, at).due(at);
            let mut story = (0..steps).fold(Story::default(), failed);
            story = Story { owner: Some(owner.clone()), note: Some(owner.repeat(2)), ..story };
            let bare = Outgoing::from(Message::new("t", "T"));
            for story in [story.clone(), story.dead(Reason::new(&reason))] {
                let message = bare.message.clone();
                let told = Outgoing { message, story }.to_headers().bytes();
                prop_assert!(told - bare.to_headers().bytes() < 4_096);
            }
        }
    }

    #[test]
    fn foreign_and_broken_headers_never_fail_and_lose_no_byte() {
        let mut headers = Headers::new();
        headers.push("x-message-id", "  ");
        headers.push("x-version", "seven");
        headers.push("x-occurred-at", vec![0xff]);
        headers.push("x-retry-count", "many");
        headers.push("x-due-at", "soon");
        headers.push_optional("x-event-type", None);
        headers.push("Foreign", "1");
        headers.push("tracestate", "v=1");
        let timestamp = datetime!(2020-01-01 0:00 UTC);
        let read = Received {
            coordinates: coordinates(),
            key: None,
            headers,
            payload: None,
            timestamp,
        }
        .read();
        assert!(read.id_missing);
        assert_eq!(read.message.id.as_str(), "orders/2/41");
        assert_eq!(read.message.occurred_at, timestamp);
        assert_eq!(read.story, Story::default());
        let kept: Vec<_> = read
            .message
            .headers
            .iter()
            .map(|h| h.name.as_str())
            .collect();
        assert_eq!(
            kept,
            [
                "x-message-id",
                "x-version",
                "x-occurred-at",
                "x-event-type",
                "Foreign",
                "tracestate"
            ]
        );
    }

    #[test]
    fn a_message_has_one_cause_and_keeps_a_trace_of_its_own() {
        let cause = Incoming::from(full().with_id("m-1"));
        let sent = Message::new("payments", "PaymentTaken")
            .with_header("a", "1")
            .with_causation_id("m-0")
            .with_header("b", "2");
        let sent = sent.caused_by(&cause);
        assert_eq!(sent.causation_id(), Some("m-1"));
        assert_eq!(sent.headers.len(), 3);
        assert_eq!(sent.trace, cause.message.trace);
        let back = receive(&Outgoing::from(sent.clone())).message;
        assert_eq!(back.causation_id(), Some("m-1"));
        let own = Message::new("payments", "T").with_trace("00-cc-dd-01", None);
        assert_eq!(own.clone().caused_by(&cause).trace, own.trace);
    }

    #[test]
    fn the_first_usable_id_wins() {
        let mut headers = Headers::new();
        headers.push("x-message-id", "x".repeat(256));
        headers.push("x-message-id", "m-1");
        headers.push("x-message-id", "m-2");
        let read = Received {
            coordinates: coordinates(),
            key: None,
            headers,
            payload: None,
            timestamp: datetime!(2020-01-01 0:00 UTC),
        }
        .read();
        assert_eq!(read.message.id.as_str(), "m-1");
        assert_eq!(read.message.headers.len(), 2);
    }
}
