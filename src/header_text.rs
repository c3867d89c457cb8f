//! Headers as one line of text, for a broker that cannot carry some of them natively.
//!
//! A JSON array of `[name, value]` in their order, a value in base64 or `null`: what [`headers::ENCODED_HEADERS`] holds.
//! Only ASCII, and no line break, so that it fits into any header of any broker.
//!
//! [`headers::ENCODED_HEADERS`]: crate::headers::ENCODED_HEADERS

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::headers::{Header, Headers};

/// The text of these headers.
pub(crate) fn encode<'a>(headers: impl IntoIterator<Item = &'a Header>) -> String {
    let mut text = String::from("[");
    for header in headers {
        if text.len() > 1 {
            text.push(',');
        }
        text.push('[');
        quote(&header.name, &mut text);
        match &header.value {
            Some(value) => {
                text.push_str(",\"");
                STANDARD.encode_string(value, &mut text);
                text.push_str("\"]");
            }
            None => text.push_str(",null]"),
        }
    }
    text.push(']');
    text
}

/// The headers of a text; `None` for one that [`encode`] cannot have written, as anybody may send it.
pub(crate) fn decode(text: &[u8]) -> Option<Headers> {
    let entries: Vec<(String, Option<String>)> = serde_json::from_slice(text).ok()?;
    let mut headers = Headers::new();
    for (name, value) in entries {
        let value = match value {
            Some(encoded) => Some(STANDARD.decode(encoded).ok()?.into()),
            None => None,
        };
        headers.push_optional(name, value);
    }
    Some(headers)
}

/// A JSON string in ASCII.
fn quote(name: &str, text: &mut String) {
    text.push('"');
    for unit in name.encode_utf16() {
        match u8::try_from(unit).map(char::from) {
            Ok(plain @ (' '..='~')) if plain != '"' && plain != '\\' => text.push(plain),
            _ => text.push_str(&format!("\\u{unit:04x}")),
        }
    }
    text.push('"');
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;

    #[test]
    fn the_text_form_is_fixed() {
        let mut headers = Headers::new();
        headers.push("a", "x");
        headers.push("a", vec![0xff]);
        headers.push_optional("\"é🚀\n\\", None);
        headers.push("", "");
        let text =
            r#"[["a","eA=="],["a","/w=="],["\u0022\u00e9\ud83d\ude80\u000a\u005c",null],["",""]]"#;
        assert_eq!(encode(&headers), text);
        assert_eq!(decode(text.as_bytes()), Some(headers));
        assert_eq!(encode(&Headers::new()), "[]");
    }

    #[test]
    fn what_is_damaged_is_no_headers() {
        for bad in [
            &b""[..],
            b"null",
            b"{}",
            b"[[\"a\"]]",
            b"[[\"a\",1]]",
            b"[[\"a\",\"?\"]]",
            b"[[\"a\",\"eA==\"]",
            b"[[\"\xff\",null]]",
            b"[[\"\\ud800\",null]]",
        ] {
            assert_eq!(decode(bad), None, "{}", String::from_utf8_lossy(bad));
        }
    }

    proptest! {
        #[test]
        fn whatever_is_encoded_reads_back_equal(
            all in vec((".{0,4}", option::of(vec(any::<u8>(), 0..5))), 0..5),
        ) {
            let headers: Headers = all
                .into_iter()
                .map(|(name, value)| Header { name, value: value.map(Bytes::from) })
                .collect();
            let text = encode(&headers);
            prop_assert!(text.bytes().all(|byte| matches!(byte, b' '..=b'~')), "{}", text);
            prop_assert_eq!(decode(text.as_bytes()), Some(headers));
        }
    }
}
