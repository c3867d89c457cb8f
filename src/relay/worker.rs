//! A worker: strictly fetch, publish, settle, over its own lanes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::{debug, info, warn};

use crate::backoff::Delays;
use crate::broker::{FailureScope, PublishOutcome, Publisher, RejectionScope};
use crate::error::{Error, Result, cut};
use crate::store::{FetchRequest, OutboxReader, Page, Settled, SettlementBatch, Verdict};
use crate::story::{ERROR_BYTES_MAX, Reason};

use super::config::{LEASE_MARGIN, RelayConfig};
use super::held::{Claim, Held};
use super::pace::{Destinations, IdlePoll, Trouble};
use super::publish::{Published, publish};
use super::status::StatusBoard;

/// Tries of the settling statement before the batch is given up and read again (duplicates, never loss).
const SETTLE_TRIES: u32 = 5;

pub(super) struct Worker {
    pub(super) index: usize,
    pub(super) config: RelayConfig,
    pub(super) publisher: Arc<dyn Publisher>,
    pub(super) reader: Box<dyn OutboxReader>,
    pub(super) held: Arc<Held>,
    pub(super) status: Arc<StatusBoard>,
}

/// How a cycle ended, and so how long the worker waits.
#[derive(Debug, PartialEq, Eq)]
enum Cycle {
    /// Something moved: go on at once.
    Moved,
    /// Nothing was there, or nothing is ours.
    Idle,
    /// The broker or the database is in trouble: back off.
    Trouble,
}

impl Worker {
    pub(super) async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let mut idle = IdlePoll::new(self.config.idle_poll_max);
        let mut trouble = self.config.backoff.delays(fastrand::u64(..));
        let mut destinations = Destinations::new(self.config.backoff);
        while !*stop.borrow() {
            let pause = match self.cycle(&mut destinations).await {
                Ok(Cycle::Moved) => {
                    idle.busy();
                    trouble.reset();
                    continue;
                }
                Ok(Cycle::Idle) => idle.pause(),
                Ok(Cycle::Trouble) => trouble.next_delay(),
                Err(error) => {
                    warn!(worker = self.index, %error, "outbox could not be read or settled");
                    self.status.database(Some(&error));
                    trouble.next_delay()
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.held.gained.notified() => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
        }
    }

    async fn cycle(&mut self, destinations: &mut Destinations) -> Result<Cycle> {
        let deadline = self.publisher.capabilities().publish_deadline;
        let fetch_started = Instant::now();
        // In hand until this cycle is over: a lane is released, or goes to another worker, only after that.
        let mut claim = self.claim(deadline);
        if claim.leases().is_empty() {
            return Ok(Cycle::Idle);
        }
        let request = FetchRequest {
            leases: claim.leases().to_vec(),
            rows_max: self.config.batch_rows_max,
            bytes_max: self.config.batch_bytes_max,
            closed: destinations.closed(fetch_started),
        };
        let Page {
            mut rows,
            unreadable,
            full,
        } = self.reader.fetch(&request).await?;
        if rows.is_empty() && unreadable.is_empty() {
            return Ok(Cycle::Idle);
        }
        let read: BTreeSet<_> = (rows.iter().map(|row| row.lane))
            .chain(unreadable.iter().map(|(lane, ..)| *lane))
            .collect();
        claim.keep_only(&read);
        // A slow read may have eaten the lease: publish only what is certain to be ours until it is settled.
        let certain = read.into_iter();
        let certain: BTreeSet<_> = certain
            .filter(|lane| claim.lasts(*lane, deadline + LEASE_MARGIN))
            .collect();
        rows.retain(|row| certain.contains(&row.lane));
        debug!(worker = self.index, rows = rows.len(), full, "page read");
        let published = publish(&*self.publisher, rows, self.config.order, deadline).await;
        let (mut verdicts, broker_trouble) = self.judge(published, destinations);
        for (lane, position, error) in unreadable {
            warn!(lane, position, %error, "row that cannot be read is parked");
            verdicts.push((lane, position, parked("unreadable", &error)));
        }
        let moved = !verdicts.is_empty();
        if moved {
            let batch = SettlementBatch {
                leases: request.leases,
                verdicts,
            };
            let settled = self.settle(&batch).await?;
            if settled.fenced > 0 {
                warn!(
                    worker = self.index,
                    fenced = settled.fenced,
                    "a lane changed hands; its rows may be sent again"
                );
            }
        }
        Ok(match (broker_trouble, moved) {
            (true, _) => Cycle::Trouble,
            (false, true) => Cycle::Moved,
            (false, false) => Cycle::Idle,
        })
    }

    fn claim(&self, deadline: Duration) -> Claim {
        self.held
            .claim(self.index, self.config.workers, deadline + LEASE_MARGIN)
    }

    /// Turns outcomes into verdicts, and notes which destination, or the broker, is in trouble.
    fn judge(
        &self,
        published: Vec<Published>,
        destinations: &mut Destinations,
    ) -> (Vec<(i32, i64, Verdict)>, bool) {
        let now = Instant::now();
        let mut verdicts = Vec::with_capacity(published.len());
        let mut broker: Option<Error> = None;
        for Published {
            place: (lane, position),
            destination,
            outcome,
        } in published
        {
            match outcome {
                PublishOutcome::Confirmed => {
                    if destinations.confirmed(&destination) {
                        info!(destination, "destination takes messages again");
                        self.status.destination(&destination, None);
                    }
                    verdicts.push((lane, position, Verdict::Confirmed));
                }
                PublishOutcome::Rejected {
                    scope: RejectionScope::Message,
                    error,
                } => {
                    warn!(lane, position, destination, %error, "message parked");
                    verdicts.push((lane, position, parked("rejected", &error)));
                }
                PublishOutcome::Rejected { error, .. }
                | PublishOutcome::Failed {
                    scope: FailureScope::Destination,
                    error,
                    ..
                } => match destinations.failed(&destination, now) {
                    Trouble::New => {
                        warn!(destination, %error, "destination in trouble; its messages wait");
                        self.status.destination(&destination, Some(&error));
                    }
                    Trouble::Known => debug!(destination, %error, "destination still in trouble"),
                    Trouble::TooMany => {
                        broker.get_or_insert(error);
                    }
                },
                PublishOutcome::Failed { error, .. } => {
                    broker.get_or_insert(error);
                }
                PublishOutcome::Withheld => {}
            }
        }
        if let Some(error) = &broker {
            warn!(worker = self.index, %error, "broker in trouble; rows stay pending");
            self.status.broker(Some(error));
        } else if verdicts
            .iter()
            .any(|(.., verdict)| *verdict == Verdict::Confirmed)
        {
            // Only a message that got through shows that the trouble is over.
            self.status.broker(None);
        }
        (verdicts, broker.is_some())
    }

    /// Settles, trying again while the database is in trouble: giving up means sending everything again.
    async fn settle(&mut self, batch: &SettlementBatch) -> Result<Settled> {
        let mut delays: Delays = self.config.backoff.delays(fastrand::u64(..));
        let mut tries = 0;
        loop {
            tries += 1;
            match self.reader.settle(batch).await {
                Err(error) if error.is_transient() && tries < SETTLE_TRIES => {
                    warn!(worker = self.index, %error, tries, "batch could not be settled yet");
                    self.status.database(Some(&error));
                    tokio::time::sleep(delays.next_delay()).await;
                }
                result => {
                    self.status.database(result.as_ref().err());
                    return result;
                }
            }
        }
    }
}

fn parked(reason: &str, error: &Error) -> Verdict {
    let text = error.to_string().replace('\0', "\u{fffd}");
    Verdict::Parked {
        reason: Reason::new(reason),
        error: cut(&text, ERROR_BYTES_MAX).to_owned(),
    }
}
