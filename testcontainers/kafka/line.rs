//! Ways to a local Kafka that a test breaks without the others noticing.
//!
//! Clients follow the address that a listener tells them, so each line needs a listener of its own, which tells the
//! proxy's.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Kafka, SERVICE};
use crate::{Proxy, ServiceError};

/// How many lines there may be at a time.
pub(super) const LINES: usize = 6;

/// One listener: where the broker has it, and where it says that it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    pub(super) port: u16,
    pub(super) advertised: u16,
}

/// The listeners that no line has now. The one given back first is given out first, because clients of the last line
/// may go on knocking for a moment.
#[derive(Debug)]
pub(super) struct Seats {
    free: Mutex<VecDeque<Seat>>,
    count: Arc<Semaphore>,
}

impl Seats {
    pub(super) fn new(seats: impl IntoIterator<Item = Seat>) -> Arc<Self> {
        let free: VecDeque<Seat> = seats.into_iter().collect();
        let count = Arc::new(Semaphore::new(free.len()));
        let free = Mutex::new(free);
        Arc::new(Self { free, count })
    }
}

/// A way to the broker through a [`Proxy`], for one test alone. Dropping it ends its connections.
pub struct KafkaLine {
    proxy: Proxy,
    seat: Seat,
    seats: Arc<Seats>,
    _permit: OwnedSemaphorePermit,
}

impl KafkaLine {
    /// The bootstrap servers behind the line.
    #[must_use]
    pub fn brokers(&self) -> String {
        self.proxy.address()
    }

    /// What breaks the line.
    #[must_use]
    pub const fn proxy(&self) -> &Proxy {
        &self.proxy
    }
}

impl Drop for KafkaLine {
    fn drop(&mut self) {
        let mut free = self
            .seats
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        free.push_back(self.seat);
    }
}

impl Kafka {
    /// A line of the caller's own; waits while all are in use. Nothing where the broker is not a local process with
    /// [lines](super::KafkaOptions::with_lines).
    ///
    /// # Errors
    ///
    /// When its port is taken.
    pub async fn line(&self) -> Result<Option<KafkaLine>, ServiceError> {
        let Some(seats) = self.seats.clone() else {
            return Ok(None);
        };
        let failed = |error: String| ServiceError::failed(SERVICE, "open a line", error);
        let permit = Arc::clone(&seats.count).acquire_owned().await;
        let permit = permit.map_err(|error| failed(error.to_string()))?;
        let seat = seats
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_front();
        let seat = seat.ok_or_else(|| failed("no seat".to_owned()))?;
        let proxy = Proxy::start_at(seat.advertised, format!("127.0.0.1:{}", seat.port)).await;
        let proxy = proxy.map_err(|error| failed(error.to_string()))?;
        Ok(Some(KafkaLine {
            proxy,
            seat,
            seats,
            _permit: permit,
        }))
    }
}
