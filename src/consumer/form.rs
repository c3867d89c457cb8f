//! Forms of handlers: what an attempt is for each.

use std::future::Future;

use crate::envelope::Incoming;
use crate::inbox::{Attempt, Inbox, Keyed};
use crate::store::InboxStore;

use super::handler::{BatchHandler, Handler, OutsideHandler};
use super::outcome::Outcome;

/// A handler with the transaction that it wants.
pub(super) trait Form<S: InboxStore>: Send + Sync + 'static {
    /// Most messages in one attempt.
    fn batch_max(&self) -> usize;

    /// Runs an attempt; `next` as in [`Inbox::within`].
    fn run(
        &self,
        inbox: &Inbox<S>,
        batch: &[&Keyed],
        next: &mut Option<S::Transaction>,
    ) -> impl Future<Output = Attempt> + Send;
}

/// One message in a transaction.
pub(super) struct Single<H>(pub(super) H);

impl<C: Send, H: Handler<C>> BatchHandler<C> for Single<H> {
    async fn handle(&self, connection: &mut C, batch: &[&Incoming]) -> Outcome {
        let mut outcome = Outcome::Skip;
        for incoming in batch {
            outcome = self.0.handle(connection, incoming).await;
        }
        outcome
    }
}

impl<S: InboxStore, H: Handler<S::Connection>> Form<S> for Single<H> {
    fn batch_max(&self) -> usize {
        1
    }

    async fn run(
        &self,
        inbox: &Inbox<S>,
        batch: &[&Keyed],
        next: &mut Option<S::Transaction>,
    ) -> Attempt {
        inbox.within(self, batch, next).await
    }
}

/// Several messages in a transaction.
pub(super) struct Batches<H> {
    pub(super) count_max: usize,
    pub(super) handler: H,
}

impl<S: InboxStore, H: BatchHandler<S::Connection>> Form<S> for Batches<H> {
    fn batch_max(&self) -> usize {
        self.count_max
    }

    async fn run(
        &self,
        inbox: &Inbox<S>,
        batch: &[&Keyed],
        next: &mut Option<S::Transaction>,
    ) -> Attempt {
        inbox.within(&self.handler, batch, next).await
    }
}

/// One message, and no transaction around the work.
pub(super) struct Outside<H>(pub(super) H);

impl<S: InboxStore, H: OutsideHandler> Form<S> for Outside<H> {
    fn batch_max(&self) -> usize {
        1
    }

    async fn run(
        &self,
        inbox: &Inbox<S>,
        batch: &[&Keyed],
        _: &mut Option<S::Transaction>,
    ) -> Attempt {
        let mut ended = Vec::with_capacity(batch.len());
        for message in batch {
            match inbox.around(&self.0, message).await {
                Attempt::Settled(one) => ended.extend(one),
                other => return other,
            }
        }
        Attempt::Settled(ended)
    }
}
