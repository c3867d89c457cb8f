//! 5,000 messages a second while somebody keeps dead rows from being removed: first an old snapshot, then a writer that
//! does not commit. What a fetch takes must not grow.

use std::sync::Arc;
use std::time::{Duration, Instant};

use relaybox::store::postgres::PostgresStore;
use relaybox::store::{FetchRequest, OutboxStore, SettlementBatch, Verdict};
use sqlx::{Connection, PgConnection};

use super::Size;
use super::backlog::{Backlog, TOPIC, run};
use super::checked::Checked;
use super::drain::BATCH;
use super::report::{Report, quantile};
use super::writers::{Load, Times, write};

/// The part of the time that is compared at both ends.
const PARTS: usize = 6;

/// What the session that is in the way does, and then nothing.
const HOLDERS: [(&str, &str); 2] = [
    (
        "an old snapshot",
        "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1",
    ),
    (
        "an open writer",
        "BEGIN; INSERT INTO relaybox_outbox (lane, message_id, destination, event_type, size)
         VALUES (0, 'open', 'bench', 'Event', 20)",
    ),
];

pub async fn measure(report: &mut Report, backlog: &Backlog, size: Size) {
    let load = Load {
        messages_a_second: 5_000,
        messages_a_transaction: 5,
        lasts: size.held,
    };
    for (name, sql) in HOLDERS {
        let url = backlog.migrated().await;
        let mut holder = PgConnection::connect(&url).await.unwrap();
        run(&mut holder, sql.to_owned()).await;
        let times = Times::new(load.messages());
        let checked = Arc::new(Checked::new(load.messages()));
        let started = Instant::now();
        let (fetches, ()) = tokio::join!(
            read_all(&url, &checked, &times),
            write(&url, TOPIC, load, &times)
        );
        let took = started.elapsed();
        assert!(checked.is_complete());
        run(&mut holder, "ROLLBACK".to_owned()).await;
        let part = load.lasts / PARTS as u32;
        let within = |from: Duration| {
            let within = move |fetch: &&Fetch| fetch.at >= from && fetch.at < from + part;
            fetches
                .iter()
                .filter(within)
                .map(|fetch| fetch.took)
                .collect::<Vec<_>>()
        };
        let first = quantile(&within(Duration::ZERO), 0.99);
        let last = quantile(&within(part * (PARTS as u32 - 1)), 0.99);
        let delays = times.delays();
        let part = delays.len() / PARTS;
        let lag = |delays: &[Duration]| quantile(delays, 0.5);
        report.line(format!(
            "5,000/s for {:?} beside {name}: fetch p99 {first:?} in the first sixth, {last:?} in the last, ratio {:.2}; \
             commit to settled p50 {:?} and {:?}; everything sent {:?} after the last commit",
            load.lasts,
            last.as_secs_f64() / first.as_secs_f64(),
            lag(&delays[..part]),
            lag(&delays[delays.len() - part..]),
            took.saturating_sub(load.lasts),
        ));
    }
}

struct Fetch {
    /// Since the first one.
    at: Duration,
    took: Duration,
}

/// A worker's circle with a publisher that confirms everything, until everything was seen.
async fn read_all(url: &str, checked: &Checked, times: &Times) -> Vec<Fetch> {
    let store = PostgresStore::connect(url).await.unwrap();
    let leases = store
        .lease("bench", 16, Duration::from_secs(3_600))
        .await
        .unwrap();
    let mut reader = store.reader();
    let request = FetchRequest {
        leases: leases.clone(),
        rows_max: BATCH,
        bytes_max: 16 << 20,
        closed: Vec::new(),
    };
    let started = Instant::now();
    let mut fetches = Vec::new();
    while !checked.is_complete() {
        let asked = Instant::now();
        let page = reader.fetch(&request).await.unwrap();
        fetches.push(Fetch {
            at: asked - started,
            took: asked.elapsed(),
        });
        if page.rows.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        }
        let batch = SettlementBatch {
            leases: leases.clone(),
            verdicts: page
                .rows
                .iter()
                .map(|row| (row.place, Verdict::Confirmed))
                .collect(),
        };
        assert_eq!(reader.settle(&batch).await.unwrap().fenced, 0);
        let messages = || page.rows.iter().map(|row| &row.message);
        times.confirm(messages().map(|message| message.version.unwrap()));
        checked.see(
            messages().map(|message| (message.key.as_deref().unwrap(), message.version.unwrap())),
        );
    }
    fetches
}
