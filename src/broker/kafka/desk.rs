//! Where the polling thread lays out deliveries, receivers pick them up, and settlements come back.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::progress::Progress;
use crate::broker::{Delivery, Receipt, Settlement};
use crate::clock::at_most_a_day;
use crate::envelope::Incoming;
use crate::error::{Error, ErrorKind, Result};
use crate::story::Origin;

/// One assignment of one partition. A later assignment of the same partition is another one, so what still belongs to
/// this one can be told apart for good: once nobody asks for its commit point any more, results change nothing.
pub(super) struct Holding {
    /// Whether deliveries may be started. False from the moment the partition is taken away.
    current: AtomicBool,
    book: Mutex<Book>,
}

#[derive(Default)]
struct Book {
    progress: Progress,
    /// Deliveries queued or handed over, and not settled.
    outstanding: usize,
    /// One past the highest offset that was handed over.
    handed_over: Option<i64>,
    /// Whether one was dropped unsettled after the end: what became of its work nobody knows.
    has_dropped: bool,
}

/// How an assignment stands at its end.
pub(super) struct Standing {
    /// Where a successor goes on. `None` if nothing was received.
    pub(super) point: Option<i64>,
    /// One past the last offset that may be in work, if any may.
    pub(super) in_work: Option<i64>,
}

impl Holding {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            current: AtomicBool::new(true),
            book: Mutex::default(),
        })
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_current(&self) -> bool {
        self.current.load(Ordering::Acquire)
    }

    /// See [`Progress::received`].
    #[must_use]
    pub(super) fn received(&self, offset: i64) -> bool {
        self.book().progress.received(offset)
    }

    pub(super) fn commit_point(&self) -> Option<i64> {
        self.book().progress.commit_point()
    }

    /// See [`Progress::next`].
    pub(super) fn next(&self) -> Option<i64> {
        self.book().progress.next()
    }

    pub(super) fn standing(&self) -> Standing {
        let book = self.book();
        let may_be_in_work = book.outstanding > 0 || book.has_dropped;
        Standing {
            point: book.progress.next(),
            in_work: book.handed_over.filter(|_| may_be_in_work),
        }
    }

    pub(super) fn tracked(&self) -> usize {
        self.book().progress.tracked()
    }
}

/// A message to be delivered, or delivered and not settled.
pub(super) struct Item {
    pub(super) holding: Arc<Holding>,
    pub(super) offset: i64,
    pub(super) incoming: Incoming,
    pub(super) coordinates: Origin,
    pub(super) redelivered: bool,
}

/// What the polling thread, the receiver and the receipts share.
pub(super) struct Desk {
    in_flight_max: usize,
    state: Mutex<State>,
    arrived: Notify,
    settled: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Item>,
    /// Queued or handed over, and not settled.
    unsettled: usize,
    /// Released with a delay.
    away: Vec<(Instant, Item)>,
    /// A report for the receiver.
    report: Option<Error>,
    /// A commit was confirmed and nobody has looked since.
    committed: bool,
    end: Option<End>,
}

enum End {
    /// Close, and be done by then.
    Asked(Instant),
    Fatal(Error),
    Over,
}

/// How many released messages may be away per delivery in flight, before nothing new is fetched.
const AWAY_FACTOR: usize = 4;

impl Desk {
    pub(super) fn new(in_flight_max: usize) -> Arc<Self> {
        Arc::new(Self {
            in_flight_max,
            state: Mutex::default(),
            arrived: Notify::new(),
            settled: Condvar::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- The polling thread's side

    pub(super) fn has_room(&self) -> bool {
        self.has_room_in(&self.state())
    }

    fn has_room_in(&self, state: &State) -> bool {
        state.unsettled < self.in_flight_max
            && state.away.len() < self.in_flight_max.saturating_mul(AWAY_FACTOR)
    }

    /// Whether so much is settled that resuming is worth the fetch it costs.
    pub(super) fn has_ample_room(&self) -> bool {
        self.state().unsettled <= self.in_flight_max / 2 && self.has_room()
    }

    pub(super) fn wait_for_settlement(&self, within: Duration) {
        let state = self.state();
        // Asked again under the lock: settlements that came since would wake nobody any more.
        if !self.has_room_in(&state) {
            drop(self.settled.wait_timeout(state, within));
        }
    }

    /// Waits until a commit is confirmed. Settlements end it too.
    pub(super) fn wait_for_commit(&self, within: Duration) {
        let mut state = self.state();
        if !state.committed {
            state = self
                .settled
                .wait_timeout(state, within)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state.committed = false;
    }

    pub(super) fn committed(&self) {
        self.state().committed = true;
        self.settled.notify_all();
    }

    /// Lays out a delivery. The thread asks for [room](Self::has_room) before it polls.
    pub(super) fn offer(&self, item: Item) {
        self.state().lay_out(item);
        self.arrived.notify_one();
    }

    /// Lays out what was released and is due, as far as there is room.
    pub(super) fn bring_back(&self) {
        let mut state = self.state();
        let now = Instant::now();
        let mut at = 0;
        while state.unsettled < self.in_flight_max && at < state.away.len() {
            if state.away[at].0 <= now {
                let (_, item) = state.away.remove(at);
                state.lay_out(item);
                self.arrived.notify_one();
            } else {
                at += 1;
            }
        }
    }

    /// Stops delivering of these holdings: what is queued is taken back, what is handed over may still be settled.
    pub(super) fn take_back(&self, holdings: &[Arc<Holding>]) {
        for holding in holdings {
            holding.current.store(false, Ordering::Release);
        }
        let mut state = self.state();
        state.away.retain(|(_, item)| item.holding.is_current());
        let queue = std::mem::take(&mut state.queue);
        for item in queue {
            if item.holding.is_current() {
                state.queue.push_back(item);
            } else {
                state.unsettled -= 1;
                item.holding.book().outstanding -= 1;
            }
        }
    }

    /// Waits until everything handed over of these holdings is settled or dropped. Whether it was, in time.
    pub(super) fn drain(&self, holdings: &[Arc<Holding>], within: Duration) -> bool {
        let until = Instant::now() + within;
        let mut state = self.state();
        loop {
            if holdings.iter().all(|h| h.book().outstanding == 0) {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || matches!(state.end, Some(End::Asked(_))) {
                return false;
            }
            // Short turns, because a wish to close comes without a settlement.
            let turn = left.min(Duration::from_millis(100));
            state = self
                .settled
                .wait_timeout(state, turn)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    pub(super) fn report(&self, error: Error) {
        self.state().report = Some(error);
        self.arrived.notify_one();
    }

    pub(super) fn fail(&self, error: Error) {
        let mut state = self.state();
        if state.end.is_none() {
            state.end = Some(End::Fatal(error));
        }
        drop(state);
        self.arrived.notify_one();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.close_by().is_some()
    }

    /// When to be done with closing, once that was asked for.
    pub(super) fn close_by(&self) -> Option<Instant> {
        match self.state().end {
            Some(End::Asked(by)) => Some(by),
            _ => None,
        }
    }

    /// Whether nothing will be delivered any more.
    pub(super) fn has_ended(&self) -> bool {
        self.state().end.is_some()
    }

    /// The thread is at its end; a receiver must not wait for ever.
    pub(super) fn over(&self) {
        let mut state = self.state();
        if !matches!(state.end, Some(End::Fatal(_))) {
            state.end = Some(End::Over);
        }
        drop(state);
        self.arrived.notify_one();
    }

    // ---- The receiver's side

    /// Waits for deliveries. What is taken from the queue is returned at once, so dropping the future loses nothing.
    pub(super) async fn receive(self: &Arc<Self>, count_max: usize) -> Result<Vec<Delivery>> {
        loop {
            if let Some(received) = self.try_receive(count_max.max(1)) {
                return received;
            }
            // Keeps one notification that came since, so none is missed. There is one receiver.
            self.arrived.notified().await;
        }
    }

    fn try_receive(self: &Arc<Self>, count_max: usize) -> Option<Result<Vec<Delivery>>> {
        let mut state = self.state();
        if state.end.is_none() && !state.queue.is_empty() {
            let count = count_max.min(state.queue.len());
            let items: Vec<Item> = state.queue.drain(..count).collect();
            // Under the lock: who looks how far it came must not miss these.
            for item in &items {
                let mut book = item.holding.book();
                book.handed_over = book.handed_over.max(Some(item.offset + 1));
            }
            drop(state);
            return Some(Ok(items.into_iter().map(|i| self.deliver(i)).collect()));
        }
        match &mut state.end {
            Some(End::Fatal(error)) => {
                let over = Error::new(ErrorKind::Closed, "receive", "the subscription ended");
                return Some(Err(std::mem::replace(error, over)));
            }
            Some(End::Asked(_) | End::Over) => {
                let detail = "the subscription is closed";
                return Some(Err(Error::new(ErrorKind::Closed, "receive", detail)));
            }
            None => {}
        }
        state.report.take().map(Err)
    }

    fn deliver(self: &Arc<Self>, item: Item) -> Delivery {
        Delivery {
            incoming: item.incoming.clone(),
            source: item.coordinates.topic.clone(),
            coordinates: item.coordinates.clone(),
            redelivered: item.redelivered,
            receipt: Box::new(Ticket {
                desk: Arc::clone(self),
                item: Some(item),
            }),
        }
    }

    pub(super) fn ask_to_close(&self, by: Instant) {
        let mut state = self.state();
        if state.end.is_none() {
            state.end = Some(End::Asked(by));
        }
        drop(state);
        self.settled.notify_all();
        self.arrived.notify_one();
    }

    /// Before the end a delivery that is dropped is given back. After it, a holder that took its leave without a word may
    /// have been cut off in the middle of the work.
    fn dropped(&self, item: Item) {
        if self.has_ended() {
            item.holding.book().has_dropped = true;
        }
        let delay = Duration::ZERO;
        self.settle(item, Settlement::Release { delay });
    }

    fn settle(&self, mut item: Item, settlement: Settlement) {
        let mut state = self.state();
        state.unsettled -= 1;
        let mut book = item.holding.book();
        book.outstanding -= 1;
        if settlement == Settlement::Acknowledge {
            book.progress.finished(item.offset);
        }
        drop(book);
        if let Settlement::Release { delay } = settlement
            && item.holding.is_current()
            && state.end.is_none()
        {
            item.redelivered = true;
            if delay.is_zero() {
                // It takes the place that it just gave up.
                state.lay_out(item);
                self.arrived.notify_one();
            } else {
                // What is further off is asked again then.
                let due = Instant::now() + at_most_a_day(delay);
                state.away.push((due, item));
            }
        }
        drop(state);
        self.settled.notify_all();
    }
}

impl State {
    fn lay_out(&mut self, item: Item) {
        self.unsettled += 1;
        item.holding.book().outstanding += 1;
        self.queue.push_back(item);
    }
}

/// The receipt of one delivery. It keeps the message, in case it is released.
struct Ticket {
    desk: Arc<Desk>,
    item: Option<Item>,
}

impl Receipt for Ticket {
    fn is_current(&self) -> bool {
        self.item
            .as_ref()
            .is_some_and(|item| item.holding.is_current())
    }

    fn settle(mut self: Box<Self>, settlement: Settlement) -> BoxFuture<'static, Result<()>> {
        // At once and not when polled: the order of settlements is the order of these calls. Durable with the next
        // commit; until then a crash brings the message again.
        if let Some(item) = self.item.take() {
            self.desk.settle(item, settlement);
        }
        Box::pin(std::future::ready(Ok(())))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(item) = self.item.take() {
            self.desk.dropped(item);
        }
    }
}
