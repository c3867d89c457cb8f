//! What happens in this world, as pure functions of the seed: transfers, their messages, and how handlers fail.

use std::time::Duration;

use relaybox::Message;
use relaybox::story::Reason;
use serde::{Deserialize, Serialize};

pub const ACCOUNTS: i64 = 24;
/// What every account has at the bank and in the replica before the first transfer.
pub const OPENING: i64 = 1_000;
pub const TOPIC: &str = "transfers";
pub const PARTITIONS: u16 = 4;
pub const CONSUMER: &str = "ledger";
/// Delays of the ladder in seconds.
pub const RUNGS: [u64; 2] = [1, 2];
pub const EVENT: &str = "BalanceChanged";

/// How a transaction ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Committed after staying open for this long: later positions are committed, and published, before it.
    Commit(Duration),
    RollBack,
}

/// One planned transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    pub number: i64,
    pub from: i64,
    pub to: i64,
    pub amount: i64,
    /// A message is enqueued within a savepoint that is rolled back.
    pub phantom: bool,
    pub ending: Ending,
    /// Pause of the writer before it.
    pub pause: Duration,
    /// Bytes of any value that travel with both messages.
    pub filler: Vec<u8>,
}

impl Transfer {
    /// The same for the same seed and number, whatever happened before.
    pub fn planned(seed: u64, number: i64) -> Self {
        let mut random = fastrand::Rng::with_seed(mixed(&format!("transfer {seed} {number}")));
        let from = random.i64(1..=ACCOUNTS);
        // One account is hot: its key has work waiting at any time.
        let other = match random.u8(0..4) {
            0 if from != 1 => 1,
            _ => (from + random.i64(0..ACCOUNTS - 1)) % ACCOUNTS + 1,
        };
        let ending = match random.u8(0..100) {
            0..8 => Ending::RollBack,
            8..12 => Ending::Commit(Duration::from_millis(random.u64(100..1_000))),
            12..30 => Ending::Commit(Duration::from_millis(random.u64(1..30))),
            _ => Ending::Commit(Duration::ZERO),
        };
        let length = random.usize(0..600);
        let filler = std::iter::repeat_with(|| random.u8(..))
            .take(length)
            .collect();
        Self {
            number,
            from,
            to: other,
            amount: random.i64(1..500),
            phantom: random.u8(0..100) < 10,
            ending,
            pause: Duration::from_millis(random.u64(0..40)),
            filler,
        }
    }
}

/// What a message says: one account after one transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    pub transfer: i64,
    pub account: i64,
    pub version: i64,
    pub delta: i64,
    pub balance: i64,
}

impl Change {
    /// JSON, a line feed, and bytes of any value; headers that are no UTF-8, null and repeated.
    pub fn message(
        &self,
        destination: &str,
        id: String,
        filler: &[u8],
    ) -> serde_json::Result<Message> {
        let mut payload = serde_json::to_vec(self)?;
        payload.push(b'\n');
        payload.extend_from_slice(filler);
        let head = filler[..filler.len().min(16)].to_vec();
        let mut message = Message::new(destination, EVENT)
            .with_id(id)
            .with_key(self.key())
            .with_version(self.version)
            .with_header("note", head)
            .with_header("note", self.transfer.to_string())
            .with_payload(payload);
        message.headers.push_optional("nothing", None);
        Ok(message)
    }

    pub fn key(&self) -> String {
        self.account.to_string()
    }

    pub fn read(message: &Message) -> serde_json::Result<Self> {
        let payload = message.payload.as_deref().unwrap_or_default();
        let line = payload.split(|byte| *byte == b'\n').next();
        serde_json::from_slice(line.unwrap_or_default())
    }
}

/// The id of the message about one account in one transfer: the same in every run of a seed.
pub fn id_of(seed: u64, transfer: i64, account: i64) -> String {
    format!("{seed}-{transfer}-{account}")
}

/// Stands for every byte of a message that must arrive as it was written.
pub fn digest(message: &Message) -> i64 {
    let mut hash = Fnv::new();
    let mut part = |bytes: Option<&[u8]>| {
        let length = bytes.map_or(-1, |bytes| i64::try_from(bytes.len()).unwrap_or(-2));
        hash.add(&length.to_be_bytes());
        hash.add(bytes.unwrap_or_default());
    };
    part(Some(message.id.as_str().as_bytes()));
    part(message.key.as_deref());
    part(Some(message.event_type.as_bytes()));
    part(message.content_type.as_deref().map(str::as_bytes));
    part(message.payload.as_deref());
    let version = message.version.map(i64::to_be_bytes);
    part(version.as_ref().map(<[u8; 8]>::as_slice));
    let occurred = message.occurred_at.unix_timestamp_nanos().to_be_bytes();
    part(Some(&occurred));
    for header in &message.headers {
        part(Some(header.name.as_bytes()));
        part(header.value.as_deref());
    }
    hash.0.cast_signed()
}

/// A handler's way to fail. Each of them comes after the effect, which must be undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    Error,
    /// A statement that the database refuses; the error is handed on.
    Sql,
    /// The same, but the handler swallows the error and says that all is done.
    SwallowedSql,
    Panic,
    Permanent,
}

/// What is to become of a message, decided by its id alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fate {
    trouble: Trouble,
    /// Attempts that fail.
    failures: u32,
}

/// How a message must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Its effect is there, after so many counted failures.
    Applied { retries: u32 },
    /// It is a dead letter with this reason and count.
    Dead { reason: &'static str, retries: u32 },
}

impl Fate {
    pub fn of(id: &str) -> Self {
        let roll = mixed(id) % 1_000;
        let (trouble, failures) = match roll {
            0..8 => (Trouble::Permanent, 1),
            8..14 => (Trouble::Error, u32::MAX),
            14..24 => (Trouble::SwallowedSql, 1),
            24..34 => (Trouble::Panic, 1),
            34..44 => (Trouble::Sql, 1),
            44..90 => (Trouble::Error, 1),
            90..110 => (Trouble::Error, 2),
            _ => (Trouble::Error, 0),
        };
        Self { trouble, failures }
    }

    /// What goes wrong in an attempt that is made after this many counted failures.
    pub fn trouble(self, retries: u32) -> Option<Trouble> {
        (retries < self.failures).then_some(self.trouble)
    }

    pub fn end(self) -> End {
        let rungs = u32::try_from(RUNGS.len()).unwrap_or(0);
        match self {
            Self {
                trouble: Trouble::Permanent,
                ..
            } => End::Dead {
                reason: Reason::PERMANENT,
                retries: 1,
            },
            Self { failures, .. } if failures > rungs => End::Dead {
                reason: Reason::RETRIES_EXHAUSTED,
                retries: rungs + 1,
            },
            Self { failures, .. } => End::Applied { retries: failures },
        }
    }
}

/// How long a handler works on a message with its transaction open, so that trouble finds it there.
pub fn effort(id: &str) -> Duration {
    match mixed(&format!("effort {id}")) {
        roll if roll % 4 == 0 => Duration::from_millis(10 + roll / 4 % 70),
        _ => Duration::ZERO,
    }
}

/// 64 well-mixed bits of a text, the same on every machine and in every version.
pub fn mixed(text: &str) -> u64 {
    let mut hash = Fnv::new();
    hash.add(text.as_bytes());
    let mut bits = hash.0;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// FNV-1a.
struct Fnv(u64);

impl Fnv {
    const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_seed_plans_the_same_transfers_and_another_seed_others() {
        let plan = |seed| -> Vec<_> { (1..50).map(|n| Transfer::planned(seed, n)).collect() };
        assert_eq!(plan(7), plan(7));
        assert_ne!(plan(7), plan(8));
        for transfer in plan(7) {
            assert_ne!(transfer.from, transfer.to);
            assert!((1..=ACCOUNTS).contains(&transfer.to));
        }
    }

    #[test]
    fn every_fate_occurs() {
        let all: HashSet<String> = (0..2_000)
            .map(|n| format!("{:?}", Fate::of(&id_of(7, n, 1))))
            .collect();
        assert_eq!(all.len(), 8, "{all:?}");
    }

    #[test]
    fn a_change_is_read_back_and_each_of_its_bytes_is_in_the_digest() {
        let change = Change {
            transfer: 1,
            account: 2,
            version: 3,
            delta: -4,
            balance: 5,
        };
        let message = change.message(TOPIC, "i".into(), b"\xff\n\0").unwrap();
        assert_eq!(Change::read(&message).unwrap(), change);
        let same = message.clone();
        assert_eq!(digest(&message), digest(&same));
        let mut others = vec![
            message.clone().with_id("j"),
            message.clone().with_key("3"),
            message.clone().with_version(4),
            message.clone().with_payload("p"),
            message.clone().with_header("more", ""),
            message.clone().with_content_type("text/plain"),
        ];
        let mut other = message.clone();
        other.headers.push_optional("nothing", None);
        others.push(other);
        let digests: HashSet<i64> = others.iter().chain([&message]).map(digest).collect();
        assert_eq!(digests.len(), others.len() + 1);
    }
}
