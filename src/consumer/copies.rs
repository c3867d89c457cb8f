//! What follows a failure: a copy on a rung or among the dead letters, and only then the end of the original.

use std::sync::Arc;

use tracing::{info, warn};

use crate::broker::Publisher;
use crate::clock::Clock;
use crate::dlq::{DeadLetters, Refused, send_copy};
use crate::envelope::Outgoing;
use crate::ladder::{Ask, Ladder, Step};
use crate::story::{Reason, Story};

use super::job::Job;
use super::outcome::Failure;

/// Where copies go.
pub(super) struct Copies {
    pub(super) consumer: String,
    pub(super) ladder: Ladder,
    pub(super) dead_letters: DeadLetters,
    pub(super) publisher: Arc<dyn Publisher>,
    pub(super) clock: Arc<dyn Clock>,
}

impl Copies {
    /// What comes after this failure.
    pub(super) fn step(&self, job: &Job, failure: &Failure, ask: Ask) -> Step {
        let now = self.clock.now();
        let incoming = &job.message.incoming;
        let text = failure.to_string();
        let story = incoming
            .story
            .failed(&self.consumer, &job.origin, failure.class(), &text, now);
        self.ladder
            .step(&job.topic, &self.consumer, story, ask, now)
    }

    /// Puts the copy where the step says. Succeeds once the broker, or the table, has it.
    pub(super) async fn put(&self, step: &Step, job: &Job) -> Result<(), Refused> {
        let copy = |story: &Story| Outgoing {
            message: job.message.incoming.message.clone(),
            story: story.clone(),
        };
        match step {
            Step::Climb { destination, story } => {
                send_copy(&*self.publisher, destination.clone(), copy(story)).await
            }
            Step::Bury { story } => {
                self.dead_letters
                    .bury(&*self.publisher, &job.topic, &self.consumer, copy(story))
                    .await
            }
        }
    }

    /// What becomes of a message for which no rung has room, not even with the least of its story.
    pub(super) fn without_rung(step: Step) -> Step {
        match step {
            Step::Climb { story, .. } => Step::Bury {
                story: story.dead(Reason::new(Reason::TOO_LARGE)),
            },
            step => step,
        }
    }

    /// Failures are never silent: what an operator sees without metrics.
    pub(super) fn tell(&self, step: &Step, job: &Job) {
        let message = &job.message.incoming.message;
        let (Step::Climb { story, .. } | Step::Bury { story }) = step;
        let error = story.last_error.as_deref().unwrap_or_default();
        match step {
            Step::Climb { destination, .. } => info!(
                consumer = self.consumer, id = %message.id, event_type = message.event_type,
                attempt = story.retry_count, rung = destination, error, "attempt failed; the message waits"
            ),
            Step::Bury { .. } => warn!(
                consumer = self.consumer, id = %message.id, event_type = message.event_type,
                attempts = story.retry_count, reason = story.reason.as_ref().map(Reason::as_str), error,
                "message is a dead letter"
            ),
        }
    }
}
