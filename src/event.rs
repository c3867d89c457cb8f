//! What relaybox tells about itself: one table of metrics, one of spans, and the thin functions that record them.
//!
//! Metrics go to the recorder of the `metrics` facade (feature `metrics`); without the feature nothing is recorded and
//! nothing computed. Spans go to `tracing`; feature `opentelemetry` joins them into traces.
//!
//! Label values are configured names, codes, and destinations. Destinations come with messages and reasons with rows, so
//! only the first so many different ones get a series of their own; all further ones share `other`. Message ids, keys and
//! error texts are never labels.

mod facade;
mod trace;

pub(crate) use facade::{Tally, Value, count, observe};
#[cfg(feature = "metrics")]
pub(crate) use facade::{describe, gauge, label};
pub use trace::current_trace;
pub(crate) use trace::{
    PublishSpans, enqueue_span, handle_batch_span, handle_span, handled, page_span,
};

/// How a metric behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows, from the start of the process.
    Counter,
    /// The value at the last sample.
    Gauge,
    /// A distribution.
    Histogram,
}

/// A row of the table of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metric {
    /// Its name. A contract: dashboards and alerts stand on it.
    pub name: &'static str,
    /// How it behaves.
    pub kind: MetricKind,
    /// What its values are counted in.
    pub unit: &'static str,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// What it tells.
    pub meaning: &'static str,
}

/// A row of the table of spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpanEntry {
    /// Its name. All spans have the level INFO and a target below `relaybox`.
    pub name: &'static str,
    /// Its fields, but for those that only OpenTelemetry's layer reads (`otel.*`).
    pub fields: &'static [&'static str],
    /// What it surrounds, and how it stands to other spans.
    pub meaning: &'static str,
}

macro_rules! metrics {
    ($($row:ident = $kind:ident $name:literal [$($label:literal),*] $unit:literal $meaning:literal;)+) => {
        $(
            #[allow(dead_code, reason = "without the feature nobody samples")]
            pub(crate) const $row: Metric = Metric {
                name: $name,
                kind: MetricKind::$kind,
                unit: $unit,
                labels: &[$($label),*],
                meaning: $meaning,
            };
        )+
        /// All metrics, by name. `docs/OBSERVABILITY.md` shows the same table.
        pub const METRICS: &[Metric] = &[$($row),+];
    };
}

metrics! {
    CONSUMER_ATTEMPTS = Counter "relaybox_consumer_attempts_total" ["consumer", "outcome"] "attempts"
        "Attempts at messages by how they ended: `done`, `skip`, `retry`, `permanent`, `panic`, `timeout`, `crash` (of the process), `batch` (failed together: each is tried again alone); or what kept the handler from them: `duplicate`, `busy`, `rerun`, `unavailable`";
    CONSUMER_COPIES_REFUSED = Counter "relaybox_consumer_copies_refused_total" ["consumer", "destination"] "attempts"
        "Times that a rung or a place of dead letters did not take a copy, or its confirmation did not come: the message stays and is tried again";
    CONSUMER_DEAD = Counter "relaybox_consumer_dead_letters_total" ["consumer", "reason"] "messages"
        "Messages made a dead letter, by the code of the reason";
    CONSUMER_END_TO_END = Histogram "relaybox_consumer_end_to_end_seconds" ["consumer"] "seconds"
        "From `occurred_at` of a message (its enqueue, unless set) to its effect committed, retries included; by two machines' clocks";
    CONSUMER_HANDLER = Histogram "relaybox_consumer_handler_seconds" ["consumer"] "seconds"
        "How long an attempt took, with its transaction";
    CONSUMER_LAG = Gauge "relaybox_consumer_lag_messages" ["consumer", "source"] "messages"
        "What a source or rung holds that the consumer has not settled, as far as the broker knows";
    CONSUMER_LAG_AGE = Gauge "relaybox_consumer_lag_seconds" ["consumer", "source"] "seconds"
        "Age of the oldest of them, where the broker tells it";
    CONSUMER_MESSAGES = Counter "relaybox_consumer_messages_total" ["consumer", "outcome"] "messages"
        "How deliveries ended: `handled`, `duplicate`, `retried` (on a rung, or waiting elsewhere), `behind` (a message of its key that waits), `dead`, `skipped` (failed, and recorded as its route says)";
    CONSUMER_RETRY_LATE = Histogram "relaybox_consumer_retry_late_seconds" ["consumer"] "seconds"
        "From the time that a message on a rung was due to the start of its next attempt; never early, and late by what waited before it";
    CONSUMER_SKIPPED = Counter "relaybox_consumer_skipped_total" ["consumer", "class"] "messages"
        "Failed messages recorded without their effect, as the route of their class says";
    CONSUMER_WAITING_LATE = Histogram "relaybox_consumer_waiting_late_seconds" ["consumer"] "seconds"
        "How long a message had been due in the waiting room when it was claimed, by the database's clock";
    DEAD_LETTERS = Gauge "relaybox_dead_letters" ["consumer", "destination"] "messages"
        "What the consumer's dead letter destination at the broker holds";
    OUTBOX_ASIDE = Gauge "relaybox_outbox_aside_messages" ["reason"] "messages"
        "Messages set aside, by the code of the reason";
    OUTBOX_CUT = Gauge "relaybox_outbox_depth_cut" [] "0 or 1"
        "1 when there was more than is counted: the other gauges of the outbox are then lower bounds";
    OUTBOX_OLDEST = Gauge "relaybox_outbox_oldest_seconds" ["destination"] "seconds"
        "How long the oldest message to be sent has been in the outbox, by the database's clock";
    OUTBOX_PENDING = Gauge "relaybox_outbox_pending_messages" ["destination"] "messages"
        "Messages to be sent";
    OUTBOX_SAMPLED = Gauge "relaybox_outbox_sampled_timestamp_seconds" [] "seconds since 1970"
        "When the gauges of the outbox were last true; they stay as they are while the database does not answer";
    RELAY_CYCLE = Histogram "relaybox_relay_cycle_seconds" ["result"] "seconds"
        "How long a worker's turn took, from the fetch to the settlement: `moved`, `idle`, `trouble`";
    RELAY_FENCED = Counter "relaybox_relay_fenced_total" [] "messages"
        "Rows that a settlement left alone, because their lane had gone to another relay: they may be sent again";
    RELAY_LEASES_LOST = Counter "relaybox_relay_leases_lost_total" [] "lanes"
        "Lanes that another relay took before this one gave them up";
    RELAY_PUBLISHED = Counter "relaybox_relay_publishes_total" ["destination", "outcome"] "messages"
        "The broker's word on each message: `confirmed`, `rejected` (the message), `undeliverable` (its destination), `failed` (certainly not stored), `unknown` (perhaps stored), `withheld` (not tried)";
}

/// All spans. `docs/OBSERVABILITY.md` shows the same table.
pub const SPANS: &[SpanEntry] = &[
    SpanEntry {
        name: "enqueue",
        fields: &[
            "messaging.destination.name",
            "messaging.batch.message_count",
        ],
        meaning: "The statement of an enqueue, in the caller's trace. The messages carry the caller's span, not this one",
    },
    SpanEntry {
        name: "relay",
        fields: &["relay", "worker", "messaging.batch.message_count"],
        meaning: "A page of a worker, from what was read to the settlement; a trace of its own. Turns that find nothing have none",
    },
    SpanEntry {
        name: "publish",
        fields: &[
            "messaging.destination.name",
            "messaging.batch.message_count",
            "confirmed",
            "traceparent",
        ],
        meaning: "Up to 128 messages on their way to one scope, below `relay`; linked to the span that each was enqueued in. `traceparent` where they share it",
    },
    SpanEntry {
        name: "handle",
        fields: &[
            "messaging.consumer.group.name",
            "messaging.destination.name",
            "messaging.message.id",
            "attempt",
            "outcome",
            "traceparent",
        ],
        meaning: "A delivery from its start to its settlement, on each rung anew; a child of the span that the message was enqueued in",
    },
    SpanEntry {
        name: "handle batch",
        fields: &[
            "messaging.consumer.group.name",
            "messaging.batch.message_count",
            "outcome",
            "traceparent",
        ],
        meaning: "Several deliveries in one transaction; linked to the span that each was enqueued in",
    },
];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn page() -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/OBSERVABILITY.md");
        std::fs::read_to_string(path).unwrap()
    }

    fn quoted(names: &[&str]) -> String {
        let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
        names.join(", ")
    }

    /// The rows of the page's table under this heading.
    fn table<'a>(page: &'a str, heading: &str) -> Vec<&'a str> {
        let (_, rest) = page.split_once(heading).unwrap();
        let rows = rest.lines().skip_while(|line| !line.starts_with("|---"));
        rows.skip(1)
            .take_while(|line| line.starts_with('|'))
            .collect()
    }

    #[test]
    fn the_page_shows_the_table_of_metrics() {
        let rows = METRICS.iter().map(|metric| {
            let kind = format!("{:?}", metric.kind).to_lowercase();
            let (name, unit, meaning) = (metric.name, metric.unit, metric.meaning);
            format!(
                "| `{name}` | {kind} | {unit} | {} | {meaning} |",
                quoted(metric.labels)
            )
        });
        let rows: Vec<String> = rows.collect();
        assert_eq!(table(&page(), "## Metrics"), rows);
    }

    #[test]
    fn the_page_shows_the_table_of_spans() {
        let rows = SPANS.iter().map(|span| {
            format!(
                "| `{}` | {} | {} |",
                span.name,
                quoted(span.fields),
                span.meaning
            )
        });
        let rows: Vec<String> = rows.collect();
        assert_eq!(table(&page(), "## Spans"), rows);
    }

    #[test]
    fn names_are_sorted_and_say_unit_and_kind() {
        let names: Vec<&str> = METRICS.iter().map(|metric| metric.name).collect();
        assert!(names.is_sorted(), "{names:?}");
        assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
        for metric in METRICS {
            let counts = metric.name.ends_with("_total");
            assert_eq!(counts, metric.kind == MetricKind::Counter, "{metric:?}");
            let plain = |b: u8| b.is_ascii_lowercase() || b == b'_';
            assert!(metric.name.bytes().all(plain), "{metric:?}");
        }
    }
}
