//! Which entries go back, and as what. Pure.

use std::fmt;
use std::time::Duration;

use time::OffsetDateTime;

use crate::ladder::told_source;
use crate::store::LetterEntry;

/// Why an entry is not sent back. It stays where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Refusal {
    /// It was redriven as often as the limit allows.
    Loop,
    /// It is older than the inbox remembers.
    Age,
    /// Nobody tells which of the consumer's sources it belongs to.
    Source,
    /// Its row cannot be read as a message.
    Unreadable,
}

impl Refusal {
    pub(super) const ALL: [Self; 4] = [Self::Loop, Self::Age, Self::Source, Self::Unreadable];

    /// The reason as a code.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Loop => "redriven-too-often",
            Self::Age => "older-than-the-inbox",
            Self::Source => "no-source",
            Self::Unreadable => "unreadable",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The rules of one run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rules<'a> {
    pub(super) sources: &'a [String],
    /// Where an entry goes whose story does not tell its source.
    pub(super) fallback: Option<&'a str>,
    pub(super) redrives_max: Option<u32>,
    pub(super) age_max: Option<Duration>,
}

impl<'a> Rules<'a> {
    /// The source whose way back an entry goes.
    pub(super) fn judge(
        &self,
        entry: &LetterEntry,
        now: OffsetDateTime,
    ) -> Result<&'a str, Refusal> {
        let story = &entry.story;
        if self
            .redrives_max
            .is_some_and(|most| story.redrive_count >= most)
        {
            return Err(Refusal::Loop);
        }
        // A redrive begins a new story, and some letters tell no failure: then nothing but the message is as old as its effect
        // may be.
        let told = story.first_failed_at.filter(|_| story.redrive_count == 0);
        let since = told.unwrap_or(entry.occurred_at.min(entry.stored_at));
        let age = Duration::try_from(now - since).unwrap_or_default();
        if self.age_max.is_some_and(|most| age >= most) {
            return Err(Refusal::Age);
        }
        let told = story.origin.as_ref();
        let told = told.and_then(|origin| told_source(self.sources, origin));
        let only = match self.sources {
            [only] => Some(only.as_str()),
            _ => None,
        };
        told.map(String::as_str)
            .or(only)
            .or(self.fallback)
            .ok_or(Refusal::Source)
    }
}

#[cfg(test)]
mod tests {
    use time::macros::datetime;

    use super::*;
    use crate::message::MessageId;
    use crate::story::{Origin, Story};

    const NOW: OffsetDateTime = datetime!(2026-01-31 10:00 UTC);
    const DAY: Duration = Duration::from_secs(86_400);

    fn entry(origin: Option<&str>) -> LetterEntry {
        LetterEntry {
            position: 1,
            message_id: MessageId::new("m"),
            event_type: "T".into(),
            key: None,
            story: Story {
                origin: origin.map(|topic| Origin {
                    topic: topic.into(),
                    partition: None,
                    offset: None,
                }),
                ..Story::default()
            },
            digest: Vec::new(),
            size: 1,
            stored_at: NOW - DAY,
            occurred_at: NOW - 2 * DAY,
        }
    }

    fn rules(sources: &[String]) -> Rules<'_> {
        Rules {
            sources,
            fallback: None,
            redrives_max: Some(3),
            age_max: Some(30 * DAY),
        }
    }

    #[test]
    fn an_entry_goes_back_to_the_source_that_it_tells_or_the_only_one() {
        let two = ["a".to_owned(), "b".to_owned()];
        assert_eq!(rules(&two).judge(&entry(Some("b")), NOW), Ok("b"));
        for untold in [entry(None), entry(Some("c"))] {
            assert_eq!(rules(&two).judge(&untold, NOW), Err(Refusal::Source));
            assert_eq!(rules(&two[..1]).judge(&untold, NOW), Ok("a"));
            let named = Rules {
                fallback: Some("b"),
                ..rules(&two)
            };
            assert_eq!(named.judge(&untold, NOW), Ok("b"));
        }
    }

    #[test]
    fn what_came_round_too_often_or_is_too_old_is_refused_unless_forced() {
        let sources = ["a".to_owned()];
        let rules = rules(&sources);
        let mut looping = entry(None);
        looping.story.redrive_count = 2;
        assert_eq!(rules.judge(&looping, NOW), Ok("a"));
        looping.story.redrive_count = 3;
        assert_eq!(rules.judge(&looping, NOW), Err(Refusal::Loop));
        let mut old = entry(None);
        old.story.first_failed_at = Some(NOW - 30 * DAY);
        assert_eq!(rules.judge(&old, NOW), Err(Refusal::Age));
        // Without a first failure, and after a redrive, it is as old as its message.
        old.story.first_failed_at = None;
        assert_eq!(rules.judge(&old, NOW), Ok("a"));
        old.occurred_at = NOW - 30 * DAY;
        assert_eq!(rules.judge(&old, NOW), Err(Refusal::Age));
        old.story.first_failed_at = Some(NOW - DAY);
        assert_eq!(rules.judge(&old, NOW), Ok("a"));
        old.story.redrive_count = 1;
        assert_eq!(rules.judge(&old, NOW), Err(Refusal::Age));
        // A clock that runs ahead makes nothing younger than its entry.
        old.occurred_at = NOW + DAY;
        old.stored_at = NOW - 30 * DAY;
        assert_eq!(rules.judge(&old, NOW), Err(Refusal::Age));
        let forced = Rules {
            redrives_max: None,
            age_max: None,
            ..rules
        };
        assert_eq!(forced.judge(&old, NOW), Ok("a"));
        assert_eq!(forced.judge(&looping, NOW), Ok("a"));
    }
}
