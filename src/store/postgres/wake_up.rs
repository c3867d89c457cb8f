//! When an enqueue also notifies: at most now and then, and never on the word of memory alone.
//!
//! Commits that notify wait for each other in the server, so most enqueues should not. See decision 0007.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use md5::{Digest, Md5};

use crate::store::Prefix;

/// The longest name of a channel; a longer one is an error that aborts the writer's transaction.
const CHANNEL_BYTES_MAX: usize = 63;

/// What stays of a prefix in front of its hash.
const SHORTENED: usize = CHANNEL_BYTES_MAX - 33;

/// The channel of the tables with this prefix: `{prefix}wake_up`, or of a very long one its beginning and its MD5.
pub(super) fn channel(prefix: &Prefix) -> String {
    let prefix = prefix.as_str();
    let name = format!("{prefix}wake_up");
    if name.len() <= CHANNEL_BYTES_MAX {
        return name;
    }
    let begin: String = prefix.chars().take(SHORTENED).collect();
    let hash: String = Md5::digest(prefix)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("{begin}_{hash}")
}

/// Transactions remembered in one window; where so many were rolled back, all that follow notify.
const EARLIER_MAX: usize = 16;

/// Enqueues that notify side by side in one window, none of them committed yet. Two, because one alone may be rolled back
/// or stay open for long, and what relied on it would wait for a poll.
pub(super) const OPEN_MAX: usize = 2;

/// A span of time that begins with an enqueue, and in which few others need to notify.
///
/// They need not where one has notified whose transaction has committed, or some whose transactions are still open. Only
/// the database knows: it is asked in the INSERT itself. So what was rolled back, forgotten or dropped half-way costs a
/// notification too many.
#[derive(Debug, Default)]
pub(super) struct Window(Mutex<Option<Turn>>);

/// What an enqueue knows of its window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Turn {
    begun: Instant,
    /// Transactions that notified in this window.
    pub(super) earlier: Vec<String>,
}

impl Window {
    pub(super) fn enter(&self, now: Instant, pause: Duration) -> Turn {
        let mut window = self.turn();
        match &*window {
            Some(turn) if now.saturating_duration_since(turn.begun) < pause => turn.clone(),
            _ => window
                .insert(Turn {
                    begun: now,
                    earlier: Vec::new(),
                })
                .clone(),
        }
    }

    /// The enqueue of this turn notified, in transaction `xid`.
    pub(super) fn notified(&self, turn: &Turn, xid: String) {
        if let Some(window) = &mut *self.turn()
            && window.begun == turn.begun
            && window.earlier.len() < EARLIER_MAX
            && !window.earlier.contains(&xid)
        {
            window.earlier.push(xid);
        }
    }

    fn turn(&self) -> MutexGuard<'_, Option<Turn>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_millis(10);

    #[test]
    fn a_channel_is_named_after_its_prefix_and_never_too_long() {
        let named = |prefix: &str| channel(&Prefix::new(prefix).unwrap());
        assert_eq!(channel(&Prefix::default()), "relaybox_wake_up");
        assert_eq!(named("messaging.relaybox_"), "messaging.relaybox_wake_up");
        let fits = format!("{}.{}", "a".repeat(40), "b".repeat(15));
        assert_eq!(named(&fits), format!("{fits}wake_up"));
        let long = format!("{}.{}", "a".repeat(40), "b".repeat(16));
        let other = format!("{}.{}", "a".repeat(40), "c".repeat(16));
        assert_eq!(named(&long).len(), 63);
        assert_ne!(named(&long), named(&other));
    }

    #[test]
    fn a_window_remembers_only_those_that_notified_in_it() {
        let window = Window::default();
        let start = Instant::now();
        let first = window.enter(start, PAUSE);
        assert!(first.earlier.is_empty());
        window.notified(&first, "7".into());
        let second = window.enter(start + PAUSE / 2, PAUSE);
        assert_eq!(second.earlier, ["7"]);
        window.notified(&second, "8".into());
        assert_eq!(window.enter(start, PAUSE).earlier, ["7", "8"]);
        let third = window.enter(start + PAUSE, PAUSE);
        assert!(third.earlier.is_empty());
        // One that comes to its end late changes no later window.
        window.notified(&second, "9".into());
        assert_eq!(window.enter(start + PAUSE, PAUSE), third);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let window = Window::default();
        let turn = window.enter(Instant::now(), PAUSE);
        for xid in 0..100 {
            // One transaction that notified twice speaks no louder.
            window.notified(&turn, xid.to_string());
            window.notified(&turn, xid.to_string());
        }
        let earlier = window.enter(turn.begun, PAUSE).earlier;
        assert_eq!(earlier.len(), EARLIER_MAX);
        assert_eq!(earlier[..3], ["0", "1", "2"]);
    }

    #[test]
    fn without_a_pause_nothing_is_silent() {
        let window = Window::default();
        let now = Instant::now();
        for _ in 0..3 {
            let turn = window.enter(now, Duration::ZERO);
            assert!(turn.earlier.is_empty());
            window.notified(&turn, "7".into());
        }
    }
}
