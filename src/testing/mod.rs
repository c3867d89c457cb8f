//! Tools for your own tests: a clock moved by hand, publishers that fail on command, and waiting without sleeping.
//!
//! Nothing here belongs into production. Where a helper panics its documentation says so.
//!
#![cfg_attr(feature = "memory", doc = "```")]
#![cfg_attr(not(feature = "memory"), doc = "```ignore")]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> relaybox::Result<()> {
//! use relaybox::Message;
//! use relaybox::broker::Publisher;
//! use relaybox::broker::memory::MemoryBroker;
//! use relaybox::testing::{Fault, FaultyPublisher};
//!
//! let broker = MemoryBroker::new();
//! broker.create_topic("orders", 1)?;
//! let publisher = FaultyPublisher::new(broker.clone()).with_fault(1, Fault::LoseConfirm);
//!
//! let message = Message::new("orders", "OrderPlaced");
//! let outcomes = publisher.publish(&[message.into()]).await;
//! assert!(!outcomes[0].is_confirmed());
//! assert_eq!(broker.log("orders").len(), 1, "stored all the same");
//! # Ok(())
//! # }
//! ```

mod clock;
mod faults;
mod signal;

use std::future::Future;
use std::time::{Duration, Instant};

pub use clock::ManualClock;
pub use faults::{Callback, Fault, FaultyPublisher};
pub use signal::Signal;

/// Asks `condition` every few milliseconds until it is true.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use std::time::Duration;
///
/// let mut left = 3;
/// relaybox::testing::eventually(Duration::from_secs(5), "the countdown ends", || {
///     left -= 1;
///     async move { left == 0 }
/// })
/// .await;
/// # }
/// ```
///
/// # Panics
/// Once `deadline` has passed on the machine's clock, naming `awaited`. The condition is asked at least once; one that
/// never answers is cut off at the deadline.
#[allow(clippy::panic, reason = "a test that waits in vain has to fail")]
pub async fn eventually<F, Answer>(deadline: Duration, awaited: &str, mut condition: F)
where
    F: FnMut() -> Answer,
    Answer: Future<Output = bool>,
{
    let started = Instant::now();
    loop {
        let left = deadline.saturating_sub(started.elapsed());
        if let Ok(true) = tokio::time::timeout(left, condition()).await {
            return;
        }
        if started.elapsed() >= deadline {
            panic!("waited {deadline:?} in vain until {awaited}");
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
