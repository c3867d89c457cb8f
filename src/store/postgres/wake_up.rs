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

/// A span of time that begins with an enqueue that notifies, and in which later ones need not.
///
/// They need not once the transaction of the first has committed, and only the database knows: it is asked in the
/// INSERT itself. So what is forgotten, rolled back or dropped half-way here costs a notification too many, never one
/// too few.
#[derive(Debug, Default)]
pub(super) struct Window(Mutex<Option<Opened>>);

#[derive(Debug)]
struct Opened {
    at: Instant,
    /// Transaction of the enqueue that opened it, once that is known.
    by: Option<String>,
}

/// What an enqueue has to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// Notify, and tell the window who it was.
    Opens(Instant),
    /// Notify unless this transaction has committed.
    Within(Option<String>),
}

impl Window {
    pub(super) fn enter(&self, now: Instant, pause: Duration) -> Turn {
        let mut window = self.opened();
        if let Some(opened) = &*window
            && now.saturating_duration_since(opened.at) < pause
        {
            return Turn::Within(opened.by.clone());
        }
        *window = Some(Opened { at: now, by: None });
        Turn::Opens(now)
    }

    /// The enqueue of this turn has run in transaction `xid`.
    pub(super) fn entered(&self, turn: &Turn, xid: String) {
        if let (Turn::Opens(at), Some(opened)) = (turn, &mut *self.opened())
            && opened.at == *at
        {
            opened.by = Some(xid);
        }
    }

    fn opened(&self) -> MutexGuard<'_, Option<Opened>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// The transaction whose commit makes a notification needless.
    pub(super) fn opener(&self) -> Option<&str> {
        match self {
            Self::Opens(_) => None,
            Self::Within(by) => by.as_deref(),
        }
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
    fn an_enqueue_may_be_silent_only_within_the_window_of_one_that_is_known() {
        let window = Window::default();
        let start = Instant::now();
        let first = window.enter(start, PAUSE);
        assert_eq!(first, Turn::Opens(start));
        assert_eq!(window.enter(start, PAUSE), Turn::Within(None));
        window.entered(&first, "7".into());
        let second = window.enter(start + PAUSE / 2, PAUSE);
        assert_eq!(second.opener(), Some("7"));
        // One that is within tells nobody, and one that comes to its end late changes no later window.
        window.entered(&second, "8".into());
        assert_eq!(window.enter(start, PAUSE).opener(), Some("7"));
        assert_eq!(
            window.enter(start + PAUSE, PAUSE),
            Turn::Opens(start + PAUSE)
        );
        window.entered(&first, "7".into());
        assert_eq!(window.enter(start + PAUSE, PAUSE), Turn::Within(None));
    }

    #[test]
    fn without_a_pause_every_enqueue_notifies() {
        let window = Window::default();
        let now = Instant::now();
        for _ in 0..3 {
            assert_eq!(window.enter(now, Duration::ZERO), Turn::Opens(now));
        }
    }
}
