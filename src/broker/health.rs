//! How an adapter stands with its broker, and how much waits there: data for health checks and metrics.

use std::time::Duration;

/// How a publisher or subscription stands with its broker, as far as it knows without asking.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// The state.
    pub state: ConnectionState,
    /// For people: what was tried and what came of it. No payload and no secret.
    pub detail: Option<String>,
}

/// The state of a connection to a broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConnectionState {
    /// The last word from the broker was a good one.
    Up,
    /// The broker answers and takes nothing, because of an alarm or a limit of its own. It ends by itself.
    Blocked,
    /// There is no usable connection; it is being made anew.
    Down,
    /// It was closed, or ended for good; nothing is tried any more.
    Closed,
}

impl Health {
    /// All is well.
    #[must_use]
    pub const fn up() -> Self {
        Self {
            state: ConnectionState::Up,
            detail: None,
        }
    }

    /// The broker takes nothing for now.
    pub fn blocked(detail: impl Into<String>) -> Self {
        Self {
            state: ConnectionState::Blocked,
            detail: Some(detail.into()),
        }
    }

    /// There is no connection.
    pub fn down(detail: impl Into<String>) -> Self {
        Self {
            state: ConnectionState::Down,
            detail: Some(detail.into()),
        }
    }

    /// It is over.
    #[must_use]
    pub const fn closed() -> Self {
        Self {
            state: ConnectionState::Closed,
            detail: None,
        }
    }

    /// What keeps messages from going through now.
    pub(crate) fn trouble(&self) -> Option<String> {
        let known = || self.detail.clone();
        match self.state {
            ConnectionState::Up => None,
            ConnectionState::Closed => Some("the connection was closed".to_owned()),
            ConnectionState::Blocked => known().or(Some("the broker takes nothing".to_owned())),
            ConnectionState::Down => known().or(Some("no usable connection".to_owned())),
        }
    }

    /// Whether messages can go through now.
    #[must_use]
    pub const fn is_up(&self) -> bool {
        matches!(self.state, ConnectionState::Up)
    }
}

/// How much waits somewhere, at the moment of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Backlog {
    /// How many messages.
    pub messages: u64,
    /// Age of the oldest of them. `None` when there is none, or where the broker does not tell.
    pub oldest: Option<Duration>,
}

impl Backlog {
    /// So many messages, the oldest of this age.
    #[must_use]
    pub const fn new(messages: u64, oldest: Option<Duration>) -> Self {
        Self { messages, oldest }
    }
}
