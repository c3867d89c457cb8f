//! Rungs of an earlier ladder: changed delays strand no message.

use tracing::{info, warn};

use crate::broker::{Backlog, Rung, SubscriptionRequest, TopologyMode};
use crate::error::{ErrorKind, Result};
use crate::store::InboxStore;

use super::Consumer;

/// Most of them that a consumer reads.
const EARLIER_MAX: usize = 128;

/// A rung at the broker that an earlier ladder of this consumer made and the present one does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EarlierRung {
    /// Its name and delay, and the source that it belongs to.
    pub rung: Rung,
    /// What waits on it for this consumer.
    pub backlog: Backlog,
}

impl<S: InboxStore> Consumer<S> {
    /// Rungs at the broker that are no longer in the ladder, known by the ladder's template, and what waits on each. At most 128.
    ///
    /// A consumer asks for them when it starts, reads them beside its rungs as long as it runs, and deletes none: once a rung is
    /// empty, and no member with the earlier ladder runs any more, it may be deleted by hand. Nothing is found where the template
    /// does not name the consumer, because such rungs may be another's, or was changed; nor where the broker moves what waits back
    /// by itself. With [`TopologyMode::Unchecked`] the start asks for none.
    ///
    /// # Errors
    /// When the broker does not answer.
    pub async fn earlier_rungs(&self) -> Result<Vec<EarlierRung>> {
        self.look_for_earlier(&self.request()).await
    }

    async fn look_for_earlier(&self, request: &SubscriptionRequest) -> Result<Vec<EarlierRung>> {
        let present = request.rungs.iter().map(|rung| &rung.destination);
        let present = present.chain(&request.sources).chain(&request.dead_letters);
        let mut known: Vec<String> = present.cloned().collect();
        let mut found = Vec::new();
        for source in &self.sources {
            let Some(prefix) = self.ladder.prefix(source, &self.name) else {
                continue;
            };
            for name in self.subscriber.destinations(&prefix).await? {
                let read = self.ladder.read(source, &self.name, &name);
                let Some(rung) = read.filter(|_| !known.contains(&name)) else {
                    continue;
                };
                if found.len() == EARLIER_MAX {
                    warn!(
                        consumer = self.name,
                        EARLIER_MAX, "more rungs of earlier ladders are not read"
                    );
                    return Ok(found);
                }
                let backlog = match self.subscriber.lag(&self.name, &name).await {
                    Ok(backlog) => backlog,
                    // Somebody has just deleted it.
                    Err(error) if error.kind() == ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                };
                known.push(name);
                found.push(EarlierRung { rung, backlog });
            }
        }
        Ok(found)
    }

    /// The same at a start. A broker that may not be asked keeps nobody from starting.
    pub(super) async fn find_earlier(&self, request: &SubscriptionRequest) -> Vec<Rung> {
        if request.topology == TopologyMode::Unchecked {
            return Vec::new();
        }
        let found = match self.look_for_earlier(request).await {
            Ok(found) => found,
            Err(error) => {
                warn!(
                    consumer = self.name, %error,
                    "rungs of an earlier ladder could not be looked for: what may wait there is not read"
                );
                return Vec::new();
            }
        };
        for EarlierRung { rung, backlog } in &found {
            let (consumer, rung, messages) = (&self.name, &rung.destination, backlog.messages);
            if messages > 0 {
                warn!(
                    consumer,
                    rung,
                    messages,
                    "messages wait on a rung that the ladder no longer has; it is read too"
                );
            } else {
                info!(
                    consumer,
                    rung, "a rung that the ladder no longer has is empty; it is read too"
                );
            }
        }
        found.into_iter().map(|earlier| earlier.rung).collect()
    }
}
