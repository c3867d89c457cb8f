//! What every measured run is held against: nothing lost, nothing twice, keys in order.

use std::collections::HashMap;
use std::sync::Mutex;

use tokio::sync::Notify;

/// Sees each message as it goes out, by key and number.
pub struct Checked {
    total: u32,
    seen: Mutex<Seen>,
    pub done: Notify,
}

#[derive(Default)]
struct Seen {
    count: u32,
    last: HashMap<Vec<u8>, i64>,
}

impl Checked {
    pub fn new(total: u32) -> Self {
        Self {
            total,
            seen: Mutex::default(),
            done: Notify::new(),
        }
    }

    /// Numbers grow per key: one that does not is a repeat or out of order.
    pub fn see<'a>(&self, messages: impl Iterator<Item = (&'a [u8], i64)>) {
        let mut seen = self.seen.lock().unwrap();
        for (key, number) in messages {
            seen.count += 1;
            match seen.last.get_mut(key) {
                Some(last) => {
                    assert!(
                        number > *last,
                        "repeated or out of order: {number} after {last}"
                    );
                    *last = number;
                }
                None => {
                    seen.last.insert(key.to_vec(), number);
                }
            }
        }
        assert!(seen.count <= self.total);
        if seen.count == self.total {
            self.done.notify_one();
        }
    }

    pub fn count(&self) -> u32 {
        self.seen.lock().unwrap().count
    }

    pub fn is_complete(&self) -> bool {
        self.count() == self.total
    }
}
