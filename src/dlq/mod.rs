//! Dead letters: where messages end that cannot be handled, each with its reason.

pub mod redrive;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;

use crate::broker::{PublishOutcome, Publisher, RejectionScope, Rung};
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind, Result};
use crate::ladder::fill;
use crate::store::{DeadLetterSink, DeadLetterStore};
use crate::story::{NOTE_BYTES_MAX, OWNER_BYTES_MAX, Story};

/// What a table is called in logs and health.
const TABLE: &str = "the table of dead letters";
/// How long a sink may take for a letter: a broker's publisher keeps a deadline of its own.
const PUT_MAX: Duration = Duration::from_secs(30);

/// Where a consumer's dead letters go: a destination at the broker, a table, a place of your own, or several of them.
#[derive(Clone)]
pub struct DeadLetters {
    template: Option<String>,
    way_back: String,
    sinks: Vec<Sink>,
    owner: Option<String>,
    note: Option<String>,
}

#[derive(Clone)]
struct Sink {
    name: Arc<str>,
    takes: Arc<dyn DeadLetterSink>,
}

/// A copy that no place took: which one, and why.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) place: String,
    pub(crate) error: Error,
    /// The message itself: however often it is tried, it will not be taken there.
    pub(crate) for_good: bool,
}

impl Refused {
    /// What the waiting room did not take.
    pub(crate) fn by_room(error: Error) -> Self {
        Self {
            place: "waiting room".to_owned(),
            error,
            for_good: false,
        }
    }
}

impl fmt::Debug for DeadLetters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sinks: Vec<&str> = self.sinks.iter().map(|sink| &*sink.name).collect();
        f.debug_struct("DeadLetters")
            .field("template", &self.template)
            .field("way_back", &self.way_back)
            .field("sinks", &sinks)
            .field("owner", &self.owner)
            .field("note", &self.note)
            .finish()
    }
}

impl DeadLetters {
    /// Name of the destination unless another template is set.
    pub const TEMPLATE_DEFAULT: &str = "{topic}.{consumer}.DLQ";
    /// Name of the way back unless another template is set.
    pub const WAY_BACK_DEFAULT: &str = "{topic}.{consumer}.redrive";

    /// A destination at the broker, per topic and consumer.
    #[must_use]
    pub fn topic() -> Self {
        Self {
            template: Some(Self::TEMPLATE_DEFAULT.to_owned()),
            way_back: Self::WAY_BACK_DEFAULT.to_owned(),
            sinks: Vec::new(),
            owner: None,
            note: None,
        }
    }

    /// A table in a database.
    pub fn table(store: impl DeadLetterStore) -> Self {
        Self::custom(TABLE, store)
    }

    /// A place of your own; `name` stands for it in logs, health and metrics.
    pub fn custom(name: impl Into<String>, sink: impl DeadLetterSink) -> Self {
        let nowhere = Self {
            template: None,
            ..Self::topic()
        };
        nowhere.and_custom(name, sink)
    }

    /// Also a table: a letter counts as stored when every place has it.
    #[must_use]
    pub fn and_table(self, store: impl DeadLetterStore) -> Self {
        self.and_custom(TABLE, store)
    }

    /// Also a place of your own: a letter counts as stored when every place has it.
    #[must_use]
    pub fn and_custom(mut self, name: impl Into<String>, sink: impl DeadLetterSink) -> Self {
        self.sinks.push(Sink {
            name: name.into().into(),
            takes: Arc::new(sink),
        });
        self
    }

    /// Names the broker's destination otherwise; `{topic}` and `{consumer}` are filled in.
    #[must_use]
    pub fn with_template(mut self, template: impl Into<String>) -> Self {
        self.template = Some(template.into());
        self
    }

    /// Names the way back otherwise: where a redrive sends to, and what only this consumer reads. It is
    /// made and verified with the rungs. `{topic}` and `{consumer}` are filled in; without `{consumer}` several consumers
    /// share it, as they may share a rung.
    #[must_use]
    pub fn with_way_back(mut self, template: impl Into<String>) -> Self {
        self.way_back = template.into();
        self
    }

    /// The way back to a consumer: a rung on which nothing waits.
    #[must_use]
    pub fn way_back(&self, topic: &str, consumer: &str) -> Rung {
        Rung {
            destination: fill(&self.way_back, topic, consumer),
            delay: Duration::ZERO,
            source: topic.to_owned(),
        }
    }

    /// Whether letters at the broker may be those of several consumers.
    pub(crate) fn is_shared(&self) -> bool {
        let names = |template: &String| template.contains("{consumer}");
        self.template
            .as_ref()
            .is_some_and(|template| !names(template))
    }

    /// Who looks after these letters: a team, an address, at most 255 bytes. Travels with each letter, as
    /// [`x-dead-letter-owner`](crate::headers::DEAD_LETTER_OWNER) and in the table.
    #[must_use]
    pub fn with_owner(mut self, owner: impl Into<String>) -> Self {
        self.owner = Some(owner.into());
        self
    }

    /// What is to be known about these letters, for example where the runbook is: at most 512 bytes. Travels with each letter, as
    /// [`x-dead-letter-note`](crate::headers::DEAD_LETTER_NOTE) and in the table.
    #[must_use]
    pub fn with_note(mut self, note: impl Into<String>) -> Self {
        self.note = Some(note.into());
        self
    }

    /// The destination at the broker, if letters go there.
    #[must_use]
    pub fn destination(&self, topic: &str, consumer: &str) -> Option<String> {
        self.template
            .as_deref()
            .map(|template| fill(template, topic, consumer))
    }

    pub(crate) fn validate(&self) -> Result<()> {
        for (field, text, bytes_max) in [
            ("dead letter owner", &self.owner, OWNER_BYTES_MAX),
            ("dead letter note", &self.note, NOTE_BYTES_MAX),
        ] {
            let Some(text) = text else { continue };
            if text.is_empty() || text.len() > bytes_max || text.chars().any(char::is_control) {
                let limit = format!("1 to {bytes_max} bytes without control characters");
                return Err(Error::configuration(field, limit, text));
            }
        }
        Ok(())
    }

    /// Finds out at start whether the places other than the broker are there.
    pub(crate) async fn check(&self, consumer: &str) -> Result<()> {
        for sink in &self.sinks {
            sink.takes.check(consumer).await?;
        }
        Ok(())
    }

    /// Stores a letter in every place asked for. Safe to repeat after an error: a repeat may leave a second copy at
    /// the broker, with the same message id.
    pub(crate) async fn bury(
        &self,
        publisher: &dyn Publisher,
        topic: &str,
        consumer: &str,
        mut letter: Outgoing,
    ) -> Result<(), Refused> {
        letter.story.owner.clone_from(&self.owner);
        letter.story.note.clone_from(&self.note);
        for sink in &self.sinks {
            sink.put(&letter).await.map_err(|error| Refused {
                place: sink.name.to_string(),
                error,
                for_good: false,
            })?;
        }
        if let Some(destination) = self.destination(topic, consumer) {
            send_copy(publisher, destination, letter).await?;
        }
        Ok(())
    }
}

impl Sink {
    /// Within a deadline, and whatever somebody else's code does.
    async fn put(&self, letter: &Outgoing) -> Result<()> {
        let failed = |detail| Error::new(ErrorKind::Timeout, "put dead letter", detail);
        let put = async { self.takes.put(letter).await };
        let put = AssertUnwindSafe(put).catch_unwind();
        match tokio::time::timeout(PUT_MAX, put).await {
            Ok(Ok(stored)) => stored,
            Ok(Err(_panic)) => Err(failed("the sink panicked".to_owned())),
            Err(_elapsed) => Err(failed(format!("no answer within {PUT_MAX:?}"))),
        }
    }
}

/// Publishes a copy with its story; where the message leaves no room for the story, with the least of it, and a dead letter
/// with its reason alone or without any: it stands in the consumer's own place, and a message that nobody takes would stop
/// its key.
///
/// # Errors
/// When the copy was not confirmed; the caller must not acknowledge the original.
pub(crate) async fn send_copy(
    publisher: &dyn Publisher,
    destination: String,
    mut copy: Outgoing,
) -> Result<(), Refused> {
    copy.message.destination = destination;
    let mut stories = smaller(&copy.story).into_iter();
    loop {
        let (scope, error) = match send(publisher, &copy).await {
            Ok(()) => return Ok(()),
            Err(failed) => failed,
        };
        let for_good = scope == Some(RejectionScope::Message);
        match stories.next().filter(|_| for_good) {
            Some(story) => copy.story = story,
            None => {
                return Err(Refused {
                    place: copy.message.destination,
                    error,
                    for_good,
                });
            }
        }
    }
}

/// What is tried where a story does not fit. On a rung the count of attempts has to be there.
fn smaller(story: &Story) -> Vec<Story> {
    let mut stories = vec![story.shrunk()];
    if let Some(reason) = &story.reason {
        // The count of redrives is kept to the last: by it a letter is told from an earlier one of the same message.
        let bare = Story {
            redrive_count: story.redrive_count,
            ..Story::default()
        };
        let code = Story {
            reason: Some(reason.clone()),
            ..bare.clone()
        };
        stories.extend([code, bare]);
    }
    stories
}

async fn send(
    publisher: &dyn Publisher,
    copy: &Outgoing,
) -> Result<(), (Option<RejectionScope>, Error)> {
    let mut outcomes = publisher.publish(std::slice::from_ref(copy)).await;
    match outcomes.pop() {
        Some(PublishOutcome::Confirmed) => Ok(()),
        Some(PublishOutcome::Rejected { scope, error }) => Err((Some(scope), error)),
        Some(PublishOutcome::Failed { error, .. }) => Err((None, error)),
        Some(PublishOutcome::Withheld) | None => {
            let detail = "the publisher gave no outcome to a message that stood alone";
            Err((None, Error::new(ErrorKind::Other, "publish", detail)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::story::Reason;

    #[test]
    fn a_story_that_shrinks_still_tells_how_often_it_was_redriven() {
        let mut story = Story::default().dead(Reason::new(Reason::PERMANENT));
        story.redrive_count = 2;
        let stories = smaller(&story);
        assert_eq!(stories.len(), 3);
        assert!(stories.iter().all(|story| story.redrive_count == 2));
        assert_eq!(stories[2].reason, None);
    }
}
