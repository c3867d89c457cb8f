//! What follows a failure: a copy on a rung or among the dead letters, and only then the end of the original.

use std::sync::Arc;

use tracing::{info, warn};

use crate::broker::Publisher;
use crate::clock::Clock;
use crate::dlq::{DeadLetters, Refused, send_copy};
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind};
use crate::ladder::{Ask, Ladder, Step};
use crate::story::{Reason, Story};

use super::job::Job;
use super::outcome::Failure;
use super::room::Room;

/// Where copies go.
pub(super) struct Copies {
    pub(super) consumer: String,
    pub(super) ladder: Ladder,
    pub(super) dead_letters: DeadLetters,
    pub(super) publisher: Arc<dyn Publisher>,
    pub(super) room: Option<Arc<Room>>,
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
        let names = (&*job.topic, &*self.consumer);
        self.ladder
            .next(names, story, ask, now, job.ticket.is_some())
    }

    /// What becomes of a message behind a dead one, at which no attempt is made.
    pub(super) fn park(&self, job: &Job) -> Step {
        let story = job.message.incoming.story.clone();
        let story = story.taken(&self.consumer, &job.origin);
        Step::Bury {
            story: story.dead(Reason::new(Reason::PARKED)),
        }
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
            Step::Wait { delay, story } => {
                let room = self.room()?;
                let in_line = self.ladder.dead_head().is_some();
                let waiting = job.waiting(story.clone());
                let put = room.store.put(&self.consumer, &waiting, in_line, *delay);
                put.await.map_err(Refused::by_room)?;
                room.expect(*delay);
                Ok(())
            }
            Step::Stay { delay, story } => {
                let waiting = job.waiting(story.clone());
                let store = &self.room()?.store;
                let noted = store.note(&self.consumer, &waiting, *delay).await;
                noted.map_err(Refused::by_room)
            }
            // The line is closed last: until then the letter is not acknowledged, and all this done again.
            Step::Bury { story } => {
                self.dead_letters
                    .bury(&*self.publisher, &job.topic, &self.consumer, copy(story))
                    .await?;
                let closed = self.close_line(job, story).await;
                closed.map_err(Refused::by_room)
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

    fn room(&self) -> Result<&Room, Refused> {
        self.room.as_deref().ok_or_else(|| {
            let detail = "a message is to wait, and there is no waiting room";
            Refused::by_room(Error::new(ErrorKind::Configuration, "put waiting", detail))
        })
    }

    /// Failures are never silent: what an operator sees without metrics.
    pub(super) fn tell(&self, step: &Step, job: &Job) {
        let message = &job.message.incoming.message;
        let (Step::Climb { story, .. }
        | Step::Wait { story, .. }
        | Step::Stay { story, .. }
        | Step::Bury { story }) = step;
        let error = story.last_error.as_deref().unwrap_or_default();
        match step {
            Step::Climb { destination, .. } => info!(
                consumer = self.consumer, id = %message.id, event_type = message.event_type,
                attempt = story.retry_count, rung = destination, error, "attempt failed; the message waits"
            ),
            Step::Wait { delay, .. } | Step::Stay { delay, .. } => info!(
                consumer = self.consumer, id = %message.id, event_type = message.event_type,
                attempt = story.retry_count, ?delay, error, "attempt failed; the message waits"
            ),
            Step::Bury { .. } => warn!(
                consumer = self.consumer, id = %message.id, event_type = message.event_type,
                attempts = story.retry_count, reason = story.reason.as_ref().map(Reason::as_str), error,
                "message is a dead letter"
            ),
        }
    }
}
