//! The gauges of the outbox, sampled beside the workers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::warn;

use crate::clock::{Clock, SystemClock};
use crate::event::{self, Value};
use crate::store::{Depth, OutboxStore};

/// Pending rows of a lane, and rows set aside, that a sample counts at most: with the longest backlog about a tenth of a
/// second of the database.
const COUNT_MAX: u64 = 2_500;
/// The share of time that samples may take: one part in so many.
const SHARE: u32 = 20;

/// Samples every `interval` until told to stop. Each relay of an outbox tells the same.
pub(super) async fn run(
    store: Arc<dyn OutboxStore>,
    interval: Duration,
    mut stop: watch::Receiver<bool>,
) {
    let sampling = async {
        let mut shown = Shown::default();
        loop {
            let began = Instant::now();
            if let Some(admin) = store.admin() {
                // All that were counted: those without a series of their own are added up.
                match admin.depth(COUNT_MAX, usize::MAX).await {
                    Ok(depth) => shown.show(&depth),
                    Err(error) => warn!(%error, "gauges of the outbox could not be sampled"),
                }
            }
            // A query that takes long, because dead rows are in its way, must not become a load of its own.
            let pause = began.elapsed().saturating_mul(SHARE).max(interval);
            tokio::time::sleep(pause).await;
        }
    };
    tokio::select! {
        () = sampling => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

/// The values of a sample by label, bounded as labels are.
#[derive(Debug, Default, PartialEq)]
struct Sample {
    pending: BTreeMap<String, u64>,
    oldest: BTreeMap<String, Duration>,
    aside: BTreeMap<String, u64>,
}

impl Sample {
    /// Adds up what shares a label.
    fn of(depth: &Depth) -> Self {
        let called = |value| event::label(value).to_string();
        let mut sample = Self::default();
        for of in &depth.destinations {
            let destination = called(Value::Destination(&of.destination));
            let oldest = of.oldest.unwrap_or_default();
            let shown = sample.oldest.entry(destination.clone()).or_default();
            *shown = oldest.max(*shown);
            *sample.pending.entry(destination).or_default() += of.pending;
            for (reason, count) in &of.aside {
                let reason = called(Value::Reason(reason.as_str()));
                *sample.aside.entry(reason).or_default() += count;
            }
        }
        sample
    }
}

/// What the gauges show.
#[derive(Debug, Default)]
struct Shown(Sample);

impl Shown {
    fn show(&mut self, depth: &Depth) {
        let mut sample = Sample::of(depth);
        // What is gone is 0 from now on; a gauge that is not set keeps its last value for ever.
        let gone = std::mem::take(&mut self.0);
        for destination in gone.pending.into_keys() {
            sample.pending.entry(destination.clone()).or_default();
            sample.oldest.entry(destination).or_default();
        }
        for reason in gone.aside.into_keys() {
            sample.aside.entry(reason).or_default();
        }
        for (destination, count) in &sample.pending {
            let labels = [Value::Destination(destination)];
            event::gauge(&event::OUTBOX_PENDING, &labels, *count as f64);
        }
        for (destination, age) in &sample.oldest {
            let labels = [Value::Destination(destination)];
            event::gauge(&event::OUTBOX_OLDEST, &labels, age.as_secs_f64());
        }
        for (reason, count) in &sample.aside {
            event::gauge(
                &event::OUTBOX_ASIDE,
                &[Value::Reason(reason)],
                *count as f64,
            );
        }
        event::gauge(&event::OUTBOX_CUT, &[], f64::from(u8::from(depth.cut)));
        let now = SystemClock.now().unix_timestamp_nanos() as f64 / 1e9;
        event::gauge(&event::OUTBOX_SAMPLED, &[], now);
        self.0 = sample;
    }
}
