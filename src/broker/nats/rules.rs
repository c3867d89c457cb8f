//! The bounds of the settings, and what follows from them.

use std::time::Duration;

use async_nats::ServerAddr;

use super::config::{KnownStream, NatsConfig};
use super::names::{self, STREAM_RULE};
use crate::error::{Error, Result, within};

impl NatsConfig {
    /// Checks every setting.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) naming the first setting that breaks a bound, the bound and
    /// the value.
    pub fn check(&self) -> Result<()> {
        if self.servers.is_empty() {
            return Err(Error::configuration("servers", "at least one", "none"));
        }
        for address in self.addresses()? {
            // The client would leave them out without a word.
            if address.username().is_some() || address.password().is_some() {
                let limit =
                    "addresses without user, password or token, which have settings of their own";
                let shown = format!("{}:{}", address.host(), address.port());
                return Err(Error::configuration("servers", limit, shown));
            }
        }
        if self.name.is_empty() {
            return Err(Error::configuration("name", "not empty", ""));
        }
        let milli = Duration::from_millis(1);
        let second = Duration::from_secs(1);
        let minute = Duration::from_secs(60);
        let day = 1_440 * minute;
        for (field, value, least, most) in [
            ("ping_interval", self.ping_interval, second, 10 * minute),
            (
                "publish_deadline",
                self.publish_deadline,
                second,
                10 * minute,
            ),
            ("answer_deadline", self.answer_deadline, 100 * milli, minute),
            ("ack_wait", self.ack_wait, 500 * milli, day),
            ("heartbeat", self.heartbeat, 500 * milli, 30 * second),
            (
                "resend_horizon",
                self.resend_horizon,
                Duration::ZERO,
                30 * day,
            ),
        ] {
            if !(least..=most).contains(&value) {
                let limit = format!("{least:?} to {most:?}");
                return Err(Error::configuration(field, limit, format!("{value:?}")));
            }
        }
        if let Some(kept) = self.dead_letter_retention.filter(|kept| *kept < second) {
            let field = "dead_letter_retention";
            return Err(Error::configuration(
                field,
                "at least 1s",
                format!("{kept:?}"),
            ));
        }
        within("in_flight_max", self.in_flight_max, 1, 65_536)?;
        within("ack_pending_max", self.ack_pending_max, 1, 1_000_000)?;
        // A stream in files refuses a record of 32 MiB and says only that it could not store it.
        let largest = 31_000_000;
        within(
            "limits.message_bytes_max",
            self.limits.message_bytes_max,
            1_000,
            largest,
        )?;
        for stream in &self.streams {
            stream_name("streams", &stream.name)?;
            patterns("streams", &stream.subjects)?;
        }
        patterns("core_subjects", &self.core_subjects)?;
        for alias in &self.aliases {
            stream_name("sources", &alias.stream)?;
            patterns("sources", &alias.filters)?;
        }
        Ok(())
    }

    pub(super) fn addresses(&self) -> Result<Vec<ServerAddr>> {
        self.servers
            .iter()
            .map(|server| {
                server.parse().map_err(|_| {
                    // Without the text: it may hold a password.
                    Error::configuration("servers", "nats://host:port", "another form")
                })
            })
            .collect()
    }

    /// What is tried, for errors: hosts and ports only, because an address may hold a password.
    pub(super) fn tried(&self) -> String {
        let shown: Vec<String> = self
            .addresses()
            .unwrap_or_default()
            .iter()
            .map(|address| format!("{}:{}", address.host(), address.port()))
            .collect();
        shown.join(", ")
    }

    /// The configured stream that holds this subject.
    pub(super) fn stream_for(&self, subject: &str) -> Option<&str> {
        let holds = |stream: &&KnownStream| {
            let mut subjects = stream.subjects.iter();
            subjects.any(|pattern| names::matches(pattern, subject))
        };
        self.streams
            .iter()
            .find(holds)
            .map(|stream| stream.name.as_str())
    }

    /// Whether this subject is sent as a plain NATS message.
    pub(super) fn is_core(&self, subject: &str) -> bool {
        let mut patterns = self.core_subjects.iter();
        patterns.any(|pattern| names::matches(pattern, subject))
    }
}

fn stream_name(field: &'static str, name: &str) -> Result<()> {
    if names::is_stream_name(name) {
        return Ok(());
    }
    Err(Error::configuration(field, STREAM_RULE, name))
}

fn patterns(field: &'static str, patterns: &[String]) -> Result<()> {
    match patterns.iter().find(|pattern| !names::is_pattern(pattern)) {
        Some(bad) => Err(Error::configuration(field, "subjects or patterns", bad)),
        None => Ok(()),
    }
}
#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Limits;

    const SECOND: Duration = Duration::from_secs(1);

    fn config() -> NatsConfig {
        NatsConfig::new("nats://127.0.0.1:4222")
    }

    fn refused(config: &NatsConfig) -> Option<&'static str> {
        let error = config.check().err()?;
        error.violation().map(|violation| violation.field)
    }

    #[test]
    fn defaults_pass_and_every_bound_is_named() {
        assert!(config().check().is_ok());
        let too_large = Limits {
            message_bytes_max: 31_000_001,
            ..Limits::default()
        };
        for (config, field) in [
            (NatsConfig::new("not an address"), "servers"),
            (NatsConfig::new("nats://u:p@127.0.0.1"), "servers"),
            (config().with_name(""), "name"),
            (config().with_ping_interval(Duration::ZERO), "ping_interval"),
            (
                config().with_publish_deadline(Duration::ZERO),
                "publish_deadline",
            ),
            (config().with_in_flight_max(0), "in_flight_max"),
            (config().with_limits(too_large), "limits.message_bytes_max"),
            (
                config().with_answer_deadline(61 * SECOND),
                "answer_deadline",
            ),
            (config().with_ack_wait(Duration::ZERO), "ack_wait"),
            (config().with_ack_pending_max(0), "ack_pending_max"),
            (config().with_heartbeat(31 * SECOND), "heartbeat"),
            (
                config().with_dead_letter_retention(Duration::ZERO),
                "dead_letter_retention",
            ),
            (config().with_stream("a.b", ["x"]), "streams"),
            (config().with_stream("a", ["x y"]), "streams"),
            (config().with_core_subject("x.>.y"), "core_subjects"),
            (config().with_source("s", "a b", ["x"]), "sources"),
        ] {
            assert_eq!(refused(&config), Some(field));
        }
    }

    #[test]
    fn neither_debug_nor_an_error_shows_a_secret() {
        let secret = "hunter2";
        let address = format!("nats://user:{secret}@127.0.0.1:4222");
        let configs = [
            NatsConfig::new(&address),
            config().with_token(secret),
            config().with_user("u", secret),
            config().with_nkey_seed(secret),
            config().with_credentials(secret),
        ];
        for config in configs {
            assert!(!format!("{config:?}").contains(secret));
            assert!(!config.tried().contains(secret));
            let shown = config.check().err().map(|error| error.to_string());
            assert!(!shown.unwrap_or_default().contains(secret));
        }
        let broken = NatsConfig::new(format!("nats://user:{secret}@:::")).check();
        let text = broken.map_err(|error| error.to_string());
        assert!(text.is_err_and(|text| !text.contains(secret)));
    }

    #[test]
    fn a_subject_belongs_to_the_first_stream_that_holds_it() {
        let config = config()
            .with_stream("ORDERS", ["orders.>"])
            .with_stream("ALL", [">"])
            .with_core_subject("metrics.>");
        assert_eq!(config.stream_for("orders.placed"), Some("ORDERS"));
        assert_eq!(config.stream_for("other"), Some("ALL"));
        assert!(config.is_core("metrics.cpu") && !config.is_core("orders.placed"));
    }
}
