//! Settings of the memory broker.

use std::sync::Arc;

use crate::clock::{Clock, SystemClock};
use crate::error::{Error, Result};
use crate::message::Limits;

/// Headroom of a record beyond its message: envelope names and the 4 KiB of a story.
const STORY_BYTES: usize = 8 * 1_024;

/// Settings of a [`MemoryBroker`](super::MemoryBroker).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MemoryConfig {
    /// All stored records together, each with 128 bytes for itself (default 64 MiB; at least `record_bytes_max`).
    pub bytes_max: usize,
    /// Key, headers (envelope and story included) and payload of one record (default 1 MiB; at least 16 KiB).
    /// A larger message is rejected.
    pub record_bytes_max: usize,
    /// Where rungs and released messages read the time and wait (default [`SystemClock`]).
    pub clock: Arc<dyn Clock>,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            bytes_max: 64 * 1_024 * 1_024,
            record_bytes_max: 1_024 * 1_024,
            clock: Arc::new(SystemClock),
        }
    }
}

impl MemoryConfig {
    /// Sets the bound of all stored records together.
    #[must_use]
    pub const fn with_bytes_max(mut self, bytes_max: usize) -> Self {
        self.bytes_max = bytes_max;
        self
    }

    /// Sets the bound of one record.
    #[must_use]
    pub const fn with_record_bytes_max(mut self, record_bytes_max: usize) -> Self {
        self.record_bytes_max = record_bytes_max;
        self
    }

    /// Sets the clock.
    #[must_use]
    pub fn with_clock(mut self, clock: impl Clock) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    pub(super) fn validate(&self) -> Result<()> {
        let least = |field, value: usize, bytes_min: usize| {
            if value < bytes_min {
                let limit = format!("at least {bytes_min}");
                return Err(Error::configuration(field, limit, value.to_string()));
            }
            Ok(())
        };
        least("record_bytes_max", self.record_bytes_max, 16 * 1_024)?;
        least("bytes_max", self.bytes_max, self.record_bytes_max)
    }

    /// What a message may be so that its copy on a rung or as a dead letter fits as well.
    pub(super) fn limits(&self) -> Limits {
        let mut limits = Limits::default();
        limits.message_bytes_max = limits
            .message_bytes_max
            .min(self.record_bytes_max.saturating_sub(STORY_BYTES));
        limits.headers_bytes_max = limits.headers_bytes_max.min(limits.message_bytes_max);
        limits
    }
}
