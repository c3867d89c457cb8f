//! Entries of dead letters as an operator sees them, and which are meant.

use std::fmt;

use bytes::Bytes;
use time::OffsetDateTime;

use super::{Leaving, LetterOutcome};
use crate::error::Result;
use crate::message::{Message, MessageId};
use crate::story::{Reason, Story};

/// An entry, without payload and headers.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct LetterEntry {
    /// Its number, in order of arrival.
    pub position: i64,
    /// Identity of the message.
    pub message_id: MessageId,
    /// What happened.
    pub event_type: String,
    /// Its key.
    pub key: Option<Bytes>,
    /// Its failures; `reason` says why it is here.
    pub story: Story,
    /// The message's [digest](Message::digest).
    pub digest: Vec<u8>,
    /// Bytes of the message as stored.
    pub size: u64,
    /// When it was stored, by the database's clock.
    pub stored_at: OffsetDateTime,
    /// When what it tells happened, as the message says.
    pub occurred_at: OffsetDateTime,
}

impl LetterEntry {
    /// What the audit calls it by.
    #[must_use]
    pub fn leaving(&self, outcome: LetterOutcome, detail: impl Into<String>) -> Leaving {
        Leaving {
            position: self.position,
            message_id: self.message_id.clone(),
            redrive_count: self.story.redrive_count,
            digest: self.digest.clone(),
            outcome,
            detail: detail.into(),
        }
    }
}

/// Key and error text may quote what is not for logs.
impl fmt::Debug for LetterEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LetterEntry")
            .field("position", &self.position)
            .field("message_id", &self.message_id)
            .field("event_type", &self.event_type)
            .field("reason", &self.story.reason)
            .field("redrive_count", &self.story.redrive_count)
            .finish_non_exhaustive()
    }
}

/// An entry, whole.
#[derive(Debug)]
#[non_exhaustive]
pub struct WholeLetter {
    /// What a list shows.
    pub entry: LetterEntry,
    /// The message; an error where the row cannot be read as one.
    pub message: Result<Message>,
}

/// Which entries are meant: all that match every field given.
///
/// ```
/// use relaybox::store::LetterFilter;
/// use relaybox::story::Reason;
///
/// let undecodable = LetterFilter::all().with_reason(Reason::new(Reason::UNDECODABLE)).with_event_type("OrderPlaced");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct LetterFilter {
    pub(crate) reason: Option<Reason>,
    pub(crate) event_type: Option<String>,
    pub(crate) key: Option<Bytes>,
    pub(crate) message_id: Option<MessageId>,
    pub(crate) stored_from: Option<OffsetDateTime>,
    pub(crate) stored_until: Option<OffsetDateTime>,
    pub(crate) redrives_min: u32,
    pub(crate) redrives_max: u32,
    pub(crate) error: Option<String>,
    pub(crate) position: Option<i64>,
}

impl LetterFilter {
    /// Every entry; each `with_` narrows it.
    #[must_use]
    pub const fn all() -> Self {
        Self {
            reason: None,
            event_type: None,
            key: None,
            message_id: None,
            stored_from: None,
            stored_until: None,
            redrives_min: 0,
            redrives_max: u32::MAX,
            error: None,
            position: None,
        }
    }

    /// Only this reason.
    #[must_use]
    pub fn with_reason(mut self, reason: Reason) -> Self {
        self.reason = Some(reason);
        self
    }

    /// Only this event type.
    #[must_use]
    pub fn with_event_type(mut self, event_type: impl Into<String>) -> Self {
        self.event_type = Some(event_type.into());
        self
    }

    /// Only this key.
    #[must_use]
    pub fn with_key(mut self, key: impl AsRef<[u8]>) -> Self {
        self.key = Some(Bytes::copy_from_slice(key.as_ref()));
        self
    }

    /// Only this message.
    #[must_use]
    pub fn with_message_id(mut self, id: impl Into<MessageId>) -> Self {
        self.message_id = Some(id.into());
        self
    }

    /// Only what was stored at this instant or later, by the database's clock.
    #[must_use]
    pub const fn with_stored_from(mut self, instant: OffsetDateTime) -> Self {
        self.stored_from = Some(instant);
        self
    }

    /// Only what was stored before this instant, by the database's clock.
    #[must_use]
    pub const fn with_stored_until(mut self, instant: OffsetDateTime) -> Self {
        self.stored_until = Some(instant);
        self
    }

    /// Only what was redriven at least `min` and at most `max` times.
    #[must_use]
    pub const fn with_redrives(mut self, min: u32, max: u32) -> Self {
        self.redrives_min = min;
        self.redrives_max = max;
        self
    }

    /// Only where the last error contains this text, by exact characters.
    #[must_use]
    pub fn with_error(mut self, text: impl Into<String>) -> Self {
        self.error = Some(text.into());
        self
    }

    /// Only the entry at this position.
    #[must_use]
    pub const fn with_position(mut self, position: i64) -> Self {
        self.position = Some(position);
        self
    }

    /// The positions that may match, of those above `after` up to `last`: exclusive, inclusive.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn range(&self, (after, last): (i64, i64)) -> (i64, i64) {
        match self.position {
            Some(position) => (after.max(position.saturating_sub(1)), last.min(position)),
            None => (after, last),
        }
    }
}

/// Keys may be personal data: shown by size.
impl fmt::Debug for LetterFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LetterFilter")
            .field("reason", &self.reason)
            .field("event_type", &self.event_type)
            .field("key_bytes", &self.key.as_ref().map(Bytes::len))
            .field("message_id", &self.message_id)
            .field("stored_from", &self.stored_from)
            .field("stored_until", &self.stored_until)
            .field("redrives", &(self.redrives_min..=self.redrives_max))
            .field("error", &self.error.is_some())
            .field("position", &self.position)
            .finish()
    }
}
