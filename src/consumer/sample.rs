//! The gauges of a consumer, asked of its broker beside the work.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::debug;

use crate::broker::{Backlog, Subscriber, SubscriptionRequest};
use crate::error::Result;
use crate::event::{self, Value};

/// How long an answer may take.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// The share of time that samples may take: one part in so many.
const SHARE: u32 = 20;

/// Samples lag and dead letters every `interval`. Does not end; to be dropped at a stop. Each member tells the same.
pub(super) fn run(
    subscriber: Arc<dyn Subscriber>,
    request: &SubscriptionRequest,
    interval: Duration,
) -> impl Future<Output = ()> + Send + use<> {
    let consumer = request.consumer.clone();
    let rungs = request.rungs.iter().chain(&request.earlier_rungs);
    let rungs = rungs.map(|rung| &rung.destination);
    let mut read: Vec<String> = request.sources.iter().chain(rungs).cloned().collect();
    read.sort_unstable();
    read.dedup();
    let dead_letters = request.dead_letters.clone();
    async move {
        loop {
            let began = Instant::now();
            for source in &read {
                if let Some(lag) = answer(source, subscriber.lag(&consumer, source)).await {
                    tell_lag(&consumer, source, lag);
                }
            }
            for destination in &dead_letters {
                if let Some(depth) = answer(destination, subscriber.depth(destination)).await {
                    let labels = [Value::Name(&consumer), Value::Name(destination)];
                    event::gauge(&event::DEAD_LETTERS, &labels, depth.messages as f64);
                }
            }
            let pause = began.elapsed().saturating_mul(SHARE).max(interval);
            tokio::time::sleep(pause).await;
        }
    }
}

/// What cannot be asked now keeps its last value: the probe tells of a broker that is away.
async fn answer(of: &str, asked: impl Future<Output = Result<Backlog>>) -> Option<Backlog> {
    match tokio::time::timeout(ANSWER_DEADLINE, asked).await {
        Ok(Ok(backlog)) => Some(backlog),
        Ok(Err(error)) => {
            debug!(of, %error, "gauge could not be sampled");
            None
        }
        Err(_) => {
            debug!(of, "gauge could not be sampled: no answer");
            None
        }
    }
}

fn tell_lag(consumer: &str, source: &str, lag: Backlog) {
    let labels = [Value::Name(consumer), Value::Name(source)];
    event::gauge(&event::CONSUMER_LAG, &labels, lag.messages as f64);
    let oldest = lag.oldest.or((lag.messages == 0).then_some(Duration::ZERO));
    if let Some(oldest) = oldest {
        event::gauge(&event::CONSUMER_LAG_AGE, &labels, oldest.as_secs_f64());
    }
}
