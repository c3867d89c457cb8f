//! The `headers` column: one text form for every database and every foreign writer.
//!
//! A JSON array of `[name, value]`; a value is a string (UTF-8 text), `null`, or `{"base64": "..."}`. No headers and
//! no trace context is a NULL column. What the message carries beside its user's headers stands in front, under its
//! name in [`headers`]: the trace context, and type texts that a text column cannot hold because of a NUL. A bare
//! `null` ends that front where the first user's header would be taken for a part of it.

use std::borrow::Cow;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Map, Value};

use crate::error::{Error, ErrorKind, Result};
use crate::headers;
use crate::message::{Message, TraceContext};

const FRONT: [&str; 4] = [
    headers::TRACE_PARENT,
    headers::TRACE_STATE,
    headers::EVENT_TYPE,
    headers::CONTENT_TYPE,
];

/// The column of a message.
pub(crate) fn encode(message: &Message) -> Option<String> {
    let with_nul = |text: &&String| text.contains('\0');
    let trace = message.trace.as_ref();
    let front = [
        trace.map(|trace| &trace.parent),
        trace.and_then(|trace| trace.state.as_ref()),
        Some(&message.event_type).filter(with_nul),
        message.content_type.as_ref().filter(with_nul),
    ];
    let mut entries: Vec<Value> = FRONT
        .into_iter()
        .zip(front)
        .filter_map(|(name, value)| Some(entry(name, Value::from(value?.as_str()))))
        .collect();
    let first = message.headers.iter().next();
    if first.is_some_and(|header| FRONT.contains(&header.name.as_str())) {
        entries.push(Value::Null);
    }
    for header in &message.headers {
        let value = match &header.value {
            None => Value::Null,
            Some(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => Value::from(text),
                Err(_) => {
                    let encoded = Value::from(STANDARD.encode(bytes));
                    Value::Object(Map::from_iter([("base64".to_owned(), encoded)]))
                }
            },
        };
        entries.push(entry(&header.name, value));
    }
    (!entries.is_empty()).then(|| Value::Array(entries).to_string())
}

fn entry(name: &str, value: Value) -> Value {
    Value::Array(vec![Value::from(name), value])
}

/// Reads the column into the message's headers, its trace context and, where they stand there, its types.
///
/// # Errors
/// [`Corrupt`](ErrorKind::Corrupt) for text that is none of the above, as foreign SQL may write it.
pub(crate) fn decode(column: Option<&str>, message: &mut Message) -> Result<()> {
    let Some(column) = column else {
        return Ok(());
    };
    let entries: Vec<Option<(String, Value)>> = serde_json::from_str(column)
        .map_err(|e| unreadable("not a JSON array of [name, value]").with_source(e))?;
    let mut front: [Option<String>; 4] = Default::default();
    let mut taken = 0;
    for entry in &entries {
        // Each at most once and in order, as written: a repeat is the user's.
        let Some((name, Value::String(text))) = entry else {
            break;
        };
        let Some(slot) = FRONT.iter().position(|front| front == name) else {
            break;
        };
        if front[slot..].iter().any(Option::is_some) {
            break;
        }
        front[slot] = Some(text.clone());
        taken += 1;
    }
    for (name, value) in entries.into_iter().skip(taken).flatten() {
        message.headers.push_optional(name, bytes(value)?);
    }
    let [parent, state, event_type, content_type] = front;
    message.trace = parent.map(|parent| TraceContext { parent, state });
    if let Some(event_type) = event_type {
        message.event_type = event_type;
    }
    if content_type.is_some() {
        message.content_type = content_type;
    }
    Ok(())
}

fn bytes(value: Value) -> Result<Option<Bytes>> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.into())),
        Value::Object(object) => match object.get("base64") {
            Some(Value::String(encoded)) if object.len() == 1 => STANDARD
                .decode(encoded)
                .map(|bytes| Some(bytes.into()))
                .map_err(|e| unreadable("a value that is not base64").with_source(e)),
            _ => Err(unreadable("an object other than {\"base64\": \"...\"}")),
        },
        _ => Err(unreadable(
            "a value other than text, null or {\"base64\": \"...\"}",
        )),
    }
}

fn unreadable(what: &str) -> Error {
    Error::new(
        ErrorKind::Corrupt,
        "read headers",
        format!("the headers column holds {what}"),
    )
}

/// The text with every NUL replaced: what a text column can hold of a text from outside.
pub(crate) fn without_nul(text: &str) -> Cow<'_, str> {
    if text.contains('\0') {
        Cow::Owned(text.replace('\0', "\u{fffd}"))
    } else {
        Cow::Borrowed(text)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::headers::Headers;
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;

    fn read_back(message: &Message) -> Message {
        let column = encode(message);
        let mut back = message.clone();
        back.headers = Headers::new();
        back.trace = None;
        back.event_type = without_nul(&message.event_type).into_owned();
        back.content_type = message
            .content_type
            .as_deref()
            .map(|text| without_nul(text).into_owned());
        decode(column.as_deref(), &mut back).unwrap();
        back
    }

    #[test]
    fn the_text_form_is_fixed() {
        let mut message = Message::new("d", "T")
            .with_trace("00-aa", Some("v=1".into()))
            .with_header("a", "x\0🚀\"")
            .with_header("a", vec![0xff]);
        message.headers.push_optional("b", None);
        assert_eq!(
            encode(&message).as_deref(),
            Some(
                r#"[["traceparent","00-aa"],["tracestate","v=1"],["a","x\u0000🚀\""],["a",{"base64":"/w=="}],["b",null]]"#
            )
        );
        assert_eq!(encode(&Message::new("d", "T")), None);
        assert_eq!(read_back(&message), message);
    }

    #[test]
    fn foreign_text_is_read_or_named_corrupt() {
        let mut message = Message::new("d", "T");
        decode(Some(r#" [ ["a", "1"], ["b", null] ] "#), &mut message).unwrap();
        assert_eq!(message.headers.len(), 2);
        for bad in [
            "",
            "null",
            "{}",
            r#"{"a":"1"}"#,
            r#"[["a"]]"#,
            r#"[["a",1]]"#,
            r#"[["a",{"base64":"?"}]]"#,
            r#"[["a",{"b":""}]]"#,
            r#"[["a","\ud800"]]"#,
        ] {
            let error = decode(Some(bad), &mut Message::new("d", "T")).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{bad}");
        }
    }

    fn name() -> impl Strategy<Value = String> {
        let front: Vec<String> = FRONT.map(str::to_owned).to_vec();
        prop_oneof![
            proptest::sample::select(front),
            ".{0,3}",
            Just("a\0".to_owned())
        ]
    }

    fn value() -> impl Strategy<Value = Option<Vec<u8>>> {
        option::of(prop_oneof![
            vec(any::<u8>(), 0..4),
            ".{0,3}".prop_map(String::into_bytes)
        ])
    }

    proptest! {
        #[test]
        fn whatever_is_written_reads_back_equal(
            headers in vec((name(), value()), 0..5),
            trace in option::of((".{0,3}", option::of(".{0,3}"))),
            event_type in "[a\0]{0,2}",
            content_type in option::of("[a\0]{0,2}"),
        ) {
            let mut message = Message::new("d", event_type);
            message.content_type = content_type;
            message.trace = trace.map(|(parent, state)| TraceContext { parent, state });
            for (name, value) in headers {
                message.headers.push_optional(name, value.map(Bytes::from));
            }
            let back = read_back(&message);
            prop_assert_eq!(back.trace, message.trace);
            prop_assert_eq!(back.event_type, message.event_type);
            prop_assert_eq!(back.content_type, message.content_type);
            prop_assert_eq!(back.headers, message.headers);
        }
    }
}
