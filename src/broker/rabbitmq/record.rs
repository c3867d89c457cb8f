//! Messages as AMQP properties and a table of headers, and back.

use std::collections::BTreeMap;

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, ByteArray, FieldArray, FieldTable, LongString};
use time::OffsetDateTime;

use super::arguments::{acts, is_made, short, text};
use super::place::Place;
use crate::envelope::{Outgoing, Received};
use crate::error::{Error, Result};
use crate::header_text;
use crate::headers::{self, Header, Headers};
use crate::message::Message;
use crate::story::Origin;

/// Most bytes of properties and headers. They travel in one frame, which the protocol cannot split, and the client
/// sends nothing any more behind one that is larger than its buffer.
pub(super) const HEADER_BYTES_MAX: usize = 64 * 1_024;
/// What a story may take of that.
const STORY_BYTES_MAX: usize = 4 * 1_024;
const PERSISTENT: u8 = 2;
const NAME_BYTES_MAX: usize = 255;

/// Refuses what can never be carried, at enqueue.
pub(super) fn refuse(message: &Message) -> Result<()> {
    Place::read(&message.destination)?;
    let outgoing = Outgoing::from(message.clone());
    properties(&outgoing, HEADER_BYTES_MAX - STORY_BYTES_MAX).map(drop)
}

/// The properties of a message, with its headers.
///
/// # Errors
/// [`Invalid`](crate::ErrorKind::Invalid) for headers over `bytes_max` or an id that the protocol cannot carry.
pub(super) fn properties(outgoing: &Outgoing, bytes_max: usize) -> Result<BasicProperties> {
    let message = &outgoing.message;
    let id = short(message.id.as_str())
        .ok_or_else(|| Error::invalid("id", "at most 255 bytes", message.id.as_str()))?;
    let mut properties = BasicProperties::default()
        .with_delivery_mode(PERSISTENT)
        .with_message_id(id);
    let mut table = BTreeMap::new();
    let all = outgoing.to_headers();
    let own = all.len() - message.headers.len();
    for header in all.iter().take(own) {
        let value = header.value.as_deref().unwrap_or_default();
        let property = std::str::from_utf8(value).ok().and_then(short);
        match (&*header.name, property) {
            (headers::EVENT_TYPE, Some(property)) => properties = properties.with_type(property),
            (headers::CONTENT_TYPE, Some(property)) => {
                properties = properties.with_content_type(property);
            }
            (name, _) => {
                table.insert(name.to_owned(), bytes(value));
            }
        }
    }
    if let Some(key) = &message.key {
        table.insert(headers::KEY.to_owned(), ByteArray::from(&**key).into());
    }
    if message.payload.is_none() {
        table.insert(headers::NULL_PAYLOAD.to_owned(), AMQPValue::Boolean(true));
    }
    let envelope_bytes = table_bytes(&table);
    let native = native(&message.headers, &table);
    if is_whole(&message.headers, &native) {
        table.extend(native);
    } else {
        let encoded = header_text::encode(&message.headers);
        table.insert(headers::ENCODED_HEADERS.to_owned(), text(&encoded));
        // Beside the encoding the native ones only serve readers of another kind: they go where both do not fit.
        if envelope_bytes + encoded.len() + table_bytes(&native) + FIXED_BYTES <= bytes_max {
            table.extend(native);
        }
    }
    let bytes = table_bytes(&table) + FIXED_BYTES;
    if bytes > bytes_max {
        return Err(Error::invalid(
            "headers",
            format!("at most {bytes_max} bytes with the envelope, as RabbitMQ carries them"),
            format!("{bytes} bytes"),
        ));
    }
    let mut headers = FieldTable::default();
    for (name, value) in table {
        if let Some(name) = short(&name) {
            headers.insert(name, value);
        }
    }
    Ok(properties.with_headers(headers))
}

/// The properties beside the table: three short strings at most, and their framing.
const FIXED_BYTES: usize = 3 * 256 + 64;

/// Text and bytes in the types that most clients show as such.
fn bytes(value: &[u8]) -> AMQPValue {
    match std::str::from_utf8(value) {
        Ok(_) => AMQPValue::LongString(LongString::from(value)),
        Err(_) => AMQPValue::ByteArray(ByteArray::from(value)),
    }
}

/// Those headers that a table can hold beside the envelope: repeats as an array, null as no value.
fn native(user: &Headers, envelope: &BTreeMap<String, AMQPValue>) -> BTreeMap<String, AMQPValue> {
    let mut values: BTreeMap<&str, Vec<AMQPValue>> = BTreeMap::new();
    for header in user {
        let fits = (1..=NAME_BYTES_MAX).contains(&header.name.len());
        if !fits
            || acts(&header.name)
            || headers::is_reserved(&header.name)
            || envelope.contains_key(&header.name)
        {
            continue;
        }
        let value = header.value.as_deref().map_or(AMQPValue::Void, bytes);
        values.entry(&header.name).or_default().push(value);
    }
    values
        .into_iter()
        .map(|(name, mut values)| {
            let value = match values.pop() {
                Some(only) if values.is_empty() => only,
                last => {
                    values.extend(last);
                    AMQPValue::FieldArray(FieldArray::from(values))
                }
            };
            (name.to_owned(), value)
        })
        .collect()
}

/// Whether the table alone gives all headers back in their order, which in a table is that of the names.
fn is_whole(user: &Headers, native: &BTreeMap<String, AMQPValue>) -> bool {
    user.iter().all(|header| native.contains_key(&header.name))
        && user.iter().is_sorted_by_key(|header| &header.name)
}

fn table_bytes(table: &BTreeMap<String, AMQPValue>) -> usize {
    table
        .iter()
        .map(|(name, value)| name.len() + 1 + value_bytes(value))
        .sum()
}

fn value_bytes(value: &AMQPValue) -> usize {
    const TYPE_AND_LENGTH: usize = 5;
    TYPE_AND_LENGTH
        + match value {
            AMQPValue::LongString(text) => text.len(),
            AMQPValue::ByteArray(bytes) => bytes.len(),
            AMQPValue::FieldArray(values) => values.as_slice().iter().map(value_bytes).sum(),
            _ => 8,
        }
}

/// Reads a message that came through this place. Never fails: what others sent comes out as well as headers can hold it.
pub(super) fn received(
    topic: String,
    queue: &str,
    properties: &BasicProperties,
    body: Vec<u8>,
) -> Received {
    let coordinates = Origin {
        topic,
        partition: Some(queue.to_owned()),
        offset: None,
    };
    let mut read = Table::default();
    for (name, value) in properties.headers().iter().flat_map(FieldTable::inner) {
        read.take(name.as_str(), value);
    }
    let mut out = Headers::new();
    let fields = [
        (headers::MESSAGE_ID, properties.message_id()),
        (headers::EVENT_TYPE, properties.kind()),
        (headers::CONTENT_TYPE, properties.content_type()),
    ];
    for (name, value) in fields {
        // Where a message has both, the header is the one that nobody else writes.
        if let Some(value) = value
            && !read.headers.iter().any(|header| header.name == name)
        {
            out.push(name, value.as_str().to_owned());
        }
    }
    let encoded = read.encoded.unwrap_or_default();
    let is_encoded = |name: &str| encoded.iter().any(|header| header.name == name);
    let native = read
        .headers
        .into_iter()
        .filter(|header| headers::is_reserved(&header.name) || !is_encoded(&header.name));
    let all: Headers = out
        .into_iter()
        .chain(native)
        .chain(encoded.clone())
        .collect();
    let is_null = read.null_payload && body.is_empty();
    Received {
        coordinates,
        key: read.key,
        headers: all,
        payload: (!is_null).then(|| body.into()),
        timestamp: properties
            .timestamp()
            .and_then(|seconds| i64::try_from(seconds).ok())
            .and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok())
            .unwrap_or_else(OffsetDateTime::now_utc),
    }
}

#[derive(Default)]
struct Table {
    key: Option<Bytes>,
    null_payload: bool,
    encoded: Option<Headers>,
    headers: Vec<Header>,
}

impl Table {
    fn take(&mut self, name: &str, value: &AMQPValue) {
        match name {
            headers::KEY => self.key = scalar(value),
            headers::NULL_PAYLOAD => self.null_payload = true,
            name if is_made(name) => {}
            _ => {
                if name == headers::ENCODED_HEADERS
                    && let Some(encoded) = scalar(value).and_then(|text| header_text::decode(&text))
                {
                    self.encoded = Some(encoded);
                    return;
                }
                let mut push = |value| {
                    let name = name.to_owned();
                    self.headers.push(Header { name, value });
                };
                match value {
                    AMQPValue::FieldArray(values) => {
                        values
                            .as_slice()
                            .iter()
                            .for_each(|value| push(scalar(value)));
                    }
                    value => push(scalar(value)),
                }
            }
        }
    }
}

/// One value as bytes; `None` is null. Numbers become decimal text, structures JSON.
fn scalar(value: &AMQPValue) -> Option<Bytes> {
    let text = match value {
        AMQPValue::Void => return None,
        AMQPValue::LongString(text) => return Some(Bytes::copy_from_slice(text.as_bytes())),
        AMQPValue::ByteArray(bytes) => return Some(Bytes::copy_from_slice(bytes.as_slice())),
        AMQPValue::ShortString(text) => text.as_str().to_owned(),
        AMQPValue::Boolean(value) => value.to_string(),
        AMQPValue::ShortShortInt(value) => value.to_string(),
        AMQPValue::ShortShortUInt(value) => value.to_string(),
        AMQPValue::ShortInt(value) => value.to_string(),
        AMQPValue::ShortUInt(value) => value.to_string(),
        AMQPValue::LongInt(value) => value.to_string(),
        AMQPValue::LongUInt(value) => value.to_string(),
        AMQPValue::LongLongInt(value) => value.to_string(),
        AMQPValue::Timestamp(value) => value.to_string(),
        AMQPValue::Float(value) => value.to_string(),
        AMQPValue::Double(value) => value.to_string(),
        AMQPValue::DecimalValue(value) => format!("{}e-{}", value.value, value.scale),
        other => serde_json::to_string(other).unwrap_or_default(),
    };
    Some(text.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::story::Story;
    use lapin::types::ShortString;
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;

    fn back(outgoing: &Outgoing) -> crate::envelope::Incoming {
        let properties = properties(outgoing, HEADER_BYTES_MAX).unwrap();
        let place = Place::read(&outgoing.message.destination).unwrap();
        let body = outgoing.message.payload.as_deref().unwrap_or_default();
        received(place.name(), "q", &properties, body.to_vec()).read()
    }

    fn table(outgoing: &Outgoing) -> FieldTable {
        let properties = properties(outgoing, HEADER_BYTES_MAX).unwrap();
        properties.headers().clone().unwrap()
    }

    #[test]
    fn what_a_table_can_hold_is_native_and_nothing_else_is_written() {
        let mut message = Message::new("orders", "T")
            .with_header("a", "1")
            .with_header("b", "2")
            .with_header("b", vec![0xff]);
        message.headers.push_optional("c", None);
        let outgoing = Outgoing::from(message);
        let table = table(&outgoing);
        assert!(!table.contains_key(headers::ENCODED_HEADERS));
        assert_eq!(table.inner().get("a"), Some(&text("1")));
        assert_eq!(table.inner().get("c"), Some(&AMQPValue::Void));
        assert_eq!(back(&outgoing).message, outgoing.message);
    }

    #[test]
    fn what_the_broker_would_act_on_travels_encoded_and_reads_back_equal() {
        let names = [
            "CC",
            "bcc",
            "x-death",
            "x-first-death-queue",
            "x-delay",
            "x-delivery-count",
        ];
        let message = names
            .iter()
            .fold(Message::new("orders", "T"), |message, name| {
                message.with_header(*name, "orders.stolen")
            });
        let outgoing = Outgoing::from(message);
        let table = table(&outgoing);
        assert!(
            names.iter().all(|name| !table.contains_key(name)),
            "{table:?}"
        );
        assert_eq!(back(&outgoing).message, outgoing.message);
    }

    #[test]
    fn headers_over_a_frame_are_refused_and_natives_give_way_first() {
        let of = |bytes: usize| {
            Message::new("orders", "T")
                .with_header("z", vec![0xff; bytes])
                .with_header("a", "unsorted")
        };
        let outgoing = Outgoing::from(of(32 * 1_024));
        assert!(!table(&outgoing).contains_key("z"));
        assert_eq!(back(&outgoing).message, outgoing.message);
        let error = refuse(&of(60 * 1_024)).unwrap_err();
        assert_eq!(error.violation().unwrap().field, "headers");
    }

    #[test]
    fn foreign_types_are_read_as_text() {
        let mut inner = FieldTable::default();
        inner.insert(ShortString::from("n"), AMQPValue::LongInt(1));
        let mut table = FieldTable::default();
        for (name, value) in [
            ("count", AMQPValue::LongLongInt(-7)),
            ("flag", AMQPValue::Boolean(true)),
            (
                "list",
                AMQPValue::FieldArray(FieldArray::from(vec![
                    AMQPValue::LongInt(1),
                    AMQPValue::Void,
                ])),
            ),
            ("nested", AMQPValue::FieldTable(inner)),
            (headers::ENCODED_HEADERS, text("not ours")),
            (headers::KEY, AMQPValue::LongInt(5)),
            ("x-death", AMQPValue::FieldArray(FieldArray::default())),
        ] {
            table.insert(ShortString::from(name), value);
        }
        let properties = BasicProperties::default()
            .with_headers(table)
            .with_timestamp(u64::MAX);
        let place = Place::read("events/a").unwrap();
        let read = received(place.name(), "q", &properties, b"body".to_vec());
        let get = |name| read.headers.get_str(name);
        assert_eq!(get("count"), Some("-7"));
        assert_eq!(get("flag"), Some("true"));
        assert_eq!(read.headers.iter().filter(|h| h.name == "list").count(), 2);
        assert!(get("nested").is_some_and(|json| json.contains("\"n\"")));
        assert_eq!(get(headers::ENCODED_HEADERS), Some("not ours"));
        assert_eq!(get("x-death"), None);
        assert_eq!(read.key.as_deref(), Some(&b"5"[..]));
        assert_eq!(read.coordinates.topic, "events/a");
        assert!(read.read().id_missing);
    }

    proptest! {
        #[test]
        fn whatever_is_sent_reads_back_equal(
            all in vec(("[a-cCx-]{0,3}|CC", option::of(vec(any::<u8>(), 0..4))), 0..5),
            key in option::of(vec(any::<u8>(), 0..3)),
            payload in option::of(vec(any::<u8>(), 0..3)),
            content_type in option::of("[a-z/]{0,3}"),
        ) {
            let mut message = Message::new("orders", "T");
            for (name, value) in all {
                message.headers.push_optional(name, value.map(Bytes::from));
            }
            message.key = key.map(Bytes::from);
            message.payload = payload.map(Bytes::from);
            message.content_type = content_type;
            let at = message.occurred_at;
            let origin = Origin { topic: "t".into(), partition: None, offset: None };
            let story = Story::default().failed("billing", &origin, "handler", "€", at).due(at);
            let outgoing = Outgoing { message, story };
            let incoming = back(&outgoing);
            prop_assert_eq!(incoming.message, outgoing.message);
            prop_assert_eq!(incoming.story, outgoing.story);
        }
    }
}
