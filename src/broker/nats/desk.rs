//! Where pulled messages are laid out, receivers pick them up, and settlements are noted.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::shelf::{Lease, Shelf};

use crate::broker::{Delivery, Receipt, Settlement};
use crate::envelope::Incoming;
use crate::error::{Error, ErrorKind, Result};
use crate::story::Origin;

/// A message to be delivered.
pub(super) struct Item {
    pub(super) shelf: Arc<Shelf>,
    pub(super) lease: Arc<Lease>,
    pub(super) incoming: Incoming,
    pub(super) coordinates: Origin,
    pub(super) redelivered: bool,
}

/// What the pullers, the receiver and the receipts share.
pub(super) struct Desk {
    in_flight_max: usize,
    state: Mutex<State>,
    arrived: Notify,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Item>,
    /// Handed over and not settled.
    unsettled: usize,
    /// A report for the receiver.
    report: Option<Error>,
    end: Option<End>,
}

enum End {
    Closed,
    Fatal(Error),
}

impl Desk {
    pub(super) fn new(in_flight_max: usize) -> Arc<Self> {
        Arc::new(Self {
            in_flight_max,
            state: Mutex::default(),
            arrived: Notify::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- The pullers' side

    pub(super) fn offer(&self, item: Item) {
        self.state().queue.push_back(item);
        self.arrived.notify_one();
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

    pub(super) fn close(&self) {
        let mut state = self.state();
        if state.end.is_none() {
            state.end = Some(End::Closed);
        }
        drop(state);
        self.arrived.notify_one();
    }

    /// Whether nothing is delivered any more.
    pub(super) fn has_ended(&self) -> bool {
        self.state().end.is_some()
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
        let mut items = Vec::new();
        while state.end.is_none()
            && items.len() < count_max
            && state.unsettled < self.in_flight_max
            && let Some(item) = state.queue.pop_front()
        {
            if item.shelf.is_current(&item.lease) {
                state.unsettled += 1;
                items.push(item);
            } else {
                // It went to somebody else while it waited here.
                let delay = Duration::ZERO;
                item.shelf
                    .settle(&item.lease, Settlement::Release { delay });
            }
        }
        if !items.is_empty() {
            drop(state);
            return Some(Ok(items
                .into_iter()
                .map(|item| self.deliver(item))
                .collect()));
        }
        match &mut state.end {
            Some(End::Fatal(error)) => {
                let over = Error::new(ErrorKind::Closed, "receive", "the subscription ended");
                Some(Err(std::mem::replace(error, over)))
            }
            Some(End::Closed) => {
                let detail = "the subscription is closed";
                Some(Err(Error::new(ErrorKind::Closed, "receive", detail)))
            }
            None => state.report.take().map(Err),
        }
    }

    fn deliver(self: &Arc<Self>, item: Item) -> Delivery {
        Delivery {
            source: item.shelf.source.clone(),
            incoming: item.incoming,
            coordinates: item.coordinates,
            redelivered: item.redelivered,
            receipt: Box::new(Ticket {
                desk: Arc::clone(self),
                shelf: item.shelf,
                lease: Some(item.lease),
            }),
        }
    }

    fn settled(&self) {
        let mut state = self.state();
        state.unsettled = state.unsettled.saturating_sub(1);
        let more = !state.queue.is_empty();
        drop(state);
        if more {
            self.arrived.notify_one();
        }
    }
}

/// Held by a puller: one that ends without being asked to ends the subscription, so that nobody waits for what it
/// would have brought.
pub(super) struct Vigil(pub(super) Arc<Desk>);

impl Drop for Vigil {
    fn drop(&mut self) {
        let detail = "what receives from a source ended before its time";
        self.0.fail(Error::new(ErrorKind::Other, "receive", detail));
    }
}

/// The receipt of one delivery.
struct Ticket {
    desk: Arc<Desk>,
    shelf: Arc<Shelf>,
    lease: Option<Arc<Lease>>,
}

impl Ticket {
    fn settle_once(&mut self, settlement: Settlement) {
        if let Some(lease) = self.lease.take() {
            self.shelf.settle(&lease, settlement);
            self.desk.settled();
        }
    }
}

impl Receipt for Ticket {
    fn is_current(&self) -> bool {
        let lease = self.lease.as_ref();
        lease.is_some_and(|lease| self.shelf.is_current(lease))
    }

    fn settle(mut self: Box<Self>, settlement: Settlement) -> BoxFuture<'static, Result<()>> {
        // At once and not when polled: the order of settlements is the order of these calls. The puller sends it; until
        // the server has it a crash brings the message again.
        self.settle_once(settlement);
        Box::pin(std::future::ready(Ok(())))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let delay = Duration::ZERO;
        self.settle_once(Settlement::Release { delay });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use async_nats::Subject;
    use bytes::Bytes;
    use time::OffsetDateTime;
    use tokio::time::Instant;

    use super::super::shelf::release;
    use super::*;
    use crate::message::Message;

    const WAIT: Duration = Duration::from_secs(30);
    const STORED_AT: OffsetDateTime = OffsetDateTime::UNIX_EPOCH;

    fn later() -> Instant {
        Instant::now() + WAIT
    }

    fn lay_out(desk: &Arc<Desk>, shelf: &Arc<Shelf>, sequence: u64, until: Instant) {
        let reply = Subject::from(format!("reply.{sequence}"));
        if let Some((lease, _)) = shelf.take_in(sequence, STORED_AT, reply, until) {
            desk.offer(Item {
                shelf: Arc::clone(shelf),
                lease,
                incoming: Message::new("t", "T").into(),
                coordinates: Origin {
                    topic: "t".into(),
                    partition: None,
                    offset: Some(sequence.to_string()),
                },
                redelivered: false,
            });
        }
    }

    fn words(shelf: &Shelf) -> Vec<(String, String)> {
        let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
        let settled = shelf.take_settled().into_iter();
        settled
            .map(|(reply, word)| (reply.to_string(), text(word)))
            .collect()
    }

    #[tokio::test]
    async fn no_more_than_allowed_are_handed_over_and_each_is_settled_once() {
        let desk = Desk::new(2);
        let shelf = Shelf::new("s".into(), 3);
        for sequence in 1..=3 {
            lay_out(&desk, &shelf, sequence, later());
        }
        assert_eq!(shelf.room(), 0);
        let mut first = desk.receive(9).await.unwrap();
        assert_eq!(first.len(), 2);
        assert!(desk.try_receive(9).is_none());
        first
            .remove(0)
            .receipt
            .settle(Settlement::Acknowledge)
            .await
            .unwrap();
        drop(first);
        assert_eq!(desk.receive(9).await.unwrap().len(), 1);
        let expected = [
            ("reply.1", "+ACK"),
            ("reply.2", "-NAK"),
            ("reply.3", "-NAK"),
        ];
        let expected = expected.map(|(reply, word)| (reply.to_owned(), word.to_owned()));
        assert_eq!(words(&shelf), expected);
        assert_eq!(shelf.room(), 3);
    }

    #[tokio::test]
    async fn what_may_be_somebody_elses_is_neither_delivered_nor_settled() {
        let desk = Desk::new(9);
        let shelf = Shelf::new("s".into(), 9);
        lay_out(&desk, &shelf, 1, Instant::now());
        lay_out(&desk, &shelf, 2, later());
        let delivery = desk.receive(9).await.unwrap().remove(0);
        assert_eq!(delivery.coordinates.offset.as_deref(), Some("2"));
        assert!(delivery.receipt.is_current());
        let held: Vec<_> = shelf.close().into_keys().collect();
        assert_eq!(held, [2]);
        assert!(!delivery.receipt.is_current());
        delivery
            .receipt
            .settle(Settlement::Acknowledge)
            .await
            .unwrap();
        assert!(words(&shelf).is_empty());
    }

    #[tokio::test]
    async fn what_is_given_back_is_in_its_order_and_what_is_lost_is_left_alone() {
        let desk = Desk::new(99);
        let shelf = Shelf::new("s".into(), 99);
        for sequence in (1..=64).rev() {
            lay_out(&desk, &shelf, sequence, later());
        }
        lay_out(&desk, &shelf, 65, Instant::now());
        // A sign of life would take it from who has it now.
        let ending = shelf.ending(later() + WAIT);
        assert!(ending.iter().all(|lease| lease.sequence != 65));
        let held: Vec<_> = shelf.close().into_keys().collect();
        assert_eq!(held, (1..=64).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_puller_that_dies_ends_the_subscription() {
        let desk = Desk::new(9);
        assert!(!desk.has_ended());
        drop(Vigil(Arc::clone(&desk)));
        assert!(desk.has_ended());
        let error = desk.receive(1).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Other);

        let desk = Desk::new(9);
        desk.close();
        drop(Vigil(Arc::clone(&desk)));
        let error = desk.receive(1).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Closed);
    }

    #[tokio::test]
    async fn a_stream_that_was_made_anew_delivers_under_the_old_sequences() {
        let desk = Desk::new(9);
        let shelf = Shelf::new("s".into(), 9);
        lay_out(&desk, &shelf, 1, later());
        let old = desk.receive(9).await.unwrap().remove(0);
        let anew = STORED_AT + WAIT;
        let (lease, _) = shelf.take_in(1, anew, "anew".into(), later()).unwrap();
        assert!(!old.receipt.is_current());
        old.receipt.settle(Settlement::Acknowledge).await.unwrap();
        assert!(words(&shelf).is_empty());
        assert!(shelf.is_current(&lease));
        shelf.settle(&lease, Settlement::Acknowledge);
        assert_eq!(words(&shelf), [("anew".to_owned(), "+ACK".to_owned())]);
    }

    #[tokio::test]
    async fn a_message_that_is_still_held_goes_on_under_its_new_delivery() {
        let desk = Desk::new(9);
        let shelf = Shelf::new("s".into(), 9);
        lay_out(&desk, &shelf, 1, later());
        let delivery = desk.receive(9).await.unwrap().remove(0);
        assert!(
            shelf
                .take_in(1, STORED_AT, "again".into(), later())
                .is_none()
        );
        assert!(desk.try_receive(9).is_none());
        delivery
            .receipt
            .settle(Settlement::Acknowledge)
            .await
            .unwrap();
        assert_eq!(words(&shelf), [("again".to_owned(), "+ACK".to_owned())]);
        assert!(shelf.take_in(1, STORED_AT, "new".into(), later()).is_some());
    }

    #[tokio::test]
    async fn a_delay_is_told_to_the_server_and_remembered() {
        let desk = Desk::new(9);
        let shelf = Shelf::new("s".into(), 9);
        lay_out(&desk, &shelf, 1, later());
        let delivery = desk.receive(9).await.unwrap().remove(0);
        let settlement = Settlement::Release { delay: WAIT };
        delivery.receipt.settle(settlement).await.unwrap();
        let word = r#"-NAK {"delay": 30000000000}"#;
        assert_eq!(words(&shelf), [("reply.1".to_owned(), word.to_owned())]);
        let (_, wait) = shelf
            .take_in(1, STORED_AT, "early".into(), later())
            .unwrap();
        assert!(wait.is_some());
        assert!(release(Duration::MAX).starts_with(b"-NAK {"));
    }
}
