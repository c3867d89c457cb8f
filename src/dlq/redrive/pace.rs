//! How many messages may go now. Pure.

use std::time::Duration;

use time::OffsetDateTime;

/// A rate, kept over bursts of a tenth of a second.
#[derive(Debug)]
pub(super) struct Pace {
    rate_max: u32,
    /// Nothing goes before this.
    next: Option<OffsetDateTime>,
    /// The longest that anything waits, whatever the clock says.
    wait_max: Duration,
}

impl Pace {
    pub(super) const fn new(rate_max: u32) -> Self {
        Self {
            rate_max,
            next: None,
            wait_max: Duration::ZERO,
        }
    }

    /// Most messages that go together.
    pub(super) fn burst(&self) -> usize {
        usize::try_from(self.rate_max.div_ceil(10)).unwrap_or(usize::MAX)
    }

    /// How long to wait before the next ones.
    pub(super) fn wait(&self, now: OffsetDateTime) -> Duration {
        let left = self.next.map(|next| next - now);
        let left = left.and_then(|left| Duration::try_from(left).ok());
        left.unwrap_or_default().min(self.wait_max)
    }

    /// So many go at this instant. A wait that took longer than it had to is not made up for.
    pub(super) fn gone(&mut self, count: usize, now: OffsetDateTime) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let takes = Duration::from_secs(1).saturating_mul(count) / self.rate_max.max(1);
        let rest = self.wait(now);
        self.wait_max = rest + takes;
        self.next = Some(crate::clock::add(now, self.wait_max));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use time::macros::datetime;

    #[test]
    fn a_second_has_no_more_than_its_rate() {
        let mut pace = Pace::new(50);
        let start = datetime!(2026-01-05 10:00 UTC);
        let (mut now, mut gone) = (start, 0);
        while gone < 100 {
            now += pace.wait(now);
            pace.gone(pace.burst(), now);
            gone += pace.burst();
        }
        // The last burst needs not be waited for.
        assert_eq!(now - start, time::Duration::milliseconds(1_900));
        assert_eq!(pace.wait(now), Duration::from_millis(100));
        assert_eq!(pace.wait(now + Duration::from_secs(9)), Duration::ZERO);
        assert_eq!(Pace::new(1).burst(), 1);
    }

    #[test]
    fn a_clock_that_is_put_back_lets_nobody_wait_for_the_difference() {
        let mut pace = Pace::new(50);
        let now = datetime!(2026-01-05 10:00 UTC);
        pace.gone(5, now);
        let back = now - Duration::from_secs(3_600);
        assert_eq!(pace.wait(back), Duration::from_millis(100));
        pace.gone(5, back);
        assert_eq!(pace.wait(back), Duration::from_millis(200));
        assert_eq!(pace.wait(back + Duration::from_millis(200)), Duration::ZERO);
    }
}
