//! Messages as NATS messages with headers, and back.
//!
//! A NATS header is a line of text: values lose space at their ends, names keep no order among each other, and there is
//! no null. What fits travels natively, so that anybody can read it; what does not fit travels in
//! [`headers::ENCODED_HEADERS`] as well, and a reader takes it from there.

use std::collections::BTreeSet;
use std::str::FromStr;

use async_nats::header::{HeaderMap, HeaderName, HeaderValue};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bytes::Bytes;
use md5::{Digest as _, Md5};
use time::OffsetDateTime;

use super::fit::{Parts, is_servers_own, line_bytes};
use super::names::{SUBJECT_RULE, is_subject};
use crate::envelope::{Outgoing, Received};
use crate::error::{Error, ErrorKind, Result};
use crate::header_text;
use crate::headers::{self, Headers};
use crate::message::Message;
use crate::story::{Origin, Story};

/// The server's own bound is 65,535 bytes for everything in front of the payload.
pub(super) const HEADER_BYTES_MAX: usize = 65_000;
/// What a story may add to a message that was accepted without one, also where all of it must be encoded.
const STORY_BYTES: usize = 8 * 1_024;

const MESSAGE_ID: &str = "Nats-Msg-Id";
const EXPECTED_STREAM: &str = "Nats-Expected-Stream";
/// Begins a word of the id that does not stand for itself.
const ENCODED: &str = "base64:";
/// Longest word of the id that stands for itself.
const WORD_BYTES_MAX: usize = 1_024;

/// Refuses at enqueue what can never be published: a destination that is no subject, and headers that do not fit into
/// what the server takes, once they are encoded and a story stands beside them.
pub(super) fn refuse(message: &Message) -> Result<()> {
    if !is_subject(&message.destination) {
        return Err(Error::invalid(
            "destination",
            SUBJECT_RULE,
            &message.destination,
        ));
    }
    let parts = Parts::of(message, &Story::default());
    let limit = HEADER_BYTES_MAX - STORY_BYTES;
    if parts.least_bytes() <= limit {
        return Ok(());
    }
    Err(Error::invalid(
        "headers",
        format!("at most {limit} bytes as NATS headers, encoded where they are no plain text"),
        format!("{} bytes", parts.least_bytes()),
    ))
}

/// The headers and the body of a message.
///
/// # Errors
/// [`ErrorKind::Rejected`] when the headers are larger than a server takes.
pub(super) fn encode(outgoing: &Outgoing, stream: Option<&str>) -> Result<(HeaderMap, Bytes)> {
    let Outgoing { message, story } = outgoing;
    let parts = Parts::of(message, story);
    let id = (MESSAGE_ID.to_owned(), deduplication_id(outgoing));
    let expected = stream.map(|name| (EXPECTED_STREAM.to_owned(), name.to_owned()));
    let mut bytes = parts.least_bytes() + line_bytes(&id);
    bytes += expected.as_ref().map_or(0, line_bytes);
    if bytes > HEADER_BYTES_MAX {
        return Err(Error::new(
            ErrorKind::Rejected,
            "publish",
            format!("{bytes} bytes of headers, and a server takes {HEADER_BYTES_MAX}"),
        ));
    }
    let courtesy: usize = parts.courtesy.iter().map(line_bytes).sum();
    let courtesy = if bytes + courtesy <= HEADER_BYTES_MAX {
        parts.courtesy
    } else {
        Vec::new()
    };
    let mut map = HeaderMap::new();
    let all = parts.native.into_iter().chain(courtesy);
    for (name, value) in all.chain([id]).chain(expected) {
        // Checked before; the fallible way all the same, because the other one panics.
        if let (Ok(name), Ok(value)) = (HeaderName::from_str(&name), HeaderValue::from_str(&value))
        {
            map.append(name, value);
        }
    }
    Ok((map, message.payload.clone().unwrap_or_default()))
}

/// What the server compares to find repetitions, over all subjects of a stream. Another subject has another one, and a
/// copy for a rung, for the dead letters or by a redrive has another one than its original: within the window the server
/// would answer such a message with a confirmation and drop it.
///
/// Words with spaces between: the id, the subject, the digest, and what is said of a copy. None holds a space itself, so no
/// two messages share one by chance. The digest tells messages apart whose sender repeats ids; a resend has the same one.
fn deduplication_id(Outgoing { message, story }: &Outgoing) -> String {
    let digest = URL_SAFE_NO_PAD.encode(message.digest());
    let mut words = vec![
        word(message.id.as_str()),
        message.destination.clone(),
        digest,
    ];
    if story.retry_count > 0 {
        words.push(format!("r{}", story.retry_count));
    }
    if story.redrive_count > 0 {
        words.push(format!("d{}", story.redrive_count));
    }
    if story.reason.is_some() {
        words.push("dead".to_owned());
    }
    // Consumers may share a stream for what they failed, and sources a rung.
    if let Some(consumer) = &story.consumer {
        words.push(format!("by={}", word(consumer)));
    }
    if let Some(origin) = &story.origin {
        words.push(format!("from={}", word(&origin.topic)));
    }
    words.join(" ")
}

/// A text as one word that can stand in a header.
fn word(text: &str) -> String {
    let split = |c: char| c.is_whitespace() || c.is_control();
    if text.is_empty() || text.starts_with(ENCODED) || text.chars().any(split) {
        format!("{ENCODED}{}", STANDARD.encode(text))
    } else if text.len() > WORD_BYTES_MAX {
        // Somebody else's name of a topic may have any length.
        format!("{ENCODED}{}", STANDARD.encode(Md5::digest(text)))
    } else {
        text.to_owned()
    }
}

/// Where a message stands and since when.
pub(super) struct Place<'a> {
    pub(super) subject: &'a str,
    pub(super) stream: &'a str,
    pub(super) sequence: u64,
    pub(super) stored_at: OffsetDateTime,
}

/// The header lines that the client read, in an order that is always the same; it keeps none of names.
pub(super) fn lines(map: Option<&HeaderMap>) -> Vec<(String, Bytes)> {
    let mut lines: Vec<(String, Bytes)> = map
        .into_iter()
        .flat_map(HeaderMap::iter)
        .flat_map(|(name, values)| {
            let name: &str = name.as_ref();
            let line = move |value: &HeaderValue| {
                let value = Bytes::copy_from_slice(value.as_str().as_bytes());
                (name.to_owned(), value)
            };
            values.iter().map(line)
        })
        .collect();
    // Values of a name stay in their order.
    lines.sort_by(|(a, _), (b, _)| a.cmp(b));
    lines
}

/// Reads a message. Never fails: what is broken stays with the user's headers.
pub(super) fn received(
    place: &Place<'_>,
    mut lines: Vec<(String, Bytes)>,
    payload: Bytes,
) -> Received {
    let mut fields = Fields::default();
    lines.retain(|(name, value)| {
        !is_servers_own(name) && !fields.take(name, value, payload.is_empty())
    });
    let decoded = fields.decoded.unwrap_or_default();
    let names: BTreeSet<&str> = decoded.iter().map(|header| header.name.as_str()).collect();
    let mut all = Headers::new();
    for (name, value) in lines {
        if !names.contains(name.as_str()) {
            all.push(name, value);
        }
    }
    for header in &decoded {
        all.push_optional(header.name.clone(), header.value.clone());
    }
    Received {
        coordinates: Origin {
            topic: place.subject.to_owned(),
            partition: Some(place.stream.to_owned()),
            offset: Some(place.sequence.to_string()),
        },
        key: fields.key,
        headers: all,
        payload: (!fields.null_payload).then_some(payload),
        timestamp: place.stored_at,
    }
}

/// What a message holds besides its headers proper.
#[derive(Default)]
struct Fields {
    decoded: Option<Headers>,
    key: Option<Bytes>,
    null_payload: bool,
}

impl Fields {
    /// Whether the header is one of ours and well-formed; the first of each is taken.
    fn take(&mut self, name: &str, value: &[u8], empty: bool) -> bool {
        match name {
            headers::ENCODED_HEADERS if self.decoded.is_none() => {
                self.decoded = header_text::decode(value);
                self.decoded.is_some()
            }
            headers::KEY if self.key.is_none() => {
                self.key = STANDARD.decode(value).ok().map(Bytes::from);
                self.key.is_some()
            }
            headers::NULL_PAYLOAD if empty && !self.null_payload => {
                self.null_payload = true;
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::story::Reason;
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;
    use time::macros::datetime;

    fn place() -> Place<'static> {
        Place {
            subject: "orders",
            stream: "ORDERS",
            sequence: 7,
            stored_at: datetime!(2026-01-05 10:00 UTC),
        }
    }

    fn full() -> Message {
        let mut message = Message::new("orders", "OrderPlaced")
            .with_key("")
            .with_payload("")
            .with_content_type("application/json")
            .with_version(-3)
            .with_trace("00-aa-bb-01", Some("v=1".into()))
            .with_header("b", "1")
            .with_header("a", "2")
            .with_header("b", vec![0xff, 0, b'\r', b'\n'])
            .with_header("empty", Vec::new())
            .with_header("名 with : and space", " leading space")
            .with_header("Nats-Rollup", "all")
            .with_header("nats-ttl", "1s");
        message.headers.push_optional("null", None);
        message
    }

    /// As a client does it that reads the lines from the wire.
    fn over_the_wire(map: &HeaderMap) -> HeaderMap {
        let mut read = HeaderMap::new();
        for (name, values) in map.iter() {
            for value in values {
                let text = value.as_str().trim();
                read.append(name.clone(), HeaderValue::from_str(text).unwrap());
            }
        }
        read
    }

    fn round_trip(outgoing: &Outgoing) -> crate::envelope::Incoming {
        let (map, body) = encode(outgoing, Some("ORDERS")).unwrap();
        received(&place(), lines(Some(&over_the_wire(&map))), body).read()
    }

    fn value(map: &HeaderMap, name: &str) -> Option<String> {
        let name = HeaderName::from_str(name).unwrap();
        map.get(name).map(|value| value.as_str().to_owned())
    }

    #[test]
    fn every_byte_of_a_message_reads_back_equal() {
        for message in [
            full(),
            Message::new("orders", "OrderDeleted").with_key([0, 0xff]),
            Message::new("orders", "T")
                .with_payload(vec![0, 0xff])
                .with_header("one", "plain"),
        ] {
            let read = round_trip(&message.clone().into());
            assert_eq!(read.message, message);
            assert!(!read.id_missing);
        }
    }

    #[test]
    fn plain_text_is_not_encoded() {
        let message = Message::new("orders", "T")
            .with_header("tenant", "acme")
            .with_payload("x");
        let (map, _) = encode(&message.into(), None).unwrap();
        assert_eq!(value(&map, "tenant").as_deref(), Some("acme"));
        for absent in [
            "x-headers",
            "x-key",
            "x-null-payload",
            "Nats-Expected-Stream",
        ] {
            assert_eq!(value(&map, absent), None, "{absent}");
        }
    }

    #[test]
    fn no_header_of_a_user_gives_orders_to_the_server() {
        let (map, _) = encode(&full().into(), Some("ORDERS")).unwrap();
        let orders: BTreeSet<String> = map
            .iter()
            .map(|(name, _)| name.to_string())
            .filter(|name| is_servers_own(name))
            .collect();
        assert_eq!(
            orders.into_iter().collect::<Vec<_>>(),
            ["Nats-Expected-Stream", "Nats-Msg-Id"]
        );
    }

    #[test]
    fn a_story_with_line_breaks_survives() {
        let origin = Origin {
            topic: "orders".into(),
            partition: Some("ORDERS".into()),
            offset: Some("7".into()),
        };
        let at = datetime!(2026-01-05 10:00 UTC);
        let story = Story::default()
            .failed(" my\nbilling", &origin, "handler", "no\r\nstock ", at)
            .dead(Reason::new("permanent"));
        let outgoing = Outgoing {
            message: full(),
            story,
        };
        let read = round_trip(&outgoing);
        assert_eq!(
            (read.message, read.story),
            (outgoing.message, outgoing.story)
        );
    }

    #[test]
    fn copies_have_ids_of_their_own() {
        let mut outgoing = Outgoing::from(Message::new("orders", "T").with_id("m-1"));
        let digest = URL_SAFE_NO_PAD.encode(outgoing.message.digest());
        let first = format!("m-1 orders {digest}");
        assert_eq!(deduplication_id(&outgoing), first);
        outgoing.story.retry_count = 2;
        assert_eq!(deduplication_id(&outgoing), format!("{first} r2"));
        outgoing.story.redrive_count = 1;
        outgoing.story.consumer = Some("billing".into());
        outgoing.story.origin = Some(Origin {
            topic: "orders.placed".into(),
            partition: None,
            offset: None,
        });
        let on_a_rung = deduplication_id(&outgoing);
        let said = "r2 d1 by=billing from=orders.placed";
        assert_eq!(on_a_rung, format!("{first} {said}"));
        outgoing.story.reason = Some(Reason::new("permanent"));
        assert_ne!(deduplication_id(&outgoing), on_a_rung);
        for (id, expected) in [
            (" m\r\n1", "base64:IG0NCjE= orders"),
            ("a b", "base64:YSBi orders"),
            ("base64:YSBi", "base64:YmFzZTY0OllTQmk= orders"),
        ] {
            let outgoing = Outgoing::from(Message::new("orders", "T").with_id(id));
            assert!(deduplication_id(&outgoing).starts_with(&format!("{expected} ")));
        }
    }

    #[test]
    fn subjects_and_origins_of_one_stream_do_not_share_an_id() {
        let of = |subject: &str| Outgoing::from(Message::new(subject, "T").with_id("order-17"));
        let placed = deduplication_id(&of("orders.placed"));
        assert_ne!(placed, deduplication_id(&of("orders.audit")));
        let failed = |topic: String| {
            let mut outgoing = of("orders.billing.retry");
            let (partition, offset) = (None, None);
            outgoing.story.origin = Some(Origin {
                topic,
                partition,
                offset,
            });
            deduplication_id(&outgoing)
        };
        assert_ne!(failed("orders".into()), failed("refunds".into()));
        let long = |end: &str| failed("x".repeat(40_000) + end);
        assert_ne!(long("a"), long("b"));
        assert!(long("a").len() < 3 * WORD_BYTES_MAX);
    }

    #[test]
    fn a_users_header_is_not_taken_for_the_key_or_for_no_payload() {
        let bare = Message::new("orders", "T").with_payload("");
        for (name, value) in [
            ("x-key", "a2V5"),
            ("x-null-payload", "true"),
            ("x-headers", "[]"),
        ] {
            let message = bare.clone().with_header(name, value);
            assert_eq!(round_trip(&message.clone().into()).message, message);
        }
    }

    #[test]
    fn foreign_and_broken_headers_lose_no_byte() {
        let mut map = HeaderMap::new();
        for (name, text) in [
            ("Foreign", "1"),
            ("x-headers", "not json"),
            ("x-key", "?"),
            ("x-null-payload", "true"),
            ("x-message-id", "m-1"),
            ("Nats-Stream", "ORDERS"),
        ] {
            map.append(
                HeaderName::from_str(name).unwrap(),
                HeaderValue::from_str(text).unwrap(),
            );
        }
        let read = received(&place(), lines(Some(&map)), "body".into()).read();
        assert_eq!(read.message.id.as_str(), "m-1");
        assert_eq!(read.message.key, None);
        assert_eq!(read.message.payload.as_deref(), Some(&b"body"[..]));
        let kept: Vec<_> = read
            .message
            .headers
            .iter()
            .map(|h| h.name.as_str())
            .collect();
        assert_eq!(kept, ["Foreign", "x-headers", "x-key", "x-null-payload"]);
        // A copy of it carries what was broken on, byte for byte.
        let copy = round_trip(&read.message.clone().into());
        assert_eq!(copy.message.headers, read.message.headers);

        let bare = received(&place(), lines(None), Bytes::new()).read();
        assert!(bare.id_missing);
        assert_eq!(bare.message.id.as_str(), "orders/ORDERS/7");
        assert_eq!(bare.message.payload, Some(Bytes::new()));
    }

    #[test]
    fn what_no_server_takes_is_refused_at_enqueue() {
        let field = |message: &Message| refuse(message).err()?.violation().map(|v| v.field);
        assert_eq!(field(&full()), None);
        assert_eq!(field(&Message::new("a b", "T")), Some("destination"));
        assert_eq!(
            field(&Message::new("$JS.API.INFO", "T")),
            Some("destination")
        );
        let many = (0..5_000).fold(Message::new("orders", "T"), |message, n| {
            message.with_header(format!("h{n}"), "v")
        });
        assert_eq!(field(&many), Some("headers"));
        assert!(encode(&many.into(), None).is_err());
        let largest = Message::new("orders", "T").with_header("a", vec![0xff; 32_000]);
        assert_eq!(field(&largest), None);
    }

    proptest! {
        #[test]
        fn any_headers_read_back_equal(
            all in vec((".{1,9}", option::of(vec(any::<u8>(), 0..9))), 0..6),
            key in option::of(vec(any::<u8>(), 0..9)),
            payload in option::of(vec(any::<u8>(), 0..9)),
        ) {
            let mut message = Message::new("orders", "T");
            message.key = key.map(Bytes::from);
            message.payload = payload.map(Bytes::from);
            for (name, value) in all {
                message.headers.push_optional(name, value.map(Bytes::from));
            }
            let read = round_trip(&message.clone().into());
            prop_assert_eq!(read.message, message);
        }
    }
}
