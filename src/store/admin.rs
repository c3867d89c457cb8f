//! The administration contract: what is pending, what is set aside, and an operator's two ways to end that.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use time::OffsetDateTime;

use crate::error::Result;
use crate::message::{Message, MessageId};
use crate::story::Reason;

/// Shows an outbox to an operator, and acts on what is set aside.
///
/// Rows that wait for an operator leave only through [`requeue`](Self::requeue) and [`discard`](Self::discard), never by
/// age or by themselves. Both act on rows in state `parked` or `blocking`: rows that wait for something else have an
/// owner.
///
/// ```
/// use std::time::Duration;
/// use relaybox::store::{AsideFilter, Mode, OutboxAdmin};
/// use relaybox::story::Reason;
///
/// async fn send_again(admin: &dyn OutboxAdmin) -> relaybox::Result<u64> {
///     let filter = AsideFilter::all()
///         .with_destination("orders")
///         .with_reason(Reason::new("rejected"))
///         .with_age(Duration::from_secs(60));
///     let would = admin.requeue(&filter, Mode::DryRun).await?;
///     println!("{would} messages will be sent again");
///     admin.requeue(&filter, Mode::Apply).await
/// }
/// ```
pub trait OutboxAdmin: Send + Sync + 'static {
    /// What waits, by destination: the one with the oldest pending message first.
    ///
    /// Bounded: counts at most `count_max` pending rows of each lane, oldest first, and `count_max` rows set aside, and
    /// returns at most `destinations_max` destinations. What a bound leaves out is younger than what was counted in its
    /// lane. One statement, so that no row is missed or counted twice on its way
    /// between the two tables.
    fn depth(&self, count_max: u64, destinations_max: usize) -> BoxFuture<'_, Result<Depth>>;

    /// Up to `count_max` rows set aside after position `after`, in order of arrival, without payload and headers.
    fn list_aside<'a>(
        &'a self,
        filter: &'a AsideFilter,
        after: i64,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<AsideEntry>>>;

    /// One row set aside, with all that is stored of it; `None` when it is not there (any more).
    fn show_aside(&self, position: i64) -> BoxFuture<'_, Result<Option<AsideMessage>>>;

    /// When a message was published, and what it was, oldest first, up to `count_max` times: a message that was sent again
    /// is found again. Only what was settled by relays over a store that keeps it, and not for longer than that.
    ///
    /// To send it once more enqueue it; under the same id, consumers with an inbox know it.
    fn find_published<'a>(
        &'a self,
        id: &'a MessageId,
        count_max: usize,
    ) -> BoxFuture<'a, Result<Vec<PublishedMessage>>>;

    /// Puts parked rows back into the outbox, in order of arrival, unchanged but for a new position; returns how many.
    ///
    /// Rules: a message moves once, however many operators do this at once. Bounded steps, each its own transaction.
    /// What is parked after the beginning stays, so that a message which is refused again is not moved for ever. A
    /// requeued message has left the order of its key; but one that blocks its key keeps its place, in front of those
    /// that wait behind it, and goes first.
    ///
    /// An error leaves the finished steps done: repeat it to go on. Cancel safety: the same.
    fn requeue<'a>(&'a self, filter: &'a AsideFilter, mode: Mode) -> BoxFuture<'a, Result<u64>>;

    /// Deletes parked rows for good; returns how many. Each id is logged with `because`, an operator's words. What one
    /// of them blocked goes on.
    ///
    /// Steps, errors and cancelling are those of [`requeue`](Self::requeue).
    fn discard<'a>(
        &'a self,
        filter: &'a AsideFilter,
        because: &'a str,
        mode: Mode,
    ) -> BoxFuture<'a, Result<u64>>;

    /// Lets no message go to the destination until [`resume`](Self::resume). Relays notice within a second or two; they
    /// set aside what comes meanwhile, and later send it in order.
    ///
    /// # Errors
    /// [`Invalid`](crate::ErrorKind::Invalid) when as many destinations as relays read have been spoken about.
    fn pause<'a>(&'a self, destination: &'a str, because: &'a str) -> BoxFuture<'a, Result<()>>;

    /// Ends a pause. One that is not paused is no error.
    fn resume<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Result<()>>;

    /// Lets at most `rate_max` messages a second go to the destination, by all relays together; `None` ends the limit.
    /// Each lane has a sixteenth of the rate, and saves up a second of it at most.
    ///
    /// # Errors
    /// As [`pause`](Self::pause), and for a rate of 0: that is a pause.
    fn limit<'a>(
        &'a self,
        destination: &'a str,
        rate_max: Option<u32>,
        because: &'a str,
    ) -> BoxFuture<'a, Result<()>>;
}

/// Destinations that operators may speak about at one time.
pub const CONTROLS_MAX: usize = 1_000;

/// What operators said about a destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DestinationControl {
    /// Its name.
    pub destination: String,
    /// Whether nothing may go there.
    pub paused: bool,
    /// Messages a second at most.
    pub rate_max: Option<u32>,
    /// The operator's words.
    pub because: String,
    /// Since when, by the database's clock.
    pub changed_at: OffsetDateTime,
}

/// Whether to act or only to count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Counts what would be touched and changes nothing.
    DryRun,
    /// Does it.
    Apply,
}

/// Which rows set aside are meant: all that match every field given.
///
/// ```
/// use relaybox::store::AsideFilter;
///
/// let of_one_key = AsideFilter::all().with_destination("orders").with_key("order-17");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct AsideFilter {
    pub(crate) destination: Option<String>,
    pub(crate) reason: Option<Reason>,
    pub(crate) key: Option<Bytes>,
    pub(crate) message_id: Option<MessageId>,
    pub(crate) age: Option<Duration>,
    pub(crate) position: Option<i64>,
}

impl AsideFilter {
    /// Every row; each `with_` narrows it.
    #[must_use]
    pub const fn all() -> Self {
        Self {
            destination: None,
            reason: None,
            key: None,
            message_id: None,
            age: None,
            position: None,
        }
    }

    /// Only this destination.
    #[must_use]
    pub fn with_destination(mut self, destination: impl Into<String>) -> Self {
        self.destination = Some(destination.into());
        self
    }

    /// Only this reason.
    #[must_use]
    pub fn with_reason(mut self, reason: Reason) -> Self {
        self.reason = Some(reason);
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

    /// Only rows set aside at least so long ago, by the database's clock.
    #[must_use]
    pub const fn with_age(mut self, age: Duration) -> Self {
        self.age = Some(age);
        self
    }

    /// Only the row at this position.
    #[must_use]
    pub const fn with_position(mut self, position: i64) -> Self {
        self.position = Some(position);
        self
    }
}

/// Keys may be personal data: shown by size.
impl fmt::Debug for AsideFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsideFilter")
            .field("destination", &self.destination)
            .field("reason", &self.reason)
            .field("key_bytes", &self.key.as_ref().map(Bytes::len))
            .field("message_id", &self.message_id)
            .field("age", &self.age)
            .field("position", &self.position)
            .finish()
    }
}

/// What waits in an outbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Depth {
    /// The one with the oldest pending message first, those without one last.
    pub destinations: Vec<DestinationDepth>,
    /// Whether a bound was reached: there may be more rows, and more destinations.
    pub cut: bool,
}

/// What waits for one destination.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DestinationDepth {
    /// Its name.
    pub destination: String,
    /// Messages to be sent.
    pub pending: u64,
    /// How long the oldest of them has been in the outbox (since its enqueue or requeue), by the database's clock.
    pub oldest: Option<Duration>,
    /// Messages set aside, by reason, sorted.
    pub aside: Vec<(Reason, u64)>,
}

/// A row that is set aside, without payload and headers.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AsideEntry {
    /// Its number, in order of arrival here.
    pub position: i64,
    /// What it waits for: the word of an [`AsideState`](super::AsideState).
    pub state: String,
    /// Why.
    pub reason: Reason,
    /// Text of the refusal.
    pub error: Option<String>,
    /// How often it was refused again since.
    pub attempts: u32,
    /// Since when, by the database's clock.
    pub set_aside_at: OffsetDateTime,
    /// Identity of the message.
    pub message_id: MessageId,
    /// Where it was to go.
    pub destination: String,
    /// Its key.
    pub key: Option<Bytes>,
    /// What happened.
    pub event_type: String,
    /// Bytes of the message as stored.
    pub size: u64,
}

/// Key and error text may quote what is not for logs.
impl fmt::Debug for AsideEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsideEntry")
            .field("position", &self.position)
            .field("state", &self.state)
            .field("reason", &self.reason)
            .field("message_id", &self.message_id)
            .field("destination", &self.destination)
            .finish_non_exhaustive()
    }
}

/// A row of the history.
#[derive(Debug)]
#[non_exhaustive]
pub struct PublishedMessage {
    /// Its position in the outbox.
    pub position: i64,
    /// When the settlement of its batch began, by the database's clock: the broker had confirmed it by then.
    pub published_at: OffsetDateTime,
    /// The message; an error where the row cannot be read as one.
    pub message: Result<Message>,
}

/// A row that is set aside, whole.
#[derive(Debug)]
#[non_exhaustive]
pub struct AsideMessage {
    /// What a list shows.
    pub entry: AsideEntry,
    /// The message; an error where the row cannot be read as one, which may be why it is here.
    pub message: Result<Message>,
    /// The headers column as it is, to see what cannot be read.
    pub stored_headers: Option<String>,
    /// The payload's bytes.
    pub payload: Option<Bytes>,
}
