//! The story of a message's failures, carried in headers: replaced at each step, never appended.

use std::fmt;

use time::OffsetDateTime;

use crate::error::cut;

/// Longest `x-dead-letter-owner`.
pub const OWNER_BYTES_MAX: usize = 255;
/// Longest `x-dead-letter-note`.
pub const NOTE_BYTES_MAX: usize = 512;
/// Longest `x-last-error`.
pub const ERROR_BYTES_MAX: usize = 1_024;

/// Where a message first came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// Topic, `exchange/routing key` or subject.
    pub topic: String,
    /// Partition, queue or stream.
    pub partition: Option<String>,
    /// Offset or sequence, where the broker numbers messages.
    pub offset: Option<String>,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.topic)?;
        for part in [&self.partition, &self.offset].into_iter().flatten() {
            write!(f, "/{part}")?;
        }
        Ok(())
    }
}

/// Why a message is a dead letter: a short machine-readable code.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Reason(String);

impl Reason {
    /// Every rung was climbed.
    pub const RETRIES_EXHAUSTED: &str = "retries-exhausted";
    /// No rung takes it with its story, not even with the least of it.
    pub const TOO_LARGE: &str = "too-large";
    /// Its next attempt would be later than the ladder allows.
    pub const TOO_OLD: &str = "too-old";
    /// The handler said that trying again is pointless.
    pub const PERMANENT: &str = "permanent";
    /// There is no usable id and the rule is to refuse.
    pub const MISSING_ID: &str = "missing-id";
    /// The payload cannot be decoded.
    pub const UNDECODABLE: &str = "undecodable";
    /// It came from elsewhere, without a reason.
    pub const FOREIGN: &str = "foreign";
    /// It was handled, and is to be handled once more.
    pub const REPROCESS: &str = "reprocess";
    /// No handler is there for its event type.
    pub const UNKNOWN_TYPE: &str = "unknown-type";
    /// A version or an aggregate is needed, and it has none.
    pub const UNVERSIONED: &str = "unversioned";
    /// One ahead of it of its key is a dead letter, and those behind go the same way.
    pub const PARKED: &str = "parked";

    /// A code of 1 to 64 of the characters `a-z`, `0-9` and `-`; others are replaced by `-`.
    #[must_use]
    pub fn new(code: &str) -> Self {
        let mut code: String = code
            .chars()
            .take(64)
            .map(|c| match c.to_ascii_lowercase() {
                c @ ('a'..='z' | '0'..='9') => c,
                _ => '-',
            })
            .collect();
        if code.is_empty() {
            code.push_str("unknown");
        }
        Self(code)
    }

    /// The code.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What happened to a message so far. Empty on a first delivery.
///
/// All of it together stays below 4 KiB as headers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Story {
    /// Where it first came from; set at the first failure.
    pub origin: Option<Origin>,
    /// The consumer that failed it.
    pub consumer: Option<String>,
    /// Failed attempts so far: a message on its second rung has 2.
    pub retry_count: u32,
    /// First failure.
    pub first_failed_at: Option<OffsetDateTime>,
    /// Last failure.
    pub last_failed_at: Option<OffsetDateTime>,
    /// Class and text of the last failure.
    pub last_error: Option<String>,
    /// On a rung: not to be handled before this instant.
    pub due_at: Option<OffsetDateTime>,
    /// On a dead letter: why.
    pub reason: Option<Reason>,
    /// On a dead letter: who looks after it.
    pub owner: Option<String>,
    /// On a dead letter: what is to be known about it.
    pub note: Option<String>,
    /// How often an operator sent it back.
    pub redrive_count: u32,
}

impl Story {
    /// The story after one more failed attempt: counted, dated, the error replaced.
    #[must_use]
    pub fn failed(
        &self,
        consumer: &str,
        origin: &Origin,
        class: &str,
        text: &str,
        now: OffsetDateTime,
    ) -> Self {
        Self {
            origin: self.origin.clone().or_else(|| Some(bounded(origin))),
            consumer: Some(cut(consumer, 255).to_owned()),
            retry_count: self.retry_count.saturating_add(1),
            first_failed_at: self.first_failed_at.or(Some(now)),
            last_failed_at: Some(now),
            last_error: Some(cut(&format!("{class}: {text}"), ERROR_BYTES_MAX).to_owned()),
            due_at: None,
            reason: None,
            owner: None,
            note: None,
            redrive_count: self.redrive_count,
        }
    }

    /// The same, in the hands of a consumer that made no attempt at it.
    #[must_use]
    pub fn taken(mut self, consumer: &str, origin: &Origin) -> Self {
        self.origin = self.origin.or_else(|| Some(bounded(origin)));
        self.consumer = Some(cut(consumer, 255).to_owned());
        self
    }

    /// The same, waiting on a rung until `due_at`.
    #[must_use]
    pub fn due(mut self, due_at: OffsetDateTime) -> Self {
        self.due_at = Some(due_at);
        self
    }

    /// The same, ended as a dead letter.
    #[must_use]
    pub fn dead(mut self, reason: Reason) -> Self {
        self.due_at = None;
        self.reason = Some(reason);
        self
    }

    /// The story of a copy that an operator sends back: attempts begin anew, by their number and by their age, and one more
    /// redrive is counted. Consumer and origin stay.
    #[must_use]
    pub fn redriven(&self) -> Self {
        Self {
            origin: self.origin.clone(),
            consumer: self.consumer.clone(),
            redrive_count: self.redrive_count.saturating_add(1),
            ..Self::default()
        }
    }

    /// The same, no longer than stories of ours are, whoever wrote it.
    #[must_use]
    pub(crate) fn cut(mut self) -> Self {
        self.origin = self.origin.as_ref().map(bounded);
        self.last_error = self
            .last_error
            .map(|text| cut(&text, ERROR_BYTES_MAX).to_owned());
        self.owner = self
            .owner
            .map(|text| cut(&text, OWNER_BYTES_MAX).to_owned());
        self.note = self.note.map(|text| cut(&text, NOTE_BYTES_MAX).to_owned());
        self
    }

    /// Only what nobody can do without, for a message so large that its story does not fit beside it.
    #[must_use]
    pub fn shrunk(&self) -> Self {
        Self {
            consumer: self.consumer.clone(),
            retry_count: self.retry_count,
            reason: self.reason.clone(),
            redrive_count: self.redrive_count,
            due_at: self.due_at,
            ..Self::default()
        }
    }
}

fn bounded(origin: &Origin) -> Origin {
    let part = |text: &String| cut(text, 255).to_owned();
    Origin {
        topic: part(&origin.topic),
        partition: origin.partition.as_ref().map(part),
        offset: origin.offset.as_ref().map(part),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    fn origin() -> Origin {
        Origin {
            topic: "orders".into(),
            partition: Some("3".into()),
            offset: Some("99".into()),
        }
    }

    #[test]
    fn a_second_failure_replaces_the_error_and_keeps_the_beginning() {
        let monday = datetime!(2026-01-05 10:00 UTC);
        let tuesday = datetime!(2026-01-06 10:00 UTC);
        let first = Story::default().failed("billing", &origin(), "handler", "no stock", monday);
        let elsewhere = Origin {
            topic: "rung".into(),
            ..origin()
        };
        let second = first.failed(
            "billing",
            &elsewhere,
            "panic",
            &"x".repeat(300_000),
            tuesday,
        );
        assert_eq!(second.retry_count, 2);
        assert_eq!(second.origin, Some(origin()));
        assert_eq!(second.first_failed_at, Some(monday));
        assert_eq!(second.last_failed_at, Some(tuesday));
        assert_eq!(
            second.last_error.as_ref().map(String::len),
            Some(ERROR_BYTES_MAX)
        );
        assert!(
            second
                .last_error
                .is_some_and(|e| e.starts_with("panic: xxx"))
        );
    }

    #[test]
    fn a_redrive_begins_the_attempts_anew_and_is_counted() {
        let monday = datetime!(2026-01-05 10:00 UTC);
        let dead = Story::default()
            .failed("billing", &origin(), "handler", "no stock", monday)
            .dead(Reason::new(Reason::PERMANENT));
        let back = dead.redriven();
        let expected = Story {
            origin: Some(origin()),
            consumer: Some("billing".into()),
            redrive_count: 1,
            ..Story::default()
        };
        assert_eq!(back, expected);
        let tuesday = datetime!(2026-01-06 10:00 UTC);
        let again = back.failed("billing", &origin(), "handler", "no stock", tuesday);
        assert_eq!((again.retry_count, again.redrive_count), (1, 1));
        assert_eq!(again.first_failed_at, Some(tuesday));
    }

    #[test]
    fn the_count_stops_at_its_end() {
        let story = Story {
            retry_count: u32::MAX,
            ..Story::default()
        };
        let failed = story.failed("c", &origin(), "e", "t", datetime!(2026-01-01 0:00 UTC));
        assert_eq!(failed.retry_count, u32::MAX);
    }

    #[test]
    fn reason_codes_are_bounded_and_plain() {
        assert_eq!(Reason::new("Bad Thing\0").as_str(), "bad-thing-");
        assert_eq!(Reason::new("").as_str(), "unknown");
        assert_eq!(Reason::new(&"a".repeat(100)).as_str().len(), 64);
    }
}
