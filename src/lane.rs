//! Lanes: the fixed number of queues inside an outbox that let many relays share the work and keep order per key.

use md5::{Digest, Md5};

use crate::message::Message;

/// Number of a lane, from 0.
pub type Lane = i32;

/// How many lanes an outbox has. Part of the schema: changing it is a migration.
pub const LANES: Lane = 16;

/// The lane of a key: the first two bytes of its MD5, big-endian, modulo the number of lanes.
///
/// In PostgreSQL: `('x' || substr(md5(key), 1, 4))::bit(16)::int % 16`.
/// MD5 because every database and language has it; nothing here is a secret.
#[must_use]
pub fn lane_of(key: &[u8]) -> Lane {
    let digest = Md5::digest(key);
    Lane::from(u16::from_be_bytes([digest[0], digest[1]])) % LANES
}

/// The lane of a message: its key's, or its id's where it has none, so that messages without a key are spread.
#[must_use]
pub fn lane_of_message(message: &Message) -> Lane {
    let id = message.id.as_str().as_bytes();
    lane_of(message.key.as_deref().unwrap_or(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fixed for ever: rows written by an older version, another language or a trigger must land in the same lane.
    #[test]
    fn lanes_of_known_keys_never_change() {
        let known: [(&[u8], Lane); 5] = [
            (b"", 0xd41d % 16),
            (b"a", 0x0cc1 % 16),
            (b"order-17", 0x0093 % 16),
            (b"Codertocat/Hello-World", 0xfa85 % 16),
            ("ключ-🚀".as_bytes(), 0xfb49 % 16),
        ];
        for (key, lane) in known {
            assert_eq!(lane_of(key), lane, "{key:?}");
        }
    }
}
