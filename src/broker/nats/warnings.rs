//! What is not refused, and told once.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use async_nats::jetstream::stream::{self, DiscardPolicy, RetentionPolicy};

use super::config::NatsConfig;
use crate::broker::SubscriptionRequest;

/// Below this a hiccup of the network already looks like a dead member.
const ACK_WAIT_SOUND: Duration = Duration::from_secs(2);
/// Most warnings kept.
const WARNINGS_MAX: usize = 256;

/// What is not wrong and still likely to lose or repeat messages.
#[derive(Default)]
pub(super) struct Warnings(Mutex<BTreeSet<String>>);

impl Warnings {
    pub(super) fn all(&self) -> Vec<String> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().cloned().collect()
    }

    /// Each is told once.
    pub(super) fn add(&self, warning: String) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < WARNINGS_MAX && all.insert(warning.clone()) {
            tracing::warn!("{warning}");
        }
    }

    /// What its settings do to messages of ours.
    pub(super) fn about_stream(&self, config: &NatsConfig, info: &stream::Info) {
        let consumers = info.state.consumer_count;
        for warning in stream_warnings(&info.config, consumers, config.resend_horizon) {
            self.add(warning);
        }
    }
}

fn stream_warnings(settings: &stream::Config, consumers: usize, horizon: Duration) -> Vec<String> {
    let name = &settings.name;
    let mut warnings = Vec::new();
    let limits: Vec<&str> = [
        ("max_msgs", settings.max_messages > 0),
        ("max_bytes", settings.max_bytes > 0),
        (
            "max_msgs_per_subject",
            settings.max_messages_per_subject > 0,
        ),
    ]
    .into_iter()
    .filter_map(|(limit, set)| set.then_some(limit))
    .collect();
    if settings.discard == DiscardPolicy::Old && !limits.is_empty() {
        let limits = limits.join(", ");
        warnings.push(format!(
            "stream {name} drops its oldest messages unread once {limits} is reached (discard: old)"
        ));
    }
    if settings.retention == RetentionPolicy::Interest && consumers == 0 {
        warnings.push(format!(
            "stream {name} keeps only what a consumer asks for, and has none: it confirms messages and drops them"
        ));
    }
    if !settings.duplicate_window.is_zero() && settings.duplicate_window < horizon {
        warnings.push(format!(
            "stream {name} forgets ids after {:?}, before a relay stops sending again ({horizon:?}): it may store a \
             message twice",
            settings.duplicate_window
        ));
    }
    warnings
}

/// What a consumer's settings do to its messages.
pub(super) fn warn_of_settings(
    config: &NatsConfig,
    warnings: &Warnings,
    request: &SubscriptionRequest,
) {
    if config.ack_pending_max < request.in_flight_max {
        warnings.add(format!(
            "ack_pending_max ({}) is below in_flight_max ({}) of consumer {}",
            config.ack_pending_max, request.in_flight_max, request.consumer
        ));
    }
    if config.ack_wait < ACK_WAIT_SOUND {
        warnings.add(format!(
            "ack_wait ({:?}) is below {ACK_WAIT_SOUND:?}: a short hiccup delivers messages twice",
            config.ack_wait
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::super::streams::unlimited;
    use super::*;

    #[test]
    fn what_drops_or_repeats_messages_is_warned_about() {
        let horizon = Duration::from_secs(120);
        let mut settings = stream::Config {
            name: "S".into(),
            duplicate_window: horizon,
            ..unlimited()
        };
        assert!(stream_warnings(&settings, 1, horizon).is_empty());
        settings.max_messages = 10;
        assert!(
            stream_warnings(&settings, 1, horizon).is_empty(),
            "it refuses what is new"
        );
        settings.discard = DiscardPolicy::Old;
        settings.duplicate_window = Duration::from_secs(1);
        let warnings = stream_warnings(&settings, 1, horizon);
        assert_eq!(warnings.len(), 2);
        assert!(
            warnings.iter().any(|text| text.contains("max_msgs")),
            "{warnings:?}"
        );
        settings.retention = RetentionPolicy::Interest;
        assert_eq!(stream_warnings(&settings, 1, horizon).len(), 2);
        assert_eq!(stream_warnings(&settings, 0, horizon).len(), 3);
    }
}
