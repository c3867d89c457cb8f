//! Queues and exchanges: sources are verified, rungs and dead letters can be made, and counts are asked for.

use std::collections::BTreeMap;
use std::time::Duration;

use lapin::ExchangeKind as ClientKind;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use tokio::time::{Instant, timeout_at};

use super::arguments::{self, short, table, text};
use super::config::RabbitMqConfig;
use super::error::{inequivalent, is_not_found, mapped, mismatch};
use super::link::Link;
use super::place::{Place, Shards, queue, shard_names};
use super::{ExchangeKind, QueueKind};
use crate::broker::{Rung, SubscriptionRequest, TopologyMode};
use crate::error::{Error, ErrorKind, Result};

/// Asks and makes. Every question has a channel of its own, because a refusal closes it.
pub(super) struct Surveyor<'a> {
    pub(super) config: &'a RabbitMqConfig,
    pub(super) link: &'a Link,
    pub(super) shards: &'a Shards,
    pub(super) operation: &'static str,
}

impl Surveyor<'_> {
    /// Verifies the sources and, as the request says, makes or verifies rungs and dead letters. What is missing is found
    /// before anything is made.
    pub(super) async fn prepare(&self, request: &SubscriptionRequest) -> Result<()> {
        check(request)?;
        for rung in &request.rungs {
            self.shards.like(&rung.destination, &rung.source);
        }
        if request.topology == TopologyMode::Unchecked {
            return Ok(());
        }
        let mut wanted: Vec<&str> = request.sources.iter().map(String::as_str).collect();
        let own = || {
            let rungs = request.rungs.iter().map(|rung| &*rung.destination);
            rungs.chain(request.dead_letters.iter().map(String::as_str))
        };
        if request.topology == TopologyMode::Verify {
            wanted.extend(own());
        }
        self.all_exist(wanted).await?;
        for rung in &request.rungs {
            let queues = self.shards.queues(&rung.destination)?;
            let back = self.shards.queues(&rung.source)?;
            for (name, back) in queues.iter().zip(&back) {
                self.declare(name, self.rung_arguments(rung, back)?).await?;
            }
        }
        for name in &request.dead_letters {
            // One behind an exchange is the user's: where it goes is a matter of bindings.
            match Place::read(name) {
                Ok(Place { exchange: "", .. }) => {
                    for name in self.shards.queues(name)? {
                        // Beyond a limit dead letters would be dropped; only without one they are safe.
                        let never = self.config.delivery_limit.filter(|limit| *limit < 0);
                        self.declare(&name, taken_from(self.config.queue_kind, never))
                            .await?;
                    }
                }
                _ => self.all_exist([name.as_str()]).await?,
            }
        }
        Ok(())
    }

    /// A queue from which the broker itself moves what is due to the source's queue.
    fn rung_arguments(&self, rung: &Rung, back: &str) -> Result<FieldTable> {
        let kind = self.config.queue_kind;
        let mut all = kind_arguments(kind);
        let mut put = |name: &str, value: AMQPValue| {
            if let Some(name) = short(name) {
                all.insert(name, value);
            }
        };
        put(arguments::TTL, AMQPValue::LongLongInt(time_to_live(rung)?));
        put(arguments::DEAD_LETTER_EXCHANGE, text(""));
        put(arguments::DEAD_LETTER_ROUTING_KEY, text(back));
        if kind == QueueKind::Quorum {
            // Without either of these the broker moves at most once.
            put(arguments::DEAD_LETTER_STRATEGY, text("at-least-once"));
            put(arguments::OVERFLOW, text("reject-publish"));
        }
        Ok(all)
    }

    /// Checks that each of these exists: a queue, or the exchange of a destination.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] naming every missing one.
    pub(super) async fn all_exist(&self, names: impl IntoIterator<Item = &str>) -> Result<()> {
        let mut missing = Vec::new();
        for name in names {
            let found = match Place::read(name) {
                Err(_) => false,
                Ok(Place { exchange: "", .. }) => {
                    let mut all = true;
                    for queue in self.shards.queues(name)? {
                        all &= self.count(&queue).await?.is_some();
                    }
                    all
                }
                Ok(Place { exchange, .. }) => self.exchange_exists(exchange).await?,
            };
            if !found && !missing.contains(&name) {
                missing.push(name);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        let detail = format!("no such queue or exchange: {}", missing.join(", "));
        Err(Error::new(ErrorKind::NotFound, self.operation, detail))
    }

    /// Ready messages of all queues of a name.
    pub(super) async fn depth(&self, name: &str) -> Result<u64> {
        let mut all = 0;
        for queue in self.shards.queues(name)? {
            match self.count(&queue).await? {
                Some(count) => all += u64::from(count),
                None => return self.depth_of_split(name, &queue).await,
            }
        }
        Ok(all)
    }

    /// The same of a rung that is split like its source, of which only its members know.
    async fn depth_of_split(&self, name: &str, missing: &str) -> Result<u64> {
        let mut all = None;
        for shard in shard_names(queue(name)?) {
            let Some(count) = self.count(&shard).await? else {
                break;
            };
            all = Some(all.unwrap_or(0) + u64::from(count));
        }
        all.ok_or_else(|| {
            let detail = format!("no such queue: {missing}");
            Error::new(ErrorKind::NotFound, self.operation, detail)
        })
    }

    /// Ready messages of a queue; `None` if there is no such queue.
    async fn count(&self, queue: &str) -> Result<Option<u32>> {
        let passive = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::default()
        };
        let name = self.short(queue)?;
        let until = self.until();
        let (_connection, channel) = self.link.channel(self.operation, until).await?;
        let asked = channel.queue_declare(name, passive, FieldTable::default());
        match self.answer(queue, until, asked).await? {
            Ok(found) => Ok(Some(found.message_count())),
            Err(error) if is_not_found(&error) => Ok(None),
            Err(error) => Err(mapped(self.operation, queue, error)),
        }
    }

    async fn exchange_exists(&self, exchange: &str) -> Result<bool> {
        let passive = ExchangeDeclareOptions {
            passive: true,
            ..ExchangeDeclareOptions::default()
        };
        let name = self.short(exchange)?;
        let until = self.until();
        let (_connection, channel) = self.link.channel(self.operation, until).await?;
        let kind = ClientKind::Direct;
        let asked = channel.exchange_declare(name, kind, passive, FieldTable::default());
        match self.answer(exchange, until, asked).await? {
            Ok(()) => Ok(true),
            Err(error) if is_not_found(&error) => Ok(false),
            Err(error) => Err(mapped(self.operation, exchange, error)),
        }
    }

    /// Makes a queue, or finds it there with the same arguments.
    async fn declare(&self, queue: &str, arguments: FieldTable) -> Result<()> {
        let durable = QueueDeclareOptions {
            durable: true,
            ..QueueDeclareOptions::default()
        };
        let name = self.short(queue)?;
        let until = self.until();
        let (_connection, channel) = self.link.channel(self.operation, until).await?;
        let asked = channel.queue_declare(name, durable, arguments);
        match self.answer(queue, until, asked).await? {
            Ok(_) => Ok(()),
            Err(error) => Err(match mismatch(&error) {
                Some(text) => inequivalent(queue, &text),
                None => mapped(self.operation, queue, error),
            }),
        }
    }

    /// Makes a source.
    pub(super) async fn declare_source(&self, name: &str, kind: QueueKind) -> Result<()> {
        let is_split = self.shards.of(name).is_some();
        for queue in self.shards.queues(name)? {
            let mut all = taken_from(kind, self.config.delivery_limit);
            if is_split && let Some(name) = short(arguments::SINGLE_ACTIVE_CONSUMER) {
                all.insert(name, AMQPValue::Boolean(true));
            }
            self.declare(&queue, all).await?;
        }
        Ok(())
    }

    pub(super) async fn declare_exchange(&self, exchange: &str, kind: ExchangeKind) -> Result<()> {
        let durable = ExchangeDeclareOptions {
            durable: true,
            ..ExchangeDeclareOptions::default()
        };
        let name = self.short(exchange)?;
        let until = self.until();
        let (_connection, channel) = self.link.channel(self.operation, until).await?;
        let kind = match kind {
            ExchangeKind::Direct => ClientKind::Direct,
            ExchangeKind::Topic => ClientKind::Topic,
            ExchangeKind::Fanout => ClientKind::Fanout,
            ExchangeKind::Headers => ClientKind::Headers,
        };
        let asked = channel.exchange_declare(name, kind, durable, FieldTable::default());
        match self.answer(exchange, until, asked).await? {
            Ok(()) => Ok(()),
            Err(error) => Err(match mismatch(&error) {
                Some(text) => inequivalent(exchange, &text),
                None => mapped(self.operation, exchange, error),
            }),
        }
    }

    pub(super) async fn bind(
        &self,
        queue: &str,
        exchange: &str,
        routing_key: &str,
        matching: &[(&str, &str)],
    ) -> Result<()> {
        if self.shards.of(queue).is_some() {
            // With one routing key for all each would get every message.
            let limit = format!("one queue: bind {queue}.0 and so on, each by keys of its own");
            return Err(Error::configuration("queue", limit, queue));
        }
        let mut all = FieldTable::default();
        for (name, value) in matching {
            all.insert(self.short(name)?, text(value));
        }
        let queue = super::place::queue(queue)?;
        let until = self.until();
        let (_connection, channel) = self.link.channel(self.operation, until).await?;
        let asked = channel.queue_bind(
            self.short(queue)?,
            self.short(exchange)?,
            self.short(routing_key)?,
            QueueBindOptions::default(),
            all,
        );
        let detail = format!("{queue} to {exchange}");
        let bound = self.answer(queue, until, asked).await?;
        bound.map_err(|error| mapped(self.operation, &detail, error))
    }

    fn until(&self) -> Instant {
        Instant::now() + self.config.answer_deadline
    }

    fn short(&self, name: &str) -> Result<ShortString> {
        short(name).ok_or_else(|| Error::configuration("name", "at most 255 bytes", name))
    }

    async fn answer<T>(
        &self,
        name: &str,
        until: Instant,
        asked: impl Future<Output = lapin::Result<T>>,
    ) -> Result<lapin::Result<T>> {
        timeout_at(until, asked).await.map_err(|_| {
            let detail = format!(
                "{} did not answer in time about {name}",
                self.config.addresses()
            );
            Error::new(ErrorKind::Unavailable, self.operation, detail)
        })
    }
}

/// Of a queue from which somebody takes messages, and may end with them in hand.
fn taken_from(kind: QueueKind, delivery_limit: Option<i64>) -> FieldTable {
    let mut all = kind_arguments(kind);
    if kind == QueueKind::Quorum
        && let (Some(limit), Some(name)) = (delivery_limit, short(arguments::DELIVERY_LIMIT))
    {
        all.insert(name, AMQPValue::LongLongInt(limit));
    }
    all
}

fn kind_arguments(kind: QueueKind) -> FieldTable {
    table([(arguments::QUEUE_TYPE, text(kind.name()))])
}

/// The delay as the broker takes it: one of zero is a way back, which is left as soon as can be.
fn time_to_live(rung: &Rung) -> Result<i64> {
    u32::try_from(rung.delay.as_millis().max(1))
        .map(i64::from)
        .map_err(|_| {
            let limit = format!(
                "at most {:?} on {}",
                Duration::from_millis(u32::MAX.into()),
                rung.destination
            );
            Error::configuration("rung delay", limit, format!("{:?}", rung.delay))
        })
}

/// What can be refused without asking the broker.
fn check(request: &SubscriptionRequest) -> Result<()> {
    if request.consumer.is_empty() || request.consumer.contains('\0') {
        let name = &request.consumer;
        return Err(Error::configuration("consumer", "a name without NUL", name));
    }
    if request.in_flight_max == 0 {
        return Err(Error::configuration("in_flight_max", "at least 1", "0"));
    }
    if request.sources.is_empty() {
        return Err(Error::configuration(
            "sources",
            "at least one queue",
            "none",
        ));
    }
    for source in &request.sources {
        queue(source)?;
    }
    let mut homes = BTreeMap::new();
    for rung in &request.rungs {
        queue(&rung.destination)?;
        queue(&rung.source)?;
        time_to_live(rung)?;
        // The broker moves what is due to the one queue that the rung was made for.
        let home = homes.entry(&rung.destination).or_insert(&rung.source);
        if *home != &rung.source {
            let limit = format!("a rung for one source: {} is for {home}", rung.destination);
            return Err(Error::configuration("rung", limit, &rung.source));
        }
    }
    for name in &request.dead_letters {
        if Place::read(name).is_err() {
            return Err(Error::configuration("dead_letters", "a destination", name));
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn rung(delay: Duration, source: &str) -> Rung {
        Rung {
            destination: "orders.retry".into(),
            delay,
            source: source.into(),
        }
    }

    #[test]
    fn a_delay_the_broker_cannot_hold_is_refused() {
        let largest = Duration::from_millis(u32::MAX.into());
        assert_eq!(
            time_to_live(&rung(largest, "a")).unwrap(),
            i64::from(u32::MAX)
        );
        let over = largest + Duration::from_millis(1);
        let error = time_to_live(&rung(over, "a")).unwrap_err();
        assert_eq!(error.violation().unwrap().field, "rung delay");
    }

    #[test]
    fn a_rung_belongs_to_one_source() {
        let mut request = SubscriptionRequest::new("billing", vec!["a".into(), "b".into()]);
        let second = Duration::from_secs(1);
        request.rungs = vec![rung(second, "a"), rung(second, "a")];
        check(&request).unwrap();
        request.rungs.push(rung(second, "b"));
        assert_eq!(
            check(&request).unwrap_err().violation().unwrap().field,
            "rung"
        );
    }
}
