//! The waiting contract: messages that wait in the consumer's database for their next attempt, and their successors.

use std::fmt;
use std::time::Duration;

use futures_util::future::BoxFuture;
use md5::{Digest, Md5};
use time::OffsetDateTime;

use crate::envelope::Outgoing;
use crate::error::{Error, Result};
use crate::message::MessageId;

/// What one consumer's rows of one source and key have in common: they go in their order, one at a time.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Line([u8; 16]);

impl Line {
    /// The line of a key of a source.
    #[must_use]
    pub fn of(source: &str, key: &[u8]) -> Self {
        Self(hash([b"line", source.as_bytes(), key]))
    }

    /// Takes stored bytes; `None` if they are no line.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    /// The bytes to store.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A message that waits, or a note about one.
#[derive(Debug, Clone, PartialEq)]
pub struct Waiting {
    /// The source that it belongs to.
    pub source: String,
    /// What the inbox knows it by.
    pub known_as: String,
    /// The message and its failures so far.
    pub letter: Outgoing,
}

impl Waiting {
    /// The line that it stands in, if it has a key.
    #[must_use]
    pub fn line(&self) -> Option<Line> {
        let key = self.letter.message.key.as_deref()?;
        Some(Line::of(&self.source, key))
    }

    /// What tells whether a row is about the same message: source, what the inbox knows it by, its digest, and how often an
    /// operator sent it back.
    #[must_use]
    pub fn identity(&self) -> [u8; 16] {
        self.hashed(b"message")
    }

    /// The same for a note, which is never taken for the message itself.
    #[must_use]
    pub fn note_identity(&self) -> [u8; 16] {
        self.hashed(b"note")
    }

    fn hashed(&self, kind: &[u8]) -> [u8; 16] {
        let redrives = self.letter.story.redrive_count.to_be_bytes();
        hash([
            kind,
            self.source.as_bytes(),
            self.known_as.as_bytes(),
            &redrives,
            &self.letter.message.digest(),
        ])
    }
}

/// Each part with its length in front, so that no two lists of parts are one.
fn hash<const N: usize>(parts: [&[u8]; N]) -> [u8; 16] {
    let mut hash = Md5::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// A row that a member works on, until its lease ends. Another claim, and every change of the row, makes it void.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Claim {
    /// The row.
    pub position: i64,
    /// Fences the writes of earlier holders.
    pub token: i64,
}

/// A row that was due.
#[derive(Debug, Clone, PartialEq)]
pub struct Claimed {
    /// Shown by everything that its holder does with the row.
    pub claim: Claim,
    /// The source that it belongs to.
    pub source: String,
    /// The message and its failures so far.
    pub letter: Outgoing,
    /// Whether it is to be a dead letter without an attempt, because one ahead of it is.
    pub parked: bool,
    /// Whether a claim of it ended without a word, so that it may have ended its process.
    pub again: bool,
    /// How long it has been due.
    pub late: Duration,
}

/// What a claim found.
#[derive(Debug, Default)]
pub struct Claims {
    /// Rows that are the caller's now, those that have been due longest first.
    pub rows: Vec<Claimed>,
    /// When the next of those that could not be claimed yet can be; `None` if there is none.
    pub next_in: Option<Duration>,
    /// Rows that cannot be read, each with why. They stay, and are tried again after each lease.
    pub unreadable: Vec<(i64, Error)>,
}

/// What a finish did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Finished {
    /// Whether the claim held; otherwise nothing was done.
    pub held: bool,
    /// Whether another row of the line is due now.
    pub promoted: bool,
}

/// A note about a message.
#[derive(Debug, Clone, PartialEq)]
pub struct Noted {
    /// Its [`note_identity`](Waiting::note_identity).
    pub identity: [u8; 16],
    /// Its failures so far.
    pub story: crate::story::Story,
    /// What is left of its wait.
    pub due_in: Duration,
}

/// How it is with a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum WaitingState {
    /// It waits for its time, or is in work.
    Due,
    /// It waits for those of its line ahead of it.
    Behind,
    /// It is a dead letter whose line waits for an operator.
    Held,
    /// It says how far the attempts at a message have come that waits in its place at the broker.
    Noted,
}

impl WaitingState {
    /// The column's word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Due => "due",
            Self::Behind => "behind",
            Self::Held => "held",
            Self::Noted => "noted",
        }
    }

    /// The state of a column's word, if it is one of this version's.
    #[must_use]
    pub fn read(word: &str) -> Option<Self> {
        [Self::Due, Self::Behind, Self::Held, Self::Noted]
            .into_iter()
            .find(|state| state.as_str() == word)
    }
}

/// A row as an operator sees it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct WaitingEntry {
    /// Its number, in order of arrival.
    pub position: i64,
    /// What it waits for; `None` for a state that a newer version wrote.
    pub state: Option<WaitingState>,
    /// The source that it belongs to.
    pub source: String,
    /// Its key.
    pub key: Option<Vec<u8>>,
    /// Its id.
    pub id: MessageId,
    /// Failed attempts so far.
    pub retry_count: u32,
    /// Class and text of the last failure.
    pub last_error: Option<String>,
    /// Not before this instant, in state [`Due`](WaitingState::Due).
    pub due_at: Option<OffsetDateTime>,
    /// Since when it is here, by the database's clock.
    pub stored_at: OffsetDateTime,
}

impl WaitingEntry {
    /// An entry of what an adapter has read.
    #[expect(clippy::too_many_arguments, reason = "one for each column")]
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) const fn new(
        position: i64,
        state: Option<WaitingState>,
        source: String,
        key: Option<Vec<u8>>,
        id: MessageId,
        retry_count: u32,
        last_error: Option<String>,
        due_at: Option<OffsetDateTime>,
        stored_at: OffsetDateTime,
    ) -> Self {
        Self {
            position,
            state,
            source,
            key,
            id,
            retry_count,
            last_error,
            due_at,
            stored_at,
        }
    }
}

/// What becomes of a line whose head is a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReleaseAs {
    /// The head goes, and the line goes on.
    Skip,
    /// The head goes, and those that wait behind it now become dead letters too, each for reason `parked`.
    Park,
    /// The head is tried again first, with all attempts before it. Its dead letter stays where it is.
    Retry,
}

/// The waiting room of consumers: keeps failed messages until they are due, by the database's clock, and behind them what
/// follows of their key.
///
/// Rows of one line go in order of arrival: the first is due at its time, the others when it is gone. A row keeps its place
/// when its message fails again. Each operation is a statement or a short transaction on a connection of its own: it takes
/// none of those that handlers use.
///
/// Errors are the database's: after one, whether the change was made is unknown, and repeating it is harmless.
pub trait WaitingStore: Send + Sync + 'static {
    /// Checks that the table exists; errors as [`OutboxStore::check`](super::OutboxStore::check).
    fn check(&self) -> BoxFuture<'_, Result<()>>;

    /// Stores a message durably, due after `delay`.
    ///
    /// A row with its [identity](Waiting::identity) and fewer failures takes over story and due time, keeps its place, and
    /// whoever has claimed it has lost it; one with as many or more stays as it is. With `in_line` a new row goes behind all
    /// others of its [line](Waiting::line), and is due no earlier than they are gone.
    fn put<'a>(
        &'a self,
        consumer: &'a str,
        waiting: &'a Waiting,
        in_line: bool,
        delay: Duration,
    ) -> BoxFuture<'a, Result<()>>;

    /// Which of these lines somebody waits in. Waits for nobody; what is there may be gone the next moment.
    fn occupied<'a>(
        &'a self,
        consumer: &'a str,
        lines: &'a [Line],
    ) -> BoxFuture<'a, Result<Vec<Line>>>;

    /// Stores a message durably behind those of its line, if there are any; whether there were. A message that waits there
    /// already is not stored again.
    ///
    /// Against a [`finish`](Self::finish) of the last of them at the same time: either that finds the message behind it, or
    /// this finds nobody.
    fn follow<'a>(&'a self, consumer: &'a str, waiting: &'a Waiting)
    -> BoxFuture<'a, Result<bool>>;

    /// Claims up to `count_max` rows that are due, for `lease` by the database's clock.
    fn claim<'a>(
        &'a self,
        consumer: &'a str,
        count_max: usize,
        lease: Duration,
    ) -> BoxFuture<'a, Result<Claims>>;

    /// Prolongs claims to `lease` from now, and returns those that still hold.
    fn renew<'a>(
        &'a self,
        claims: &'a [Claim],
        lease: Duration,
    ) -> BoxFuture<'a, Result<Vec<Claim>>>;

    /// Gives rows back, to be claimed again after `delay`, by anybody. Claims that do not hold any more are passed over.
    fn give_back<'a>(&'a self, claims: &'a [Claim], delay: Duration) -> BoxFuture<'a, Result<()>>;

    /// Deletes a row that is dealt with, and makes the next of its line due.
    fn finish(&self, claim: Claim) -> BoxFuture<'_, Result<Finished>>;

    /// Sees to it that those that wait behind the row now will be parked when their turn comes. Whether the claim held.
    fn park(&self, claim: Claim) -> BoxFuture<'_, Result<bool>>;

    /// Makes a message that is a dead letter the head of its line, which waits for an operator from then on. With a claim its
    /// row becomes the head, if the claim holds and the row stands in a line; without, a new one, unless the message waits
    /// already.
    fn hold<'a>(
        &'a self,
        consumer: &'a str,
        waiting: &'a Waiting,
        claim: Option<Claim>,
    ) -> BoxFuture<'a, Result<()>>;

    /// Frees a line that waits for an operator; whether one did. One whose first row stands behind nobody, for whatever reason, goes on
    /// too.
    ///
    /// Against a [`finish`](Self::finish) at the same time of a row ahead of the head: either that or this makes the next one due.
    fn release<'a>(
        &'a self,
        consumer: &'a str,
        line: Line,
        how: ReleaseAs,
    ) -> BoxFuture<'a, Result<bool>>;

    /// Notes durably how often a message has failed that waits in its place at the broker, and when its next attempt is
    /// due. A note of more failures stays.
    fn note<'a>(
        &'a self,
        consumer: &'a str,
        waiting: &'a Waiting,
        delay: Duration,
    ) -> BoxFuture<'a, Result<()>>;

    /// The notes with these identities.
    fn recall<'a>(
        &'a self,
        consumer: &'a str,
        identities: &'a [[u8; 16]],
    ) -> BoxFuture<'a, Result<Vec<Noted>>>;

    /// Forgets a note.
    fn forget<'a>(&'a self, consumer: &'a str, identity: &'a [u8; 16])
    -> BoxFuture<'a, Result<()>>;

    /// Deletes up to `rows_max` notes that are at least `age` old; how many it were.
    fn clean_up<'a>(
        &'a self,
        consumer: &'a str,
        age: Duration,
        rows_max: usize,
    ) -> BoxFuture<'a, Result<u64>>;

    /// Up to `count_max` rows of a consumer after position `after`, in order; of one state if one is given.
    fn list<'a>(
        &'a self,
        consumer: &'a str,
        state: Option<WaitingState>,
        after: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<WaitingEntry>>>;

    /// How many rows a consumer has in each state that has any.
    fn count<'a>(&'a self, consumer: &'a str) -> BoxFuture<'a, Result<Vec<(WaitingState, u64)>>>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Message;

    fn waiting(source: &str, id: &str, key: &str) -> Waiting {
        let message = Message::new(source, "T").with_id(id).with_key(key);
        Waiting {
            source: source.into(),
            known_as: id.into(),
            letter: message.into(),
        }
    }

    #[test]
    fn a_line_is_one_key_of_one_source() {
        let line = |source, key| waiting(source, "m", key).line().unwrap_or(Line([0; 16]));
        assert_eq!(line("orders", "k"), line("orders", "k"));
        assert_ne!(line("orders", "k"), line("orders", "j"));
        assert_ne!(line("orders", "k"), line("order", "sk"));
        assert_eq!(
            Line::from_bytes(line("a", "b").as_bytes()),
            Some(line("a", "b"))
        );
        assert_eq!(Line::from_bytes(b"short"), None);
    }

    #[test]
    fn another_message_redrive_or_kind_of_row_is_another_identity() {
        let one = waiting("orders", "m-1", "k");
        let mut sent_back = one.clone();
        sent_back.letter.story.redrive_count = 1;
        let mut failed = one.clone();
        failed.letter.story.retry_count = 7;
        assert_eq!(one.identity(), failed.identity());
        let others = [
            sent_back.identity(),
            one.note_identity(),
            waiting("orders", "m-2", "k").identity(),
            waiting("orders", "m-1", "j").identity(),
            waiting("bills", "m-1", "k").identity(),
        ];
        assert!(!others.contains(&one.identity()));
    }

    #[test]
    fn states_read_back_equal() {
        for state in [
            WaitingState::Due,
            WaitingState::Behind,
            WaitingState::Held,
            WaitingState::Noted,
        ] {
            assert_eq!(WaitingState::read(state.as_str()), Some(state));
        }
        assert_eq!(WaitingState::read("later"), None);
    }
}
