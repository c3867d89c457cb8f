//! Names that RabbitMQ acts on: arguments of queues and consumers, and the headers it makes or obeys.

use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};

pub(super) const QUEUE_TYPE: &str = "x-queue-type";
pub(super) const TTL: &str = "x-message-ttl";
pub(super) const DEAD_LETTER_EXCHANGE: &str = "x-dead-letter-exchange";
pub(super) const DEAD_LETTER_ROUTING_KEY: &str = "x-dead-letter-routing-key";
pub(super) const DEAD_LETTER_STRATEGY: &str = "x-dead-letter-strategy";
pub(super) const OVERFLOW: &str = "x-overflow";
pub(super) const DELIVERY_LIMIT: &str = "x-delivery-limit";
pub(super) const SINGLE_ACTIVE_CONSUMER: &str = "x-single-active-consumer";

/// Headers that the broker writes. They tell of its own queues, differ between its versions, and one that is sent back
/// may be taken for a cycle; so they are neither read nor sent.
const MADE: [&str; 3] = ["x-death", "x-delivery-count", "x-acquired-count"];
const MADE_PREFIXES: [&str; 2] = ["x-first-death-", "x-last-death-"];
/// Headers that route or delay a message.
const OBEYED: [&str; 4] = ["cc", "bcc", "x-delay", "x-match"];

/// Whether the broker writes a header of this name.
pub(super) fn is_made(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    MADE.contains(&&*name) || MADE_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Whether the broker may act on a header of this name: such a user's header travels encoded.
pub(super) fn acts(name: &str) -> bool {
    is_made(name)
        || OBEYED
            .iter()
            .any(|obeyed| obeyed.eq_ignore_ascii_case(name))
}

/// A short string, unless it is longer than the protocol allows.
pub(super) fn short(text: &str) -> Option<ShortString> {
    ShortString::try_new(text).ok()
}

/// A table of constants and values.
pub(super) fn table<const N: usize>(entries: [(&str, AMQPValue); N]) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in entries {
        if let Some(name) = short(name) {
            table.insert(name, value);
        }
    }
    table
}

pub(super) fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(value.as_bytes()))
}
