//! The inbox: records the message id, runs the handler and commits both, as one transaction.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;

use crate::consumer::{Failure, Handler, Outcome};
use crate::envelope::Incoming;
use crate::error::{Error, ErrorKind};
use crate::ladder::Ask;
use crate::store::{InboxStore, Recorded};

/// How an attempt ended.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// The effect is committed.
    Done,
    /// The handler chose to do nothing, and that is committed.
    Skipped,
    /// The effect was committed before.
    Duplicate,
    /// The same message is being handled elsewhere.
    Busy,
    /// The handler failed; nothing of it is left. Counts.
    Failed { failure: Failure, ask: Ask },
    /// The database asked to run the transaction again, or its connection broke under the work. Counts as nothing,
    /// a bounded number of times.
    Rerun(Failure),
    /// The database is away. Counts as nothing.
    Unavailable(Error),
}

/// Runs one attempt.
///
/// Not cancel safe by choice: a future dropped in here closes its connection, and the message comes again.
pub(crate) async fn attempt<S, H>(
    store: &S,
    consumer: &str,
    handler: &H,
    handler_timeout: Duration,
    incoming: &Incoming,
) -> Attempt
where
    S: InboxStore,
    H: Handler<S::Connection>,
{
    let mut transaction = match store.begin().await {
        Ok(transaction) => transaction,
        Err(error) => return before_the_work(error),
    };
    match store
        .record(&mut transaction, consumer, &incoming.message.id)
        .await
    {
        Ok(Recorded::First) => {}
        Ok(Recorded::Duplicate) => {
            // Nothing was written; a broken connection changes nothing about that.
            let _ = store.rollback(transaction).await;
            return Attempt::Duplicate;
        }
        Err(error) => {
            let _ = store.rollback(transaction).await;
            return before_the_work(error);
        }
    }

    // Called inside, because a handler may panic before it has a future to return.
    let work = async {
        handler
            .handle(S::connection(&mut transaction), incoming)
            .await
    };
    let guarded = AssertUnwindSafe(work).catch_unwind();
    let outcome = match tokio::time::timeout(handler_timeout, guarded).await {
        Ok(Ok(outcome)) => outcome,
        // After a panic or a timeout a statement may be half sent: dropping the transaction closes its connection.
        Ok(Err(panic)) => {
            drop(transaction);
            return failed(Failure::panic(&*panic), Ask::Next);
        }
        Err(_) => {
            drop(transaction);
            return failed(Failure::timeout(handler_timeout), Ask::Next);
        }
    };
    match outcome {
        Outcome::Done => commit(store, transaction, Attempt::Done).await,
        Outcome::Skip => commit(store, transaction, Attempt::Skipped).await,
        Outcome::Retry(failure) => undo(store, transaction, failure, Ask::Next).await,
        Outcome::RetryAfter(delay, failure) => {
            undo(store, transaction, failure, Ask::After(delay)).await
        }
        Outcome::Permanent(failure) => undo(store, transaction, failure, Ask::Never).await,
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

async fn commit<S: InboxStore>(
    store: &S,
    transaction: S::Transaction,
    committed: Attempt,
) -> Attempt {
    match store.commit(transaction).await {
        Ok(()) => committed,
        // After a broken connection, whether it was committed shows when the id is recorded again.
        Err(error) if error.is_transient() => Attempt::Rerun(Failure::from(error)),
        // For example a handler that swallowed an error and left the transaction aborted, or a deferred constraint.
        Err(error) => failed(Failure::from(error), Ask::Next),
    }
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
