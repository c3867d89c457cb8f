//! Metrics, as Prometheus would read them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use relaybox::broker::{Health, PublishOutcome, Publisher, PublisherCapabilities, RejectionScope};
use relaybox::envelope::Outgoing;
use relaybox::event::{METRICS, MetricKind};
use relaybox::relay::RelayConfig;
use relaybox::testing::eventually;
use relaybox::{Error, ErrorKind, Message, Result};

use crate::house;
use crate::support::{Altered, DEADLINE, brisk, impatient, names, numbered, to};

/// Runs on this thread alone, where the recorder sees all that happens and nothing of other tests.
pub fn recorded<T>(work: impl AsyncFnOnce(PrometheusHandle) -> T) -> T {
    let recorder = PrometheusBuilder::new().build_recorder();
    let _guard = metrics::set_default_local_recorder(&recorder);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(work(recorder.handle()))
}

fn sampling() -> RelayConfig {
    impatient().with_sample_interval(Duration::from_millis(10))
}

pub async fn shown(handle: &PrometheusHandle, line: &str) {
    eventually(DEADLINE, &format!("{line:?} is shown"), || async {
        handle.render().lines().any(|shown| shown == line)
    })
    .await;
}

/// What is shown of a relay that has met everything. Once for all tests, because the names of labels are given out
/// once in a process.
fn relayed() -> &'static str {
    static TOLD: OnceLock<String> = OnceLock::new();
    TOLD.get_or_init(|| recorded(meet_everything))
}

async fn meet_everything(handle: PrometheusHandle) -> String {
    let house = house().await;
    house.enqueue(&numbered("k", "m", 3)).await;
    house.enqueue(&to("nowhere", numbered("k", "n", 2))).await;
    house.enqueue(&to("refused", numbered("k", "r", 1))).await;
    let publisher = Altered::answering(house.broker.clone(), |sent| {
        (sent.message.destination == "refused").then(|| refused("too large"))
    });
    let relay = house.relay(publisher, sampling());
    for line in [
        r#"relaybox_relay_publishes_total{destination="orders",outcome="confirmed"} 3"#,
        r#"relaybox_relay_publishes_total{destination="refused",outcome="rejected"} 1"#,
        r#"relaybox_outbox_pending_messages{destination="nowhere"} 0"#,
        r#"relaybox_outbox_aside_messages{reason="closed"} 2"#,
        r#"relaybox_outbox_aside_messages{reason="rejected"} 1"#,
        "relaybox_outbox_depth_cut 0",
    ] {
        shown(&handle, line).await;
    }
    // Another relay takes the lanes, as after a pause longer than the lease.
    sqlx::query("UPDATE relaybox_outbox_lane SET token = token + 1, owner = 'another'")
        .execute(house.store.pool())
        .await
        .unwrap();
    shown(&handle, "relaybox_relay_leases_lost_total 16").await;
    relay.stop().await.unwrap();
    handle.render()
}

fn refused(why: &str) -> PublishOutcome {
    let error = Error::new(ErrorKind::Rejected, "publish", why.to_owned());
    PublishOutcome::Rejected {
        scope: RejectionScope::Message,
        error,
    }
}

/// Lines that are no comment: a series each, or a part of one.
fn series(text: &str) -> Vec<&str> {
    let lines = text.lines();
    lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .collect()
}

#[test]
fn a_relay_tells_depth_outcomes_cycles_and_lost_leases() {
    let text = relayed();
    assert!(text.contains(r#"relaybox_relay_cycle_seconds_count{result="moved"}"#));
    assert!(text.contains("relaybox_outbox_sampled_timestamp_seconds 1"));
    assert!(text.contains(r#"publishes_total{destination="nowhere",outcome="undeliverable"}"#));
    let help = METRICS.iter().filter(|metric| text.contains(metric.name));
    for metric in help {
        let described = format!("# HELP {} ", metric.name);
        assert!(text.contains(&described), "{} is described", metric.name);
    }
}

#[test]
fn the_age_of_the_oldest_and_what_is_gone_are_told() {
    relayed();
    recorded(async |handle| {
        let house = house().await;
        house.enqueue(&numbered("k", "m", 2)).await;
        sqlx::query("UPDATE relaybox_outbox SET enqueued_at = enqueued_at - 60000000")
            .execute(house.store.pool())
            .await
            .unwrap();
        house.broker.set_available(false);
        let relay = house.relay(house.broker.clone(), sampling());
        shown(
            &handle,
            r#"relaybox_outbox_pending_messages{destination="orders"} 2"#,
        )
        .await;
        let oldest = r#"relaybox_outbox_oldest_seconds{destination="orders"} "#;
        let text = handle.render();
        let age = text.lines().find_map(|line| line.strip_prefix(oldest));
        let age: f64 = age.unwrap().parse().unwrap();
        assert!((60.0..600.0).contains(&age), "{age}");
        house.broker.set_available(true);
        for gone in ["pending_messages", "oldest_seconds"] {
            let line = format!(r#"relaybox_outbox_{gone}{{destination="orders"}} 0"#);
            shown(&handle, &line).await;
        }
        relay.stop().await.unwrap();
    });
}

#[test]
fn a_fenced_settlement_is_counted() {
    relayed();
    recorded(async |handle| {
        let house = house().await;
        let pool = house.store.pool().clone();
        house.enqueue(&numbered("k", "m", 3)).await;
        let taken = AtomicBool::new(false);
        let publisher = Stealing {
            inner: house.broker.clone(),
            pool,
            taken,
        };
        let relay = house.relay(publisher, sampling());
        shown(&handle, "relaybox_relay_fenced_total 3").await;
        relay.stop().await.unwrap();
    });
}

/// While it publishes for the first time the lanes go to another relay.
struct Stealing<P> {
    inner: P,
    pool: sqlx::SqlitePool,
    taken: AtomicBool,
}

impl<P: Publisher> Publisher for Stealing<P> {
    fn capabilities(&self) -> PublisherCapabilities {
        self.inner.capabilities()
    }

    fn publish<'a>(&'a self, batch: &'a [Outgoing]) -> BoxFuture<'a, Vec<PublishOutcome>> {
        Box::pin(async move {
            if !self.taken.swap(true, Ordering::SeqCst) {
                sqlx::query("UPDATE relaybox_outbox_lane SET token = token + 1, owner = 'another'")
                    .execute(&self.pool)
                    .await
                    .unwrap();
            }
            self.inner.publish(batch).await
        })
    }

    fn health(&self) -> Health {
        self.inner.health()
    }

    fn check<'a>(&'a self, destinations: &'a [String]) -> BoxFuture<'a, Result<()>> {
        self.inner.check(destinations)
    }

    fn close(&self, deadline: Duration) -> BoxFuture<'_, Result<()>> {
        self.inner.close(deadline)
    }
}

/// Series of one metric at most: what its labels can be, times the lines of a histogram.
fn series_max() -> usize {
    let values = |label: &str| match label {
        "destination" => 101,
        "reason" => 51,
        "consumer" | "source" => 201,
        "outcome" => 8,
        "result" => 3,
        other => panic!("a label that this test does not know: {other}"),
    };
    let relays = METRICS.iter().filter(|metric| {
        metric.name.starts_with("relaybox_outbox") || metric.name.starts_with("relaybox_relay")
    });
    let most = relays.map(|metric| {
        let lines = if metric.kind == MetricKind::Histogram {
            16
        } else {
            1
        };
        lines
            * metric
                .labels
                .iter()
                .map(|label| values(label))
                .product::<usize>()
    });
    most.sum()
}

#[test]
fn ten_thousand_ephemeral_names_ids_keys_and_errors_make_a_bounded_number_of_series() {
    const MANY: usize = 10_000;
    relayed();
    let text = recorded(async |handle| {
        let house = house().await;
        let ids = names("ephemeral", 0..MANY);
        let messages: Vec<_> = ids
            .iter()
            .map(|id| {
                Message::new(format!("to-{id}"), "T")
                    .with_id(id.as_str())
                    .with_key(id)
            })
            .collect();
        for part in messages.chunks(1_000) {
            house.enqueue(part).await;
        }
        // Half of them are confirmed, and each of the others is refused in words of its own.
        let publisher = Altered::answering(house.broker.clone(), |sent| {
            let id = sent.message.id.as_str();
            Some(match id.ends_with(['0', '2', '4', '6', '8']) {
                true => PublishOutcome::Confirmed,
                false => refused(&format!("error of {id}")),
            })
        });
        let relay = house.relay(
            publisher,
            brisk().with_sample_interval(Duration::from_millis(200)),
        );
        eventually(4 * DEADLINE, "all is sent", || async {
            house.pending().await == 0
        })
        .await;
        let rejected =
            |rows: usize| format!(r#"relaybox_outbox_aside_messages{{reason="rejected"}} {rows}"#);
        // As many as a sample counts.
        shown(&handle, &rejected(2_500)).await;
        // Reasons that other clients made up.
        sqlx::query("UPDATE relaybox_outbox_aside SET reason = 'reason-' || position")
            .execute(house.store.pool())
            .await
            .unwrap();
        shown(&handle, &rejected(0)).await;
        relay.stop().await.unwrap();
        handle.render()
    });
    let series = series(&text);
    let most = series_max();
    assert!(
        series.len() <= most,
        "{} series, at most {most}",
        series.len()
    );
    let of_others = |metric: &str| series.iter().any(|line| line.starts_with(metric));
    assert!(of_others(
        r#"relaybox_relay_publishes_total{destination="other""#
    ));
    assert!(of_others(
        r#"relaybox_outbox_aside_messages{reason="other""#
    ));
    assert!(!text.contains("error of"));
    for line in &series {
        let named = line.contains(r#"destination="to-ephemeral"#);
        assert!(named || !line.contains("ephemeral"), "{line}");
    }
    assert!(series.contains(&"relaybox_outbox_depth_cut 1"));
    // What is added up loses nothing.
    let count = |outcome: &str| -> u64 {
        let of = |line: &&&str| {
            line.starts_with("relaybox_relay_publishes_total") && line.contains(outcome)
        };
        let counts = series.iter().filter(of);
        counts
            .map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap())
            .sum()
    };
    assert_eq!(count("confirmed"), MANY as u64 / 2);
    assert_eq!(count("rejected"), MANY as u64 / 2);
}
