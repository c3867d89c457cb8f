//! Consuming: one supervised consumer a queue. Whatever ends it, it is attached again.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, Consumer};
use time::OffsetDateTime;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use super::arguments::short;
use super::balance::{Balance, Shift};
use super::config::RabbitMqConfig;
use super::desk::{Desk, Generation, Item};
use super::error::{is_unreadable, mapped};
use super::link::{Link, PAUSE};
use super::place::{Place, Shards};
use super::record::received;
use super::topology::Surveyor;
use crate::MessageId;
use crate::broker::{Delivery, Health, Subscription, SubscriptionRequest, TopologyMode};
use crate::clock::at_most_a_day;
use crate::error::{Error, ErrorKind, Result, cut};

const OPERATION: &str = "subscribe";
/// A channel that lived for so long was well.
const STEADY: Duration = Duration::from_secs(30);

pub(super) async fn subscribe(
    config: &Arc<RabbitMqConfig>,
    link: &Arc<Link>,
    shards: &Arc<Shards>,
    request: SubscriptionRequest,
) -> Result<Box<dyn Subscription>> {
    let surveyor = Surveyor {
        config,
        link,
        shards,
        operation: OPERATION,
    };
    surveyor.prepare(&request).await?;
    let mut posts = Vec::new();
    for source in &request.sources {
        for queue in shards.queues(source)? {
            posts.push((Arc::from(source.as_str()), queue));
        }
    }
    let desk = Desk::new(
        request.in_flight_max,
        posts.len(),
        config.release_hold_max,
        config.answer_deadline,
    );
    let (stop, stopping) = watch::channel(None);
    let mut posted = JoinSet::new();
    let mut shifts: BTreeMap<Arc<str>, Vec<Arc<Shift>>> = BTreeMap::new();
    for (number, (source, queue)) in posts.into_iter().enumerate() {
        let shift = Arc::new(Shift::default());
        let of_source = shifts.entry(Arc::clone(&source)).or_default();
        of_source.push(Arc::clone(&shift));
        let post = Post {
            shift,
            is_shard: shards.of(&source).is_some(),
            drain_deadline: config.drain_deadline,
            number,
            source,
            queue,
            consumer: request.consumer.clone(),
            prefetch: u16::try_from(request.in_flight_max).unwrap_or(u16::MAX),
            link: Arc::clone(link),
            desk: Arc::clone(&desk),
            answer_deadline: config.answer_deadline,
        };
        // Unchecked asks nothing: what is missing shows as a report.
        let attached = match request.topology {
            TopologyMode::Unchecked => None,
            _ => Some(post.attach(post.prefetch).await?),
        };
        posted.spawn(post.hold(attached, stopping.clone()));
    }
    for (source, shifts) in shifts {
        // Unchecked makes nothing, and balancing makes a roll of members.
        if shards.of(&source).is_some() && request.topology != TopologyMode::Unchecked {
            let balance = Balance {
                link: Arc::clone(link),
                answer_deadline: config.answer_deadline,
                source,
                shifts,
            };
            posted.spawn(balance.keep(stopping.clone()));
        }
    }
    Ok(Box::new(RabbitSubscription { desk, stop, posted }))
}

/// A member of a consumer. Dropping it closes its channels: the broker takes back what is unsettled.
struct RabbitSubscription {
    desk: Arc<Desk>,
    stop: watch::Sender<Option<Instant>>,
    posted: JoinSet<bool>,
}

impl Subscription for RabbitSubscription {
    fn receive(&mut self, count_max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(self.desk.receive(count_max))
    }

    fn health(&self) -> Health {
        self.desk.health()
    }

    fn close(mut self: Box<Self>, deadline: Duration) -> BoxFuture<'static, Result<()>> {
        let until = Instant::now() + at_most_a_day(deadline);
        // From here on settlements count no more: what the broker has not heard of comes again.
        self.desk.over();
        self.stop.send_replace(Some(until));
        Box::pin(async move {
            let mut orderly = true;
            let all = async {
                while let Some(ended) = self.posted.join_next().await {
                    orderly &= ended.unwrap_or(false);
                }
            };
            let in_time = timeout_at(until, all).await.is_ok();
            if in_time && orderly {
                return Ok(());
            }
            let detail = "the broker did not confirm that the channels are closed";
            Err(Error::new(ErrorKind::Timeout, "close", detail))
        })
    }
}

impl Drop for RabbitSubscription {
    fn drop(&mut self) {
        self.desk.over();
    }
}

/// One consumer on one queue.
struct Post {
    shift: Arc<Shift>,
    is_shard: bool,
    drain_deadline: Duration,
    number: usize,
    source: Arc<str>,
    queue: String,
    consumer: String,
    prefetch: u16,
    link: Arc<Link>,
    desk: Arc<Desk>,
    answer_deadline: Duration,
}

/// How often in a row a consumer lost its channel soon after it was attached.
#[derive(Debug, Default, PartialEq, Eq)]
struct Setbacks {
    count: u32,
    /// Whether a message could not be read. Whatever is prefetched beside such a one counts as delivered each time, and
    /// a quorum queue may drop what was delivered too often.
    unreadable: bool,
}

impl Setbacks {
    fn add(&mut self, lived: Duration, unreadable: bool) {
        if lived >= STEADY {
            *self = Self::default();
        }
        self.count = self.count.saturating_add(1);
        self.unreadable |= unreadable;
    }
}

enum Ended {
    By(Error),
    /// Another member is to have the shard.
    Shift,
    Stop,
}

struct Attached {
    // Held: it lives as long as its channels are used.
    _connection: Arc<Connection>,
    channel: Channel,
    consumer: Consumer,
    generation: Arc<Generation>,
}

impl Post {
    async fn attach(&self, prefetch: u16) -> Result<Attached> {
        let until = Instant::now() + self.answer_deadline;
        let (connection, channel) = self.link.channel(OPERATION, until).await?;
        let until = Instant::now() + self.answer_deadline;
        let attaching = async {
            // Before the consumer, whose buffer in the client has no bound of its own.
            let each = BasicQosOptions { global: false };
            channel.basic_qos(prefetch, each).await?;
            let queue = short(&self.queue).unwrap_or_default();
            let tag = short(cut(&self.consumer, 255)).unwrap_or_default();
            let options = BasicConsumeOptions::default();
            let arguments = FieldTable::default();
            channel.basic_consume(queue, tag, options, arguments).await
        };
        match timeout_at(until, attaching).await {
            Ok(Ok(consumer)) => {
                self.desk.up(self.number);
                Ok(Attached {
                    _connection: connection,
                    channel,
                    consumer,
                    generation: Generation::new(),
                })
            }
            Ok(Err(error)) => Err(mapped(OPERATION, &self.queue, error)),
            // The queue may be slow alone, and others use the connection. One that is dead opens no channel the next time.
            Err(_) => {
                let detail = format!("no consumer on {} in time", self.queue);
                Err(Error::new(ErrorKind::Unavailable, OPERATION, detail))
            }
        }
    }

    /// Keeps a consumer attached until told to stop. Whether it ended in order.
    async fn hold(
        self,
        mut attached: Option<Attached>,
        mut stopping: watch::Receiver<Option<Instant>>,
    ) -> bool {
        let mut setbacks = Setbacks::default();
        loop {
            self.shift.forget();
            let prefetch = if setbacks.unreadable {
                1
            } else {
                self.prefetch
            };
            let next = match attached.take() {
                Some(attached) => Ok(attached),
                None => tokio::select! {
                    next = self.attach(prefetch) => next,
                    _ = stopping.wait_for(Option::is_some) => return true,
                },
            };
            let attached_at = Instant::now();
            let error = match next {
                Ok(mut next) => {
                    let ended = tokio::select! {
                        error = self.consume(&mut next) => Ended::By(error),
                        () = self.shift.asked.notified() => Ended::Shift,
                        _ = stopping.wait_for(Option::is_some) => Ended::Stop,
                    };
                    if matches!(ended, Ended::Shift) {
                        self.shift.forget();
                        tokio::select! {
                            () = self.desk.drain(&next.generation, self.drain_deadline) => {}
                            _ = stopping.wait_for(Option::is_some) => {}
                        }
                    }
                    self.desk.end(&next.generation);
                    match ended {
                        Ended::By(error) => error,
                        Ended::Shift => {
                            let until = Instant::now() + self.answer_deadline;
                            let mut leaving = pin!(leave(&next.channel, until));
                            tokio::select! {
                                _ = &mut leaving => continue,
                                _ = stopping.wait_for(Option::is_some) => {}
                            }
                            let until = stopping.borrow().unwrap_or_else(Instant::now);
                            return timeout_at(until, leaving).await.unwrap_or(false);
                        }
                        Ended::Stop => {
                            let until = stopping.borrow().unwrap_or_else(Instant::now);
                            return leave(&next.channel, until).await;
                        }
                    }
                }
                Err(error) => error,
            };
            setbacks.add(attached_at.elapsed(), is_unreadable(&error));
            self.tell(error);
            let pause = PAUSE.delay(setbacks.count, None, &mut fastrand::Rng::new());
            tokio::select! {
                () = sleep(pause) => {}
                _ = stopping.wait_for(Option::is_some) => return true,
            }
        }
    }

    /// Lays out deliveries until there are no more.
    async fn consume(&self, attached: &mut Attached) -> Error {
        while let Some(next) = attached.consumer.next().await {
            match next {
                Ok(delivery) => {
                    self.shift.busy.store(true, Ordering::Release);
                    let (item, early) = self.item(delivery, &attached.generation);
                    self.desk.offer(item, early);
                }
                Err(error) => return mapped("receive", &self.queue, error),
            }
        }
        // The broker cancels a consumer when its queue is deleted or moves.
        let detail = format!("the consumer on {} was cancelled", self.queue);
        Error::new(ErrorKind::Unavailable, "receive", detail)
    }

    /// A report: consuming goes on, whatever it was.
    fn tell(&self, error: Error) {
        let text = error.to_string();
        // The broker's words on a delivery that was kept for longer than it allows.
        if text.contains("delivery acknowledgement") {
            tracing::warn!(
                queue = self.queue,
                error = text,
                "a delivery was unsettled for longer than the broker's consumer_timeout"
            );
        } else if is_unreadable(&error) {
            tracing::error!(
                queue = self.queue,
                error = text,
                "the client cannot read a message of this queue, or of another on the same connection: remove it by other \
                 means; until then one message is taken at a time"
            );
        } else {
            tracing::debug!(queue = self.queue, error = text, "attaching again");
        }
        let report = Error::new(ErrorKind::Unavailable, "receive", text).with_source(error);
        self.desk.down(self.number, report);
    }

    fn item(
        &self,
        delivery: lapin::message::Delivery,
        generation: &Arc<Generation>,
    ) -> (Item, Duration) {
        let place = Place {
            exchange: delivery.exchange.as_str(),
            routing_key: delivery.routing_key.as_str(),
        };
        // What came straight to a shard was sent to the name that all of them share.
        let is_direct = place.exchange.is_empty() && place.routing_key == self.queue;
        let topic = if self.is_shard && is_direct {
            self.source.to_string()
        } else {
            place.name()
        };
        let received = received(topic, &self.queue, &delivery.properties, delivery.data);
        let coordinates = received.coordinates.clone();
        let mut incoming = received.read();
        if incoming.id_missing {
            // A queue has no positions, so its name would be the id of every such message, and the second a duplicate.
            incoming.message.id = MessageId::new(cut(
                &format!("{}/{coordinates}", MessageId::generate()),
                255,
            ));
        }
        // What came over a rung of ours comes by its source; anybody else may write anything into a header.
        let is_ours = incoming.story.consumer.as_deref() == Some(self.consumer.as_str());
        let due = incoming.story.due_at.filter(|_| is_ours);
        let early = due
            .and_then(|due| Duration::try_from(due - OffsetDateTime::now_utc()).ok())
            .unwrap_or_default();
        let item = Item {
            generation: Arc::clone(generation),
            acker: delivery.acker,
            incoming,
            source: Arc::clone(&self.source),
            coordinates,
            redelivered: delivery.redelivered,
        };
        (item, early)
    }
}

/// Closes a channel. Its answer comes behind every acknowledgement that was sent on it, so these are in effect then.
async fn leave(channel: &Channel, until: Instant) -> bool {
    let Some(reason) = short("closed") else {
        return true;
    };
    match timeout_at(until, channel.close(200, reason)).await {
        Ok(Ok(())) => true,
        // It was gone already: nothing is unheard of that is not brought again.
        Ok(Err(_)) => true,
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection that dies of the same message soon after each attaching must not be made anew at full speed for ever.
    #[test]
    fn only_a_channel_that_lives_ends_the_setbacks() {
        let mut setbacks = Setbacks::default();
        for count in 1..=20 {
            setbacks.add(Duration::from_millis(50), count == 3);
            assert_eq!(setbacks.count, count);
            assert_eq!(setbacks.unreadable, count >= 3);
        }
        setbacks.add(STEADY, false);
        let first = Setbacks {
            count: 1,
            unreadable: false,
        };
        assert_eq!(setbacks, first);
    }
}
