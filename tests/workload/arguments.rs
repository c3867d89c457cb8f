//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use super::broker::Product;
use super::world::Anyhow;

const USAGE: &str = "usage: workload [--seconds N] [--seed N] [--relays N] [--consumers N] [--broker kafka|rabbitmq|nats] [--calm] [--role run|write|relay|consume]
       workload --check FILE

--calm leaves out the nemesis. --check judges the history that a failed run has kept.";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Run,
    Write,
    Relay,
    Consume,
}

#[derive(Debug)]
pub struct Arguments {
    /// How long there is trouble; starting, draining and checking come on top.
    pub time: Duration,
    pub seed: u64,
    pub relays: usize,
    pub consumers: usize,
    pub product: Product,
    pub calm: bool,
    pub role: Role,
    pub check: Option<PathBuf>,
}

impl Arguments {
    pub fn parse(words: impl IntoIterator<Item = String>) -> Anyhow<Self> {
        let mut arguments = Self {
            time: Duration::from_secs(60),
            seed: fastrand::u64(..1_000_000),
            relays: 3,
            consumers: 2,
            product: Product::Kafka,
            calm: false,
            role: Role::Run,
            check: None,
        };
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(USAGE);
            match word.as_str() {
                "--seconds" => arguments.time = Duration::from_secs(number(&value()?)?),
                "--seed" => arguments.seed = number(&value()?)?,
                "--relays" => arguments.relays = number(&value()?)?,
                "--consumers" => arguments.consumers = number(&value()?)?,
                "--broker" => arguments.product = Product::named(&value()?).ok_or(USAGE)?,
                "--calm" => arguments.calm = true,
                "--check" => arguments.check = Some(value()?.into()),
                "--role" => {
                    arguments.role = match value()?.as_str() {
                        "run" => Role::Run,
                        "write" => Role::Write,
                        "relay" => Role::Relay,
                        "consume" => Role::Consume,
                        _ => return Err(USAGE.into()),
                    }
                }
                _ => return Err(USAGE.into()),
            }
        }
        if arguments.relays == 0 || arguments.consumers == 0 {
            return Err(USAGE.into());
        }
        Ok(arguments)
    }
}

fn number<T: std::str::FromStr>(word: &str) -> Result<T, &'static str> {
    word.parse().map_err(|_| USAGE)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Anyhow<Arguments> {
        Arguments::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn words_are_settings_and_others_are_refused() {
        let arguments = parse("--seconds 3 --seed 7 --role write --calm").unwrap();
        assert_eq!(arguments.time, Duration::from_secs(3));
        assert_eq!((arguments.seed, arguments.role), (7, Role::Write));
        assert!(arguments.calm);
        for line in [
            "--seed",
            "--seed x",
            "--role x",
            "--broker x",
            "--relays 0",
            "x",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
