//! The inbox: records the keys of messages, runs the handler and commits both, as one transaction.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;

use crate::consumer::{BatchHandler, Failure, Outcome, OutsideHandler};
use crate::envelope::Incoming;
use crate::error::{Error, ErrorKind};
use crate::ladder::Ask;
use crate::store::{InboxStore, Recorded};

/// How an attempt ended.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// What was to be done is committed: how it is with each message.
    Settled(Vec<Ended>),
    /// A message of them is being handled elsewhere.
    Busy,
    /// The handler failed; nothing of it is left. Counts.
    Failed { failure: Failure, ask: Ask },
    /// The database asked to run the transaction again, or its connection broke under the work. Counts as nothing,
    /// a bounded number of times.
    Rerun(Failure),
    /// The database is away. Counts as nothing.
    Unavailable(Error),
    /// The work is done, outside of any transaction, and could not be recorded. It must not be done again.
    Unrecorded(Ended, Error),
}

/// How it is with one message after an attempt that succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The effect is committed.
    Done,
    /// The handler chose to do nothing, and that is committed.
    Skipped,
    /// The effect was committed before.
    Duplicate,
}

/// A message and what the inbox remembers it by.
#[derive(Debug, Clone)]
pub(crate) struct Keyed {
    pub incoming: Incoming,
    pub key: String,
}

/// The inbox of one consumer.
#[derive(Debug)]
pub(crate) struct Inbox<S> {
    pub store: S,
    pub consumer: String,
    pub handler_timeout: Duration,
}

impl<S: InboxStore> Inbox<S> {
    /// Runs one attempt inside a transaction: `next`, if there is one, which another attempt's commit began. Leaves there the
    /// one that its own commit began.
    ///
    /// Not cancel safe by choice: a future dropped in here closes its connection, and the messages come again.
    pub(crate) async fn within<H>(
        &self,
        handler: &H,
        batch: &[&Keyed],
        next: &mut Option<S::Transaction>,
    ) -> Attempt
    where
        H: BatchHandler<S::Connection>,
    {
        let store = &self.store;
        let keys: Vec<&str> = batch.iter().map(|message| &*message.key).collect();
        let (mut transaction, recorded) = match self.recorded(&keys, next.take()).await {
            Ok(recorded) => recorded,
            Err(attempt) => return attempt,
        };
        let new = batch.iter().zip(&recorded);
        let new = new.filter(|(_, recorded)| **recorded == Recorded::First);
        let new: Vec<&Incoming> = new.map(|(message, _)| &message.incoming).collect();
        if new.is_empty() {
            // Nothing was written; a broken connection changes nothing about that.
            let _ = store.rollback(transaction).await;
            return Attempt::Settled(vec![Ended::Duplicate; batch.len()]);
        }

        // Called inside, because a handler may panic before it has a future to return.
        let work = async { handler.handle(S::connection(&mut transaction), &new).await };
        let ended = match self.guarded(work).await {
            Ok(outcome) => outcome,
            Err(failure) => {
                // A statement may be half sent: dropping the transaction closes its connection.
                drop(transaction);
                return self.cut_off(failure, keys.first().copied()).await;
            }
        };
        let (failure, ask) = match asked(ended) {
            Ok(ended) => {
                let each = recorded.iter().map(|recorded| match recorded {
                    Recorded::First => ended,
                    Recorded::Duplicate => Ended::Duplicate,
                });
                let each = each.collect();
                return match store.commit_and_begin(transaction).await {
                    Ok(begun) => {
                        *next = begun;
                        Attempt::Settled(each)
                    }
                    Err(error) => uncommitted(error),
                };
            }
            Err(failed) => failed,
        };
        undo(store, transaction, failure, ask).await
    }

    /// Whose fault it was that a handler did not end by itself. A database that fell silent in the middle of a statement looks
    /// like a handler that takes too long, so it is asked something. No free connection is no silence.
    async fn cut_off(&self, failure: Failure, key: Option<&str>) -> Attempt {
        if failure.class() == Failure::TIMEOUT
            && let Err(error) = self
                .store
                .is_recorded(&self.consumer, key.unwrap_or_default())
                .await
            && error.kind() == ErrorKind::Unavailable
        {
            return Attempt::Unavailable(error);
        }
        failed(failure, Ask::Next)
    }

    /// The keys recorded in a transaction: in `next`, if there is one, or in one of its own. What was wrong with `next` (a
    /// connection that broke, or a setting that its last handler left) is no trouble of these messages.
    async fn recorded(
        &self,
        keys: &[&str],
        next: Option<S::Transaction>,
    ) -> Result<(S::Transaction, Vec<Recorded>), Attempt> {
        let store = &self.store;
        let mut was_begun = next.is_some();
        let mut transaction = match next {
            Some(next) => next,
            None => self.begun().await?,
        };
        loop {
            match store.record(&mut transaction, &self.consumer, keys).await {
                Ok(recorded) => return Ok((transaction, recorded)),
                Err(error) => {
                    let _ = store.rollback(transaction).await;
                    let ours = matches!(error.kind(), ErrorKind::Busy | ErrorKind::Conflict);
                    if ours || !was_begun {
                        return Err(before_the_work(error));
                    }
                }
            }
            was_begun = false;
            transaction = self.begun().await?;
        }
    }

    async fn begun(&self) -> Result<S::Transaction, Attempt> {
        self.store.begin().await.map_err(|error| {
            // Whoever holds SQLite's only lock need not have anything to do with this message.
            if error.kind() == ErrorKind::Busy {
                return Attempt::Unavailable(error);
            }
            before_the_work(error)
        })
    }

    /// Runs one attempt with no transaction around it, and records the key once it is done. Two copies at once may both be
    /// handled, and so may one whose process dies before the record.
    pub(crate) async fn around<H: OutsideHandler>(&self, handler: &H, message: &Keyed) -> Attempt {
        let (store, key) = (&self.store, &*message.key);
        match store.is_recorded(&self.consumer, key).await {
            Ok(true) => return Attempt::Settled(vec![Ended::Duplicate]),
            Ok(false) => {}
            Err(error) => return before_the_work(error),
        }
        let work = async { handler.handle(&message.incoming).await };
        let ended = match self.guarded(work).await.map(asked) {
            Ok(Ok(ended)) => ended,
            Ok(Err((failure, ask))) => return failed(failure, ask),
            Err(failure) => return failed(failure, Ask::Next),
        };
        match self.remember(key).await {
            Ok(()) => Attempt::Settled(vec![ended]),
            Err(error) => Attempt::Unrecorded(ended, error),
        }
    }

    /// Records a key in a transaction of its own.
    pub(crate) async fn remember(&self, key: &str) -> Result<(), Error> {
        let mut transaction = self.store.begin().await?;
        let keys = [key];
        let recorded = self.store.record(&mut transaction, &self.consumer, &keys);
        match recorded.await {
            Ok(_) => self.store.commit(transaction).await,
            Err(error) => {
                let _ = self.store.rollback(transaction).await;
                Err(error)
            }
        }
    }

    async fn guarded(
        &self,
        work: impl Future<Output = Outcome> + Send,
    ) -> Result<Outcome, Failure> {
        let guarded = AssertUnwindSafe(work).catch_unwind();
        match tokio::time::timeout(self.handler_timeout, guarded).await {
            Ok(Ok(outcome)) => Ok(outcome),
            Ok(Err(panic)) => Err(Failure::panic(&*panic)),
            Err(_) => Err(Failure::timeout(self.handler_timeout)),
        }
    }
}

/// What a handler's word asks for.
fn asked(outcome: Outcome) -> Result<Ended, (Failure, Ask)> {
    match outcome {
        Outcome::Done => Ok(Ended::Done),
        Outcome::Skip => Ok(Ended::Skipped),
        Outcome::Retry(failure) => Err((failure, Ask::Next)),
        Outcome::RetryAfter(delay, failure) => Err((failure, Ask::After(delay))),
        Outcome::Permanent(failure) => {
            let ask = Ask::Never(failure.reason().cloned());
            Err((failure, ask))
        }
    }
}

fn failed(failure: Failure, ask: Ask) -> Attempt {
    Attempt::Failed { failure, ask }
}

/// An error before the handler ran is never the message's fault.
fn before_the_work(error: Error) -> Attempt {
    match error.kind() {
        ErrorKind::Busy => Attempt::Busy,
        ErrorKind::Conflict => Attempt::Rerun(Failure::from(error)),
        _ => Attempt::Unavailable(error),
    }
}

fn uncommitted(error: Error) -> Attempt {
    // After a broken connection, whether it was committed shows when the keys are recorded again.
    if error.is_transient() {
        return Attempt::Rerun(Failure::from(error));
    }
    // For example a handler that swallowed an error and left the transaction aborted, or a deferred constraint.
    failed(Failure::from(error), Ask::Next)
}

/// Rolls back and says whose fault it was: a connection that broke under the handler is the database's, as is a statement
/// that failed for its state (a conflict, a full disk, a shutdown).
async fn undo<S: InboxStore>(
    store: &S,
    transaction: S::Transaction,
    failure: Failure,
    ask: Ask,
) -> Attempt {
    let broken = store.rollback(transaction).await.is_err();
    let kind = failure.source().and_then(|source| store.kind_of(source));
    let database = matches!(kind, Some(ErrorKind::Conflict | ErrorKind::Unavailable));
    if broken || database {
        return Attempt::Rerun(failure);
    }
    failed(failure, ask)
}
