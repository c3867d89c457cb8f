//! What every adapter's administration shares: checks of what an operator gives, steps, and grouping.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::time::Duration;

use super::{AsideFilter, Depth, DestinationDepth};
use crate::error::{Error, Result};
use crate::story::Reason;

/// Most rows of one step: one transaction.
pub(crate) const STEP_ROWS_MAX: i64 = 500;
/// Most bytes of one step, but for its first message.
pub(crate) const STEP_BYTES_MAX: i64 = 16 * 1_024 * 1_024;
/// Most matching rows of one step that only counts.
pub(crate) const COUNT_ROWS_MAX: i64 = 10_000;

impl AsideFilter {
    /// Refuses what no row can have: more likely a script's empty variable than a wish.
    pub(crate) fn validate(&self) -> Result<()> {
        if let Some(destination) = &self.destination {
            words("destination", destination)?;
        }
        self.message_id
            .as_ref()
            .map_or(Ok(()), |id| words("message_id", id.as_str()))
    }

    /// The positions that may match, of those above `after` up to `last`: exclusive, inclusive.
    pub(crate) fn range(&self, after: i64, last: i64) -> (i64, i64) {
        match self.position {
            Some(position) => (after.max(position.saturating_sub(1)), last.min(position)),
            None => (after, last),
        }
    }
}

/// Text of an operator that ends in a statement's bind or in a log line.
pub(crate) fn words(field: &'static str, text: &str) -> Result<()> {
    if text.trim().is_empty() || text.len() > 1_024 || text.contains('\0') {
        let limit = "1 to 1024 bytes, not blank, without NUL";
        return Err(Error::invalid(field, limit, text));
    }
    Ok(())
}

/// What one step did.
pub(crate) struct Step {
    /// Where the next one begins; `None` when nothing was left. Not whether rows were moved: others may have been
    /// faster.
    pub last: Option<i64>,
    pub count: u64,
}

/// Runs steps until one finds nothing, and sums up.
pub(crate) async fn in_steps<F>(mut step: impl FnMut(i64) -> F) -> Result<u64>
where
    F: Future<Output = Result<Step>>,
{
    let (mut after, mut sum) = (0, 0);
    loop {
        let done = step(after).await.inspect_err(|_| {
            if sum > 0 {
                tracing::warn!(done = sum, "stopped by an error; repeat to go on");
            }
        })?;
        sum += done.count;
        match done.last {
            Some(last) => after = last,
            None => return Ok(sum),
        }
    }
}

/// What an operator says about a destination.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Control {
    Pause,
    Resume,
    Limit(Option<u32>),
}

/// ... as a database writes it: `None` and `false` leave what is there.
pub(crate) struct ControlRow {
    pub paused: Option<bool>,
    pub limits: bool,
    pub rate_max: Option<i32>,
}

impl Control {
    pub(crate) fn row(self, destination: &str, because: &str) -> Result<ControlRow> {
        words("destination", destination)?;
        words("because", because)?;
        let rate_max = match self {
            Self::Limit(Some(rate)) => {
                let rate = i32::try_from(rate).ok().filter(|rate| *rate > 0);
                let refused = || Error::invalid("rate_max", "1 to 2147483647", "another");
                Some(rate.ok_or_else(refused)?)
            }
            _ => None,
        };
        Ok(ControlRow {
            paused: match self {
                Self::Pause => Some(true),
                Self::Resume => Some(false),
                Self::Limit(_) => None,
            },
            limits: matches!(self, Self::Limit(_)),
            rate_max,
        })
    }

    /// Leaves a trace, or says that there is no room.
    pub(crate) fn done(self, destination: &str, because: &str, written: u64) -> Result<()> {
        if written == 0 && !matches!(self, Self::Resume) {
            let limit = "fewer destinations paused or limited at one time";
            return Err(Error::invalid("destination", limit, destination));
        }
        tracing::info!(destination, because, control = ?self, "destination controlled");
        Ok(())
    }
}

/// The trace that a requeue (`because` is `None`) or a discard leaves of each message.
pub(crate) fn log(ids: &[String], because: Option<&str>) {
    for id in ids {
        match because {
            None => tracing::info!(message_id = id, "requeued"),
            Some(because) => tracing::info!(message_id = id, because, "discarded"),
        }
    }
}

/// One group of rows as a database counts it: lane (`None`: set aside), destination, reason, count, age of the oldest
/// in microseconds.
pub(crate) type Counted = (Option<i64>, String, Option<String>, i64, Option<i64>);

/// Groups by destination within the bounds.
pub(crate) fn depth_of(rows: Vec<Counted>, count_max: i64, destinations_max: usize) -> Depth {
    let mut counted: HashMap<Option<i64>, i64> = HashMap::new();
    let mut found: BTreeMap<String, DestinationDepth> = BTreeMap::new();
    for (lane, destination, reason, count, age) in rows {
        *counted.entry(lane).or_default() += count;
        let count = u64::try_from(count).unwrap_or(0);
        let depth = found
            .entry(destination)
            .or_insert_with_key(|name| DestinationDepth {
                destination: name.clone(),
                pending: 0,
                oldest: None,
                aside: Vec::new(),
            });
        if let Some(reason) = reason {
            depth.aside.push((Reason::new(&reason), count));
        } else {
            depth.pending += count;
            // A clock that was set back makes no age.
            let age = age.map(|age| Duration::from_micros(u64::try_from(age).unwrap_or(0)));
            depth.oldest = depth.oldest.max(age);
        }
    }
    let mut destinations: Vec<_> = found.into_values().collect();
    destinations.sort_by_key(|depth| Reverse(depth.oldest));
    let cut =
        counted.values().any(|count| *count >= count_max) || destinations.len() > destinations_max;
    destinations.truncate(destinations_max);
    for depth in &mut destinations {
        depth.aside.sort_by(|a, b| a.0.as_str().cmp(b.0.as_str()));
    }
    Depth { destinations, cut }
}
