//! The store contracts, and one adapter per database.
//!
//! Typed where the user's transaction passes ([`Enqueue`], [`InboxStore`]); object-safe where only relaybox's own
//! statements run ([`OutboxStore`], [`OutboxAdmin`], [`DeadLetterStore`], [`RedriveStore`], [`WaitingStore`]).

mod admin;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod admin_steps;
mod aside;
mod dead_letter;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod header_codec;
mod inbox;
mod letters;
mod names;
mod no_inbox;
mod outbox;
mod redrive;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod transaction;
mod version;
mod waiting;
mod wake_up;

pub use admin::{
    AsideEntry, AsideFilter, AsideMessage, CONTROLS_MAX, Depth, DestinationControl,
    DestinationDepth, Mode, OutboxAdmin, PublishedMessage,
};
pub use aside::{Ahead, AsideState, Place, SetAside, Table};
pub use dead_letter::{DeadLetter, DeadLetterSink, DeadLetterStore};
pub use inbox::{InboxStore, Recorded};
pub use letters::{LetterEntry, LetterFilter, WholeLetter};
pub use names::Prefix;
pub use no_inbox::NoInbox;
pub use outbox::{
    Due, Enqueue, EnqueueStatement, FetchRequest, Lease, OutboxReader, OutboxStore, Page,
    PendingMessage, Settled, SettlementBatch, Standing, Verdict,
};
pub use redrive::{
    Arrival, AuditEntry, LETTERS_MAX, Leaving, LetterOutcome, NewRun, Note, RedriveStore, RunRow,
    RunState, RunStep,
};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use transaction::StoreTransaction;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
use transaction::kind_in_chain;
pub use version::{AGGREGATE_BYTES_MAX, Advanced, VersionStore};
pub use waiting::{
    Claim, Claimed, Claims, Finished, Line, Noted, ReleaseAs, Waiting, WaitingEntry, WaitingState,
    WaitingStore,
};
pub use wake_up::{WakeUp, WakeUps};

#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;
