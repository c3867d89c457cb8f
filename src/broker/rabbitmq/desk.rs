//! Where the consumers of one subscription lay out deliveries, the receiver picks them up, and settlements come back.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use lapin::Acker;
use lapin::options::BasicAckOptions;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};

use super::error::mapped;
use crate::broker::{Delivery, Health, Receipt, Settlement};
use crate::envelope::Incoming;
use crate::error::{Error, ErrorKind, Result};
use crate::story::Origin;

/// One life of one channel. Its delivery tags mean nothing on the next one.
pub(super) struct Generation {
    current: AtomicBool,
    /// Whether it still hands over: a shard that goes to another member only waits for what is in work.
    open: AtomicBool,
    /// Handed over and not settled.
    in_work: AtomicUsize,
    idle: Notify,
}

impl Generation {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            current: AtomicBool::new(true),
            open: AtomicBool::new(true),
            in_work: AtomicUsize::new(0),
            idle: Notify::new(),
        })
    }

    fn is_current(&self) -> bool {
        self.current.load(Ordering::Acquire)
    }

    fn hands_over(&self) -> bool {
        self.is_current() && self.open.load(Ordering::Acquire)
    }
}

/// Something handed over of a generation, until it is dropped.
struct InWork(Arc<Generation>);

impl InWork {
    fn new(generation: &Arc<Generation>) -> Self {
        generation.in_work.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(generation))
    }
}

impl Drop for InWork {
    fn drop(&mut self) {
        if self.0.in_work.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.idle.notify_one();
        }
    }
}

/// A message to be delivered, or delivered and not settled.
pub(super) struct Item {
    pub(super) generation: Arc<Generation>,
    pub(super) acker: Acker,
    pub(super) incoming: Incoming,
    pub(super) source: Arc<str>,
    pub(super) coordinates: Origin,
    pub(super) redelivered: bool,
}

/// What the consumers, the receiver and the receipts share.
pub(super) struct Desk {
    in_flight_max: usize,
    hold_max: Duration,
    answer_deadline: Duration,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Item>,
    /// Released or early, and kept back until then.
    away: Vec<(Instant, Item)>,
    /// Handed over and not settled.
    unsettled: usize,
    report: Option<Error>,
    /// Per consumer, why it has no channel.
    down: Vec<Option<String>>,
    over: bool,
}

enum Next {
    Received(Result<Vec<Delivery>>),
    Wait(Option<Instant>),
}

impl Desk {
    pub(super) fn new(
        in_flight_max: usize,
        consumers: usize,
        hold_max: Duration,
        answer_deadline: Duration,
    ) -> Arc<Self> {
        let state = State {
            down: vec![Some("not yet attached".to_owned()); consumers],
            ..State::default()
        };
        Arc::new(Self {
            in_flight_max,
            hold_max,
            answer_deadline,
            state: Mutex::new(state),
            changed: Notify::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- The consumers' side

    pub(super) fn up(&self, consumer: usize) {
        if let Some(down) = self.state().down.get_mut(consumer) {
            *down = None;
        }
    }

    /// A consumer has no channel. The receiver is told once per change.
    pub(super) fn down(&self, consumer: usize, error: Error) {
        let mut state = self.state();
        let text = error.to_string();
        let Some(down) = state.down.get_mut(consumer) else {
            return;
        };
        let is_news = down.as_ref() != Some(&text);
        *down = Some(text);
        if is_news {
            state.report = Some(error);
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Lays out a delivery; one that may not be handled for so long is kept back, since a rung's queue goes by the
    /// broker's clock and `x-due-at` by ours. However long: should the broker lose patience, it comes again and waits again.
    pub(super) fn offer(&self, item: Item, early: Duration) {
        let mut state = self.state();
        if !item.generation.hands_over() {
            return;
        }
        if early.is_zero() {
            state.queue.push_back(item);
        } else {
            state.away.push((later(early), item));
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Hands over nothing more of this generation and waits until what was is settled, so long at most.
    pub(super) async fn drain(&self, generation: &Arc<Generation>, within: Duration) {
        generation.open.store(false, Ordering::Release);
        self.forget_what_is_shut();
        let idle = async {
            while generation.in_work.load(Ordering::Acquire) > 0 {
                generation.idle.notified().await;
            }
        };
        // Whatever is not settled by then comes again elsewhere.
        drop(timeout(within, idle).await);
    }

    /// The channel is gone: what was not handed over comes again on the next one, and what was may not be settled.
    pub(super) fn end(&self, generation: &Arc<Generation>) {
        generation.current.store(false, Ordering::Release);
        self.forget_what_is_shut();
    }

    fn forget_what_is_shut(&self) {
        let mut state = self.state();
        state.queue.retain(|item| item.generation.hands_over());
        state.away.retain(|(_, item)| item.generation.hands_over());
    }

    /// The subscription is over.
    pub(super) fn over(&self) {
        let mut state = self.state();
        state.over = true;
        let queue = std::mem::take(&mut state.queue);
        let away = std::mem::take(&mut state.away);
        drop(state);
        drop((queue, away));
        self.changed.notify_one();
    }

    pub(super) fn health(&self) -> Health {
        let state = self.state();
        if state.over {
            return Health::closed();
        }
        match state.down.iter().flatten().next() {
            Some(text) => Health::down(text.clone()),
            None => Health::up(),
        }
    }

    // ---- The receiver's side

    /// Waits for deliveries. What is taken from the queue is returned at once, so dropping the future loses nothing.
    pub(super) async fn receive(self: &Arc<Self>, count_max: usize) -> Result<Vec<Delivery>> {
        loop {
            match self.next(count_max.max(1)) {
                Next::Received(received) => return received,
                // A notification that came since is kept, so none is missed. There is one receiver.
                Next::Wait(None) => self.changed.notified().await,
                Next::Wait(Some(due)) => tokio::select! {
                    () = self.changed.notified() => {}
                    () = sleep_until(due) => {}
                },
            }
        }
    }

    fn next(self: &Arc<Self>, count_max: usize) -> Next {
        let mut state = self.state();
        if state.over {
            let detail = "the subscription is closed";
            return Next::Received(Err(Error::new(ErrorKind::Closed, "receive", detail)));
        }
        let now = Instant::now();
        let (due, away) = std::mem::take(&mut state.away)
            .into_iter()
            .partition(|(due, _)| *due <= now);
        state.away = away;
        state
            .queue
            .extend(due.into_iter().map(|(_, item): (_, Item)| item));
        let room = self.in_flight_max.saturating_sub(state.unsettled);
        let count = count_max.min(room).min(state.queue.len());
        if count > 0 {
            state.unsettled += count;
            let items: Vec<Item> = state.queue.drain(..count).collect();
            let items: Vec<_> = items
                .into_iter()
                .map(|item| (InWork::new(&item.generation), item))
                .collect();
            drop(state);
            return Next::Received(Ok(items.into_iter().map(|i| self.deliver(i)).collect()));
        }
        if let Some(error) = state.report.take() {
            return Next::Received(Err(error));
        }
        // Without room only a settlement helps.
        let due = state.away.iter().map(|(due, _)| *due).min();
        Next::Wait(due.filter(|_| room > 0))
    }

    fn deliver(self: &Arc<Self>, (in_work, item): (InWork, Item)) -> Delivery {
        Delivery {
            incoming: item.incoming.clone(),
            source: item.source.to_string(),
            coordinates: item.coordinates.clone(),
            redelivered: item.redelivered,
            receipt: Box::new(Ticket {
                desk: Arc::clone(self),
                held: Some((in_work, item)),
            }),
        }
    }

    fn release(&self, mut item: Item, delay: Duration) {
        let mut state = self.state();
        state.unsettled = state.unsettled.saturating_sub(1);
        if !state.over && item.generation.hands_over() {
            item.redelivered = true;
            state
                .away
                .push((Instant::now() + delay.min(self.hold_max), item));
        }
        drop(state);
        self.changed.notify_one();
    }

    fn settled(&self) {
        let mut state = self.state();
        state.unsettled = state.unsettled.saturating_sub(1);
        drop(state);
        self.changed.notify_one();
    }

    fn is_over(&self) -> bool {
        self.state().over
    }
}

/// So long from now. What is further off than a clock can tell has been given back by then.
fn later(delay: Duration) -> Instant {
    const LONG: Duration = Duration::from_secs(365 * 86_400);
    Instant::now() + delay.min(LONG)
}

/// The receipt of one delivery. It keeps the message, in case it is released.
struct Ticket {
    desk: Arc<Desk>,
    held: Option<(InWork, Item)>,
}

impl Ticket {
    fn is_valid(&self, item: &Item) -> bool {
        item.generation.is_current() && item.acker.usable() && !self.desk.is_over()
    }
}

impl Receipt for Ticket {
    fn is_current(&self) -> bool {
        self.held
            .as_ref()
            .is_some_and(|(_, item)| self.is_valid(item))
    }

    fn settle(mut self: Box<Self>, settlement: Settlement) -> BoxFuture<'static, Result<()>> {
        let Some((in_work, item)) = self.held.take() else {
            return Box::pin(std::future::ready(Ok(())));
        };
        if let Settlement::Release { delay } = settlement {
            self.desk.release(item, delay);
            return Box::pin(std::future::ready(Ok(())));
        }
        let is_valid = self.is_valid(&item);
        self.desk.settled();
        // A tag of a channel that is gone would be somebody else's on the next one.
        if !is_valid {
            return Box::pin(std::future::ready(Ok(())));
        }
        let acker = item.acker;
        let mut ack = Box::pin(async move { acker.ack(BasicAckOptions::default()).await });
        // Begun at once and not when polled: a future that is dropped has still acknowledged.
        let begun = (&mut ack).now_or_never();
        let patience = self.desk.answer_deadline;
        Box::pin(async move {
            let answer = match begun {
                Some(answer) => answer,
                None => match timeout(patience, ack).await {
                    Ok(answer) => answer,
                    Err(_) => {
                        let detail = "the acknowledgement could not be sent in time";
                        return Err(Error::new(ErrorKind::Timeout, "settle", detail));
                    }
                },
            };
            // A channel that is given up waits for this, so as not to be closed in front of it.
            drop(in_work);
            answer
                .map(drop)
                .map_err(|error| mapped("settle", "not acknowledged", error))
        })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some((_in_work, item)) = self.held.take() {
            self.desk.release(item, Duration::ZERO);
        }
    }
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use lapin::message::Delivery as Sent;

    use super::*;
    use crate::broker::rabbitmq::record::received;

    fn item(generation: &Arc<Generation>) -> Item {
        let sent = Sent::mock(1, "".into(), "q".into(), false, Vec::new());
        let received = received("q".into(), "q", &BasicProperties::default(), sent.data);
        Item {
            generation: Arc::clone(generation),
            acker: sent.acker,
            coordinates: received.coordinates.clone(),
            incoming: received.read(),
            source: "q".into(),
            redelivered: false,
        }
    }

    /// A rung moves by the broker's clock, and ours may be far behind.
    #[test]
    fn what_comes_early_waits_for_its_due_time_however_long() {
        let second = Duration::from_secs(1);
        let desk = Desk::new(10, 1, second, second);
        let generation = Generation::new();
        let hour = 3_600 * second;
        let due = Instant::now() + hour;
        desk.offer(item(&generation), hour);
        let wait = desk.next(1);
        assert!(matches!(wait, Next::Wait(Some(until)) if until >= due));
        desk.offer(item(&generation), Duration::MAX);
        desk.offer(item(&generation), Duration::ZERO);
        let next = desk.next(10);
        assert!(matches!(next, Next::Received(Ok(all)) if all.len() == 1));
    }
}
