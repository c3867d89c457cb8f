//! Where messages go: destinations as exchange and routing key, and queues that are split into shards.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use crate::error::{Error, Result};
use crate::lane::{LANES, lane_of_message};
use crate::message::Message;

/// The rule for destinations, in words.
const RULE: &str = "a queue, or exchange/routing key, each of at most 255 bytes without NUL";
/// The rule for queues, in words.
const QUEUE_RULE: &str = "a queue of 1 to 255 bytes without NUL";
const NAME_BYTES_MAX: usize = 255;

/// A destination, read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place<'a> {
    /// Empty for the default exchange, which routes by the queue's name.
    pub(super) exchange: &'a str,
    pub(super) routing_key: &'a str,
}

impl<'a> Place<'a> {
    /// Splits at the first `/`; without one it is a queue.
    ///
    /// # Errors
    /// [`Invalid`](crate::ErrorKind::Invalid) for what the protocol cannot carry.
    pub(super) fn read(destination: &'a str) -> Result<Self> {
        let (exchange, routing_key) = destination.split_once('/').unwrap_or(("", destination));
        let fits = |name: &str| name.len() <= NAME_BYTES_MAX && !name.contains('\0');
        if (exchange.is_empty() && routing_key.is_empty()) || !fits(exchange) || !fits(routing_key)
        {
            return Err(Error::invalid("destination", RULE, destination));
        }
        Ok(Self {
            exchange,
            routing_key,
        })
    }

    /// The destination that reads as this place.
    pub(super) fn name(&self) -> String {
        let Self {
            exchange,
            routing_key,
        } = self;
        if exchange.is_empty() && !routing_key.contains('/') {
            return (*routing_key).to_owned();
        }
        format!("{exchange}/{routing_key}")
    }
}

/// What orders together: the exchange, or the queue where there is none.
pub(super) fn scope(destination: &str) -> &str {
    match destination.split_once('/') {
        Some((exchange, _)) if !exchange.is_empty() => exchange,
        _ => destination,
    }
}

/// The queue of a source, rung or dead letter destination.
///
/// # Errors
/// [`Configuration`](crate::ErrorKind::Configuration) for one that goes through an exchange.
pub(super) fn queue(name: &str) -> Result<&str> {
    match Place::read(name) {
        Ok(Place {
            exchange: "",
            routing_key,
        }) => Ok(routing_key),
        _ => Err(Error::configuration("queue", QUEUE_RULE, name)),
    }
}

/// Names that stand for several queues, and how many each.
#[derive(Debug, Default)]
pub(super) struct Shards(RwLock<BTreeMap<String, u16>>);

impl Shards {
    pub(super) fn new(configured: &BTreeMap<String, u16>) -> Self {
        Self(RwLock::new(configured.clone()))
    }

    /// How many queues the name stands for; `None` for an ordinary one.
    pub(super) fn of(&self, name: &str) -> Option<u16> {
        let shards = self.0.read().unwrap_or_else(PoisonError::into_inner);
        shards.get(name).copied()
    }

    /// Splits a rung as its source is.
    pub(super) fn like(&self, name: &str, source: &str) {
        if let Some(count) = self.of(source) {
            let mut shards = self.0.write().unwrap_or_else(PoisonError::into_inner);
            shards.insert(name.to_owned(), count);
        }
    }

    /// The queues of a name, in the order of their lanes.
    pub(super) fn queues(&self, name: &str) -> Result<Vec<String>> {
        let queue = queue(name)?;
        Ok(match self.of(name) {
            Some(count) => (0..count).map(|shard| shard_name(queue, shard)).collect(),
            None => vec![queue.to_owned()],
        })
    }

    /// The queue of a message in a name that stands for several.
    pub(super) fn queue_of(&self, message: &Message) -> Option<String> {
        let count = self.of(&message.destination)?.max(1);
        let lane = lane_of_message(message).rem_euclid(LANES);
        let shard = u16::try_from(lane).unwrap_or(0) % count;
        let queue = message.destination.strip_prefix('/');
        Some(shard_name(queue.unwrap_or(&message.destination), shard))
    }
}

fn shard_name(queue: &str, shard: u16) -> String {
    format!("{queue}.{shard}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_is_a_queue_or_exchange_and_routing_key() {
        let read = |name| Place::read(name).map(|place| (place.exchange, place.routing_key));
        assert_eq!(read("orders"), Ok(("", "orders")));
        assert_eq!(read("events/order.placed"), Ok(("events", "order.placed")));
        assert_eq!(read("events/"), Ok(("events", "")));
        assert_eq!(read("events/a/b"), Ok(("events", "a/b")));
        assert_eq!(read("/a/b"), Ok(("", "a/b")));
        let long = "x".repeat(256);
        for bad in [
            "",
            "/",
            "a\0",
            &long,
            &format!("{long}/a"),
            &format!("a/{long}"),
        ] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
        for name in [
            "orders",
            "events/order.placed",
            "events/",
            "events/a/b",
            "/a/b",
        ] {
            assert_eq!(Place::read(name).unwrap().name(), name);
        }
    }

    #[test]
    fn a_scope_is_the_exchange_or_the_queue() {
        assert_eq!(scope("orders"), "orders");
        assert_eq!(scope("events/a"), scope("events/b"));
        assert_eq!(scope("/a/b"), "/a/b");
    }

    #[test]
    fn a_key_stays_in_its_shard_and_rungs_follow_their_source() {
        let shards = Shards::new(&BTreeMap::from([("orders".to_owned(), 3)]));
        shards.like("orders.retry", "orders");
        assert_eq!(
            shards.queues("orders").unwrap(),
            ["orders.0", "orders.1", "orders.2"]
        );
        assert_eq!(shards.queues("other").unwrap(), ["other"]);
        let of = |destination: &str, key: &str| {
            shards.queue_of(&Message::new(destination, "T").with_key(key))
        };
        // 0x0093 % 16 = 3, and 3 % 3 = 0: fixed for ever, as a key's lane is.
        assert_eq!(of("orders", "order-17").as_deref(), Some("orders.0"));
        assert_eq!(
            of("orders.retry", "order-17").as_deref(),
            Some("orders.retry.0")
        );
        assert_eq!(of("other", "order-17"), None);
    }
}
