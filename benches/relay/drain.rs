//! How fast a backlog leaves when publishing costs nothing.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use relaybox::Result;
use relaybox::broker::{PublishOutcome, Publisher, PublisherCapabilities, PublisherOrder};
use relaybox::envelope::Outgoing;
use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::OutboxStore;
use relaybox::store::postgres::PostgresStore;

use super::Size;
use super::backlog::{Backlog, TOPIC};
use super::checked::Checked;
use super::report::{Report, Run};
use super::twin::{self, Statements};

pub const BATCH: usize = 1_000;

pub async fn measure(report: &mut Report, backlog: &Backlog, size: Size) {
    let rows = size.drain_rows;
    for relays in [1, 4] {
        let (mut ours, mut same, mut simplest) = (Vec::new(), Vec::new(), Vec::new());
        let bare = |statements| twin::once(report, backlog, rows, relays, statements);
        for _ in 0..size.pairs {
            ours.push(ours_once(report, backlog, rows, relays).await);
            same.push(bare(Statements::Same).await);
            simplest.push(bare(Statements::Simplest).await);
        }
        let what = format!("drain to a no-op publisher, {relays} relay(s), batch {BATCH}");
        for (twin_name, twin) in [
            ("bare loop, same statements", &same),
            ("bare loop, simplest statements", &simplest),
        ] {
            report.rate(&what, rows, &times(&ours), twin_name, &times(twin));
            report.cpu(&what, rows, &ours, twin_name, twin);
        }
    }
}

pub fn times(runs: &[Run]) -> Vec<Duration> {
    runs.iter().map(|run| run.took).collect()
}

pub async fn ours_once(report: &Report, backlog: &Backlog, rows: u32, relays: usize) -> Run {
    let url = backlog.database(rows, TOPIC).await;
    let checked = Arc::new(Checked::new(rows));
    let mut stores = Vec::new();
    for _ in 0..relays {
        stores.push(PostgresStore::connect(&url).await.unwrap());
    }
    let start = report.start();
    let stop = when_done(&checked);
    let tasks: Vec<_> = stores
        .iter()
        .map(|store| {
            let config = RelayConfig::default().with_batch_rows_max(BATCH);
            let relay = Relay::new(store.clone(), Noop::checked(&checked)).with_config(config);
            tokio::spawn(relay.run_until(stop.clone()))
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    let run = start.end();
    assert!(checked.is_complete());
    assert_eq!(stores[0].pending(10).await.unwrap(), 0);
    run
}

/// Completes for everybody once everything was seen.
pub fn when_done(checked: &Arc<Checked>) -> futures_util::future::Shared<BoxFuture<'static, ()>> {
    let checked = checked.clone();
    let stop: BoxFuture<'static, ()> = Box::pin(async move { checked.done.notified().await });
    futures_util::FutureExt::shared(stop)
}

/// Confirms everything, and holds it against the order if asked to.
#[derive(Default)]
pub struct Noop(Option<Arc<Checked>>);

impl Noop {
    pub fn checked(checked: &Arc<Checked>) -> Self {
        Self(Some(checked.clone()))
    }
}

impl Publisher for Noop {
    fn capabilities(&self) -> PublisherCapabilities {
        let mut capabilities = PublisherCapabilities::new("noop");
        capabilities.order = PublisherOrder::Prefix;
        capabilities
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        let sent = batch.iter().map(|sent| &sent.message);
        if let Some(checked) = &self.0 {
            checked.see(
                sent.map(|message| (message.key.as_deref().unwrap(), message.version.unwrap())),
            );
        }
        let outcomes = batch.iter().map(|_| PublishOutcome::Confirmed).collect();
        Box::pin(std::future::ready(outcomes))
    }

    fn health(&self) -> relaybox::broker::Health {
        relaybox::broker::Health::up()
    }

    fn check<'a>(&'a self, _: &'a [String]) -> BoxFuture<'a, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn close(&self, _: Duration) -> BoxFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
