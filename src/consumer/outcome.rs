//! What a handler says: outcomes are words, and a failure is what an operator will read.

use std::any::Any;
use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use crate::story::Reason;

use super::routes::Route;

/// How a handler ended. Only `Done` and `Skip` commit.
#[derive(Debug)]
pub enum Outcome {
    /// The work is done: commit and acknowledge.
    Done,
    /// There is nothing to do: commit and acknowledge.
    Skip,
    /// It failed: roll back and try again on the next rung. What an error becomes by default.
    Retry(Failure),
    /// It failed: roll back and try again on the first rung that waits at least this long.
    RetryAfter(Duration, Failure),
    /// It can never work: roll back; the message becomes a dead letter at once, for the failure's reason if it has one.
    Permanent(Failure),
}

/// `Ok` is [`Outcome::Done`], an error is [`Outcome::Retry`]: a handler may return a plain `Result<(), E>`.
impl<E: Into<Failure>> From<Result<(), E>> for Outcome {
    fn from(result: Result<(), E>) -> Self {
        match result {
            Ok(()) => Self::Done,
            Err(error) => Self::Retry(error.into()),
        }
    }
}

/// The handler's own word, or [`Outcome::Retry`] for an error: so that a handler can use `?` and still say
/// [`Permanent`](Outcome::Permanent).
impl<E: Into<Failure>> From<Result<Outcome, E>> for Outcome {
    fn from(result: Result<Outcome, E>) -> Self {
        result.unwrap_or_else(|error| Self::Retry(error.into()))
    }
}

/// Why a handler failed. Made from any `std::error::Error`, so `?` works in a handler.
///
/// An error type that wraps the database driver's error should return it as its `source`: a deadlock that is found
/// there is run again without counting as an attempt.
pub struct Failure {
    class: Cow<'static, str>,
    text: String,
    reason: Option<Reason>,
    /// Boxed, because most have none.
    route: Option<Box<Route>>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Failure {
    /// Class of a failure that ended the process.
    pub(crate) const CRASH: &str = "crash";
    /// It did not end within its time.
    pub(crate) const TIMEOUT: &str = "timeout";
    /// Classes that only the consumer gives.
    const OWN: [&str; 3] = ["panic", Self::TIMEOUT, Self::CRASH];

    /// A failure described in words. Keep personal data out of it: it travels in `x-last-error`.
    pub fn new(text: impl Into<String>) -> Self {
        Self::plain("handler", text.into())
    }

    /// A failure of a boxed error, for error types that are no `std::error::Error` themselves.
    pub fn of(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        let source = error.into();
        let text = with_sources(&*source);
        Self {
            source: Some(source),
            ..Self::new(text)
        }
    }

    /// A payload that cannot be read, with the reason [`Reason::UNDECODABLE`]: for handlers that decode it themselves.
    /// Answer it by [`Outcome::Permanent`].
    pub fn undecodable(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::of(error).with_reason(Reason::new(Reason::UNDECODABLE))
    }

    /// Sets the reason that the dead letter gets if the outcome is [`Outcome::Permanent`] (default
    /// [`Reason::PERMANENT`]). Others keep theirs: what was tried in vain is [`Reason::RETRIES_EXHAUSTED`].
    #[must_use]
    pub fn with_reason(mut self, reason: Reason) -> Self {
        self.reason = Some(reason);
        self
    }

    pub(crate) fn panic(payload: &(dyn Any + Send)) -> Self {
        let text = payload
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "a panic without a text".to_owned());
        Self::plain("panic", text)
    }

    pub(crate) fn timeout(limit: Duration) -> Self {
        let text = format!("the handler did not end within {limit:?}");
        Self::plain(Self::TIMEOUT, text)
    }

    pub(crate) fn crash() -> Self {
        let text = "the process ended while it handled this message alone";
        Self::plain(Self::CRASH, text.to_owned())
    }

    fn plain(class: &'static str, text: String) -> Self {
        Self {
            class: Cow::Borrowed(class),
            text,
            reason: None,
            route: None,
            source: None,
        }
    }

    /// Names its class, by which [`Routes`](super::Routes) decide and operators sort (default `handler`): 1 to 64 of the characters
    /// `a-z`, `0-9` and `-`; others are replaced by `-`. `panic`, `timeout` and `crash` are the consumer's own words: they become
    /// `handler-panic` and so on.
    #[must_use]
    pub fn with_class(mut self, class: &str) -> Self {
        let class = Reason::new(class);
        self.class = if Self::OWN.contains(&class.as_str()) {
            Cow::Owned(format!("handler-{}", class.as_str()))
        } else {
            Cow::Owned(class.as_str().to_owned())
        };
        self
    }

    /// Sends it a way, unless it has one.
    pub(super) fn on(mut self, route: Option<Route>) -> Self {
        self.route = self.route.or_else(|| route.map(Box::new));
        self
    }

    pub(super) fn route(&self) -> Option<&Route> {
        self.route.as_deref()
    }

    /// What [`with_class`](Self::with_class) said, or `handler`, `panic`, `timeout` or `crash`.
    #[must_use]
    pub fn class(&self) -> &str {
        &self.class
    }

    /// Why the message is a dead letter, where it is one at once.
    #[must_use]
    pub fn reason(&self) -> Option<&Reason> {
        self.reason.as_ref()
    }

    /// The error it was made from.
    #[must_use]
    pub fn source(&self) -> Option<&(dyn StdError + Send + Sync + 'static)> {
        self.source.as_deref()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.class, self.text)
    }
}

/// The text is the error's and those of its sources, joined by `: `.
impl<E: StdError + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::of(error)
    }
}

fn with_sources(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        // Many errors print their source themselves.
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
