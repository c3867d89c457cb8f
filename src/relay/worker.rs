//! A worker: strictly fetch, publish, settle, over its own lanes.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::watch;
use tracing::{Instrument, debug, warn};

use crate::backoff::Delays;
use crate::broker::Publisher;
use crate::error::Result;
use crate::event;
use crate::lane::{LANES, Lane};
use crate::readiness::Pulse;
use crate::store::{
    AsideState, DestinationControl, FetchRequest, Lease, OutboxReader, Page, PendingMessage, Place,
    Settled, SettlementBatch, Verdict,
};

use super::config::{LEASE_MARGIN, RelayConfig};
use super::destinations::{Destinations, reason};
use super::held::{Claim, Held};
use super::judge::{Judge, parked};
use super::late::{Landed, Late};
use super::pace::IdlePoll;
use super::plan::{Group, ScopesOf, groups};
use super::publish::{Outcomes, publish};
use super::status::Reporter;
use super::triage::{Triage, put_off, triage};

/// Tries of the settling statement before the batch is given up and read again (duplicates, never loss). More than a relay
/// has connections: after a server's restart each of them is found broken once.
const SETTLE_TRIES: u32 = 12;

pub(super) struct Worker {
    pub(super) index: usize,
    pub(super) config: RelayConfig,
    pub(super) publisher: Arc<dyn Publisher>,
    pub(super) reader: Box<dyn OutboxReader>,
    pub(super) held: Arc<Held>,
    pub(super) woken: watch::Receiver<()>,
    pub(super) status: Reporter,
    pub(super) pulse: Pulse,
    /// What operators said about destinations, as the keeper last read it.
    pub(super) controls: watch::Receiver<Arc<[DestinationControl]>>,
    pub(super) destinations: Destinations,
    pub(super) late: Late,
}

/// How a cycle ended, and so how long the worker waits.
#[derive(Debug, PartialEq, Eq)]
enum Cycle {
    /// Something moved: go on at once.
    Moved,
    /// Nothing was there, nothing is ours, or nothing may go.
    Idle,
    /// The broker or the database is in trouble: back off.
    Trouble,
}

impl Worker {
    pub(super) async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let mut idle = IdlePoll::new(self.config.idle_poll_max);
        let mut trouble = self.config.backoff.delays(fastrand::u64(..));
        let mut landed = None;
        while !*stop.borrow() {
            self.pulse.beat();
            self.woken.mark_unchanged();
            let mut resting = false;
            let began = Instant::now();
            let cycle = match landed.take() {
                Some(landed) => self.land(landed).await,
                None => self.cycle().await,
            };
            tell(&cycle, began.elapsed());
            let pause = match cycle {
                Ok(Cycle::Moved) => {
                    idle.busy();
                    trouble.reset();
                    Duration::ZERO
                }
                Ok(Cycle::Idle) => {
                    resting = true;
                    idle.pause()
                }
                Ok(Cycle::Trouble) => trouble.next_delay(),
                Err(error) => {
                    warn!(worker = self.index, %error, "outbox could not be read or settled");
                    self.status.database(Some(&error));
                    trouble.next_delay()
                }
            };
            if pause.is_zero() && self.late.is_empty() {
                continue;
            }
            self.pulse.rest(pause);
            tokio::select! {
                biased;
                ended = self.late.landed(), if !self.late.is_empty() => landed = ended,
                () = tokio::time::sleep(pause) => {}
                () = self.held.gained.notified() => {}
                // What came with the news may commit a little later: the polls begin again at their quickest. A pause
                // after trouble is never cut short.
                Ok(()) = self.woken.changed(), if resting => idle.busy(),
                _ = stop.wait_for(|stop| *stop) => {}
            }
        }
        // What is on its way is settled, as long as the stop allows.
        if let Some(landed) = landed {
            self.finish(landed).await;
        }
        while let Some(landed) = self.late.landed().await {
            self.finish(landed).await;
        }
    }

    async fn finish(&mut self, landed: Landed) {
        if let Err(error) = self.land(landed).await {
            warn!(worker = self.index, %error, "late messages could not be settled and will be sent again");
        }
    }

    async fn cycle(&mut self) -> Result<Cycle> {
        let deadline = self.publisher.capabilities().publish_deadline;
        let now = Instant::now();
        // In hand until this cycle is over: a lane is released, or goes to another worker, only after that.
        let claim = self
            .held
            .claim(self.index, self.config.workers, deadline + LEASE_MARGIN);
        if claim.leases().is_empty() {
            if self.held.all().is_empty() {
                self.destinations.forget();
                self.status.at_rest();
            }
            // Its lanes may be with another worker and come back: the reader is told, and remembers nothing of them.
            let none = FetchRequest {
                leases: Vec::new(),
                rows_max: 0,
                bytes_max: 0,
                closed: Vec::new(),
            };
            self.reader.fetch(&none).await?;
            return Ok(Cycle::Idle);
        }
        let controls = self.controls.borrow().clone();
        // Each lane has its part of a rate, so that all relays together keep it.
        let share = claim.leases().len() as f64 / f64::from(LANES);
        let request = FetchRequest {
            leases: claim.leases().to_vec(),
            rows_max: self.config.batch_rows_max,
            bytes_max: self.config.batch_bytes_max,
            closed: self.destinations.gate(&controls, share, now).closed(),
        };
        let page = self.reader.fetch(&request).await?;
        self.status.database(None);
        if page.rows.is_empty() && page.unreadable.is_empty() {
            return Ok(Cycle::Idle);
        }
        let span = event::page_span(&self.config.name, self.index, page.rows.len());
        self.work(page, claim, &controls, share, request.leases)
            .instrument(span)
            .await
    }

    /// Sorts, publishes and settles a page.
    async fn work(
        &mut self,
        page: Page,
        mut claim: Claim,
        controls: &[DestinationControl],
        share: f64,
        leases: Vec<Lease>,
    ) -> Result<Cycle> {
        let deadline = self.publisher.capabilities().publish_deadline;
        let Page {
            rows,
            unreadable,
            full,
        } = page;
        let read: BTreeSet<Lane> = (rows.iter().map(|row| row.place.lane))
            .chain(unreadable.iter().map(|(place, _)| place.lane))
            .collect();
        claim.keep_only(&read);
        let rows = certain(rows, &read, &claim, deadline);
        debug!(worker = self.index, rows = rows.len(), full, "page read");
        let Triage {
            send,
            set_aside,
            parted,
        } = self.sort(rows, controls, share);
        let mut verdicts: Vec<(Place, Verdict)> = set_aside
            .into_iter()
            .map(|(place, aside)| (place, Verdict::SetAside(aside)))
            .collect();
        for (place, error) in unreadable {
            warn!(?place, %error, "row that cannot be read is parked");
            let aside = parked("unreadable", &error, "");
            verdicts.push((place, Verdict::SetAside(aside)));
        }
        let groups = groups(send, &ScopesOf(&self.publisher));
        let (order, patience) = (self.config.order, self.config.patience);
        self.pulse.rest(patience);
        let (finished, unfinished) = publish(&self.publisher, groups, order, patience).await;
        for publishing in unfinished {
            let group = &publishing.group;
            warn!(
                scope = group.scope,
                "no answer yet; its messages are set aside until there is one"
            );
            verdicts.extend(set_aside_late(group));
            let names = group.messages.iter().map(|sent| &sent.message.destination);
            self.destinations.departed(&group.scope, names);
            self.late.depart(publishing, &claim);
        }
        self.pulse.beat();
        self.conclude(finished, verdicts, parted, leases).await
    }

    /// Sorts a page by what may go now.
    fn sort(
        &mut self,
        rows: Vec<PendingMessage>,
        controls: &[DestinationControl],
        share: f64,
    ) -> Triage {
        let mut gate = self.destinations.gate(controls, share, Instant::now());
        let plain = |row: &PendingMessage| !row.place.is_aside() && row.ahead.is_empty();
        if gate.is_open() && rows.iter().all(plain) {
            return Triage {
                send: rows,
                ..Triage::default()
            };
        }
        triage(
            rows,
            self.config.dead_head,
            &ScopesOf(&self.publisher),
            |destination, scope, wanted| gate.admit(destination, scope, wanted),
        )
    }

    /// Settles a publish that ended after its page: all its rows are set aside by now.
    async fn land(&mut self, landed: Landed) -> Result<Cycle> {
        let Landed {
            group,
            mut outcomes,
            claim,
        } = landed;
        self.destinations.landed(&group.scope);
        let places = group.places.iter();
        let set_aside = Group {
            scope: group.scope.clone(),
            places: places
                .map(|place| Place::aside(place.lane, place.position))
                .collect(),
            messages: group.messages.clone(),
        };
        outcomes.resize_with(set_aside.places.len(), || None);
        let finished = vec![(Arc::new(set_aside), outcomes)];
        let leases = claim.leases().to_vec();
        self.conclude(finished, Vec::new(), HashSet::new(), leases)
            .await
    }

    /// Judges what came back, and settles it with the verdicts that stood before.
    async fn conclude(
        &mut self,
        finished: Vec<(Arc<Group>, Outcomes)>,
        verdicts: Vec<(Place, Verdict)>,
        parted: HashSet<(String, Bytes)>,
        leases: Vec<Lease>,
    ) -> Result<Cycle> {
        let mut judge = Judge {
            config: &self.config,
            destinations: &mut self.destinations,
            status: &self.status,
            parted,
            verdicts,
            broker: None,
        };
        for (group, outcomes) in finished {
            judge.judge(&group, outcomes);
        }
        let Judge {
            verdicts, broker, ..
        } = judge;
        if let Some(error) = &broker {
            warn!(worker = self.index, %error, "broker in trouble; rows stay pending");
            self.status.broker(Some(error));
        } else if verdicts
            .iter()
            .any(|(_, verdict)| *verdict == Verdict::Confirmed)
        {
            // Only a message that got through shows that the trouble is over.
            self.status.broker(None);
        }
        let moved = verdicts.iter().any(|(_, verdict)| !is_put_off(verdict));
        if !verdicts.is_empty() {
            let settled = self.settle(&SettlementBatch { leases, verdicts }).await?;
            if settled.fenced > 0 {
                event::count(&event::RELAY_FENCED, &[], settled.fenced as u64);
                warn!(
                    worker = self.index,
                    fenced = settled.fenced,
                    "a lane changed hands; its rows may be sent again"
                );
            }
        }
        Ok(match (broker, moved) {
            (Some(_), _) => Cycle::Trouble,
            (None, true) => Cycle::Moved,
            (None, false) => Cycle::Idle,
        })
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
                    let pause = delays.next_delay();
                    self.pulse.rest(pause);
                    tokio::time::sleep(pause).await;
                }
                result => {
                    self.status.database(result.as_ref().err());
                    return result;
                }
            }
        }
    }
}

fn tell(cycle: &Result<Cycle>, took: Duration) {
    let result = match cycle {
        Ok(Cycle::Moved) => "moved",
        Ok(Cycle::Idle) => "idle",
        Ok(Cycle::Trouble) | Err(_) => "trouble",
    };
    event::observe(&event::RELAY_CYCLE, &[event::Value::Word(result)], took);
}

/// A page of these alone had nothing for anybody else. Taking it easy then keeps a broker that stalls for seconds from
/// turning a whole backlog over.
fn is_put_off(verdict: &Verdict) -> bool {
    matches!(verdict, Verdict::SetAside(aside) if matches!(aside.state, AsideState::Waiting | AsideState::Held))
}

/// A slow read may have eaten a lease: publish only what is certain to be ours until it is settled.
fn certain(
    mut rows: Vec<PendingMessage>,
    read: &BTreeSet<Lane>,
    claim: &Claim,
    deadline: Duration,
) -> Vec<PendingMessage> {
    let lasts = |lane: &&Lane| claim.lasts(**lane, deadline + LEASE_MARGIN);
    let certain: BTreeSet<_> = read.iter().filter(lasts).collect();
    if certain.len() < read.len() {
        rows.retain(|row| certain.contains(&row.place.lane));
    }
    rows
}

/// Rows of a publish that goes on: others must not wait for them.
fn set_aside_late(group: &Group) -> impl Iterator<Item = (Place, Verdict)> {
    let pending = group.places.iter().filter(|place| !place.is_aside());
    pending.map(|place| {
        let aside = put_off(AsideState::Waiting, reason::SLOW, &group.scope);
        (*place, Verdict::SetAside(aside))
    })
}
