//! Publishing into memory.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use super::log::Record;
use super::{MemoryBroker, NAME, error};
use crate::broker::{
    FailureScope, Health, PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder,
    RejectionScope, Stored,
};
use crate::envelope::Outgoing;
use crate::error::{Error, Result};

impl Publisher for MemoryBroker {
    fn capabilities(&self) -> PublisherCapabilities {
        let mut capabilities = PublisherCapabilities::new(NAME);
        capabilities.limits = self.shared.config.limits();
        capabilities.order = PublisherOrder::Prefix;
        capabilities.publish_deadline = Duration::from_secs(1);
        capabilities
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            // Nothing below ever waits: without this a loop around it could keep other tasks from running.
            tokio::task::consume_budget().await;
            self.store(batch)
        })
    }

    fn health(&self) -> Health {
        self.shared.health()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let state = self.shared.lock();
            if !state.available {
                return Err(error::down("check"));
            }
            match state.missing(destinations) {
                none if none.is_empty() => Ok(()),
                missing => Err(error::missing("check", &missing)),
            }
        })
    }

    /// Nothing is buffered, and other clones may go on publishing: this changes nothing.
    fn close(&self, _deadline: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

impl MemoryBroker {
    fn store(&self, batch: &[Outgoing]) -> Vec<PublishOutcome> {
        let config = &self.shared.config;
        let now = config.clock.now();
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        let mut held: BTreeSet<(&str, &Bytes)> = BTreeSet::new();
        let mut outcomes = Vec::with_capacity(batch.len());
        for outgoing in batch {
            let message = &outgoing.message;
            let run = message.key.as_ref().map(|key| (&*message.destination, key));
            let outcome = if !state.available {
                failed(FailureScope::Broker, error::down("publish"))
            } else if run.is_some_and(|run| held.contains(&run)) {
                PublishOutcome::Withheld
            } else if let Some(topic) = state.topics.get_mut(&message.destination) {
                let record = Record::new(outgoing, now);
                if record.bytes() > config.record_bytes_max {
                    PublishOutcome::Rejected {
                        scope: RejectionScope::Message,
                        error: error::too_large(record.bytes(), config.record_bytes_max),
                    }
                } else if state.bytes + record.cost() > config.bytes_max {
                    failed(FailureScope::Destination, error::full(config.bytes_max))
                } else {
                    state.bytes += record.cost();
                    topic.append(record);
                    PublishOutcome::Confirmed
                }
            } else {
                PublishOutcome::Rejected {
                    scope: RejectionScope::Destination,
                    error: error::missing("publish", &[&message.destination]),
                }
            };
            // A whole destination that is missing is to blame for each of its messages; they hold back nobody.
            let destination_missing = matches!(
                outcome,
                PublishOutcome::Rejected {
                    scope: RejectionScope::Destination,
                    ..
                }
            );
            if !outcome.is_confirmed() && !destination_missing {
                held.extend(run);
            }
            outcomes.push(outcome);
        }
        drop(guard);
        self.shared.changed.notify_waiters();
        outcomes
    }
}

fn failed(scope: FailureScope, error: Error) -> PublishOutcome {
    PublishOutcome::Failed {
        scope,
        stored: Stored::No,
        error,
    }
}
