//! What a consumer under test gets in place of its clock and its handler.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use time::OffsetDateTime;

use super::broker::Book;
use super::clock::ManualClock;
use super::ledger::Ledger;
use crate::clock::Clock;
use crate::consumer::{BatchHandler, Handler, Outcome, OutsideHandler};
use crate::envelope::Incoming;

/// How much faster the consumer's own pauses pass.
const HASTE: u32 = 1_000;

/// The consumer's clock: it shows the time of the manual one, and its pauses pass by themselves. What waits for the manual
/// clock is at the broker.
#[derive(Debug)]
pub(super) struct Pauses(ManualClock);

impl Pauses {
    pub(super) const fn of(clock: ManualClock) -> Self {
        Self(clock)
    }
}

impl Clock for Pauses {
    fn now(&self) -> OffsetDateTime {
        self.0.now()
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(duration / HASTE))
    }
}

/// Writes down what the handler says.
pub(super) struct Watching<H> {
    handler: Arc<H>,
    book: Arc<Book>,
}

impl<H> Watching<H> {
    pub(super) fn new(handler: &Arc<H>, book: &Arc<Book>) -> Self {
        Self {
            handler: Arc::clone(handler),
            book: Arc::clone(book),
        }
    }

    async fn watch(&self, batch: &[&Incoming], work: impl Future<Output = Outcome>) -> Outcome {
        let ids = || batch.iter().map(|incoming| &incoming.message.id);
        self.book
            .write(|ledger| ids().for_each(|id| ledger.called(id)));
        let outcome = work.await;
        let answered = |ledger: &mut Ledger| ids().for_each(|id| ledger.answered(id, &outcome));
        self.book.write(answered);
        outcome
    }
}

impl<C: Send, H: Handler<C>> Handler<C> for Watching<H> {
    async fn handle(&self, connection: &mut C, incoming: &Incoming) -> Outcome {
        // Called inside, because a handler may panic before it has a future to return.
        let work = async { self.handler.handle(connection, incoming).await };
        self.watch(&[incoming], work).await
    }
}

impl<C: Send, H: BatchHandler<C>> BatchHandler<C> for Watching<H> {
    async fn handle(&self, connection: &mut C, batch: &[&Incoming]) -> Outcome {
        let work = async { self.handler.handle(connection, batch).await };
        self.watch(batch, work).await
    }
}

impl<H: OutsideHandler> OutsideHandler for Watching<H> {
    async fn handle(&self, incoming: &Incoming) -> Outcome {
        let work = async { self.handler.handle(incoming).await };
        self.watch(&[incoming], work).await
    }
}
