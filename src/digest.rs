//! What makes a message itself, beside its id: senders repeat ids, and a second message must not pass for the first.

use md5::{Digest, Md5};

use crate::message::Message;

impl Message {
    /// A digest of event type, key and payload, each with its length in front and no key or payload told from an empty one.
    ///
    /// The same for ever, whatever way the message took: on rungs, among dead letters, in another version. Headers count
    /// for nothing, because what stands between a sender and a consumer may add some. Takes time by the size of the payload.
    #[must_use]
    pub fn digest(&self) -> [u8; 16] {
        let mut digest = Md5::new();
        let parts = [
            Some(self.event_type.as_bytes()),
            self.key.as_deref(),
            self.payload.as_deref(),
        ];
        for part in parts {
            match part {
                Some(bytes) => {
                    digest.update([1]);
                    digest.update((bytes.len() as u64).to_be_bytes());
                    digest.update(bytes);
                }
                None => digest.update([0]),
            }
        }
        digest.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn messages_that_differ_in_type_key_or_payload_differ_in_their_digest() {
        let bare = || Message::new("orders", "T");
        let all = [
            bare(),
            Message::new("orders", ""),
            bare().with_key(""),
            bare().with_payload(""),
            bare().with_key("").with_payload(""),
            bare().with_key("ab").with_payload("c"),
            bare().with_key("a").with_payload("bc"),
            bare().with_key("abc"),
            bare().with_payload("abc"),
        ];
        let digests: BTreeSet<_> = all.iter().map(Message::digest).collect();
        assert_eq!(digests.len(), all.len());
    }

    /// Rows and copies of an older version are compared with those of this one.
    #[test]
    fn the_digest_of_a_known_message_never_changes_and_headers_do_not_count() {
        let message = Message::new("orders", "OrderPlaced")
            .with_key("order-17")
            .with_payload("{}");
        let known = 0x15cc_6466_2521_e39e_c2f1_588d_a2e4_7d89;
        assert_eq!(u128::from_be_bytes(message.digest()), known);
        let elsewhere = Message::new("orders.billing.DLQ", "OrderPlaced")
            .with_key("order-17")
            .with_payload("{}")
            .with_header("via", "proxy");
        assert_eq!(elsewhere.digest(), message.digest());
    }
}
