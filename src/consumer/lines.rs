//! Order through the waiting room: what follows behind a message of its key that waits, and what waits in its place.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tracing::debug;

use crate::envelope::Outgoing;
use crate::error::Result;
use crate::ladder::DeadHead;
use crate::store::{InboxStore, Line, Waiting};
use crate::story::Story;

use super::form::Form;
use super::job::{Job, Lot, ended_its_process};
use super::process::{Leave, Processor};
use super::room::Room;
use super::tell::Became;

/// What may be handled now, and what is to be handled again, alone.
pub(super) enum Admitted {
    Now(Vec<Job>),
    Alone(Vec<Job>),
    /// The consumer stops, or none of them is ours any more.
    None,
}

impl<S, F> Processor<S, F>
where
    S: InboxStore,
    F: Form<S>,
{
    /// Before any attempt: where the ladder keeps an order, the waiting room is asked what came before. No connection of a
    /// handler is held meanwhile.
    pub(super) async fn admit(
        &self,
        jobs: Vec<Job>,
        leave: &mut Leave<S::Transaction>,
    ) -> Admitted {
        let keeps_order = self.copies.ladder.needs_affinity();
        if let Some(place) = leave.place.as_mut().filter(|_| keeps_order) {
            place.give_transaction_back();
        }
        match &self.copies.room {
            Some(room) if self.copies.ladder.dead_head().is_some() => {
                self.follow_lines(room, jobs, leave).await
            }
            Some(room) if self.copies.ladder.is_in_place() => self.recall(room, jobs, leave).await,
            _ => Admitted::Now(jobs),
        }
    }

    /// What has a key that somebody waits of goes behind, and is dealt with.
    async fn follow_lines(
        &self,
        room: &Arc<Room>,
        jobs: Vec<Job>,
        leave: &mut Leave<S::Transaction>,
    ) -> Admitted {
        let consumer = &self.inbox.consumer;
        let lines: Vec<Line> = jobs.iter().filter_map(line_of).collect();
        if lines.is_empty() {
            return Admitted::Now(jobs);
        }
        let occupied = || room.store.occupied(consumer, &lines);
        let Some(occupied) = self.until_answered(&jobs, leave, occupied).await else {
            return Admitted::None;
        };
        let mut go = Vec::with_capacity(jobs.len());
        for job in jobs {
            if !line_of(&job).is_some_and(|line| occupied.contains(&line)) {
                go.push(job);
                continue;
            }
            let story = job.message.incoming.story.clone();
            let waiting = job.waiting(story.taken(consumer, &job.origin));
            let follow = || room.store.follow(consumer, &waiting);
            match self.patiently(&job, leave, follow).await {
                Some(true) => self.acknowledge(job, Became::Behind).await,
                Some(false) => go.push(job),
                None if job.receipt.is_current() => return Admitted::None,
                None => {}
            }
        }
        Admitted::Now(go)
    }

    /// What waited in its place when another run of it ended goes on where that was.
    async fn recall(
        &self,
        room: &Arc<Room>,
        mut jobs: Vec<Job>,
        leave: &mut Leave<S::Transaction>,
    ) -> Admitted {
        let consumer = &self.inbox.consumer;
        let is_asked = |job: &Job| !job.recalled && job.ticket.is_none() && job.lot.is_work();
        let asked: Vec<(usize, [u8; 16])> = jobs
            .iter()
            .enumerate()
            .filter(|(_, job)| is_asked(job))
            .map(|(at, job)| (at, job.waiting(job.story().clone()).note_identity()))
            .collect();
        if !asked.is_empty() {
            let identities: Vec<[u8; 16]> = asked.iter().map(|(_, identity)| *identity).collect();
            let recall = || room.store.recall(consumer, &identities);
            let Some(mut notes) = self.until_answered(&jobs, leave, recall).await else {
                return Admitted::None;
            };
            for (at, identity) in asked {
                let job = &mut jobs[at];
                job.recalled = true;
                let note = notes.iter().position(|note| note.identity == identity);
                if let Some(note) = note.map(|at| notes.swap_remove(at)) {
                    job.go_on(note.story, note.due_in);
                }
            }
        }
        if let [job] = &mut *jobs {
            return match job.pause.take() {
                Some(pause) => self.stay(pause, jobs, leave).await,
                None => Admitted::Now(jobs),
            };
        }
        if jobs.iter().any(|job| job.pause.is_some()) {
            // In their order, so that nothing passes what waits.
            return Admitted::Alone(jobs);
        }
        Admitted::Now(jobs)
    }

    /// Waits, and occupies no handler meanwhile. What went to another member comes back early, to be dropped.
    async fn stay(
        &self,
        pause: Duration,
        jobs: Vec<Job>,
        leave: &mut Leave<S::Transaction>,
    ) -> Admitted {
        leave.makes_no_attempt();
        drop(leave.place.take());
        if self.wait_while(|| any_is_ours(&jobs), pause, leave).await {
            return Admitted::None;
        }
        Admitted::Alone(jobs)
    }

    /// Takes hold again of what was claimed in the waiting room, unless another member has it by now: while a handler holds a
    /// database's only lock, nobody renews its claim.
    pub(super) async fn regain(&self, job: &Job, leave: &mut Leave<S::Transaction>) {
        if let (Some(room), Some(ticket)) = (&self.copies.room, job.ticket) {
            self.ask_while(|| true, leave, || room.regain(ticket.claim))
                .await;
        }
    }

    /// Forgets the note of a message that has come to its end. One that stays is cleaned up by its age.
    pub(super) async fn forget(&self, note: [u8; 16]) {
        if let Some(room) = &self.copies.room
            && let Err(error) = room.store.forget(&self.inbox.consumer, &note).await
        {
            debug!(consumer = self.inbox.consumer, %error, "the note of a message that has ended stays");
        }
    }

    /// Asks until the database answers; `None` when the consumer stops, or none of these is ours any more.
    async fn until_answered<T, A>(
        &self,
        jobs: &[Job],
        leave: &mut Leave<S::Transaction>,
        ask: impl Fn() -> A,
    ) -> Option<T>
    where
        A: Future<Output = Result<T>>,
    {
        self.ask_while(|| any_is_ours(jobs), leave, ask).await
    }
}

fn any_is_ours(jobs: &[Job]) -> bool {
    jobs.iter().any(|job| job.receipt.is_current())
}

/// The line that a delivery of the broker has to ask for.
fn line_of(job: &Job) -> Option<Line> {
    let message = &job.message.incoming.message;
    let key = message.key.as_deref()?;
    (job.ticket.is_none() && job.lot.is_work()).then(|| Line::of(&job.topic, key))
}

impl Lot {
    /// Whether the handler is to see it.
    pub(super) const fn is_work(self) -> bool {
        matches!(self, Self::Work | Self::Suspect | Self::Watched)
    }
}

impl Job {
    fn story(&self) -> &Story {
        &self.message.incoming.story
    }

    /// What the waiting room keeps of it.
    pub(super) fn waiting(&self, story: Story) -> Waiting {
        let message = &self.message.incoming.message;
        let known_as = match &*self.message.key {
            "" => message.id.as_str(),
            key => key,
        };
        Waiting {
            source: self.topic.clone(),
            known_as: known_as.to_owned(),
            letter: Outgoing {
                message: message.clone(),
                story,
            },
        }
    }

    /// The identity of the note about it, if there is one.
    pub(super) fn note(&self) -> Option<[u8; 16]> {
        self.noted
            .then(|| self.waiting(self.story().clone()).note_identity())
    }

    /// Goes on where another run of it came to. What is suspected of having ended that run stays so, whatever it failed at before.
    fn go_on(&mut self, story: Story, pause: Duration) {
        let lot = self.lot;
        self.stay(story, pause);
        if lot == Lot::Suspect {
            self.lot = lot;
        }
    }

    /// Its next attempt is due after `pause`, in its place.
    pub(super) fn stay(&mut self, story: Story, pause: Duration) {
        self.lot = if ended_its_process(&story) {
            Lot::Suspect
        } else {
            Lot::Work
        };
        self.message.incoming.story = story;
        self.tries = 0;
        self.noted = true;
        self.pause = (!pause.is_zero()).then_some(pause);
    }
}

impl super::copies::Copies {
    /// What lets a message that is in work elsewhere wait with its key, where keys wait.
    pub(super) fn in_line(&self, job: &Job) -> Option<(&Room, Waiting)> {
        self.ladder.dead_head()?;
        let has_key = job.message.incoming.message.key.is_some();
        let room = self
            .room
            .as_deref()
            .filter(|_| has_key && job.ticket.is_none())?;
        let story = job.story().clone().taken(&self.consumer, &job.origin);
        Some((room, job.waiting(story)))
    }

    /// What a dead letter does to those of its key behind it. Safe to repeat.
    pub(super) async fn close_line(&self, job: &Job, story: &Story) -> Result<()> {
        let parked = job.ticket.is_some_and(|ticket| ticket.parked);
        let (Some(room), Some(dead_head)) = (&self.room, self.ladder.dead_head()) else {
            return Ok(());
        };
        let has_key = job.message.incoming.message.key.is_some();
        let claim = job.ticket.map(|ticket| ticket.claim);
        match (dead_head, claim) {
            _ if parked || !has_key => Ok(()),
            (DeadHead::Hold, claim) => {
                let waiting = job.waiting(story.clone());
                room.store.hold(&self.consumer, &waiting, claim).await
            }
            (DeadHead::Park, Some(claim)) => room.store.park(claim).await.map(drop),
            // Nobody waits behind what never waited itself.
            (DeadHead::Park, None) | (DeadHead::Skip, _) => Ok(()),
        }
    }
}
