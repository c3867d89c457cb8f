//! Publishing a page: every scope side by side, each in its order, and none waiting long for another.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;

use crate::broker::{FailureScope, PublishOutcome, Publisher, Stored};
use crate::clock::at_most_a_day;
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind};
use crate::event::PublishSpans;

use super::config::OrderMode;
use super::plan::{Group, Waves, needs_waves};

/// What became of the messages of a group; `None`: not tried.
pub(super) type Outcomes = Vec<Option<PublishOutcome>>;

/// A group on its way.
pub(super) struct Publishing {
    pub(super) group: Arc<Group>,
    run: BoxFuture<'static, Outcomes>,
}

impl Future for Publishing {
    type Output = (Arc<Group>, Outcomes);

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let outcomes = ready!(self.run.poll_unpin(context));
        Poll::Ready((self.group.clone(), outcomes))
    }
}

/// Publishes the groups side by side, and waits until all are finished, or `patience` has passed. Returns those that are
/// finished, and those that are not: they end at the publisher's deadline.
pub(super) async fn publish(
    publisher: &Arc<dyn Publisher>,
    groups: Vec<Group>,
    mode: OrderMode,
    patience: Duration,
) -> (Vec<(Arc<Group>, Outcomes)>, Vec<Publishing>) {
    let capabilities = publisher.capabilities();
    let deadline = Instant::now() + capabilities.publish_deadline;
    let in_waves = needs_waves(capabilities.order, mode);
    let start = |group: Group| {
        let (publisher, group) = (publisher.clone(), Arc::new(group));
        let spans = PublishSpans::of(&group.scope, &group.messages);
        let span = spans.span();
        Publishing {
            group: group.clone(),
            run: async move {
                let outcomes = publish_group(&*publisher, &group, in_waves, deadline).await;
                let confirmed = |outcome: &Option<PublishOutcome>| {
                    outcome.as_ref().is_some_and(PublishOutcome::is_confirmed)
                };
                spans.end(outcomes.iter().map(confirmed));
                outcomes
            }
            .instrument(span)
            .boxed(),
        }
    };
    let mut running: FuturesUnordered<Publishing> = groups.into_iter().map(start).collect();
    let mut finished = Vec::with_capacity(running.len());
    let patience_ends = Instant::now() + at_most_a_day(patience);
    while let Ok(Some(group)) = timeout_at(patience_ends, running.next()).await {
        finished.push(group);
    }
    (finished, running.into_iter().collect())
}

async fn publish_group(
    publisher: &dyn Publisher,
    group: &Group,
    in_waves: bool,
    deadline: Instant,
) -> Outcomes {
    if !in_waves {
        let outcomes = publish_run(publisher, &group.messages, deadline).await;
        return outcomes.into_iter().map(Some).collect();
    }
    let mut waves = Waves::new(group);
    let mut outcomes: Outcomes = group.messages.iter().map(|_| None).collect();
    while Instant::now() < deadline {
        let wave = waves.next(group);
        if wave.is_empty() {
            break;
        }
        let run: Vec<Outgoing> = wave.iter().map(|&at| group.messages[at].clone()).collect();
        let results = publish_run(publisher, &run, deadline).await;
        for ((at, sent), outcome) in wave.into_iter().zip(run).zip(results) {
            if !outcome.is_confirmed() {
                waves.stop(sent.message.key.as_ref());
            }
            outcomes[at] = Some(outcome);
        }
    }
    outcomes
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
