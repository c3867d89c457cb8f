//! What follows a failed attempt, by its route: again here, skipped, or a copy elsewhere.

use std::time::Duration;

use tracing::{debug, warn};

use crate::ladder::Ask;
use crate::store::InboxStore;

use super::form::Form;
use super::job::Job;
use super::outcome::Failure;
use super::process::{Leave, Processor};
use super::routes::Next;
use super::tell::Became;

impl<S, F> Processor<S, F>
where
    S: InboxStore,
    F: Form<S>,
{
    /// Returns the message if it is to be handled again.
    pub(super) async fn follow(
        &self,
        job: Job,
        failure: Failure,
        ask: Ask,
        leave: &mut Leave<S::Transaction>,
    ) -> Vec<Job> {
        if !job.receipt.is_current() {
            // It may take as long as the room is away: no probe waits for that, and no handler.
            leave.makes_no_attempt();
            drop(leave.place.take());
            self.regain(&job, leave).await;
        }
        match self.routes.next(&failure, ask, job.tries) {
            Next::Fail(ask) => return self.fail(job, &failure, ask, leave).await,
            Next::Skip => self.skip(job, &failure, leave).await,
            Next::Again(pause) => return self.again(job, &failure, pause, leave).await,
        }
        Vec::new()
    }

    /// It goes back to the schedule, which gives it a place as any other, and until then its key waits.
    async fn again(
        &self,
        mut job: Job,
        failure: &Failure,
        pause: Duration,
        leave: &mut Leave<S::Transaction>,
    ) -> Vec<Job> {
        job.tries += 1;
        debug!(
            consumer = self.inbox.consumer, id = %job.message.incoming.message.id,
            class = failure.class(), %failure, tries = job.tries, "attempt failed; it is made again here"
        );
        leave.failed();
        // While it waits others run beside it, and what ends the process then is not its doing.
        if !self.end(&job, leave).await {
            return Vec::new();
        }
        drop(leave.place.take());
        if self.wait(pause, leave).await {
            return Vec::new();
        }
        vec![job]
    }

    /// Records it without its effect, which is rolled back by now.
    async fn skip(&self, job: Job, failure: &Failure, leave: &mut Leave<S::Transaction>) {
        leave.failed();
        if !self.end(&job, leave).await {
            return;
        }
        let remember = || self.inbox.remember(&job.message.key);
        if self.patiently(&job, leave, remember).await.is_some() {
            let class = failure.class();
            warn!(
                consumer = self.inbox.consumer, id = %job.message.incoming.message.id, class,
                error = %failure, "a failed message is skipped, as its route says"
            );
            let became = Became::Skipped(class.to_owned());
            self.acknowledge(job, became).await;
        }
    }
}
