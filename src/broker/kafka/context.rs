//! What the client tells about itself: log lines and the state of its connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdkafka::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;

use super::error::is_connection_loss;

/// Callbacks of every client of this adapter.
#[derive(Debug, Clone, Default)]
pub(super) struct Context {
    down: Arc<AtomicBool>,
}

impl Context {
    /// Whether the client lost every broker, or none lets it in, and nothing succeeded since.
    pub(super) fn is_down(&self) -> bool {
        self.down.load(Ordering::Relaxed)
    }

    pub(super) fn succeeded(&self) {
        self.down.store(false, Ordering::Relaxed);
    }

    /// Takes note of an error that concerns no single request.
    pub(super) fn note(&self, error: &KafkaError) {
        if error.rdkafka_error_code().is_some_and(is_connection_loss) {
            self.down.store(true, Ordering::Relaxed);
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
}
