//! Where deliveries come from: the subscription, and the waiting room if there is one.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinHandle;

use crate::broker::{Delivery, Health, Subscription};
use crate::error::{Error, ErrorKind, Result};

use super::room::{Arrival, Room};

/// How long a stop may take to give back what was claimed.
const LEAVE_MAX: Duration = Duration::from_secs(2);

/// A subscription and the waiting room, as one.
pub(super) struct Intake {
    subscription: Box<dyn Subscription>,
    room: Option<Claiming>,
}

/// The waiting room with its tasks, which end with it.
struct Claiming {
    room: Arc<Room>,
    arrivals: UnboundedReceiver<Arrival>,
    tasks: [JoinHandle<()>; 2],
}

impl Claiming {
    /// What was claimed and not taken is dropped here, and so to be given back. Nothing more is claimed.
    fn close(&mut self) {
        self.arrivals.close();
        while self.arrivals.try_recv().is_ok() {}
    }
}

impl Drop for Claiming {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Intake {
    pub(super) fn new(subscription: Box<dyn Subscription>, room: Option<Arc<Room>>) -> Self {
        let room = room.map(|room| {
            let (sender, arrivals) = unbounded_channel();
            let tasks = [
                tokio::spawn(room.clone().poll(sender)),
                tokio::spawn(room.clone().keep()),
            ];
            Claiming {
                room,
                arrivals,
                tasks,
            }
        });
        Self { subscription, room }
    }

    /// As [`Subscription::receive`]. Cancel safe.
    pub(super) async fn receive(&mut self, count_max: usize) -> Result<Vec<Arrival>> {
        let of_broker = |delivery: Delivery| Arrival {
            delivery,
            ticket: None,
        };
        let received = match &mut self.room {
            None => self.subscription.receive(count_max).await?,
            Some(claiming) => {
                if claiming.arrivals.is_empty() {
                    claiming.room.want(count_max);
                }
                let mut arrived = Vec::new();
                tokio::select! {
                    received = self.subscription.receive(count_max) => received?,
                    count = claiming.arrivals.recv_many(&mut arrived, count_max) => {
                        if count == 0 {
                            let detail = "the task that asks the waiting room ended by itself";
                            return Err(Error::new(ErrorKind::Other, "consume", detail));
                        }
                        return Ok(arrived);
                    }
                }
            }
        };
        Ok(received.into_iter().map(of_broker).collect())
    }

    pub(super) fn health(&self) -> Health {
        self.subscription.health()
    }

    /// Claims nothing more, and gives back what nobody works on, while what runs comes to its end.
    pub(super) async fn claim_no_more(&mut self) {
        if let Some(claiming) = &mut self.room {
            claiming.close();
            let given_back = claiming.room.give_back_dropped();
            let _ = tokio::time::timeout(LEAVE_MAX, given_back).await;
        }
    }

    pub(super) async fn close(mut self, deadline: Duration) -> Result<()> {
        if let Some(mut claiming) = self.room.take() {
            for task in &mut claiming.tasks {
                task.abort();
                let _ = task.await;
            }
            claiming.close();
            claiming.room.leave(deadline.min(LEAVE_MAX)).await;
        }
        self.subscription.close(deadline).await
    }
}
