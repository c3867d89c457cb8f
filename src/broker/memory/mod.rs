//! A broker inside the process: topics, partitions and consumer groups in memory, for tests, examples and small
//! programs that need no other.
//!
//! It behaves like a partitioned log (a key stays on one partition, a consumer's members share the partitions, a
//! rebalance takes deliveries away) and keeps every rule of the broker contracts. It forgets everything when its
//! last clone is dropped: nothing here is durable.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> relaybox::Result<()> {
//! use relaybox::Message;
//! use relaybox::broker::memory::MemoryBroker;
//! use relaybox::broker::{Publisher, Settlement, Subscriber, SubscriptionRequest};
//!
//! let broker = MemoryBroker::new();
//! broker.create_topic("orders", 3)?;
//! broker.publish(&[Message::new("orders", "OrderPlaced").into()]).await;
//!
//! let request = SubscriptionRequest::new("billing", vec!["orders".into()]);
//! let mut subscription = broker.subscribe(request).await?;
//! for delivery in subscription.receive(10).await? {
//!     delivery.receipt.settle(Settlement::Acknowledge).await?;
//! }
//! assert_eq!(broker.deliveries("billing"), 1);
//! # Ok(())
//! # }
//! ```

mod config;
mod error;
mod group;
mod log;
mod publisher;
mod subscriber;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

pub use config::MemoryConfig;

use super::Health;
use crate::envelope::Incoming;
use crate::error::{Error, Result};
use group::Group;
use log::Topic;

/// Most partitions of a topic.
pub const PARTITIONS_MAX: usize = 1_024;

/// Name of the product in capabilities and errors.
const NAME: &str = "memory";

/// The broker. A clone is another handle on the same topics and consumers.
///
/// Order is [`Prefix`](crate::broker::PublisherOrder::Prefix): once a message is not confirmed, later ones of its
/// topic and key in the same batch are [`Withheld`](crate::broker::PublishOutcome::Withheld).
///
/// Stored messages count against [`MemoryConfig::bytes_max`] and are never removed; beyond it a message is `Failed`
/// with kind [`Busy`](crate::ErrorKind::Busy).
#[derive(Clone)]
pub struct MemoryBroker {
    shared: Arc<Shared>,
}

impl MemoryBroker {
    /// A broker without topics, with the defaults of [`MemoryConfig`].
    #[must_use]
    pub fn new() -> Self {
        Self::start(MemoryConfig::default())
    }

    /// A broker without topics.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) naming the first setting out of its bounds.
    pub fn with_config(config: MemoryConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self::start(config))
    }

    fn start(config: MemoryConfig) -> Self {
        Self {
            shared: Arc::new(Shared {
                config,
                state: Mutex::new(State {
                    available: true,
                    ..State::default()
                }),
                changed: Notify::new(),
            }),
        }
    }

    /// Makes a topic of 1 to [`PARTITIONS_MAX`] partitions. Making it again with the same number changes nothing.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) when the name is not 1 to 249 bytes, the number is out of
    /// its bounds, or the topic exists with another number.
    pub fn create_topic(&self, name: impl Into<String>, partitions: usize) -> Result<()> {
        let name = name.into();
        if name.is_empty() || name.len() > 249 {
            return Err(Error::configuration("topic", "1 to 249 bytes", name));
        }
        if partitions == 0 || partitions > PARTITIONS_MAX {
            return Err(Error::configuration(
                "partitions",
                format!("1 to {PARTITIONS_MAX}"),
                partitions.to_string(),
            ));
        }
        let mut state = self.shared.lock();
        let topic = state
            .topics
            .entry(name)
            .or_insert_with(|| Topic::new(partitions));
        if topic.partitions() != partitions {
            return Err(Error::configuration(
                "partitions",
                format!("{} as the topic exists", topic.partitions()),
                partitions.to_string(),
            ));
        }
        Ok(())
    }

    /// Takes the broker down or brings it up again.
    ///
    /// While it is down a publish is `Failed` with scope `Broker` and not stored, `check` and `subscribe` fail with
    /// [`Unavailable`](crate::ErrorKind::Unavailable), `receive` waits, and a settlement fails: its message comes again.
    pub fn set_available(&self, available: bool) {
        self.shared.lock().available = available;
        self.shared.changed.notify_waiters();
    }

    /// Names of all topics, sorted.
    #[must_use]
    pub fn topics(&self) -> Vec<String> {
        self.shared.lock().topics.keys().cloned().collect()
    }

    /// Everything that was ever stored in the topic: partition after partition, each in order. Empty for an unknown one.
    #[must_use]
    pub fn log(&self, topic: &str) -> Vec<Incoming> {
        self.shared
            .lock()
            .topics
            .get(topic)
            .map(|stored| stored.read_all(topic))
            .unwrap_or_default()
    }

    /// How many deliveries were handed to the consumer's members so far, repeated ones included.
    #[must_use]
    pub fn deliveries(&self, consumer: &str) -> u64 {
        let state = self.shared.lock();
        state.groups.get(consumer).map_or(0, Group::deliveries)
    }

    /// The consumer's position in each partition of the topic: how many messages from the oldest on are acknowledged
    /// without a gap. Empty if it never subscribed to the topic.
    #[must_use]
    pub fn committed(&self, consumer: &str, topic: &str) -> Vec<u64> {
        let state = self.shared.lock();
        state
            .groups
            .get(consumer)
            .map(|group| group.committed(topic))
            .unwrap_or_default()
    }
}

impl Default for MemoryBroker {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryBroker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.lock();
        f.debug_struct("MemoryBroker")
            .field("available", &state.available)
            .field("topics", &state.topics.len())
            .field("bytes", &state.bytes)
            .finish_non_exhaustive()
    }
}

struct Shared {
    config: MemoryConfig,
    state: Mutex<State>,
    /// Told after every change that a waiting `receive` may have waited for.
    changed: Notify,
}

impl Shared {
    /// No code that holds the lock runs a caller's, so a poisoned lock guards a whole state all the same.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn health(&self) -> Health {
        if self.lock().available {
            Health::up()
        } else {
            Health::down("taken down by set_available(false)")
        }
    }
}

#[derive(Default)]
struct State {
    available: bool,
    /// Of all records together.
    bytes: usize,
    topics: BTreeMap<String, Topic>,
    groups: BTreeMap<String, Group>,
    /// The last number given to a member or to an assignment; numbers are never used twice.
    last_number: u64,
}

impl State {
    fn missing<'a>(&self, names: impl IntoIterator<Item = &'a String>) -> Vec<&'a str> {
        names
            .into_iter()
            .filter(|name| !self.topics.contains_key(*name))
            .map(String::as_str)
            .collect()
    }
}
