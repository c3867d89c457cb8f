//! Dead letters: where messages end that cannot be handled, each with its reason.

pub mod redrive;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::broker::{PublishOutcome, Publisher, RejectionScope, Rung};
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind, Result};
use crate::ladder::fill;
use crate::store::DeadLetterStore;

/// Where a consumer's dead letters go.
#[derive(Clone)]
pub struct DeadLetters {
    template: Option<String>,
    way_back: String,
    table: Option<Arc<dyn DeadLetterStore>>,
}

impl fmt::Debug for DeadLetters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeadLetters")
            .field("template", &self.template)
            .field("way_back", &self.way_back)
            .field("table", &self.table.is_some())
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
            table: None,
        }
    }

    /// A table in a database.
    pub fn table(store: impl DeadLetterStore) -> Self {
        Self {
            template: None,
            way_back: Self::WAY_BACK_DEFAULT.to_owned(),
            table: Some(Arc::new(store)),
        }
    }

    /// Also a table: a letter counts as stored when both have it.
    #[must_use]
    pub fn and_table(mut self, store: impl DeadLetterStore) -> Self {
        self.table = Some(Arc::new(store));
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

    /// The destination at the broker, if letters go there.
    #[must_use]
    pub fn destination(&self, topic: &str, consumer: &str) -> Option<String> {
        self.template
            .as_deref()
            .map(|template| fill(template, topic, consumer))
    }

    /// Finds out at start whether the table is there.
    pub(crate) async fn check(&self, consumer: &str) -> Result<()> {
        if let Some(table) = &self.table {
            table.list(consumer, i64::MAX, 1).await?;
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
        letter: Outgoing,
    ) -> Result<()> {
        if let Some(table) = &self.table {
            table.put(&letter).await?;
        }
        if let Some(destination) = self.destination(topic, consumer) {
            send_copy(publisher, destination, letter).await?;
        }
        Ok(())
    }
}

/// Publishes a copy with its story; where the message leaves no room for the story, with the least of it.
///
/// # Errors
/// When the copy was not confirmed; the caller must not acknowledge the original.
pub(crate) async fn send_copy(
    publisher: &dyn Publisher,
    destination: String,
    mut copy: Outgoing,
) -> Result<()> {
    copy.message.destination = destination;
    match send(publisher, &copy).await {
        Err((Some(RejectionScope::Message), _)) => {
            copy.story = copy.story.shrunk();
            send(publisher, &copy).await
        }
        result => result,
    }
    .map_err(|(_, error)| error)
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
