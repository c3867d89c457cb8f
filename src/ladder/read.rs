//! The way back from a rung's name to its delay.

use std::time::Duration;

use super::{Ladder, fill, is_delay};
use crate::broker::Rung;

impl Ladder {
    /// How the names of rungs begin, where they tell whose they are. Rungs that several consumers share cannot be told from
    /// another consumer's.
    pub(crate) fn prefix(&self, topic: &str, consumer: &str) -> Option<String> {
        let names_it = self.template.contains("{consumer}");
        let filled = names_it.then(|| fill(&self.template, topic, consumer))?;
        filled
            .split_once("{delay}")
            .map(|(prefix, _)| prefix.to_owned())
    }

    /// The rung of this name, if a ladder of this template could have had it. Strictly: only what the template makes of a delay.
    pub(crate) fn read(&self, topic: &str, consumer: &str, name: &str) -> Option<Rung> {
        let rest = name.strip_prefix(&*self.prefix(topic, consumer)?)?;
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = rest.split_at(digits);
        let number: u64 = number.parse().ok()?;
        let of_unit = |ms: u64| number.checked_mul(ms).map(Duration::from_millis);
        let delays = [
            ("ms", 1),
            ("s", 1_000),
            ("m", 60_000),
            ("h", 3_600_000),
            ("d", 86_400_000),
        ];
        let delays = delays
            .into_iter()
            .filter(|(name, _)| unit.starts_with(name));
        let mut delays = delays.filter_map(|(_, ms)| of_unit(ms)).filter(is_delay);
        let delay = delays.find(|delay| self.destination(topic, consumer, *delay) == name)?;
        Some(Rung {
            destination: name.to_owned(),
            delay,
            source: topic.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_template_makes_is_read_as_a_rung_of_its_own() {
        let ladder = Ladder::none();
        let read = |name: &str| {
            ladder
                .read("orders", "billing", name)
                .map(|rung| rung.delay)
        };
        assert_eq!(
            read("orders.billing.retry.30s"),
            Some(Duration::from_secs(30))
        );
        assert_eq!(
            read("orders.billing.retry.250ms"),
            Some(Duration::from_millis(250))
        );
        assert_eq!(
            read("orders.billing.retry.1d"),
            Some(Duration::from_secs(86_400))
        );
        for other in [
            "orders.billing.eu.retry.30s",
            "orders.billing.retry.eu.retry.30s",
            "orders.billing.retry.60s",
            "orders.billing.retry.030s",
            "orders.billing.retry.0s",
            "orders.billing.retry.8d",
            "orders.billing.retry.+5s",
            "orders.billing.retry.5s.old",
            "orders.billing.retry.5 s",
            "orders.billing.retry.99999999999999999999999s",
            "orders.billing.retry.9999999999999999999d",
            "orders.billing.retry.s",
            "orders.billing.retry.",
            "orders.billing.DLQ",
            "orders2.billing.retry.30s",
        ] {
            assert_eq!(read(other), None, "{other}");
        }
        let suffixed = ladder.clone().with_template("{consumer}-{delay}-s.{topic}");
        let rung = suffixed
            .read("orders", "billing", "billing-5m-s.orders")
            .map(|rung| rung.delay);
        assert_eq!(rung, Some(Duration::from_secs(300)));
        let shared = ladder.with_template("{topic}.retry.{delay}");
        assert_eq!(shared.read("orders", "billing", "orders.retry.30s"), None);
    }
}
