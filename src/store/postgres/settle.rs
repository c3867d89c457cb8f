//! Settling a batch: one statement, whatever its verdicts are.

use futures_util::future::FutureExt;

use super::PostgresStore;
use super::outbox::columns_of;
use crate::error::Result;
use crate::lane::Lane;
use crate::store::header_codec::without_nul;
use crate::store::{Lease, Place, SetAside, Settled, SettlementBatch, Verdict};

/// Rows freed by one statement at most.
const FREED_MAX: i64 = 1_000;

/// Places of rows, as the statement wants them.
#[derive(Default)]
struct Places(Vec<Lane>, Vec<i64>);

impl Places {
    fn push(&mut self, place: &Place) {
        self.0.push(place.lane);
        self.1.push(place.position);
    }
}

/// Rows with their new state.
#[derive(Default)]
struct States {
    places: Places,
    states: Vec<&'static str>,
    reasons: Vec<String>,
    errors: Vec<String>,
    scopes: Vec<String>,
}

impl States {
    fn push(&mut self, place: &Place, aside: &SetAside) {
        self.places.push(place);
        self.states.push(aside.state.as_str());
        self.reasons.push(aside.reason.as_str().to_owned());
        // Refused here, one NUL would fail the whole batch for ever.
        self.errors.push(without_nul(&aside.error).into_owned());
        self.scopes.push(without_nul(&aside.scope).into_owned());
    }
}

impl PostgresStore {
    /// Has ended for every later snapshot when this returns.
    pub(super) async fn settle(&self, batch: &SettlementBatch) -> Result<Settled> {
        let mut leases = batch.leases.clone();
        // Only these are locked: the others may change hands meanwhile.
        leases.retain(|lease| {
            let mut places = batch.verdicts.iter().map(|(place, _)| place);
            places.any(|place| place.lane == lease.lane)
        });
        let (lanes, tokens) = columns_of(&leases);
        let (mut confirmed, mut sent) = (Places::default(), Places::default());
        let (mut moved, mut changed) = (States::default(), States::default());
        for (place, verdict) in &batch.verdicts {
            match (verdict, place.is_aside()) {
                (Verdict::Confirmed, false) => confirmed.push(place),
                (Verdict::Confirmed, true) => sent.push(place),
                (Verdict::SetAside(aside), false) => moved.push(place, aside),
                (Verdict::SetAside(aside), true) => changed.push(place, aside),
            }
        }
        let applied = if confirmed.0.len() == batch.verdicts.len() {
            let sql = match self.kept {
                None => &self.sql.confirm,
                Some(_) => &self.sql.confirm_and_keep,
            };
            let query = sqlx::query(sql.clone())
                .bind(lanes)
                .bind(tokens)
                .bind(confirmed.0)
                .bind(confirmed.1);
            let done = self.relayed("settle", |c| query.execute(c).boxed());
            done.await?.rows_affected()
        } else {
            let sql = match self.kept {
                None => &self.sql.settle,
                Some(_) => &self.sql.settle_and_keep,
            };
            let query = sqlx::query_scalar(sql.clone())
                .bind(lanes)
                .bind(tokens)
                .bind(confirmed.0)
                .bind(confirmed.1)
                .bind(moved.places.0)
                .bind(moved.places.1)
                .bind(moved.states)
                .bind(moved.reasons)
                .bind(moved.errors)
                .bind(moved.scopes)
                .bind(sent.0)
                .bind(sent.1)
                .bind(changed.places.0)
                .bind(changed.places.1)
                .bind(changed.states)
                .bind(changed.reasons)
                .bind(changed.errors);
            let counted = self.relayed("settle", |c| query.fetch_one(c).boxed());
            let applied: i64 = counted.await?;
            u64::try_from(applied).unwrap_or(0)
        };
        let applied = usize::try_from(applied).unwrap_or(0);
        Ok(Settled {
            applied,
            fenced: batch.verdicts.len().saturating_sub(applied),
        })
    }

    /// Lets those go on that nothing blocks any more; returns how many.
    pub(super) async fn free(&self, leases: &[Lease]) -> Result<u64> {
        let (lanes, tokens) = columns_of(leases);
        let query = sqlx::query_scalar(self.sql.free.clone())
            .bind(lanes)
            .bind(tokens)
            .bind(FREED_MAX);
        let freed: i64 = self.relayed("free", |c| query.fetch_one(c).boxed()).await?;
        Ok(u64::try_from(freed).unwrap_or(0))
    }
}
