//! What relaybox tells about itself: spans, metrics, readiness; on SQLite and the broker in memory.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

#[path = "../flow/support.rs"]
#[allow(dead_code, reason = "shared with the flows")]
mod support;

mod consuming;
mod gated;
mod measuring;
mod readiness;
mod spans;

use support::House;

/// A house whose spans are exported.
async fn house() -> House {
    spans::Exporter::of_process();
    House::new().await
}
