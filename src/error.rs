//! The one error type: what kind, worth retrying or not, during which operation, and from which source.

use std::error::Error as StdError;
use std::fmt;

/// Result of every fallible relaybox call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

type Source = Box<dyn StdError + Send + Sync>;

/// What went wrong, in words a program can branch on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A value handed in breaks a limit or a naming rule; see [`Error::violation`].
    Invalid,
    /// A setting would break a promise; refused at start; see [`Error::violation`].
    Configuration,
    /// A database or broker cannot be reached, or its connection broke.
    Unavailable,
    /// A deadline passed before an answer came.
    Timeout,
    /// The database asks to run the transaction again (serialization failure, deadlock).
    Conflict,
    /// Another session holds what is needed; it may be free later.
    Busy,
    /// The server understood and said no; repeating it unchanged does not help.
    Rejected,
    /// Something that must exist (table, topic, queue) does not.
    NotFound,
    /// Stored or received data cannot be read.
    Corrupt,
    /// The caller's own code failed.
    Handler,
    /// The component was closed or is shutting down.
    Closed,
    /// Anything else.
    Other,
}

impl ErrorKind {
    /// The kind as a stable lower-case code, used in headers and labels.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Invalid => "invalid",
            Self::Configuration => "configuration",
            Self::Unavailable => "unavailable",
            Self::Timeout => "timeout",
            Self::Conflict => "conflict",
            Self::Busy => "busy",
            Self::Rejected => "rejected",
            Self::NotFound => "not-found",
            Self::Corrupt => "corrupt",
            Self::Handler => "handler",
            Self::Closed => "closed",
            Self::Other => "other",
        }
    }

    /// Whether the same call may succeed later without a change.
    #[must_use]
    pub const fn is_transient(self) -> bool {
        matches!(
            self,
            Self::Unavailable | Self::Timeout | Self::Conflict | Self::Busy
        )
    }
}

/// A limit that was broken: which field, what the limit is, and the value that broke it.
///
/// Values are cut to 100 bytes, and payloads are given by their size only, so that an error is safe to log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The field or setting, for example `destination` or `lease`.
    pub field: &'static str,
    /// The rule in words, for example `1 to 255 bytes`.
    pub limit: String,
    /// The value that was refused.
    pub value: String,
}

/// What every relaybox call fails with.
///
/// Driver errors are private: they appear only as [`source`](StdError::source). Branch on [`kind`](Self::kind).
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    operation: &'static str,
    detail: String,
    violation: Option<Violation>,
    source: Option<Source>,
}

impl Error {
    /// An error of `kind` during `operation`, with a detail for people.
    pub fn new(kind: ErrorKind, operation: &'static str, detail: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            operation,
            detail: detail.into(),
            violation: None,
            source: None,
        }))
    }

    /// A value refused at the door (kind [`ErrorKind::Invalid`]).
    pub fn invalid(field: &'static str, limit: impl Into<String>, value: impl AsRef<str>) -> Self {
        Self::violated(ErrorKind::Invalid, "validate", field, limit, value)
    }

    /// A setting refused at start (kind [`ErrorKind::Configuration`]).
    pub fn configuration(
        field: &'static str,
        limit: impl Into<String>,
        value: impl AsRef<str>,
    ) -> Self {
        Self::violated(ErrorKind::Configuration, "configure", field, limit, value)
    }

    fn violated(
        kind: ErrorKind,
        operation: &'static str,
        field: &'static str,
        limit: impl Into<String>,
        value: impl AsRef<str>,
    ) -> Self {
        let violation = Violation {
            field,
            limit: limit.into(),
            value: cut(value.as_ref(), 100).to_owned(),
        };
        let detail = format!(
            "{} must be {}, got {:?}",
            violation.field, violation.limit, violation.value
        );
        let mut error = Self::new(kind, operation, detail);
        error.0.violation = Some(violation);
        error
    }

    /// Attaches the error that caused this one.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Source>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether the same call may succeed later without a change.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        self.0.kind.is_transient()
    }

    /// What relaybox was doing.
    #[must_use]
    pub fn operation(&self) -> &'static str {
        self.0.operation
    }

    /// The broken limit, for [`ErrorKind::Invalid`] and [`ErrorKind::Configuration`].
    #[must_use]
    pub fn violation(&self) -> Option<&Violation> {
        self.0.violation.as_ref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner {
            kind,
            operation,
            detail,
            ..
        } = &*self.0;
        write!(f, "{operation}: {} ({})", detail, kind.code())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Error")
            .field("kind", &self.0.kind)
            .field("operation", &self.0.operation)
            .field("detail", &self.0.detail)
            .field("source", &self.0.source)
            .finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_ref().map(|s| &**s as _)
    }
}

/// Refuses a setting outside of `least..=most`.
pub(crate) fn within(field: &'static str, value: usize, least: usize, most: usize) -> Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(Error::configuration(
        field,
        format!("{least} to {most}"),
        value.to_string(),
    ))
}

/// The longest prefix of `text` that fits `bytes_max` and ends on a character boundary.
#[must_use]
pub(crate) fn cut(text: &str, bytes_max: usize) -> &str {
    if text.len() <= bytes_max {
        return text;
    }
    let mut end = bytes_max;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_violation_names_field_limit_and_value() {
        let error = Error::invalid("destination", "1 to 255 bytes", "");
        let violation = error.violation().cloned();
        assert_eq!(
            violation,
            Some(Violation {
                field: "destination",
                limit: "1 to 255 bytes".into(),
                value: String::new()
            })
        );
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(!error.is_transient());
        assert!(
            error
                .to_string()
                .contains("destination must be 1 to 255 bytes")
        );
    }

    #[test]
    fn long_values_are_cut_on_a_character_boundary() {
        let value = "é".repeat(200);
        let error = Error::invalid("id", "1 to 255 bytes", &value);
        let kept = error.violation().map(|v| v.value.len());
        assert_eq!(kept, Some(100));
        assert_eq!(cut("aé", 2), "a");
    }
}
