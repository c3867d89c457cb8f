//! What a consumer tells of attempts and of how deliveries ended, in metrics and in the fields of the current span.

use std::time::Duration;

use time::OffsetDateTime;
use tracing::Span;

use crate::event::{self, Value};
use crate::inbox::{Attempt, Ended};
use crate::ladder::Ask;
use crate::message::Message;
use crate::story::{Reason, Story};

use super::outcome::Failure;

/// How a delivery ended.
pub(super) enum Became {
    Handled,
    Duplicate,
    Retried,
    /// It waits behind others of its key.
    Behind,
    Dead(Option<Reason>),
    /// Failed with this class, and recorded without its effect.
    Skipped(String),
}

impl Became {
    pub(super) const fn of(ended: Ended) -> Self {
        match ended {
            Ended::Done | Ended::Skipped => Self::Handled,
            Ended::Duplicate => Self::Duplicate,
        }
    }

    const fn word(&self) -> &'static str {
        match self {
            Self::Handled => "handled",
            Self::Duplicate => "duplicate",
            Self::Retried => "retried",
            Self::Behind => "behind",
            Self::Dead(_) => "dead",
            Self::Skipped(_) => "skipped",
        }
    }
}

/// A message that waited on a rung is taken up again. The clock is only asked where somebody wants to know.
pub(super) fn tell_lateness(consumer: &str, story: &Story, now: impl FnOnce() -> OffsetDateTime) {
    if cfg!(feature = "metrics")
        && let Some(due_at) = story.due_at
    {
        let late = Duration::try_from(now() - due_at).unwrap_or_default();
        event::observe(&event::CONSUMER_RETRY_LATE, &[Value::Name(consumer)], late);
    }
}

/// An attempt at so many messages has ended.
pub(super) fn tell_attempt(consumer: &str, attempt: &Attempt, messages: usize, took: Duration) {
    let count = |word: &'static str, messages: usize| {
        let labels = [Value::Name(consumer), Value::Word(word)];
        event::count(&event::CONSUMER_ATTEMPTS, &labels, messages as u64);
    };
    match attempt {
        Attempt::Settled(ended) => ended.iter().for_each(|ended| count(word_of(*ended), 1)),
        Attempt::Unrecorded(ended, _) => count(word_of(*ended), 1),
        Attempt::Failed { .. } if messages > 1 => count("batch", messages),
        Attempt::Failed { failure, ask } => count(word_of_failure(failure, ask), 1),
        Attempt::Busy => count("busy", messages),
        Attempt::Rerun(_) => count("rerun", messages),
        Attempt::Unavailable(_) => count("unavailable", messages),
    }
    event::observe(&event::CONSUMER_HANDLER, &[Value::Name(consumer)], took);
}

const fn word_of(ended: Ended) -> &'static str {
    match ended {
        Ended::Done => "done",
        Ended::Skipped => "skip",
        Ended::Duplicate => "duplicate",
    }
}

fn word_of_failure(failure: &Failure, ask: &Ask) -> &'static str {
    match (failure.class(), ask) {
        ("panic", _) => "panic",
        ("timeout", _) => "timeout",
        (_, Ask::Never(_)) => "permanent",
        (_, Ask::Next | Ask::After(_)) => "retry",
    }
}

/// An earlier attempt was found to have ended its process.
pub(super) fn tell_crash(consumer: &str) {
    let labels = [Value::Name(consumer), Value::Word(Failure::CRASH)];
    event::count(&event::CONSUMER_ATTEMPTS, &labels, 1);
}

/// A copy was not taken there.
pub(super) fn tell_refused(consumer: &str, place: &str) {
    let labels = [Value::Name(consumer), Value::Name(place)];
    event::count(&event::CONSUMER_COPIES_REFUSED, &labels, 1);
}

/// A delivery has ended. The clock is only asked where somebody wants to know.
pub(super) fn tell_end(
    consumer: &str,
    message: &Message,
    became: &Became,
    now: impl FnOnce() -> OffsetDateTime,
) {
    let consumer = Value::Name(consumer);
    let failed = matches!(
        became,
        Became::Retried | Became::Dead(_) | Became::Skipped(_)
    );
    event::handled(&Span::current(), became.word(), failed);
    let labels = [consumer, Value::Word(became.word())];
    event::count(&event::CONSUMER_MESSAGES, &labels, 1);
    match became {
        Became::Handled if cfg!(feature = "metrics") => {
            // Two machines' clocks: what seems to have been handled before it happened took no time.
            let took = Duration::try_from(now() - message.occurred_at).unwrap_or_default();
            event::observe(&event::CONSUMER_END_TO_END, &[consumer], took);
        }
        Became::Dead(reason) => {
            let reason = reason.as_ref().map_or("unknown", Reason::as_str);
            let labels = [consumer, Value::Reason(reason)];
            event::count(&event::CONSUMER_DEAD, &labels, 1);
        }
        Became::Skipped(class) => {
            let labels = [consumer, Value::Reason(class)];
            event::count(&event::CONSUMER_SKIPPED, &labels, 1);
        }
        Became::Handled | Became::Duplicate | Became::Retried | Became::Behind => {}
    }
}
