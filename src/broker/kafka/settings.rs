//! What the settings of topics must be, so that nothing is lost in them before its time.

use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::admin::{AdminOptions, OwnedResourceSpecifier};
use tokio::time::timeout;

use super::config::ENVELOPE_BYTES_MAX;
use super::control::Control;
use crate::error::{Error, Result};

/// Kafka's own default of `max.message.bytes`.
const TOPIC_BYTES_DEFAULT: u64 = 1_048_588;
/// What a rung keeps beyond its delay at least: a consumer may be away for so long.
const RUNG_SLACK: Duration = Duration::from_secs(86_400);

/// One topic's settings by name.
#[derive(Debug, Default)]
pub(super) struct Settings(BTreeMap<String, String>);

impl Settings {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    fn number(&self, key: &str) -> Option<i64> {
        self.get(key)?.parse().ok()
    }

    /// The largest record batch.
    pub(super) fn batch_bytes_max(&self) -> Option<u64> {
        self.get("max.message.bytes")?.parse().ok()
    }

    /// Refuses a rung (with its delay) or a topic of dead letters in which messages would be lost before their time,
    /// or into which they would not fit.
    pub(super) fn suit(
        &self,
        name: &str,
        delay: Option<Duration>,
        source_bytes_max: u64,
    ) -> Result<()> {
        let refused = |key: &'static str, limit: String| {
            let value = self.get(key).unwrap_or_default();
            let limit = format!("{limit} on {name}");
            Err(Error::configuration(key, limit, value))
        };
        if self
            .get("cleanup.policy")
            .is_some_and(|policy| policy != "delete")
        {
            return refused("cleanup.policy", "delete".into());
        }
        if let Some(delay) = delay {
            let least = i64::try_from(delay.saturating_add(RUNG_SLACK).as_millis());
            let least = least.unwrap_or(i64::MAX);
            if self
                .number("retention.ms")
                .is_some_and(|kept| (0..least).contains(&kept))
            {
                let limit = format!("-1 or at least {least} (the delay and a day)");
                return refused("retention.ms", limit);
            }
            if self.number("retention.bytes").is_some_and(|kept| kept >= 0) {
                return refused("retention.bytes", "-1".into());
            }
        }
        if self
            .batch_bytes_max()
            .is_some_and(|bytes| bytes < source_bytes_max)
        {
            let limit = format!("at least the source's {source_bytes_max}");
            return refused("max.message.bytes", limit);
        }
        Ok(())
    }

    /// What the topic takes, where that is less than the largest message there may be with its envelope.
    fn too_small(&self, message_bytes_max: usize) -> Option<u64> {
        let bytes_max = message_bytes_max.saturating_add(ENVELOPE_BYTES_MAX) as u64;
        self.batch_bytes_max().filter(|bytes| *bytes < bytes_max)
    }
}

/// Says of each topic if it takes less than the largest message that is let into an outbox. That is no error: what is
/// too large is refused alone, and a topic for copies need only take what its sources take.
pub(super) async fn compare(control: &Control, names: &[String], message_bytes_max: usize) {
    for (name, settings) in read(control, names).await {
        if let Some(bytes) = settings.too_small(message_bytes_max) {
            tracing::warn!(
                topic = name,
                "max.message.bytes = {bytes} is less than limits.message_bytes_max = \
                 {message_bytes_max} and {ENVELOPE_BYTES_MAX} for the envelope"
            );
        }
    }
}

/// The largest record batch of any of the topics; Kafka's default where it may not be read.
pub(super) fn largest_batch<'a>(topics: impl Iterator<Item = &'a Settings>) -> u64 {
    topics
        .filter_map(Settings::batch_bytes_max)
        .max()
        .unwrap_or(TOPIC_BYTES_DEFAULT)
}

/// The settings of each topic, without those that may not be read, which is no reason not to go on.
pub(super) async fn read(control: &Control, names: &[String]) -> BTreeMap<String, Settings> {
    let mut found = BTreeMap::new();
    let admin = match control.admin() {
        Ok(admin) => admin,
        Err(error) => {
            tracing::warn!(%error, "topic settings could not be read");
            return found;
        }
    };
    let options = AdminOptions::new().request_timeout(Some(control.deadline));
    let asked = admin.describe_topics(names, &options);
    let answer = match timeout(control.deadline, asked).await {
        Ok(Ok(answer)) => answer,
        failed => {
            tracing::warn!(topics = ?names, ?failed, "topic settings could not be read");
            return found;
        }
    };
    for result in answer {
        match result {
            Ok(resource) => {
                let OwnedResourceSpecifier::Topic(name) = resource.specifier else {
                    continue;
                };
                let entries = resource.entries.into_iter();
                let settings = entries.filter_map(|entry| Some((entry.name, entry.value?)));
                found.insert(name, Settings(settings.collect()));
            }
            Err(code) => tracing::warn!(%code, "the settings of a topic could not be read"),
        }
    }
    found
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn settings(entries: &[(&str, &str)]) -> Settings {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        Settings(entries.iter().map(owned).collect())
    }

    fn refused(result: Result<()>) -> Option<(&'static str, String)> {
        let error = result.err()?;
        let violation = error.violation().unwrap();
        assert!(violation.limit.contains("here"), "{error}");
        Some((violation.field, violation.value.clone()))
    }

    #[test]
    fn what_would_lose_a_message_before_its_time_is_refused_with_both_values() {
        let minute = Duration::from_secs(60);
        for (key, bad, good) in [
            ("cleanup.policy", "compact", "delete"),
            ("cleanup.policy", "compact,delete", "delete"),
            ("retention.ms", "60000", "-1"),
            ("retention.ms", "86459999", "86460000"),
            ("retention.bytes", "1000000", "-1"),
            ("max.message.bytes", "999", "1000"),
        ] {
            let found = refused(settings(&[(key, bad)]).suit("here", Some(minute), 1_000));
            assert_eq!(found, Some((key, bad.to_owned())));
            let suits = settings(&[(key, good)]).suit("here", Some(minute), 1_000);
            assert_eq!(refused(suits), None);
        }
        assert_eq!(refused(Settings::default().suit("here", None, 1)), None);
    }

    #[test]
    fn how_long_dead_letters_are_kept_is_for_their_owner_to_say() {
        let short = settings(&[("retention.ms", "1000"), ("retention.bytes", "1000")]);
        assert_eq!(refused(short.suit("here", None, 1)), None);
        let compacted = settings(&[("cleanup.policy", "compact")]).suit("here", None, 1);
        assert!(refused(compacted).is_some());
    }

    #[test]
    fn a_topic_must_take_the_largest_message_with_its_envelope() {
        let topic = settings(&[("max.message.bytes", "165536")]);
        assert_eq!(topic.too_small(100_000), None);
        assert_eq!(topic.too_small(100_001), Some(165_536));
        assert_eq!(topic.too_small(usize::MAX), Some(165_536));
        assert_eq!(Settings::default().too_small(usize::MAX), None);
    }
}
