//! Publishes that did not finish in time for their page: they go on while their worker does other things.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use tokio::task::{Id, JoinSet};
use tracing::warn;

use super::held::Claim;
use super::plan::Group;
use super::publish::{Outcomes, Publishing};

/// Late publishes of one worker: one a scope at most. Dropping it stops them.
#[derive(Default)]
pub(super) struct Late {
    tasks: JoinSet<Outcomes>,
    known: HashMap<Id, (Arc<Group>, Claim)>,
}

/// A late publish that has ended.
pub(super) struct Landed {
    pub(super) group: Arc<Group>,
    pub(super) outcomes: Outcomes,
    /// The lanes stay in hand until it is settled.
    pub(super) claim: Claim,
}

impl Late {
    /// Lets a publish go on, with its lanes kept in hand.
    pub(super) fn depart(&mut self, publishing: Publishing, claim: &Claim) {
        let group = publishing.group.clone();
        let lanes: BTreeSet<_> = group.places.iter().map(|place| place.lane).collect();
        let task = self.tasks.spawn(async move { publishing.await.1 });
        self.known.insert(task.id(), (group, claim.share(&lanes)));
    }

    /// The next one that ends; `None` when none is on its way. Cancel safe.
    pub(super) async fn landed(&mut self) -> Option<Landed> {
        let (id, outcomes) = match self.tasks.join_next_with_id().await? {
            Ok(ended) => ended,
            Err(broken) => {
                warn!(error = %broken, "publish broke down; its messages will be sent again");
                (broken.id(), Vec::new())
            }
        };
        let (group, claim) = self.known.remove(&id)?;
        Some(Landed {
            group,
            outcomes,
            claim,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }
}
