//! Tools for your own tests: a consumer whose time is moved by hand, an inbox without a database, brokers and databases
//! that fail on command, and waiting without sleeping.
//!
//! - [`TestConsumer`] runs your handler as it runs in production and tells what became of each message; rungs are waited on by
//!   a [`ManualClock`], so in no time. `examples/handler_test.rs` shows it.
//! - [`MemoryInbox`] is an inbox over a state of your own, for handlers that know no database.
//! - [`FaultyPublisher`] and [`FaultyInbox`] let planned calls go wrong.
//! - [`relay_all`] brings what your code enqueued to the broker.
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

mod broker;
mod clock;
mod consumer;
mod crash;
mod faults;
mod faulty_inbox;
mod inbox;
mod ledger;
mod signal;
mod watching;

use std::future::Future;
use std::time::{Duration, Instant};

use crate::broker::Publisher;
use crate::error::Result;
use crate::relay::Relay;
use crate::store::OutboxStore;

pub use broker::TestBroker;
pub use clock::ManualClock;
pub use consumer::TestConsumer;
pub use crash::CrashPoint;
pub use faults::{Callback, Fault, FaultyPublisher};
pub use faulty_inbox::{FaultyInbox, InboxCall, InboxFault};
pub use inbox::{MemoryInbox, MemoryTransaction};
pub use ledger::{Fate, Step};
pub use signal::Signal;

/// Longest wait of a helper, on the machine's clock. Only a test that fails waits so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a relay until the outbox is empty: what your code enqueued is at the publisher then, a
/// [`MemoryBroker`](crate::broker) or a [`TestBroker`] for example.
///
/// # Errors
/// What the relay refuses to start with, or the error of a store that cannot be asked.
///
/// # Panics
/// After a minute of real time: a message waits for its time, its destination, or an operator.
#[allow(clippy::panic, reason = "a test that waits in vain has to fail")]
pub async fn relay_all<S, P>(store: &S, publisher: P) -> Result<()>
where
    S: OutboxStore + Clone,
    P: Publisher,
{
    let mut asked = Ok(());
    let emptied = async {
        loop {
            match (store.pending(1).await, store.aside(1).await) {
                (Ok(0), Ok(0)) => return,
                (Ok(_), Ok(_)) => tokio::time::sleep(Duration::from_millis(5)).await,
                (Err(error), _) | (_, Err(error)) => {
                    asked = Err(error);
                    return;
                }
            }
        }
    };
    let relay = Relay::new(store.clone(), publisher).run_until(emptied);
    match tokio::time::timeout(PATIENCE, relay).await {
        Ok(ended) => ended.and(asked),
        Err(_) => panic!("waited {PATIENCE:?} in vain until the outbox is empty"),
    }
}

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
