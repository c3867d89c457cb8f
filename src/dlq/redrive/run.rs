//! A run, as an operator orders it, ends it and goes on with it.

use std::future::Future;

use tracing::{info, warn};

use crate::backoff::Delays;
use crate::error::{Error, ErrorKind, Result, cut};
use crate::store::{RunRow, RunState};

use super::Redrive;
use super::plan::{self, Order, Tally, words};
use super::worker::Worker;

pub(super) const OPERATION: &str = "redrive";

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
        let mut worker = Worker::new(self, operator, Run { row, order, would }, progress);
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

    pub(super) async fn fenced(&self, id: i64) -> Error {
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

    pub(super) fn delays(&self) -> Delays {
        self.config.backoff.delays(fastrand::u64(..))
    }
}
