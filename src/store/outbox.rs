//! The outbox contract: writing in the caller's transaction, reading by leased lanes, settling under a fence.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use futures_util::future::BoxFuture;

use crate::error::{Error, Result};
use crate::lane::Lane;
use crate::message::Message;

use super::admin::{DestinationControl, OutboxAdmin};
use super::aside::{Ahead, Place, SetAside};
use super::wake_up::WakeUps;

/// Writes messages on a connection of the caller's choosing.
pub trait Enqueue: Send + Sync + 'static {
    /// The database's connection: a pool's, a transaction's or a savepoint's.
    type Connection: Send;

    /// Inserts validated messages in this order, in one statement where the database allows it.
    ///
    /// Rules: the rows exist if and only if the caller's transaction commits. Nothing of them is kept in memory. A
    /// statement that fails for the message's own sake leaves the caller's transaction usable.
    ///
    /// Cancel safety: as the driver's; a dropped future may leave the connection mid-statement.
    fn insert(
        &self,
        connection: &mut Self::Connection,
        messages: &[Message],
    ) -> impl Future<Output = Result<()>> + Send;

    /// The same for messages that are not to be sent before `delay` has passed by the database's clock.
    fn insert_delayed(
        &self,
        connection: &mut Self::Connection,
        messages: &[Message],
        delay: Duration,
    ) -> impl Future<Output = Result<()>> + Send;
}

/// Gives the statement of [`Enqueue::insert`] away, for clients other than ours.
pub trait EnqueueStatement: Enqueue {
    /// The text and its binds.
    type Statement<'a>;

    /// The statement that inserts these messages, in this order.
    ///
    /// # Errors
    /// [`Invalid`](crate::ErrorKind::Invalid) for what a column cannot hold.
    fn statement<'a>(&'a self, messages: &'a [Message]) -> Result<Self::Statement<'a>>;
}

/// A lane held by a relay, with the fencing token that every write of the holder shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lease {
    /// The lane.
    pub lane: Lane,
    /// Grows with every change of hands, and is not given again after the database was put back to an earlier state.
    pub token: i64,
}

/// Where a relay stands among those that run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Live relays, this one included.
    pub live: usize,
    /// How many of them come before this one, in an order that all agree on: less than `live`.
    pub place: usize,
}

/// Leases and reads for relays. Judged by the database's clock alone.
pub trait OutboxStore: Send + Sync + 'static {
    /// Name of the product, for logs and errors.
    fn name(&self) -> &'static str;

    /// Checks that the tables exist and look as they must.
    ///
    /// # Errors
    /// [`NotFound`](crate::ErrorKind::NotFound) when tables are missing, [`Configuration`](crate::ErrorKind::Configuration)
    /// when they differ, [`Unavailable`](crate::ErrorKind::Unavailable) naming what was tried when the database does
    /// not answer, within seconds.
    fn check(&self) -> BoxFuture<'_, Result<()>>;

    /// Registers the running relay `id` for `duration` from now, or extends its registration, and tells where it stands.
    ///
    /// Rules: `id` is unique to a running relay, `name` need not be. A registration counts from its return until it
    /// ends by the database's clock, whether or not the relay holds lanes. Removes some registrations that have ended,
    /// a bounded number at a time and never waiting for a lock on one. Ends or extends no lease.
    fn heartbeat<'a>(
        &'a self,
        id: &'a str,
        name: &'a str,
        duration: Duration,
    ) -> BoxFuture<'a, Result<Standing>>;

    /// Tells where the relay `id` stands, and writes nothing.
    ///
    /// Rule: it counts itself also when its registration has ended.
    fn standing<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<Standing>>;

    /// Ends the registration of `id` at once. One that is not there is no error.
    fn leave<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<()>>;

    /// Takes up to `count_max` lanes whose lease has ended (or never began) for `duration`, each under a new token.
    ///
    /// Rules: a lane has one holder at a time. Two calls in the same instant take different lanes.
    fn lease<'a>(
        &'a self,
        relay: &'a str,
        count_max: usize,
        duration: Duration,
    ) -> BoxFuture<'a, Result<Vec<Lease>>>;

    /// Extends leases to `duration` from now and returns those that were still held.
    ///
    /// Rule: a lease that another relay took since is not returned and not touched.
    fn renew<'a>(
        &'a self,
        leases: &'a [Lease],
        duration: Duration,
    ) -> BoxFuture<'a, Result<Vec<Lease>>>;

    /// Ends leases at once so that others need not wait. Those no longer held are left alone.
    fn release<'a>(&'a self, leases: &'a [Lease]) -> BoxFuture<'a, Result<()>>;

    /// A reader with its own progress, for one worker.
    fn reader(&self) -> Box<dyn OutboxReader>;

    /// Puts up to `count_max` delayed messages whose time has come into the outbox, by the database's clock.
    ///
    /// Rules: a message moves once, however many relays do this at once, and never early. It gets its position now: in
    /// its key's order it comes behind what was enqueued meanwhile.
    fn release_due(&self, count_max: usize) -> BoxFuture<'_, Result<Due>>;

    /// What operators said about destinations, sorted by name; at most [`CONTROLS_MAX`](super::CONTROLS_MAX).
    fn controls(&self) -> BoxFuture<'_, Result<Vec<DestinationControl>>>;

    /// One bounded step of removing what was kept of published messages for long enough (default: nothing is kept). Whether
    /// there may be more to remove.
    ///
    /// Rules: judged by the database's clock, never early. Touches nothing but the history, so nothing that is pending, set
    /// aside or dead. However many relays do this at once, under whatever load, no enqueue, fetch or settlement waits for
    /// it longer than for another statement.
    ///
    /// # Errors
    /// [`Busy`](crate::ErrorKind::Busy) when all that could be removed now is gone, and what is left is in use: its turn
    /// comes again.
    ///
    /// Cancel safety: a dropped future may or may not have removed something.
    fn clean_up_history(&self) -> BoxFuture<'_, Result<bool>> {
        Box::pin(std::future::ready(Ok(false)))
    }

    /// News of committed messages, for one relay, where the store has any (default none). It ends when dropped.
    fn wake_ups(&self) -> Option<Box<dyn WakeUps>> {
        None
    }

    /// What an operator asks of the same outbox, where the store answers that (default: it does not). A relay samples its
    /// gauges there.
    fn admin(&self) -> Option<&dyn OutboxAdmin> {
        None
    }

    /// How many messages are pending, at most `count_max` counted.
    fn pending(&self, count_max: u64) -> BoxFuture<'_, Result<u64>>;

    /// How many messages are set aside, at most `count_max` counted.
    fn aside(&self, count_max: u64) -> BoxFuture<'_, Result<u64>>;
}

/// What became of delayed messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Due {
    /// Messages put into the outbox.
    pub released: u64,
    /// The time until the next one is due, if there is one.
    pub next: Option<Duration>,
}

/// One worker's view of its lanes: strictly fetch, publish, settle, fetch again.
///
/// A lane may be missing from a request and come back later under the same token, and may have been read and settled by
/// another reader meanwhile; never by two at a time. What a reader remembers of a lane holds until the first request
/// without it.
pub trait OutboxReader: Send {
    /// Reads committed messages of the leased lanes: of each lane first those set aside that may go now, then the
    /// pending ones, both in the order of their positions.
    ///
    /// Rules: takes no row lock and keeps no transaction or connection. Returns every committed row sooner or later,
    /// whatever the order of commits. Returns nothing of a lane whose token is no longer current. A page that was not
    /// settled before the next fetch counts as not settled at all: its rows are returned again.
    ///
    /// Of the rows set aside it returns those that are [`Waiting`](super::AsideState::Waiting), for a destination that is not
    /// closed, with nothing ahead of them in their scope and key that has to wait; and it lets those held go on once
    /// nothing blocks them any more. They take half of the page at most where there are others.
    ///
    /// Cancel safety: a dropped future changed nothing.
    fn fetch<'a>(&'a mut self, request: &'a FetchRequest) -> BoxFuture<'a, Result<Page>>;

    /// Applies all verdicts in one transaction; only those under a current token. Its effect is visible to every later
    /// statement once this returns.
    ///
    /// Rules: verdicts are about rows of the last page, or about rows set aside; a row without one stays where it is.
    /// After an error the same batch may be settled again.
    ///
    /// Cancel safety: a dropped future may or may not have applied.
    fn settle<'a>(&'a mut self, batch: &'a SettlementBatch) -> BoxFuture<'a, Result<Settled>>;
}

/// What to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchRequest {
    /// The lanes and their tokens.
    pub leases: Vec<Lease>,
    /// Most rows in all.
    pub rows_max: usize,
    /// Most bytes in all, by stored size; one message per lane is returned however large.
    pub bytes_max: usize,
    /// Destinations whose rows set aside are not wanted now.
    pub closed: Vec<String>,
}

/// What was read.
#[derive(Debug, Default)]
pub struct Page {
    /// Rows, in the order of their places.
    pub rows: Vec<PendingMessage>,
    /// Rows that are there but cannot be read, and why: foreign SQL may have written them.
    ///
    /// They count against the limits, so whoever reads parks them: left alone they would fill the page.
    pub unreadable: Vec<(Place, Error)>,
    /// Whether a limit cut it: more may be waiting.
    pub full: bool,
}

/// A row that can be sent.
#[derive(Clone, PartialEq)]
pub struct PendingMessage {
    /// Where it is. Positions are unique, and in insertion order within a lane.
    pub place: Place,
    /// The message.
    pub message: Message,
    /// What is set aside of its key, by scope. Empty for a row set aside.
    pub ahead: Vec<Ahead>,
}

impl fmt::Debug for PendingMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.place, self.message.id)
    }
}

/// What a relay decided about rows it published.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SettlementBatch {
    /// The leases under which it was read.
    pub leases: Vec<Lease>,
    /// What becomes of each row that changes. Rows without a verdict stay as they are.
    pub verdicts: Vec<(Place, Verdict)>,
}

/// What becomes of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The broker has it: delete.
    Confirmed,
    /// It may not be sent now. A row that is set aside already stays at its place, in the new state.
    SetAside(SetAside),
}

/// What the settlement changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Settled {
    /// Rows changed.
    pub applied: usize,
    /// Rows left alone because the lease had changed hands (or somebody removed them).
    pub fenced: usize,
}
