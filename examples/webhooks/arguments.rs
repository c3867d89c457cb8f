//! The command line.

use std::path::PathBuf;

use super::broker::Product;
use super::world::Anyhow;

const USAGE: &str = "usage: webhooks FILE [--copies K] [--broker kafka|rabbitmq|nats] [--run NAME] [--role all|prepare|enqueue|relay|consume|report]";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    All,
    Prepare,
    Enqueue,
    Relay,
    Consume,
    Report,
}

#[derive(Debug)]
pub struct Arguments {
    pub file: PathBuf,
    /// The file is written this often, each time with other keys.
    pub copies: u32,
    pub product: Product,
    pub run: String,
    pub role: Role,
}

impl Arguments {
    pub fn parse() -> Anyhow<Self> {
        let mut file = None;
        let mut copies = 1;
        let mut run = format!("r{:08x}", fastrand::u32(..));
        let mut role = Role::All;
        let mut product = Product::Kafka;
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(USAGE);
            match word.as_str() {
                "--copies" => copies = value()?.parse().map_err(|_| USAGE)?,
                "--broker" => product = Product::named(&value()?).ok_or(USAGE)?,
                "--run" => run = value()?,
                "--role" => {
                    role = match value()?.as_str() {
                        "all" => Role::All,
                        "prepare" => Role::Prepare,
                        "enqueue" => Role::Enqueue,
                        "relay" => Role::Relay,
                        "consume" => Role::Consume,
                        "report" => Role::Report,
                        _ => return Err(USAGE.into()),
                    }
                }
                _ if word.starts_with('-') || file.is_some() => return Err(USAGE.into()),
                _ => file = Some(PathBuf::from(word)),
            }
        }
        let needs_file = matches!(role, Role::All | Role::Enqueue);
        if copies == 0 || (needs_file && file.is_none()) {
            return Err(USAGE.into());
        }
        Ok(Self {
            file: file.unwrap_or_default(),
            copies,
            product,
            run,
            role,
        })
    }
}
