//! Whether canaries were handled, as the consumer's inbox tells.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};

use crate::clock;
use crate::consumer::InboxKey;
use crate::envelope::{Incoming, Outgoing};
use crate::error::Result;
use crate::message::MessageId;
use crate::store::{InboxStore, LetterFilter};

use super::Redrive;

const PAUSE: Duration = Duration::from_millis(100);

/// What is asked of an inbox.
pub(super) trait Witness: Send + Sync {
    fn has<'a>(&'a self, consumer: &'a str, key: &'a str) -> BoxFuture<'a, Result<bool>>;
}

pub(super) struct Witnessed<S>(pub(super) S);

impl<S: InboxStore> Witness for Witnessed<S> {
    fn has<'a>(&'a self, consumer: &'a str, key: &'a str) -> BoxFuture<'a, Result<bool>> {
        self.0.is_recorded(consumer, key).boxed()
    }
}

/// What is remembered of a canary.
pub(super) struct Sent {
    id: MessageId,
    /// What the inbox knows it by.
    key: Option<String>,
    redrive_count: u32,
}

impl Sent {
    pub(super) fn of(copy: Outgoing, key: &InboxKey) -> Self {
        let Outgoing { message, story } = copy;
        let incoming = Incoming {
            message,
            story,
            id_missing: false,
        };
        Self {
            key: key.of(&incoming),
            redrive_count: incoming.story.redrive_count,
            id: incoming.message.id,
        }
    }
}

impl Redrive {
    /// Waits until all of them are recorded, one is a dead letter again behind position `before`, or the time is over:
    /// what was seen then, or nothing when all is well.
    pub(super) async fn watch(
        &self,
        canaries: &[Sent],
        before: i64,
        wait: Duration,
    ) -> Result<Option<String>> {
        let until = clock::add(self.clock.now(), wait);
        let mut open: Vec<&Sent> = canaries.iter().collect();
        loop {
            let mut left = Vec::new();
            for canary in open {
                if self.is_handled(canary).await? {
                    continue;
                }
                if self.is_back(canary, before).await? {
                    let id = &canary.id;
                    return Ok(Some(format!("canary {id} is a dead letter again")));
                }
                left.push(canary);
            }
            if left.is_empty() {
                return Ok(None);
            }
            let rest = Duration::try_from(until - self.clock.now()).unwrap_or_default();
            if rest.is_zero() {
                let ids: Vec<&str> = left.iter().take(5).map(|c| c.id.as_str()).collect();
                return Ok(Some(format!(
                    "{} of {} canaries were not handled within {wait:?}, such as {}",
                    left.len(),
                    canaries.len(),
                    ids.join(", ")
                )));
            }
            self.clock.sleep(PAUSE.min(rest)).await;
            open = left;
        }
    }

    pub(super) async fn is_handled(&self, canary: &Sent) -> Result<bool> {
        match (&self.inbox, &canary.key) {
            (Some(inbox), Some(key)) => self.patiently(|| inbox.has(&self.consumer, key)).await,
            _ => Ok(false),
        }
    }

    /// Whether it failed again. Only the table is looked at.
    async fn is_back(&self, canary: &Sent, before: i64) -> Result<bool> {
        let filter = LetterFilter::all()
            .with_message_id(canary.id.clone())
            .with_redrives(canary.redrive_count, u32::MAX);
        let range = (before, i64::MAX);
        let entries = self.patiently(|| self.store.entries(&self.consumer, &filter, range, 1));
        Ok(!entries.await?.is_empty())
    }
}
