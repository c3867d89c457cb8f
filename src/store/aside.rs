//! What is set aside: rows that may not be sent now, apart from those that may.

use crate::lane::Lane;
use crate::story::Reason;

/// Where a row stands.
///
/// Ordered as the rows of a lane go out: what was set aside earlier comes before what is still in the outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Its lane.
    pub lane: Lane,
    /// Which of the two tables has it.
    pub table: Table,
    /// Its position in the outbox; of a row set aside, the one that it had there.
    pub position: i64,
}

impl Place {
    /// A row of the outbox.
    #[must_use]
    pub const fn pending(lane: Lane, position: i64) -> Self {
        Self {
            lane,
            table: Table::Outbox,
            position,
        }
    }

    /// A row set aside.
    #[must_use]
    pub const fn aside(lane: Lane, position: i64) -> Self {
        Self {
            lane,
            table: Table::Aside,
            position,
        }
    }

    /// Whether it is set aside.
    #[must_use]
    pub const fn is_aside(&self) -> bool {
        matches!(self.table, Table::Aside)
    }
}

/// Which table has a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Table {
    /// The rows set aside.
    Aside,
    /// The rows that can be sent.
    Outbox,
}

/// What a row set aside waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AsideState {
    /// For an operator; other messages of its key go on.
    Parked,
    /// For an operator, and its key waits with it.
    Blocking,
    /// For one of its key that is [`Blocking`](Self::Blocking) further ahead.
    Held,
    /// For its destination, or for those of its key that are ahead of it.
    Waiting,
    /// For its time to come.
    Delayed,
}

impl AsideState {
    /// The word in the table.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Parked => "parked",
            Self::Blocking => "blocking",
            Self::Held => "held",
            Self::Waiting => "waiting",
            Self::Delayed => "delayed",
        }
    }
}

/// Why and how a row is set aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetAside {
    /// What it waits for.
    pub state: AsideState,
    /// Reason code.
    pub reason: Reason,
    /// Error text, at most 1 KiB, without NUL; empty when there was none.
    pub error: String,
    /// What its destination orders together with: within it, those of a key go in order.
    pub scope: String,
}

/// What is set aside of a key in one scope: it comes before the rows of that key in the outbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ahead {
    /// The scope.
    pub scope: String,
    /// The position of the last of them.
    pub last: i64,
    /// Whether the last of them waits for an operator, or behind one that does.
    pub blocked: bool,
}
