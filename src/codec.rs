//! Payloads as types: how a value is read from bytes and written to them. [`Json`] is built in; a codec of your own is a
//! type with [`Decode`], and [`Encode`] where you also send.
//!
//! ```
//! use relaybox::Message;
//! use relaybox::codec::{CodecError, Decode, Encode, Json};
//!
//! # fn main() -> relaybox::Result<()> {
//! let message = Message::new("orders", "OrderPlaced").with_payload_of(&Json([1, 2]))?;
//! let Json(numbers) = message.decode::<Json<[u8; 2]>>()?;
//! assert_eq!(numbers, [1, 2]);
//!
//! /// A number as eight bytes.
//! struct Packed(u64);
//!
//! impl Decode for Packed {
//!     fn decode(payload: &bytes::Bytes) -> Result<Self, CodecError> {
//!         Ok(Self(u64::from_be_bytes(payload.as_ref().try_into()?)))
//!     }
//! }
//!
//! impl Encode for Packed {
//!     const CONTENT_TYPE: &str = "application/octet-stream";
//!
//!     fn encode(&self) -> Result<bytes::Bytes, CodecError> {
//!         Ok(self.0.to_be_bytes().to_vec().into())
//!     }
//! }
//!
//! let message = Message::new("orders", "OrderPlaced").with_payload_of(&Packed(17))?;
//! assert_eq!(message.decode::<Packed>()?.0, 17);
//! assert_eq!(message.content_type.as_deref(), Some(Packed::CONTENT_TYPE));
//! # Ok(())
//! # }
//! ```

use std::error::Error as StdError;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::error::Category;

use crate::error::{Error, ErrorKind, Result};
use crate::message::Message;

/// Why a codec failed. Keep what the payload says out of its text: it is logged and travels in `x-last-error`.
pub type CodecError = Box<dyn StdError + Send + Sync>;

/// Reads a value from a payload. Never waits: what needs a schema from elsewhere fetches it beforehand.
pub trait Decode: Sized {
    /// The value of these bytes; the same bytes always give the same answer, so a failure is never tried again.
    fn decode(payload: &Bytes) -> Result<Self, CodecError>;

    /// The value of no payload at all, a tombstone (default: an error). `Option` of a codec reads it as `None`.
    fn absent() -> Result<Self, CodecError> {
        Err("there is no payload".into())
    }
}

/// `None` is a message without a payload; bytes must still be readable.
impl<T: Decode> Decode for Option<T> {
    fn decode(payload: &Bytes) -> Result<Self, CodecError> {
        T::decode(payload).map(Some)
    }

    fn absent() -> Result<Self, CodecError> {
        Ok(None)
    }
}

/// Writes a value as a payload.
pub trait Encode {
    /// Media type of the payload.
    const CONTENT_TYPE: &str;

    /// The bytes of this value.
    fn encode(&self) -> Result<Bytes, CodecError>;
}

/// A payload in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned> Decode for Json<T> {
    fn decode(payload: &Bytes) -> Result<Self, CodecError> {
        let value = serde_json::from_slice(payload).map_err(|error| unfit(&error))?;
        Ok(Self(value))
    }
}

impl<T: Serialize> Encode for Json<T> {
    const CONTENT_TYPE: &str = "application/json";

    fn encode(&self) -> Result<Bytes, CodecError> {
        Ok(serde_json::to_vec(&self.0)?.into())
    }
}

impl Message {
    /// Sets the payload to `value` in its encoding, and the content type with it.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] when the codec has no form for `value`.
    pub fn with_payload_of<T: Encode>(self, value: &T) -> Result<Self> {
        let payload = value.encode().map_err(|e| {
            Error::new(ErrorKind::Invalid, "encode", "payload has no form").with_source(e)
        })?;
        Ok(self
            .with_payload(payload)
            .with_content_type(T::CONTENT_TYPE))
    }

    /// The payload read as a `T`, whatever the content type says.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] when it does not read as one: no retry will change that.
    pub fn decode<T: Decode>(&self) -> Result<T> {
        let decoded = self.payload.as_ref().map_or_else(T::absent, T::decode);
        decoded.map_err(|e| {
            Error::new(ErrorKind::Corrupt, "decode", "payload is not as expected").with_source(e)
        })
    }
}

/// What is wrong with a payload, without a word of it: serde's own text quotes the values that it did not expect.
pub(crate) fn unfit(error: &serde_json::Error) -> CodecError {
    let text = error.to_string();
    // Such a name comes from the type, not from the payload.
    let is_told = error.classify() != Category::Data || text.starts_with("missing field `");
    if is_told {
        return format!("not the JSON expected: {text}").into();
    }
    let (line, column) = (error.line(), error.column());
    format!("not the JSON expected: a value does not fit its type at line {line} column {column}")
        .into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn told<T: DeserializeOwned>(payload: &'static str) -> String {
        let message = Message::new("d", "T").with_payload(payload);
        let error = message.decode::<Json<T>>().map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        StdError::source(&error).unwrap().to_string()
    }

    #[test]
    fn no_error_quotes_the_payload() {
        #[derive(serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        #[allow(dead_code)]
        struct Order {
            total: u32,
        }
        let refused = [
            r#"{"total":"secret"}"#,
            r#"{"secret":1}"#,
            r#""secret""#,
            "secret",
            r#"{"total":1"secret"#,
        ];
        for payload in refused {
            let told = told::<Order>(payload);
            assert!(!told.contains("secret"), "{told}");
            assert!(told.contains("line 1 column"), "{told}");
        }
        assert!(told::<Order>("{}").contains("missing field `total`"));
    }

    #[test]
    fn no_payload_is_none_where_none_is_expected_and_an_error_elsewhere() {
        let tombstone = Message::new("d", "T");
        let none = tombstone.decode::<Option<Json<u32>>>().unwrap();
        assert_eq!(none, None);
        let error = tombstone.decode::<Json<u32>>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        // Whatever the type would take: JSON's null and no payload are different things.
        assert!(tombstone.decode::<Json<Option<u32>>>().is_err());
        let null = Message::new("d", "T").with_payload("null");
        assert_eq!(
            null.decode::<Json<Option<u32>>>().unwrap(),
            Json(None::<u32>)
        );
        assert!(null.decode::<Option<Json<u32>>>().is_err());
        let empty = Message::new("d", "T").with_payload("");
        assert!(empty.decode::<Option<Json<u32>>>().is_err());
    }
}
