//! Recording: to the `metrics` facade with its feature, to nowhere without.

use super::Metric;

/// The value of a label, by where it comes from: that decides how many different ones there may be.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "metrics"), allow(dead_code, reason = "only recorded"))]
pub(crate) enum Value<'a> {
    /// A word of this crate.
    Word(&'static str),
    /// A destination that came with a message.
    Destination(&'a str),
    /// A name that the user configured. Bounded too: some make names up at run time.
    Name(&'a str),
    /// The code of a reason, which handlers and other clients may invent.
    Reason(&'a str),
}

/// Counts messages by destination and outcome; runs of the same are counted at once.
pub(crate) struct Tally<'a> {
    metric: &'static Metric,
    run: Option<(&'a str, &'static str, u64)>,
}

impl<'a> Tally<'a> {
    pub(crate) const fn new(metric: &'static Metric) -> Self {
        Self { metric, run: None }
    }

    pub(crate) fn add(&mut self, destination: &'a str, outcome: &'static str) {
        if !cfg!(feature = "metrics") {
            return;
        }
        match &mut self.run {
            Some((of, what, messages)) if *of == destination && *what == outcome => *messages += 1,
            _ => {
                self.flush();
                self.run = Some((destination, outcome, 1));
            }
        }
    }

    fn flush(&mut self) {
        if let Some((destination, outcome, messages)) = self.run.take() {
            let labels = [Value::Destination(destination), Value::Word(outcome)];
            count(self.metric, &labels, messages);
        }
    }
}

impl Drop for Tally<'_> {
    fn drop(&mut self) {
        self.flush();
    }
}

#[cfg(not(feature = "metrics"))]
mod recording {
    use super::{Metric, Value};

    #[inline]
    pub(crate) fn count(_: &Metric, _: &[Value<'_>], _: u64) {}

    #[inline]
    pub(crate) fn observe(_: &Metric, _: &[Value<'_>], _: std::time::Duration) {}
}

#[cfg(feature = "metrics")]
mod recording {
    use std::collections::BTreeSet;
    use std::sync::{Arc, PoisonError, RwLock};
    use std::time::Duration;

    use metrics::{Label, SharedString, Unit};

    use super::{Metric, Value};
    use crate::event::{METRICS, MetricKind};

    /// Different destinations that get a series of their own.
    const DESTINATIONS_MAX: usize = 100;
    /// Different configured names (consumers, sources, rungs, dead letter destinations).
    const NAMES_MAX: usize = 200;
    /// Different reasons.
    const REASONS_MAX: usize = 50;
    /// What all others are called.
    const OTHER: &str = "other";

    // Of the process, as the recorder is.
    static DESTINATIONS: Bounded = Bounded::new(DESTINATIONS_MAX);
    static NAMES: Bounded = Bounded::new(NAMES_MAX);
    static REASONS: Bounded = Bounded::new(REASONS_MAX);

    /// The first so many different values; never forgotten, because a recorder does not forget a series either.
    struct Bounded {
        count_max: usize,
        known: RwLock<BTreeSet<Arc<str>>>,
    }

    impl Bounded {
        const fn new(count_max: usize) -> Self {
            Self {
                count_max,
                known: RwLock::new(BTreeSet::new()),
            }
        }

        fn label(&self, value: &str) -> SharedString {
            let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(value) = known.get(value) {
                return value.clone().into();
            }
            if known.len() >= self.count_max {
                return OTHER.into();
            }
            drop(known);
            let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
            if let Some(value) = known.get(value) {
                return value.clone().into();
            }
            if known.len() >= self.count_max {
                return OTHER.into();
            }
            let value: Arc<str> = value.into();
            known.insert(value.clone());
            value.into()
        }
    }

    /// What a value is called in a label.
    pub(crate) fn label(value: Value<'_>) -> SharedString {
        match value {
            Value::Word(word) => word.into(),
            Value::Destination(name) => DESTINATIONS.label(name),
            Value::Name(name) => NAMES.label(name),
            Value::Reason(code) => REASONS.label(code),
        }
    }

    fn labels(metric: &Metric, values: &[Value<'_>]) -> Vec<Label> {
        debug_assert_eq!(metric.labels.len(), values.len(), "{}", metric.name);
        let pairs = metric.labels.iter().zip(values);
        pairs
            .map(|(name, value)| Label::new(*name, label(*value)))
            .collect()
    }

    /// Adds to a counter.
    pub(crate) fn count(metric: &Metric, values: &[Value<'_>], more: u64) {
        metrics::counter!(metric.name, labels(metric, values)).increment(more);
    }

    /// Sets a gauge.
    pub(crate) fn gauge(metric: &Metric, values: &[Value<'_>], value: f64) {
        metrics::gauge!(metric.name, labels(metric, values)).set(value);
    }

    /// Adds a duration to a histogram, in seconds.
    pub(crate) fn observe(metric: &Metric, values: &[Value<'_>], took: Duration) {
        metrics::histogram!(metric.name, labels(metric, values)).record(took.as_secs_f64());
    }

    /// Tells the recorder what the metrics mean. To be repeated at each start: a recorder may have come since.
    pub(crate) fn describe() {
        for metric in METRICS {
            let unit = match metric.unit {
                "seconds" => Unit::Seconds,
                _ => Unit::Count,
            };
            match metric.kind {
                MetricKind::Counter => {
                    metrics::describe_counter!(metric.name, unit, metric.meaning);
                }
                MetricKind::Gauge => metrics::describe_gauge!(metric.name, unit, metric.meaning),
                MetricKind::Histogram => {
                    metrics::describe_histogram!(metric.name, unit, metric.meaning);
                }
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn the_first_values_keep_their_names_and_the_others_share_one() {
            let bounded = Bounded::new(2);
            for _ in 0..2 {
                for (value, called) in [("a", "a"), ("b", "b"), ("c", OTHER), ("a", "a")] {
                    assert_eq!(bounded.label(value), SharedString::from(called));
                }
            }
        }
    }
}

pub(crate) use recording::{count, observe};
#[cfg(feature = "metrics")]
pub(crate) use recording::{describe, gauge, label};
