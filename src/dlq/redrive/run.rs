//! A run: entries out in order of position, each leaving the table only after the broker's confirm.

use std::future::Future;

use tracing::{info, warn};

use crate::backoff::Delays;
use crate::broker::{PublishOutcome, RejectionScope};
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind, Result, cut};
use crate::store::{LetterEntry, LetterOutcome, RunRow, RunState, RunStep, WholeLetter};

use super::Redrive;
use super::judge::Refusal;
use super::pace::Pace;
use super::plan::{self, Order, Tally, words};

const OPERATION: &str = "redrive";

/// A run, as it is recorded and as it was ordered.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Run {
    /// How far it is.
    pub row: RunRow,
    /// What was ordered.
    pub order: Order,
    /// What the plan counted.
    pub would: Tally,
}

impl Redrive {
    /// Up to `count_max` runs with an id below `before`, youngest first; `None` for the youngest of all.
    ///
    /// # Errors
    /// As the database's.
    pub async fn runs(&self, before: Option<i64>, count_max: usize) -> Result<Vec<RunRow>> {
        let before = before.unwrap_or(i64::MAX);
        self.store.runs(&self.consumer, before, count_max).await
    }

    /// Ends a run for good; whether there was one that had not ended. Whoever runs it notices at its next batch.
    ///
    /// # Errors
    /// As the database's.
    pub async fn cancel(&self, operator: &str, id: i64, because: &str) -> Result<bool> {
        words("operator", operator)?;
        words("because", because)?;
        let told = format!("by {operator}: {because}");
        let cancelled = self.store.cancel_run(&self.consumer, id, &told).await?;
        info!(
            consumer = self.consumer,
            run = id,
            operator,
            cancelled,
            "redrive cancelled"
        );
        Ok(cancelled)
    }

    /// Carries out a plan. `progress` is told after each batch. Returns how it ended: done, or paused because its canaries
    /// were not handled.
    ///
    /// What the broker confirmed leaves the table together with its row in the audit; what it will never take, and what the
    /// rules refuse, stays and is counted. Entries that fail again are new ones, behind the run's end.
    ///
    /// Cancel safety: dropping the future is a kill. What was sent and not yet settled is sent again by
    /// [`resume`](Self::resume), as the same message.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) when there is no such plan or a way back is missing, [`Closed`](ErrorKind::Closed)
    /// when somebody else took the run over or cancelled it, else what broker or database said once they were tried often
    /// enough, naming the destination. The run can be resumed.
    pub async fn run(
        &self,
        operator: &str,
        id: i64,
        progress: impl FnMut(&Run) + Send,
    ) -> Result<Run> {
        self.carry_out(operator, id, &[RunState::Planned], false, progress)
            .await
    }

    /// Goes on with a run that an error stopped or whose process died. A process that is still at it is fenced out: it can
    /// settle nothing more, though what it has in hand may be sent twice.
    ///
    /// A run that was in its canaries begins with others.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn resume(
        &self,
        operator: &str,
        id: i64,
        progress: impl FnMut(&Run) + Send,
    ) -> Result<Run> {
        let from = [RunState::Running, RunState::Stopped];
        self.carry_out(operator, id, &from, false, progress).await
    }

    /// Goes on with a run that its canaries paused, without others.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn resume_past_canary(
        &self,
        operator: &str,
        id: i64,
        progress: impl FnMut(&Run) + Send,
    ) -> Result<Run> {
        self.carry_out(operator, id, &[RunState::Paused], true, progress)
            .await
    }

    async fn carry_out(
        &self,
        operator: &str,
        id: i64,
        from: &[RunState],
        proved: bool,
        progress: impl FnMut(&Run) + Send,
    ) -> Result<Run> {
        self.validate()?;
        words("operator", operator)?;
        let Some(mut row) = self.store.take_run(&self.consumer, id, from).await? else {
            return Err(self.not_to_be_had(id, from).await);
        };
        let (order, would) = match plan::read(&row.plan) {
            Ok(plan) => plan,
            Err(error) => {
                let told = error.to_string();
                let stopped = self.store.end_run(&row, RunState::Stopped, Some(&told));
                stopped.await?;
                return Err(error);
            }
        };
        row.proved |= proved || order.canary.is_none();
        info!(
            consumer = self.consumer,
            run = id,
            operator,
            "redrive began"
        );
        let mut worker = Worker {
            desk: self,
            operator,
            canaries: Vec::new(),
            run: Run { row, order, would },
            pace: Pace::new(self.config.rate_max),
            progress,
        };
        let ended = worker.go().await;
        let run = worker.run;
        let (state, told, error) = match ended {
            Ok(None) => (RunState::Done, None, None),
            Ok(Some(seen)) => (RunState::Paused, Some(seen), None),
            Err(error) if error.kind() == ErrorKind::Closed => return Err(error),
            Err(error) => (RunState::Stopped, Some(error.to_string()), Some(error)),
        };
        self.end(run, state, told, error).await
    }

    async fn end(
        &self,
        mut run: Run,
        state: RunState,
        told: Option<String>,
        error: Option<Error>,
    ) -> Result<Run> {
        let told = told.map(|told| cut(&told, 1_024).to_owned());
        let ended = self.store.end_run(&run.row, state, told.as_deref()).await;
        let (id, sent) = (run.row.id, run.row.sent);
        match &told {
            None => info!(consumer = self.consumer, run = id, sent, "redrive is done"),
            Some(told) => {
                warn!(
                    consumer = self.consumer,
                    run = id,
                    sent,
                    told,
                    "redrive {}",
                    state.as_str()
                );
            }
        }
        if let Some(error) = error {
            return Err(error);
        }
        if !ended? {
            return Err(self.fenced(id).await);
        }
        run.row.state = state;
        run.row.error = told;
        Ok(run)
    }

    async fn not_to_be_had(&self, id: i64, from: &[RunState]) -> Error {
        match self.store.find_run(&self.consumer, id).await {
            Err(error) => error,
            Ok(None) => {
                let detail = format!("{} has no run {id}", self.consumer);
                Error::new(ErrorKind::NotFound, OPERATION, detail)
            }
            Ok(Some(run)) => {
                let wanted: Vec<&str> = from.iter().map(|state| state.as_str()).collect();
                let limit = format!("{} for this call", wanted.join(" or "));
                Error::invalid("run", limit, run.state.as_str())
            }
        }
    }

    async fn fenced(&self, id: i64) -> Error {
        let detail = match self.store.find_run(&self.consumer, id).await {
            Ok(Some(run)) if run.state == RunState::Cancelled => {
                format!("run {id} was cancelled: {}", run.error.unwrap_or_default())
            }
            _ => format!("run {id} was taken over by somebody else"),
        };
        Error::new(ErrorKind::Closed, OPERATION, detail)
    }

    /// Tries a call to the database again as often as the settings say, while it may succeed later.
    pub(super) async fn patiently<T, F>(&self, call: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let mut delays = self.delays();
        let mut attempts = 1;
        loop {
            match call().await {
                Err(error) if error.is_transient() && attempts < self.config.attempts_max => {
                    attempts += 1;
                    self.clock.sleep(delays.next_delay()).await;
                }
                result => return result,
            }
        }
    }

    fn delays(&self) -> Delays {
        self.config.backoff.delays(fastrand::u64(..))
    }
}

/// One process at one run.
struct Worker<'a, F> {
    desk: &'a Redrive,
    operator: &'a str,
    /// Those sent first, by this process, until they are proved.
    canaries: Vec<Outgoing>,
    run: Run,
    pace: Pace,
    progress: F,
}

/// An entry on its way.
struct Item {
    entry: LetterEntry,
    copy: Result<Outgoing, Refusal>,
    ended: Option<Ended>,
}

enum Ended {
    Confirmed,
    Rejected(String),
}

impl<F: FnMut(&Run) + Send> Worker<'_, F> {
    /// To the end, or to what was seen instead of handled canaries.
    async fn go(&mut self) -> Result<Option<String>> {
        let ways: Vec<String> = self.desk.sources.iter().map(|to| self.way_to(to)).collect();
        let checked = self.desk.patiently(|| self.desk.publisher.check(&ways));
        checked.await?;
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
        (row.sent, row.refused, row.rejected) = (step.sent, step.refused, step.rejected);
        if !row.proved {
            let sent = |item: Item| match (item.copy, item.ended) {
                (Ok(copy), Some(Ended::Confirmed)) => Some(copy),
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
                entry,
                copy,
                ended: None,
            }
        };
        letters.into_iter().map(item).collect()
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
            leaving: Vec::with_capacity(items.len()),
            sent: row.sent,
            refused: row.refused,
            rejected: row.rejected,
            proved: row.proved,
        };
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
        let seen = self.desk.watch(&self.canaries, canary.wait).await?;
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
