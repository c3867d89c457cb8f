//! Time as a dependency: the system's clock in production, a clock moved by hand in tests.

use std::fmt;
use std::time::Duration;

use futures_util::future::BoxFuture;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Where the consumer side reads the time and waits.
///
/// The relay never asks it: claims, leases and outbox delays use the database's clock.
pub trait Clock: Send + Sync + fmt::Debug + 'static {
    /// The current instant, UTC.
    fn now(&self) -> OffsetDateTime;

    /// Completes once `duration` has passed on this clock. Dropping the future is harmless.
    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()>;
}

/// The machine's clock and tokio's timer.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> OffsetDateTime {
        OffsetDateTime::now_utc()
    }

    fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(duration))
    }
}

/// A wait that can be added to any instant: a setting may be longer than a clock can tell, and a day is as good then.
#[must_use]
pub(crate) fn at_most_a_day(wait: Duration) -> Duration {
    wait.min(Duration::from_secs(86_400))
}

/// Cuts an instant to whole microseconds, the finest that every database keeps, so that it reads back equal.
#[must_use]
pub(crate) fn to_micros(instant: OffsetDateTime) -> OffsetDateTime {
    let nanos = instant.nanosecond() / 1_000 * 1_000;
    instant.replace_nanosecond(nanos).unwrap_or(instant)
}

/// Whole microseconds since 1970.
#[must_use]
pub(crate) fn unix_micros(instant: OffsetDateTime) -> i64 {
    i64::try_from(instant.unix_timestamp_nanos() / 1_000).unwrap_or(i64::MAX)
}

/// The instant that many microseconds after 1970; `None` outside the calendar (years beyond ±9999).
#[cfg(any(feature = "sqlite", test))]
#[must_use]
pub(crate) fn from_unix_micros(micros: i64) -> Option<OffsetDateTime> {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1_000).ok()
}

/// RFC 3339 in UTC, as headers carry it; `None` only for years RFC 3339 cannot write.
#[must_use]
pub(crate) fn to_rfc3339(instant: OffsetDateTime) -> Option<String> {
    instant
        .checked_to_offset(time::UtcOffset::UTC)?
        .format(&Rfc3339)
        .ok()
}

/// Reads an RFC 3339 instant, in any offset, as UTC; `None` also where an offset leads out of the calendar, which a
/// header from anywhere may do.
#[must_use]
pub(crate) fn from_rfc3339(text: &str) -> Option<OffsetDateTime> {
    OffsetDateTime::parse(text, &Rfc3339)
        .ok()
        .and_then(|instant| instant.checked_to_offset(time::UtcOffset::UTC))
}

/// `instant + duration`, held at the end of the calendar instead of overflowing.
#[must_use]
pub(crate) fn add(instant: OffsetDateTime, duration: Duration) -> OffsetDateTime {
    time::Duration::try_from(duration)
        .ok()
        .and_then(|duration| instant.checked_add(duration))
        .unwrap_or(time::macros::datetime!(9999-12-31 23:59:59 UTC))
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn micros_and_rfc3339_read_back_equal() {
        let instant = datetime!(2026-02-03 04:05:06.123456 UTC);
        assert_eq!(from_unix_micros(unix_micros(instant)), Some(instant));
        let text = to_rfc3339(instant);
        assert_eq!(text.as_deref(), Some("2026-02-03T04:05:06.123456Z"));
        assert_eq!(text.as_deref().and_then(from_rfc3339), Some(instant));
        assert_eq!(
            from_rfc3339("2026-02-03T06:05:06.123456+02:00"),
            Some(instant)
        );
        assert_eq!(from_rfc3339("yesterday"), None);
    }

    #[test]
    fn an_offset_that_leads_out_of_the_calendar_is_no_instant() {
        assert_eq!(from_rfc3339("9999-12-31T23:59:59-01:00"), None);
        assert_eq!(to_rfc3339(datetime!(9999-12-31 23:59:59 -1)), None);
    }

    #[test]
    fn adding_never_overflows() {
        let instant = datetime!(2026-01-01 0:00 UTC);
        assert_eq!(
            add(instant, Duration::from_secs(60)),
            datetime!(2026-01-01 0:01 UTC)
        );
        assert_eq!(add(instant, Duration::MAX).year(), 9999);
    }
}
