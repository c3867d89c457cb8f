//! Consuming from memory.

use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use time::OffsetDateTime;

use super::group::{Group, Taken, Ticket};
use super::log::Topic;
use super::{MemoryBroker, NAME, Shared, State, error};
use crate::broker::{
    Backlog, DESTINATIONS_MAX, Delivery, Health, Receipt, Retention, Settlement, Subscriber,
    SubscriberCapabilities, Subscription, SubscriptionRequest, TopologyMode,
};
use crate::clock::add;
use crate::error::{Error, Result};

impl Subscriber for MemoryBroker {
    fn capabilities(&self) -> SubscriberCapabilities {
        let mut capabilities = SubscriberCapabilities::new(NAME);
        capabilities.marks_redelivery = true;
        capabilities
    }

    fn subscribe(
        &self,
        request: SubscriptionRequest,
    ) -> BoxFuture<'_, Result<Box<dyn Subscription>>> {
        Box::pin(async move {
            validate(&request)?;
            let member = {
                let mut state = self.shared.lock();
                if !state.available {
                    return Err(error::down("subscribe"));
                }
                prepare(&mut state, &request)?;
                join(&mut state, &request)
            };
            self.shared.changed.notify_waiters();
            Ok(Box::new(MemorySubscription {
                shared: Arc::clone(&self.shared),
                consumer: request.consumer.into(),
                member,
            }) as Box<dyn Subscription>)
        })
    }

    fn key_affinity(&self, _source: &str) -> bool {
        true
    }

    fn depth<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        Box::pin(async move { self.backlog("depth", None, destination) })
    }

    fn lag<'a>(&'a self, consumer: &'a str, source: &'a str) -> BoxFuture<'a, Result<Backlog>> {
        Box::pin(async move { self.backlog("lag", Some(consumer), source) })
    }

    fn destinations<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        Box::pin(async move { self.named(prefix) })
    }

    /// Until settled: the log lives as long as the process, and so does each consumer's place in it, which nothing puts back.
    fn retention<'a>(&'a self, source: &'a str) -> BoxFuture<'a, Result<Retention>> {
        Box::pin(async move {
            self.backlog("retention", None, source)?;
            Ok(Retention::UntilSettled)
        })
    }
}

impl MemoryBroker {
    fn named(&self, prefix: &str) -> Result<Vec<String>> {
        let state = self.shared.lock();
        if !state.available {
            return Err(error::down("destinations"));
        }
        let from = state
            .topics
            .range::<str, _>((Bound::Included(prefix), Bound::Unbounded));
        let named = from
            .map(|(name, _)| name)
            .take_while(|name| name.starts_with(prefix));
        Ok(named.take(DESTINATIONS_MAX).cloned().collect())
    }

    fn backlog(
        &self,
        operation: &'static str,
        consumer: Option<&str>,
        topic: &str,
    ) -> Result<Backlog> {
        let now = self.shared.config.clock.now();
        let state = self.shared.lock();
        if !state.available {
            return Err(error::down(operation));
        }
        let Some(stored) = state.topics.get(topic) else {
            return Err(error::missing(operation, &[topic]));
        };
        let group = consumer.and_then(|consumer| state.groups.get(consumer));
        let unsettled = group.unwrap_or(&Group::default()).unsettled(topic, stored);
        let age = |since| Duration::try_from(now - since).unwrap_or_default();
        Ok(Backlog::new(unsettled.messages, unsettled.since.map(age)))
    }
}

fn validate(request: &SubscriptionRequest) -> Result<()> {
    if request.consumer.is_empty() {
        return Err(Error::configuration("consumer", "a name", ""));
    }
    if request.sources.is_empty() {
        return Err(Error::configuration("sources", "at least one", "none"));
    }
    if request.in_flight_max == 0 {
        return Err(Error::configuration("in_flight_max", "at least 1", "0"));
    }
    Ok(())
}

/// Verifies everything before it creates anything, so that a refused request leaves nothing behind.
fn prepare(state: &mut State, request: &SubscriptionRequest) -> Result<()> {
    let own = || {
        let rungs = request.rungs.iter().map(|rung| &rung.destination);
        rungs.chain(&request.dead_letters)
    };
    let missing = match request.topology {
        TopologyMode::Create => state.missing(&request.sources),
        TopologyMode::Unchecked => return Ok(()),
        TopologyMode::Verify => state.missing(request.sources.iter().chain(own())),
    };
    if !missing.is_empty() {
        return Err(error::missing("subscribe", &missing));
    }
    // As many partitions as the largest source has, so that a rung shares its load like the source.
    let partitions = request
        .sources
        .iter()
        .filter_map(|source| state.topics.get(source))
        .map(Topic::partitions)
        .max()
        .unwrap_or(1);
    for name in own() {
        if !state.topics.contains_key(name) {
            state.topics.insert(name.clone(), Topic::new(partitions));
        }
    }
    Ok(())
}

fn join(state: &mut State, request: &SubscriptionRequest) -> u64 {
    let State {
        topics,
        groups,
        last_number,
        ..
    } = state;
    let partitions = |topic: &String| topics.get(topic).map_or(0, Topic::partitions);
    let sources = request.sources.iter().map(|source| (source, false));
    let rungs = request.rungs.iter().chain(&request.earlier_rungs);
    let rungs = rungs.map(|rung| (&rung.destination, true));
    let asked = sources
        .chain(rungs)
        .map(|(topic, rung)| (topic.clone(), partitions(topic), rung));
    *last_number += 1;
    let member = *last_number;
    groups.entry(request.consumer.clone()).or_default().join(
        member,
        asked,
        request.in_flight_max,
        last_number,
    );
    member
}

/// A member of a consumer. Dropping it leaves the group: what it has not settled is delivered again.
struct MemorySubscription {
    shared: Arc<Shared>,
    consumer: Arc<str>,
    member: u64,
}

enum Next {
    Taken(Vec<Taken>),
    /// Nothing now; something is due then, if anything waits.
    Wait(Option<OffsetDateTime>),
}

impl MemorySubscription {
    fn next(&self, count_max: usize) -> Next {
        let now = self.shared.config.clock.now();
        let mut guard = self.shared.lock();
        let State {
            available,
            topics,
            groups,
            ..
        } = &mut *guard;
        let Some(group) = groups.get_mut(&*self.consumer).filter(|_| *available) else {
            return Next::Wait(None);
        };
        let taken = group.take(self.member, count_max, topics, now);
        if taken.is_empty() {
            // Whatever is due already waits for room, not for the time.
            Next::Wait(group.next_due(self.member).filter(|due| *due > now))
        } else {
            Next::Taken(taken)
        }
    }

    fn deliver(&self, taken: Taken) -> Delivery {
        let coordinates = taken.received.coordinates.clone();
        Delivery {
            incoming: taken.received.read(),
            source: coordinates.topic.clone(),
            coordinates,
            redelivered: taken.redelivered,
            receipt: Box::new(MemoryReceipt {
                shared: Arc::clone(&self.shared),
                consumer: Arc::clone(&self.consumer),
                ticket: Some(taken.ticket),
            }),
        }
    }
}

impl Subscription for MemorySubscription {
    fn receive(&mut self, count_max: usize) -> BoxFuture<'_, Result<Vec<Delivery>>> {
        Box::pin(async move {
            tokio::task::consume_budget().await;
            let clock = &self.shared.config.clock;
            let changed = self.shared.changed.notified();
            tokio::pin!(changed);
            loop {
                // Listening begins before looking, so that a change in between is not missed.
                changed.as_mut().enable();
                let due = match self.next(count_max) {
                    Next::Taken(taken) => {
                        return Ok(taken.into_iter().map(|t| self.deliver(t)).collect());
                    }
                    Next::Wait(due) => due,
                };
                if let Some(due) = due {
                    let wait = Duration::try_from(due - clock.now()).unwrap_or_default();
                    let sleep = clock.sleep(wait);
                    // A clock moved by hand may have passed the instant before the sleep began.
                    if clock.now() < due {
                        tokio::select! {
                            () = sleep => {}
                            () = changed.as_mut() => {}
                        }
                    }
                } else {
                    changed.as_mut().await;
                }
                changed.set(self.shared.changed.notified());
            }
        })
    }

    fn health(&self) -> Health {
        self.shared.health()
    }

    /// Settlements are in effect when `settle` returns: there is nothing to wait for.
    fn close(self: Box<Self>, _deadline: Duration) -> BoxFuture<'static, Result<()>> {
        drop(self);
        Box::pin(async { Ok(()) })
    }
}

impl Drop for MemorySubscription {
    fn drop(&mut self) {
        let mut guard = self.shared.lock();
        let State {
            groups,
            last_number,
            ..
        } = &mut *guard;
        if let Some(group) = groups.get_mut(&*self.consumer) {
            group.leave(self.member, last_number);
        }
        drop(guard);
        self.shared.changed.notify_waiters();
    }
}

struct MemoryReceipt {
    shared: Arc<Shared>,
    consumer: Arc<str>,
    /// Taken by the settlement; what is left when it is dropped is released.
    ticket: Option<Ticket>,
}

impl MemoryReceipt {
    fn end(&mut self, settlement: Settlement) -> Result<()> {
        let Some(ticket) = self.ticket.take() else {
            return Ok(());
        };
        let now = self.shared.config.clock.now();
        let mut state = self.shared.lock();
        let available = state.available;
        let Some(group) = state.groups.get_mut(&*self.consumer) else {
            return Ok(());
        };
        let lost = !available && group.is_current(&ticket);
        let again = match settlement {
            _ if lost => Some(now),
            Settlement::Acknowledge => None,
            Settlement::Release { delay } => Some(add(now, delay)),
        };
        group.settle(&ticket, again);
        drop(state);
        self.shared.changed.notify_waiters();
        if lost {
            return Err(error::down("settle"));
        }
        Ok(())
    }
}

impl Receipt for MemoryReceipt {
    fn is_current(&self) -> bool {
        let state = self.shared.lock();
        let group = state.groups.get(&*self.consumer);
        self.ticket
            .as_ref()
            .zip(group)
            .is_some_and(|(ticket, group)| group.is_current(ticket))
    }

    fn settle(mut self: Box<Self>, settlement: Settlement) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move { self.end(settlement) })
    }
}

impl Drop for MemoryReceipt {
    fn drop(&mut self) {
        // Without a settlement the message is released; while the broker is down there is nobody to tell of it.
        let _ = self.end(Settlement::Release {
            delay: Duration::ZERO,
        });
    }
}
