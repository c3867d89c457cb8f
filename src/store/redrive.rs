//! The redrive contract: what an operator sees of dead letters in a table, and the book that is kept of their leaving.

use std::fmt;
use std::time::Duration;

use futures_util::future::BoxFuture;
use time::OffsetDateTime;

use super::{DeadLetterStore, LetterEntry, LetterFilter, WholeLetter};
use crate::envelope::Outgoing;
use crate::error::Result;
use crate::message::MessageId;

/// Most entries that one call of [`RedriveStore`] takes or returns.
pub const LETTERS_MAX: usize = 1_000;

/// Dead letters in a table, as an operator works on them: entries leave only together with a row in the audit.
///
/// Every call is one transaction, bounded in rows and bytes. The audit is kept until it is
/// [cleaned up](Self::clean_up_audit), and tells for as long which letters have left already.
pub trait RedriveStore: DeadLetterStore {
    /// Stores a letter durably that arrives from elsewhere, unless it is here or the audit says that it has left: the same
    /// consumer, id, redrive count and digest.
    fn take_in<'a>(&'a self, letter: &'a Outgoing) -> BoxFuture<'a, Result<Arrival>>;

    /// Up to `count_max` entries of a consumer that match, of the positions after `after` up to `last`, oldest first,
    /// without payload and headers.
    fn entries<'a>(
        &'a self,
        consumer: &'a str,
        filter: &'a LetterFilter,
        range: (i64, i64),
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<LetterEntry>>>;

    /// The same, whole, and of no more than `bytes_max` stored bytes but for the first.
    fn letters<'a>(
        &'a self,
        consumer: &'a str,
        filter: &'a LetterFilter,
        range: (i64, i64),
        count_max: usize,
        bytes_max: usize,
    ) -> BoxFuture<'a, Result<Vec<WholeLetter>>>;

    /// The position of the last entry there is, of any consumer; 0 when there is none.
    fn last_position(&self) -> BoxFuture<'_, Result<i64>>;

    /// Deletes those of the entries that are there and that no run may have sent, with a row each in the audit; returns how
    /// many. See [`may_have_sent`](Self::may_have_sent).
    fn take_out<'a>(
        &'a self,
        leaving: &'a [Leaving],
        note: &'a Note<'a>,
    ) -> BoxFuture<'a, Result<u64>>;

    /// Puts a letter in the place of an entry, with a row about the old one in the audit; the new position, or `None` when
    /// the entry is not there (any more) or a run [may have sent it](Self::may_have_sent), and nothing was done.
    fn replace<'a>(
        &'a self,
        old: &'a Leaving,
        new: &'a Outgoing,
        note: &'a Note<'a>,
    ) -> BoxFuture<'a, Result<Option<i64>>>;

    /// A run that may have sent the entry at this position, with nobody knowing yet: it has the entry in hand, or had when its
    /// process died or it was cancelled. What is changed or thrown away then would have its effect all the same.
    fn may_have_sent<'a>(
        &'a self,
        consumer: &'a str,
        position: i64,
    ) -> BoxFuture<'a, Result<Option<i64>>>;

    /// Stores a letter as an entry of its own, with a row in the audit; its position. Repeating it after an error is harmless:
    /// the same letter is one entry.
    fn enter<'a>(
        &'a self,
        new: &'a Outgoing,
        told: &'a Leaving,
        note: &'a Note<'a>,
    ) -> BoxFuture<'a, Result<i64>>;

    /// Records a planned run, with its `end` in front of all that comes later.
    fn plan<'a>(&'a self, run: &'a NewRun<'a>) -> BoxFuture<'a, Result<RunRow>>;

    /// A run of a consumer.
    fn find_run<'a>(&'a self, consumer: &'a str, id: i64) -> BoxFuture<'a, Result<Option<RunRow>>>;

    /// Up to `count_max` runs of a consumer with an id below `before`, youngest first.
    fn runs<'a>(
        &'a self,
        consumer: &'a str,
        before: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<RunRow>>>;

    /// Takes a run that is in one of these states, under a new token: whoever had it can settle nothing any more. `None` when
    /// it is in another state.
    fn take_run<'a>(
        &'a self,
        consumer: &'a str,
        id: i64,
        from: &'a [RunState],
    ) -> BoxFuture<'a, Result<Option<RunRow>>>;

    /// Says that these entries are about to be sent, beside those that the run has in hand. Returns the positions of those that
    /// are there still, and nothing else may be sent; `None` when the token is not the run's any more or it does not run.
    fn take_in_hand<'a>(
        &'a self,
        run: &'a RunRow,
        positions: &'a [i64],
    ) -> BoxFuture<'a, Result<Option<Vec<i64>>>>;

    /// Deletes what was sent, writes the audit and moves the run on, all of it or nothing; false, and nothing done, when the
    /// token is not the run's any more or it does not run. Repeating it after an error is harmless.
    fn settle_run<'a>(&'a self, run: &'a RunRow, step: &'a RunStep) -> BoxFuture<'a, Result<bool>>;

    /// Ends a run, or lets it rest, with words about why; false as of [`settle_run`](Self::settle_run).
    fn end_run<'a>(
        &'a self,
        run: &'a RunRow,
        state: RunState,
        error: Option<&'a str>,
    ) -> BoxFuture<'a, Result<bool>>;

    /// Cancels a run that has not ended: whoever has it can settle nothing any more. Whether there was one.
    fn cancel_run<'a>(
        &'a self,
        consumer: &'a str,
        id: i64,
        because: &'a str,
    ) -> BoxFuture<'a, Result<bool>>;

    /// Up to `count_max` rows of a consumer's audit after position `after`, oldest first.
    fn audit<'a>(
        &'a self,
        consumer: &'a str,
        after: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<AuditEntry>>>;

    /// Deletes up to `rows_max` rows of a consumer's audit, and as many runs that have ended, each at least `age` old.
    /// Returns how many it were of what was most. A letter whose row is gone may be taken in once more.
    fn clean_up_audit<'a>(
        &'a self,
        consumer: &'a str,
        age: Duration,
        rows_max: usize,
    ) -> BoxFuture<'a, Result<u64>>;
}

/// What became of a letter that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// It is an entry now.
    Stored,
    /// It is an entry already.
    Known,
    /// It was an entry, and has left.
    Left,
}

/// What became of an entry, in a word of the audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LetterOutcome {
    /// Sent back and confirmed; the entry left.
    Sent,
    /// Thrown away; the entry left.
    Discarded,
    /// Changed; the entry left, and another one came.
    Replaced,
    /// Came, to be handled once more.
    Entered,
    /// The broker will not take it as it is; the entry stays.
    Rejected,
    /// Not sent, for a reason told in the plan; the entry stays.
    Refused,
}

impl LetterOutcome {
    /// The word in the table.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sent => "sent",
            Self::Discarded => "discarded",
            Self::Replaced => "replaced",
            Self::Entered => "entered",
            Self::Rejected => "rejected",
            Self::Refused => "refused",
        }
    }

    /// Whether the entry left by it.
    #[must_use]
    pub const fn is_leaving(self) -> bool {
        matches!(self, Self::Sent | Self::Discarded | Self::Replaced)
    }
}

/// One row of the audit to be: an entry and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaving {
    /// Its position.
    pub position: i64,
    /// Identity of the message.
    pub message_id: MessageId,
    /// Its redrives so far.
    pub redrive_count: u32,
    /// The message's digest.
    pub digest: Vec<u8>,
    /// What became of it.
    pub outcome: LetterOutcome,
    /// Words for people, at most 1 KiB.
    pub detail: String,
}

/// Who does what, for the audit.
#[derive(Debug, Clone, Copy)]
pub struct Note<'a> {
    /// Whose entries.
    pub consumer: &'a str,
    /// Who.
    pub operator: &'a str,
    /// The verb: `redrive`, `edit`, `discard`, `reprocess`.
    pub verb: &'a str,
}

/// A run to be recorded.
#[derive(Clone, Copy)]
pub struct NewRun<'a> {
    /// Whose entries.
    pub consumer: &'a str,
    /// Who planned it.
    pub operator: &'a str,
    /// What is to be done, as the engine writes it.
    pub plan: &'a str,
    /// The last position that belongs to it.
    pub end: i64,
}

/// How a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// Nobody has begun it.
    Planned,
    /// Somebody has it, or died over it.
    Running,
    /// Its canaries were not handled; it waits for an operator's word.
    Paused,
    /// An error ended it; it can be resumed.
    Stopped,
    /// It came to its end.
    Done,
    /// An operator ended it.
    Cancelled,
}

impl RunState {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Planned,
        Self::Running,
        Self::Paused,
        Self::Stopped,
        Self::Done,
        Self::Cancelled,
    ];

    /// The word in the table.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Planned => "planned",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
            Self::Done => "done",
            Self::Cancelled => "cancelled",
        }
    }

    /// Reads the word.
    #[must_use]
    pub fn read(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }
}

/// A run as it is recorded.
#[derive(Clone, PartialEq, Eq)]
pub struct RunRow {
    /// Its number.
    pub id: i64,
    /// Whose entries.
    pub consumer: String,
    /// Who planned it.
    pub operator: String,
    /// What is to be done, as the engine wrote it.
    pub plan: String,
    /// The last position that belongs to it.
    pub end: i64,
    /// How it stands.
    pub state: RunState,
    /// Everything up to here is dealt with.
    pub cursor: i64,
    /// Positions of entries that may have been sent; see [`RedriveStore::may_have_sent`].
    pub in_hand: Vec<i64>,
    /// Fences the writes of those who had it before.
    pub token: i64,
    /// Entries sent and confirmed.
    pub sent: u64,
    /// Entries that were refused by the plan's rules, and stay.
    pub refused: u64,
    /// Entries that the broker would not take, and stay.
    pub rejected: u64,
    /// Whether its canaries were handled, or an operator said to go on without.
    pub proved: bool,
    /// Why it rests or was ended.
    pub error: Option<String>,
    /// When it was planned, by the database's clock.
    pub planned_at: OffsetDateTime,
    /// When it was last written, by the database's clock.
    pub changed_at: OffsetDateTime,
}

/// The plan may quote keys and errors, which are not for logs.
impl fmt::Debug for NewRun<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewRun")
            .field("consumer", &self.consumer)
            .field("operator", &self.operator)
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}

/// The plan may quote keys and errors, which are not for logs.
impl fmt::Debug for RunRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunRow")
            .field("id", &self.id)
            .field("consumer", &self.consumer)
            .field("operator", &self.operator)
            .field("end", &self.end)
            .field("state", &self.state)
            .field("cursor", &self.cursor)
            .field("sent", &self.sent)
            .field("refused", &self.refused)
            .field("rejected", &self.rejected)
            .field("proved", &self.proved)
            .finish_non_exhaustive()
    }
}

/// How a run moves on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunStep {
    /// Who runs it.
    pub operator: String,
    /// Everything up to here is dealt with now.
    pub cursor: i64,
    /// Positions of entries that may have been sent without anybody knowing; all others are free again.
    pub in_hand: Vec<i64>,
    /// What became of entries, in order. Those whose outcome says so are deleted; one that is gone already is recorded too,
    /// since it was sent.
    pub leaving: Vec<Leaving>,
    /// Counts of the run, from its beginning.
    pub sent: u64,
    /// See [`RunRow::refused`].
    pub refused: u64,
    /// See [`RunRow::rejected`].
    pub rejected: u64,
    /// See [`RunRow::proved`].
    pub proved: bool,
}

/// A row of the audit.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditEntry {
    /// Its number.
    pub position: i64,
    /// When, by the database's clock.
    pub at: OffsetDateTime,
    /// The run that did it, if one did.
    pub run: Option<i64>,
    /// Who.
    pub operator: String,
    /// The verb.
    pub verb: String,
    /// Identity of the message.
    pub message_id: MessageId,
    /// Its redrives before that.
    pub redrive_count: u32,
    /// The message's digest.
    pub digest: Vec<u8>,
    /// The word for what became of the entry; see [`LetterOutcome`].
    pub outcome: String,
    /// Words for people.
    pub detail: String,
}
