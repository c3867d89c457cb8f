//! One process at one run: entries out in order of position, each leaving the table only after the broker's confirm.

use crate::broker::{PublishOutcome, RejectionScope, Stored};
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind, Result};
use crate::store::{LetterEntry, LetterOutcome, RunStep, WholeLetter};

use super::Redrive;
use super::canary::Sent;
use super::judge::Refusal;
use super::pace::Pace;
use super::run::{OPERATION, Run};

/// One process at one run.
pub(super) struct Worker<'a, F> {
    desk: &'a Redrive,
    operator: &'a str,
    /// Those sent first, by this process, until they are proved.
    canaries: Vec<Sent>,
    /// The last entry that there was before any of them.
    before: i64,
    pub(super) run: Run,
    pace: Pace,
    progress: F,
}

/// An entry on its way.
struct Item {
    entry: LetterEntry,
    copy: Result<Outgoing, Refusal>,
    ended: Option<Ended>,
    /// The broker may have it, although it did not say so.
    perhaps: bool,
}

impl Item {
    /// One that the broker refuses as it is never was stored; of one that the rules refuse now, nobody knows what an earlier
    /// process did.
    const fn may_be_on_its_way(&self) -> bool {
        self.perhaps && self.ended.is_none()
    }
}

enum Ended {
    Confirmed,
    Rejected(String),
}

impl<'a, F: FnMut(&Run) + Send> Worker<'a, F> {
    pub(super) const fn new(desk: &'a Redrive, operator: &'a str, run: Run, progress: F) -> Self {
        Self {
            desk,
            operator,
            canaries: Vec::new(),
            before: 0,
            run,
            pace: Pace::new(desk.config.rate_max),
            progress,
        }
    }

    /// To the end, or to what was seen instead of handled canaries.
    pub(super) async fn go(&mut self) -> Result<Option<String>> {
        let ways: Vec<String> = self.desk.sources.iter().map(|to| self.way_to(to)).collect();
        let checked = self.desk.patiently(|| self.desk.publisher.check(&ways));
        checked.await?;
        if !self.run.row.proved {
            self.before = self
                .desk
                .patiently(|| self.desk.store.last_position())
                .await?;
        }
        loop {
            let letters = self.page().await?;
            let at_end = letters.is_empty();
            if !at_end {
                self.batch(letters).await?;
            }
            if let Some(seen) = self.prove(at_end).await? {
                return Ok(Some(seen));
            }
            if at_end {
                return Ok(None);
            }
        }
    }

    fn way_to(&self, source: &str) -> String {
        let way = self.desk.dead_letters.way_back(source, &self.desk.consumer);
        way.destination
    }

    /// How many canaries are still to be sent.
    fn canaries_left(&self) -> Option<usize> {
        let canary = self.run.order.canary.filter(|_| !self.run.row.proved);
        canary.map(|canary| canary.count.saturating_sub(self.canaries.len()))
    }

    async fn page(&self) -> Result<Vec<WholeLetter>> {
        let (desk, row) = (self.desk, &self.run.row);
        let canaries = self.canaries_left().unwrap_or(usize::MAX);
        let count_max = desk.config.batch_max.min(self.pace.burst()).min(canaries);
        desk.patiently(|| {
            desk.store.letters(
                &desk.consumer,
                &self.run.order.filter,
                (row.cursor, row.end),
                count_max.max(1),
                desk.config.batch_bytes_max,
            )
        })
        .await
    }

    /// Sends one batch and settles it.
    async fn batch(&mut self, letters: Vec<WholeLetter>) -> Result<()> {
        let wait = self.pace.wait(self.desk.clock.now());
        if !wait.is_zero() {
            self.desk.clock.sleep(wait).await;
        }
        let mut items = self.judged(letters);
        self.take_in_hand(&mut items).await?;
        let trouble = self.send(&mut items).await;
        let step = self.step(&items);
        let row = &self.run.row;
        let settled = self
            .desk
            .patiently(|| self.desk.store.settle_run(row, &step));
        if !settled.await? {
            return Err(self.desk.fenced(row.id).await);
        }
        let row = &mut self.run.row;
        row.cursor = step.cursor;
        row.in_hand = step.in_hand;
        (row.sent, row.refused, row.rejected) = (step.sent, step.refused, step.rejected);
        if !row.proved {
            let sent = |item: Item| match (item.copy, item.ended) {
                (Ok(copy), Some(Ended::Confirmed)) => Some(Sent::of(copy, &self.desk.inbox_key)),
                _ => None,
            };
            self.canaries.extend(items.into_iter().filter_map(sent));
        }
        (self.progress)(&self.run);
        trouble.map_or(Ok(()), Err)
    }

    fn judged(&self, letters: Vec<WholeLetter>) -> Vec<Item> {
        let rules = self.desk.rules(&self.run.order);
        let now = self.desk.clock.now();
        let item = |WholeLetter { entry, message }| {
            let copy = rules.judge(&entry, now).and_then(|source| {
                let mut message = message.map_err(|_| Refusal::Unreadable)?;
                message.destination = self.way_to(source);
                let story = entry.story.redriven();
                Ok(Outgoing { message, story })
            });
            Item {
                // Another process may have sent it before this one took the run.
                perhaps: self.run.row.in_hand.contains(&entry.position),
                entry,
                copy,
                ended: None,
            }
        };
        letters.into_iter().map(item).collect()
    }

    /// Tells before anything is sent what is about to be, and lets go of what left meanwhile: from here on nobody changes an
    /// entry of which a copy may be on its way.
    async fn take_in_hand(&mut self, items: &mut Vec<Item>) -> Result<()> {
        let going = items.iter().filter(|item| item.copy.is_ok());
        let going: Vec<i64> = going.map(|item| item.entry.position).collect();
        if going.is_empty() {
            return Ok(());
        }
        let row = &self.run.row;
        let told = self
            .desk
            .patiently(|| self.desk.store.take_in_hand(row, &going));
        let Some(there) = told.await? else {
            return Err(self.desk.fenced(row.id).await);
        };
        items.retain(|item| item.copy.is_err() || there.contains(&item.entry.position));
        Ok(())
    }

    /// Sends what may go, until the broker said its word on each or was tried often enough: what it said then.
    async fn send(&mut self, items: &mut [Item]) -> Option<Error> {
        let mut delays = self.desk.delays();
        for attempt in 1.. {
            let open = |item: &&mut Item| item.copy.is_ok() && item.ended.is_none();
            let mut open: Vec<&mut Item> = items.iter_mut().filter(open).collect();
            let batch: Vec<Outgoing> = (open.iter())
                .filter_map(|item| item.copy.as_ref().ok().cloned())
                .collect();
            if batch.is_empty() {
                return None;
            }
            let mut outcomes = self.desk.publisher.publish(&batch).await.into_iter();
            self.pace.gone(batch.len(), self.desk.clock.now());
            let mut trouble = None;
            let mut shrunk = false;
            for item in &mut open {
                match outcomes.next() {
                    Some(PublishOutcome::Confirmed) => item.ended = Some(Ended::Confirmed),
                    Some(PublishOutcome::Rejected {
                        scope: RejectionScope::Message,
                        error,
                    }) => match &mut item.copy {
                        // There may be room for the message, only not for its story.
                        Ok(copy) if copy.story != copy.story.shrunk() => {
                            copy.story = copy.story.shrunk();
                            shrunk = true;
                        }
                        _ => item.ended = Some(Ended::Rejected(error.to_string())),
                    },
                    outcome => {
                        item.perhaps |= may_be_stored(outcome.as_ref());
                        trouble = trouble.or_else(|| Some(unsent(item, outcome)));
                    }
                }
            }
            if trouble.is_some() && attempt >= self.desk.config.attempts_max {
                return trouble;
            }
            if trouble.is_some() {
                self.desk.clock.sleep(delays.next_delay()).await;
            } else if !shrunk {
                return None;
            }
        }
        None
    }

    /// What a batch changes: the run goes on up to the first entry whose fate is open.
    fn step(&self, items: &[Item]) -> RunStep {
        let row = &self.run.row;
        let mut step = RunStep {
            operator: self.operator.to_owned(),
            cursor: row.cursor,
            in_hand: row.in_hand.clone(),
            leaving: Vec::with_capacity(items.len()),
            sent: row.sent,
            refused: row.refused,
            rejected: row.rejected,
            proved: row.proved,
        };
        // Of what an earlier process had in hand beyond this batch nobody knows more than before.
        let of_batch = |at: &i64| items.iter().any(|item| item.entry.position == *at);
        step.in_hand.retain(|at| !of_batch(at));
        let open = items.iter().filter(|item| item.may_be_on_its_way());
        step.in_hand.extend(open.map(|item| item.entry.position));
        let mut whole = true;
        for item in items {
            let (outcome, detail) = match (&item.copy, &item.ended) {
                (Ok(copy), Some(Ended::Confirmed)) => {
                    (LetterOutcome::Sent, copy.message.destination.clone())
                }
                (Ok(_), Some(Ended::Rejected(error))) => (LetterOutcome::Rejected, error.clone()),
                (Err(refusal), _) => (LetterOutcome::Refused, refusal.as_str().to_owned()),
                (Ok(_), None) => {
                    whole = false;
                    continue;
                }
            };
            if whole {
                step.cursor = item.entry.position;
            } else if !outcome.is_leaving() {
                // Comes again when the run is resumed.
                continue;
            }
            match outcome {
                LetterOutcome::Sent => step.sent += 1,
                LetterOutcome::Rejected => step.rejected += 1,
                _ => step.refused += 1,
            }
            step.leaving.push(item.entry.leaving(outcome, detail));
        }
        step
    }

    /// Once all canaries are sent, waits for them. What was seen instead of all being handled.
    async fn prove(&mut self, at_end: bool) -> Result<Option<String>> {
        let Some(canary) = self.run.order.canary else {
            return Ok(None);
        };
        if self.canaries_left().is_none_or(|left| left > 0 && !at_end) {
            return Ok(None);
        }
        let seen = self
            .desk
            .watch(&self.canaries, self.before, canary.wait)
            .await?;
        if seen.is_some() {
            return Ok(seen);
        }
        self.canaries.clear();
        self.run.row.proved = true;
        let (row, step) = (&self.run.row, self.step(&[]));
        let settled = self
            .desk
            .patiently(|| self.desk.store.settle_run(row, &step));
        if settled.await? {
            return Ok(None);
        }
        Err(self.desk.fenced(row.id).await)
    }
}

/// Whether a message without a confirm may be at the broker all the same.
const fn may_be_stored(outcome: Option<&PublishOutcome>) -> bool {
    match outcome {
        Some(PublishOutcome::Failed { stored, .. }) => !matches!(stored, Stored::No),
        Some(PublishOutcome::Rejected { .. } | PublishOutcome::Withheld) => false,
        Some(PublishOutcome::Confirmed) | None => true,
    }
}

/// Why an entry is not sent, naming where it was to go.
fn unsent(item: &Item, outcome: Option<PublishOutcome>) -> Error {
    let destination = match &item.copy {
        Ok(copy) => copy.message.destination.as_str(),
        Err(_) => "",
    };
    match outcome {
        Some(PublishOutcome::Rejected { error, .. } | PublishOutcome::Failed { error, .. }) => {
            let detail = format!("{destination}: {error}");
            Error::new(error.kind(), OPERATION, detail).with_source(error)
        }
        _ => {
            let detail = format!("{destination}: not confirmed");
            Error::new(ErrorKind::Other, OPERATION, detail)
        }
    }
}
