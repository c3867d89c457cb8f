//! A deep backlog: whether the relay is as fast at its end as at its beginning.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use relaybox::Result;
use relaybox::broker::{PublishOutcome, Publisher, PublisherCapabilities};
use relaybox::envelope::Outgoing;
use relaybox::relay::Relay;
use relaybox::store::OutboxStore;
use relaybox::store::postgres::PostgresStore;

use super::Size;
use super::backlog::{Backlog, PAYLOAD_BYTES};
use super::checked::Checked;
use super::drain::{Noop, when_done};
use super::report::Report;

const PARTS: usize = 10;

pub async fn measure(report: &mut Report, backlog: &Backlog, size: Size) {
    let rows = size.depth_rows;
    let url = backlog.filled(rows, PAYLOAD_BYTES).await;
    let store = PostgresStore::connect(&url).await.unwrap();
    let checked = Arc::new(Checked::new(rows));
    let milestones = Arc::new(Mutex::new(vec![Instant::now()]));
    let publisher = Milestones {
        inner: Noop::checked(&checked),
        checked: checked.clone(),
        rows,
        passed: milestones.clone(),
    };
    let start = report.start();
    let relay = Relay::new(store.clone(), publisher);
    relay.run_until(when_done(&checked)).await.unwrap();
    let run = start.end();
    assert!(checked.is_complete());
    assert_eq!(store.pending(10).await.unwrap(), 0);
    let passed = milestones.lock().unwrap().clone();
    let part = f64::from(rows) / PARTS as f64;
    let rate = |from: usize| part / (passed[from + 1] - passed[from]).as_secs_f64();
    let (first, last) = (rate(0), rate(PARTS - 1));
    let rates: Vec<_> = (0..PARTS)
        .map(|from| format!("{:.0}", rate(from)))
        .collect();
    report.line(format!(
        "a backlog of {rows} rows: {:.0}/s, first tenth {first:.0}/s, last {last:.0}/s, ratio {:.2} [{}]",
        f64::from(rows) / run.took.as_secs_f64(),
        last / first,
        rates.join(" "),
    ));
}

/// Notes when each tenth was through.
struct Milestones {
    inner: Noop,
    checked: Arc<Checked>,
    rows: u32,
    passed: Arc<Mutex<Vec<Instant>>>,
}

impl Publisher for Milestones {
    fn capabilities(&self) -> PublisherCapabilities {
        self.inner.capabilities()
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        let published = self.inner.publish(batch);
        let mut passed = self.passed.lock().unwrap();
        let tenths = u64::from(self.checked.count()) * PARTS as u64 / u64::from(self.rows);
        while passed.len() <= tenths as usize {
            passed.push(Instant::now());
        }
        published
    }

    fn health(&self) -> relaybox::broker::Health {
        self.inner.health()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        self.inner.close(deadline)
    }
}
