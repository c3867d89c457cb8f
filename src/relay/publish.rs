//! Publishing a page: every scope side by side, each in its order, all under one deadline.

use std::mem;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;
use tokio::time::{Instant, timeout_at};

use crate::broker::{FailureScope, PublishOutcome, Publisher, Stored};
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind};
use crate::store::PendingMessage;

use super::config::OrderMode;
use super::plan::{Group, Place, Waves, groups, needs_waves};

/// Scopes published side by side at most.
const SCOPES_MAX: usize = 64;

/// What became of one row.
#[derive(Debug)]
pub(super) struct Published {
    pub(super) place: Place,
    pub(super) destination: String,
    pub(super) outcome: PublishOutcome,
}

/// Publishes the rows and returns what is known of them. Rows that were not tried are absent.
pub(super) async fn publish(
    publisher: &dyn Publisher,
    rows: Vec<PendingMessage>,
    mode: OrderMode,
    deadline: Duration,
) -> Vec<Published> {
    let deadline = Instant::now() + deadline;
    let waves = needs_waves(publisher.capabilities().order, mode);
    let groups = groups(rows, |destination| publisher.scope(destination));
    let results: Vec<Vec<Published>> = stream::iter(groups)
        .map(|group| publish_group(publisher, group, waves, deadline))
        .buffer_unordered(SCOPES_MAX)
        .collect()
        .await;
    results.into_iter().flatten().collect()
}

async fn publish_group(
    publisher: &dyn Publisher,
    mut group: Group,
    in_waves: bool,
    deadline: Instant,
) -> Vec<Published> {
    if !in_waves {
        let outcomes = publish_run(publisher, &group.messages, deadline).await;
        // Messages stay where they are: moving each once more is as dear as reading its row.
        let sent = group.messages.iter_mut();
        let destinations = sent.map(|sent| mem::take(&mut sent.message.destination));
        return group
            .places
            .into_iter()
            .zip(destinations)
            .zip(outcomes)
            .map(|((place, destination), outcome)| Published {
                place,
                destination,
                outcome,
            })
            .collect();
    }
    let mut waves = Waves::new(&group);
    let mut published = Vec::with_capacity(group.places.len());
    while Instant::now() < deadline {
        let wave = waves.next(&group);
        if wave.is_empty() {
            break;
        }
        let run: Vec<Outgoing> = wave.iter().map(|&at| group.messages[at].clone()).collect();
        let outcomes = publish_run(publisher, &run, deadline).await;
        for ((at, sent), outcome) in wave.into_iter().zip(run).zip(outcomes) {
            if !outcome.is_confirmed() {
                waves.stop(sent.message.key.as_ref());
            }
            published.push(Published {
                place: group.places[at],
                destination: sent.message.destination,
                outcome,
            });
        }
    }
    published
}

/// One call of the publisher. A publisher that breaks its own contract costs a resend, never a message.
async fn publish_run(
    publisher: &dyn Publisher,
    run: &[Outgoing],
    deadline: Instant,
) -> Vec<PublishOutcome> {
    let unknown = |detail: &str| PublishOutcome::Failed {
        scope: FailureScope::Destination,
        stored: Stored::Unknown,
        error: Error::new(ErrorKind::Timeout, "publish", detail),
    };
    match timeout_at(deadline, publisher.publish(run)).await {
        Ok(outcomes) if outcomes.len() == run.len() => outcomes,
        Ok(_) => run
            .iter()
            .map(|_| unknown("the publisher returned another number of outcomes"))
            .collect(),
        Err(_) => run
            .iter()
            .map(|_| unknown("no outcome before the publish deadline"))
            .collect(),
    }
}
