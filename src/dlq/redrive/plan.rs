//! What an operator orders, as it is counted before and kept in the database.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::clock::{from_rfc3339, to_rfc3339};
use crate::error::{Error, ErrorKind, Result};
use crate::store::{LETTERS_MAX, LetterFilter, NewRun};
use crate::story::Reason;

use super::Redrive;
use super::judge::{Refusal, Rules};
use super::run::Run;

/// What to send back, and how carefully.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    pub(super) filter: LetterFilter,
    pub(super) force_loop: bool,
    pub(super) force_age: bool,
    pub(super) source: Option<String>,
    pub(super) canary: Option<Canary>,
}

/// The first few of a run, which have to be handled before the others go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Canary {
    /// How many; at least 1 and at most 1,000.
    pub count: usize,
    /// How long they may take together, from the confirm of the last.
    pub wait: Duration,
}

impl Order {
    /// All that matches.
    #[must_use]
    pub const fn of(filter: LetterFilter) -> Self {
        Self {
            filter,
            force_loop: false,
            force_age: false,
            source: None,
            canary: None,
        }
    }

    /// Also those that were redriven too often.
    #[must_use]
    pub const fn with_force_loop(mut self) -> Self {
        self.force_loop = true;
        self
    }

    /// Also those that are older than the inbox remembers: their effect may happen a second time.
    #[must_use]
    pub const fn with_force_age(mut self) -> Self {
        self.force_age = true;
        self
    }

    /// Where entries go of which nobody tells the source. It has to be one of the consumer's.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<String>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Sends some first, and waits until the consumer's inbox has them; see [`Redrive::with_inbox`].
    #[must_use]
    pub const fn with_canary(mut self, canary: Canary) -> Self {
        self.canary = Some(canary);
        self
    }
}

/// What a plan counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// Entries that would be sent.
    pub send: u64,
    /// Entries that would not, by why.
    pub refuse: BTreeMap<Refusal, u64>,
}

impl Redrive {
    /// The dry run: counts what would go, what would not and why, and records the selection. It is frozen: a
    /// [`run`](Self::run) of it deals with what matches and is there then, up to the last position of now.
    ///
    /// # Errors
    /// [`Configuration`](ErrorKind::Configuration) for settings out of bounds, [`Invalid`](ErrorKind::Invalid) for an operator
    /// without a name or an order that means nothing; else as the database's.
    pub async fn plan(&self, operator: &str, order: &Order) -> Result<Run> {
        self.validate()?;
        words("operator", operator)?;
        self.validate_order(order)?;
        let end = self.store.last_position().await?;
        let would = self.count(order, end).await?;
        let run = NewRun {
            consumer: &self.consumer,
            operator,
            plan: &written(order, &would),
            end,
        };
        let row = self.store.plan(&run).await?;
        let order = order.clone();
        Ok(Run { row, order, would })
    }

    fn validate_order(&self, order: &Order) -> Result<()> {
        validate_filter(&order.filter)?;
        if let Some(source) = &order.source
            && !self.sources.contains(source)
        {
            return Err(Error::invalid("source", "one of the consumer's", source));
        }
        if let Some(canary) = &order.canary {
            if !(1..=LETTERS_MAX).contains(&canary.count) {
                let limit = format!("1 to {LETTERS_MAX}");
                return Err(Error::invalid("canary", limit, canary.count.to_string()));
            }
            if self.inbox.is_none() {
                let limit = "used with the consumer's inbox (with_inbox)";
                return Err(Error::invalid("canary", limit, "no inbox"));
            }
        }
        Ok(())
    }

    async fn count(&self, order: &Order, end: i64) -> Result<Tally> {
        let rules = self.rules(order);
        let mut tally = Tally::default();
        let mut after = 0;
        loop {
            let range = (after, end);
            let entries = self
                .store
                .entries(&self.consumer, &order.filter, range, LETTERS_MAX);
            let entries = entries.await?;
            let now = self.clock.now();
            for entry in &entries {
                match rules.judge(entry, now) {
                    Ok(_) => tally.send += 1,
                    Err(refusal) => *tally.refuse.entry(refusal).or_default() += 1,
                }
            }
            match entries.last() {
                Some(last) => after = last.position,
                None => return Ok(tally),
            }
        }
    }

    pub(super) fn rules<'a>(&'a self, order: &'a Order) -> Rules<'a> {
        let unless = |forced: bool| (!forced).then_some(());
        Rules {
            sources: &self.sources,
            fallback: order.source.as_deref(),
            redrives_max: unless(order.force_loop).map(|()| self.config.redrives_max),
            age_max: unless(order.force_age).map(|()| self.config.inbox_retention),
        }
    }
}

/// Text of an operator that ends in a row or in a statement's bind.
pub(super) fn words(field: &'static str, text: &str) -> Result<()> {
    if text.trim().is_empty() || text.len() > 1_024 || text.contains('\0') {
        let limit = "1 to 1024 bytes, not blank, without NUL";
        return Err(Error::invalid(field, limit, text));
    }
    Ok(())
}

/// Refuses what no entry can have: more likely a script's empty variable than a wish.
pub(super) fn validate_filter(filter: &LetterFilter) -> Result<()> {
    let texts = [
        ("event_type", filter.event_type.as_deref()),
        (
            "message_id",
            filter.message_id.as_ref().map(|id| id.as_str()),
        ),
        ("error", filter.error.as_deref()),
    ];
    for (field, text) in texts {
        text.map_or(Ok(()), |text| words(field, text))?;
    }
    let instants = [
        ("stored_from", filter.stored_from),
        ("stored_until", filter.stored_until),
    ];
    for (field, instant) in instants {
        if let Some(instant) = instant
            && to_rfc3339(instant).is_none()
        {
            let limit = "an instant that RFC 3339 can write";
            return Err(Error::invalid(field, limit, instant.to_string()));
        }
    }
    Ok(())
}

/// The order and what was counted, as text for the database.
fn written(order: &Order, would: &Tally) -> String {
    let Order { filter, .. } = order;
    let refuse: serde_json::Map<String, Value> = (would.refuse.iter())
        .map(|(refusal, count)| (refusal.as_str().to_owned(), Value::from(*count)))
        .collect();
    json!({
        "filter": {
            "reason": filter.reason.as_ref().map(Reason::as_str),
            "event_type": filter.event_type,
            "key": filter.key.as_ref().map(|key| STANDARD.encode(key)),
            "message_id": filter.message_id.as_ref().map(|id| id.as_str()),
            "stored_from": filter.stored_from.and_then(to_rfc3339),
            "stored_until": filter.stored_until.and_then(to_rfc3339),
            "redrives_min": filter.redrives_min,
            "redrives_max": filter.redrives_max,
            "error": filter.error,
            "position": filter.position,
        },
        "force_loop": order.force_loop,
        "force_age": order.force_age,
        "source": order.source,
        "canary": order.canary.map(|canary| json!({
            "count": canary.count,
            "wait_ms": u64::try_from(canary.wait.as_millis()).unwrap_or(u64::MAX),
        })),
        "would_send": would.send,
        "would_refuse": refuse,
    })
    .to_string()
}

/// Reads it back. What it does not understand is an error: a filter that is lost would send more than was meant.
pub(super) fn read(plan: &str) -> Result<(Order, Tally)> {
    let plan: Value = serde_json::from_str(plan).map_err(|error| {
        Error::new(ErrorKind::Corrupt, "read plan", "it is no JSON").with_source(error)
    })?;
    read_order(&plan).ok_or_else(|| {
        let detail = "it is not as this version writes it";
        Error::new(ErrorKind::Corrupt, "read plan", detail)
    })
}

fn read_order(plan: &Value) -> Option<(Order, Tally)> {
    let filter = plan.get("filter")?;
    // Each field: absent only where it is null.
    fn field<'a, T>(
        value: &'a Value,
        name: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Option<Option<T>> {
        match value.get(name)? {
            Value::Null => Some(None),
            value => read(value).map(Some),
        }
    }
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let count = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
    let instant = |value: &Value| value.as_str().and_then(from_rfc3339);
    let key = |value: &Value| STANDARD.decode(value.as_str()?).ok();
    let canary = |value: &Value| {
        Some(Canary {
            count: usize::try_from(value.get("count")?.as_u64()?).ok()?,
            wait: Duration::from_millis(value.get("wait_ms")?.as_u64()?),
        })
    };
    let order = Order {
        filter: LetterFilter {
            reason: field(filter, "reason", text)?.map(|code| Reason::new(&code)),
            event_type: field(filter, "event_type", text)?,
            key: field(filter, "key", key)?.map(Into::into),
            message_id: field(filter, "message_id", text)?.map(Into::into),
            stored_from: field(filter, "stored_from", instant)?,
            stored_until: field(filter, "stored_until", instant)?,
            redrives_min: field(filter, "redrives_min", count)??,
            redrives_max: field(filter, "redrives_max", count)??,
            error: field(filter, "error", text)?,
            position: field(filter, "position", Value::as_i64)?,
        },
        force_loop: field(plan, "force_loop", Value::as_bool)??,
        force_age: field(plan, "force_age", Value::as_bool)??,
        source: field(plan, "source", text)?,
        canary: field(plan, "canary", canary)?,
    };
    let mut would = Tally {
        send: field(plan, "would_send", Value::as_u64)??,
        ..Tally::default()
    };
    for (code, count) in plan.get("would_refuse")?.as_object()? {
        let mut all = Refusal::ALL.into_iter();
        let refusal = all.find(|refusal| refusal.as_str() == code)?;
        would.refuse.insert(refusal, count.as_u64()?);
    }
    Some((order, would))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use time::macros::datetime;

    use super::*;

    #[test]
    fn an_order_reads_back_as_it_was_written() {
        let filter = LetterFilter::all()
            .with_reason(Reason::new("permanent"))
            .with_event_type("T")
            .with_key([0xff, 0])
            .with_message_id("m")
            .with_stored_from(datetime!(2026-01-05 10:00:00.5 UTC))
            .with_stored_until(datetime!(2026-01-06 10:00 UTC))
            .with_redrives(1, 2)
            .with_error("no \"stock\"")
            .with_position(7);
        let full = Order::of(filter)
            .with_force_age()
            .with_force_loop()
            .with_source("orders")
            .with_canary(Canary {
                count: 3,
                wait: Duration::from_secs(60),
            });
        let would = Tally {
            send: 9,
            refuse: Refusal::ALL.into_iter().zip(1..).collect(),
        };
        for order in [full, Order::of(LetterFilter::all())] {
            let text = written(&order, &would);
            assert_eq!(read(&text).unwrap(), (order, would.clone()));
        }
    }

    #[test]
    fn a_plan_that_lost_a_part_is_not_run() {
        let text = written(&Order::of(LetterFilter::all()), &Tally::default());
        for part in ["reason", "position", "force_age", "canary", "would_send"] {
            let less = text.replace(part, "other");
            assert_eq!(
                read(&less).unwrap_err().kind(),
                ErrorKind::Corrupt,
                "{part}"
            );
        }
        assert!(read("").is_err());
    }
}
