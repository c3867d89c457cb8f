//! What the client tells about itself: log lines and the state of its connections.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdkafka::ClientContext;
use rdkafka::Statistics;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::ConsumerContext;
use rdkafka::error::KafkaError;

use super::error::{Trouble, trouble};

/// Callbacks of every client of this adapter.
#[derive(Debug, Clone, Default)]
pub(super) struct Context {
    trouble: Arc<Mutex<Option<Trouble>>>,
}

impl Context {
    fn current(&self) -> MutexGuard<'_, Option<Trouble>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why no broker serves the client, if so.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        *self.current()
    }

    pub(super) fn succeeded(&self) {
        *self.current() = None;
    }

    /// Takes note of an error that concerns no single request.
    pub(super) fn note(&self, error: &KafkaError) {
        if let Some(found) = error.rdkafka_error_code().and_then(trouble) {
            self.found(found);
        }
    }

    /// A cause that was told stays: what follows from it is only that no broker can be reached.
    fn found(&self, found: Trouble) {
        let mut current = self.current();
        if found != Trouble::Unreachable || current.is_none() {
            *current = Some(found);
        }
    }

    /// Looks at the states of all connections. The client keeps one up while it can, so none means trouble.
    fn look(&self, states: impl Iterator<Item = impl AsRef<str>>) {
        let mut trying = false;
        for state in states {
            match state.as_ref() {
                "UP" | "REAUTH" => return self.succeeded(),
                // Not wanted, so it says nothing.
                "INIT" => {}
                _ => trying = true,
            }
        }
        if trying {
            self.found(Trouble::Unreachable);
        }
    }
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        match level {
            RDKafkaLogLevel::Emerg
            | RDKafkaLogLevel::Alert
            | RDKafkaLogLevel::Critical
            | RDKafkaLogLevel::Error => tracing::warn!(target: "librdkafka", facility, message),
            RDKafkaLogLevel::Warning | RDKafkaLogLevel::Notice => {
                tracing::info!(target: "librdkafka", facility, message);
            }
            RDKafkaLogLevel::Info | RDKafkaLogLevel::Debug => {
                tracing::debug!(target: "librdkafka", facility, message);
            }
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.note(&error);
        tracing::debug!(target: "librdkafka", %error, reason);
    }

    fn stats(&self, statistics: Statistics) {
        let brokers = statistics.brokers.into_values();
        self.look(brokers.filter(|b| b.source != "internal").map(|b| b.state));
    }
}

/// For clients that only read; what a member does stands in [`Member`](super::member::Member).
impl ConsumerContext for Context {}

#[cfg(test)]
mod tests {
    use rdkafka::error::RDKafkaErrorCode as Code;

    use super::*;

    #[test]
    fn trouble_is_what_was_told_until_a_connection_is_up() {
        let context = Context::default();
        assert_eq!(context.trouble(), None);
        context.look(["INIT", "INIT"].iter());
        assert_eq!(context.trouble(), None);
        context.look(["INIT", "TRY_CONNECT"].iter());
        assert_eq!(context.trouble(), Some(Trouble::Unreachable));
        context.note(&KafkaError::Global(Code::Authentication));
        context.note(&KafkaError::Global(Code::AllBrokersDown));
        context.look(["DOWN"].iter());
        assert_eq!(context.trouble(), Some(Trouble::Authentication));
        context.note(&KafkaError::Global(Code::UnknownTopic));
        context.look(["INIT"].iter());
        assert_eq!(context.trouble(), Some(Trouble::Authentication));
        context.look(["TRY_CONNECT", "UP"].iter());
        assert_eq!(context.trouble(), None);
    }
}
