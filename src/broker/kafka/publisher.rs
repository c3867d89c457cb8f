//! Publishing: a batch in waves over one generation of the producer, again over the next one after a failure.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::producer::DeliveryFuture;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::batch::Batch;
use super::config::KafkaConfig;
use super::control::Control;
use super::error::{Verdict, health, mapped, verdict_on_delivery, verdict_on_enqueue};
use super::generation::{Generation, Generations};
use super::record;
use crate::broker::{Health, PublishOutcome, Stored};
use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind, Result};

/// Generations that one call may use up. A culprit in a batch costs one; more mean that the broker is not well.
const GENERATIONS_MAX: usize = 5;
/// How long a topic's existence and partition count are trusted.
const KNOWN_FOR: Duration = Duration::from_secs(300);
/// Most topics remembered.
const KNOWN_MAX: usize = 10_000;
/// Between two tries to enter a queue that other calls have filled.
const QUEUE_POLL: Duration = Duration::from_millis(5);

/// The sending half of the adapter.
pub(super) struct Sender {
    control: Arc<Control>,
    generations: Generations,
    careful: rdkafka::ClientConfig,
    deadline: Duration,
    known: Mutex<HashMap<String, Known>>,
}

#[derive(Clone, Copy)]
struct Known {
    partitions: usize,
    at: Instant,
}

/// What became of one record in one generation.
enum Answer {
    Confirmed,
    Refused(KafkaError),
    /// Nothing by the deadline.
    None,
}

impl Sender {
    pub(super) fn new(config: &KafkaConfig, control: Arc<Control>) -> Self {
        Self {
            control,
            generations: Generations::new(config.producer()),
            careful: config.careful_producer(),
            deadline: config.publish_deadline,
            known: Mutex::default(),
        }
    }

    /// As the producer in use knows, and before that has confirmed anything also as questions about topics are answered.
    pub(super) fn health(&self) -> Health {
        let trouble = match self.generations.in_use() {
            Err(_closed) => return Health::closed(),
            Ok(Some(generation)) if generation.has_confirmed() => generation.context.trouble(),
            Ok(Some(generation)) => generation.context.trouble().or(self.control.trouble()),
            Ok(None) => self.control.trouble(),
        };
        health(trouble)
    }

    pub(super) async fn close(&self, deadline: Duration) -> Result<()> {
        self.generations.close(deadline).await
    }

    pub(super) async fn publish(&self, messages: &[Outgoing]) -> Vec<PublishOutcome> {
        let start = Instant::now();
        // What is left of the deadline is for a machine that has other things to do.
        let deadline = start + self.deadline - (self.deadline / 10).min(Duration::from_secs(1));
        let mut batch = Batch::new(messages);
        self.look_up(&mut batch, deadline).await;
        let mut connected = true;
        for _ in 0..GENERATIONS_MAX {
            if batch.is_settled() || Instant::now() >= deadline {
                break;
            }
            let generation = match self.generations.current() {
                Ok(generation) => generation,
                Err(error) => {
                    batch.fail_pending(Stored::No, error);
                    connected = false;
                    break;
                }
            };
            if self.attempt(&generation, &mut batch, deadline).await {
                continue;
            }
            connected = generation.context.trouble().is_none();
            self.retire(generation, &mut batch).await;
            if batch.has_suspects() {
                self.one_by_one(&mut batch, deadline).await;
            }
        }
        batch.into_outcomes(connected)
    }

    /// Settles what goes to topics that do not exist, before anything is queued: the client would wait 30 s for them.
    async fn look_up(&self, batch: &mut Batch<'_>, deadline: Instant) {
        let unknown: Vec<String> = batch
            .destinations()
            .into_iter()
            .filter(|name| match record::is_topic_name(name) {
                true => !self.is_fresh(name),
                false => {
                    let error = || Error::invalid("destination", record::NAME_RULE, name);
                    batch.reject_destination(name, error);
                    false
                }
            })
            .map(str::to_owned)
            .collect();
        if unknown.is_empty() {
            return;
        }
        let asked = timeout_at(deadline, self.control.look_up("publish", unknown.clone())).await;
        let found = match asked {
            Ok(Ok(found)) => found,
            failed => {
                let error = match failed {
                    Ok(Err(error)) => error,
                    _ => Error::new(ErrorKind::Timeout, "publish", "no answer about topics"),
                };
                // Without an answer what was known stays good; the rest must wait.
                let mut error = Some(error);
                for name in unknown {
                    if self.partitions(&name).is_none() {
                        batch.fail_destination(&name, &mut error);
                    }
                }
                return;
            }
        };
        for (name, topic) in unknown.into_iter().zip(found) {
            match topic {
                Ok(Some(topic)) => self.remember(name, topic.partitions),
                Err(forbidden) => {
                    self.forget(&name);
                    let mut error = Some(forbidden);
                    batch.reject_destination(&name, || {
                        error.take().unwrap_or_else(|| {
                            let detail = format!("{name} may not be seen");
                            Error::new(ErrorKind::Rejected, "publish", detail)
                        })
                    });
                }
                Ok(None) => {
                    self.forget(&name);
                    batch.reject_destination(&name, || {
                        let detail = format!("no such topic: {name}");
                        Error::new(ErrorKind::NotFound, "publish", detail)
                    });
                }
            }
        }
    }

    /// Sends what is pending in one generation. False if it must be retired.
    async fn attempt(
        &self,
        generation: &Arc<Generation>,
        batch: &mut Batch<'_>,
        deadline: Instant,
    ) -> bool {
        batch.begin();
        loop {
            let wave = batch.wave(|topic| {
                self.partitions(topic)
                    .is_some_and(|partitions| generation.is_open(topic, partitions))
            });
            if wave.is_empty() {
                return true;
            }
            if !self.send(generation, batch, wave, deadline).await {
                return false;
            }
        }
    }

    /// Queues a wave in order and takes the answers. False on the first failure that could leave a gap.
    async fn send(
        &self,
        generation: &Arc<Generation>,
        batch: &mut Batch<'_>,
        wave: Vec<usize>,
        deadline: Instant,
    ) -> bool {
        let mut waiting = VecDeque::with_capacity(wave.len());
        let mut sound = true;
        'wave: for at in wave {
            if !batch.may_send(at) {
                continue;
            }
            let outgoing = batch.outgoing(at);
            let headers = match record::headers(outgoing) {
                Ok(headers) => headers,
                Err(error) => {
                    batch.reject_message(at, error);
                    continue;
                }
            };
            let mut record = record::record(outgoing, headers);
            loop {
                match generation.enqueue(record) {
                    Ok(delivery) => {
                        waiting.push_back((at, delivery));
                        break;
                    }
                    Err((KafkaError::MessageProduction(Code::QueueFull), same)) => {
                        record = same;
                        // Room comes from answers. The same record goes next, whatever they say of others.
                        if let Some(first) = waiting.pop_front() {
                            if !self.take(generation, batch, first, deadline).await {
                                sound = false;
                                break 'wave;
                            }
                        } else if Instant::now() >= deadline {
                            sound = false;
                            break 'wave;
                        } else {
                            sleep_until(Instant::now() + QUEUE_POLL).await;
                        }
                    }
                    Err((error, _)) => {
                        match verdict_on_enqueue(&error) {
                            Verdict::Message => batch.reject_message(at, refused(error)),
                            Verdict::Destination => {
                                // Only this client thinks so, from its last look at the topic.
                                self.generations.retire(generation);
                                self.reject_topic(batch, at, error);
                            }
                            _ => {
                                batch.note(at, Stored::No, refused(error));
                                sound = false;
                                break 'wave;
                            }
                        }
                        break;
                    }
                }
            }
        }
        while let Some(next) = waiting.pop_front() {
            sound &= self.take(generation, batch, next, deadline).await;
        }
        sound
    }

    /// Waits for one answer. False on a failure. After a fatal one the queue is given up at once, since nothing of it
    /// can be sent any more; a deadline leaves it to [`retire`](Self::retire).
    async fn take(
        &self,
        generation: &Arc<Generation>,
        batch: &mut Batch<'_>,
        (at, delivery): (usize, DeliveryFuture),
        deadline: Instant,
    ) -> bool {
        match answer(generation, batch.outgoing(at), delivery, deadline).await {
            (Answer::Confirmed, _) => {
                batch.confirm(at);
                true
            }
            (Answer::None, delivery) => {
                batch.leave_unanswered(at, delivery);
                false
            }
            (Answer::Refused(error), _) => {
                self.generations.retire(generation);
                if generation.is_fatal() {
                    purge(Arc::clone(generation)).await;
                }
                self.judge(batch, at, error);
                false
            }
        }
    }

    fn judge(&self, batch: &mut Batch<'_>, at: usize, error: KafkaError) {
        match verdict_on_delivery(&error) {
            Verdict::Destination => self.reject_topic(batch, at, error),
            Verdict::Suspect => batch.suspect(at, refused(error)),
            Verdict::NotStored => batch.note(at, Stored::No, refused(error)),
            Verdict::Message | Verdict::Unknown => batch.note(at, Stored::Unknown, refused(error)),
        }
    }

    fn reject_topic(&self, batch: &mut Batch<'_>, at: usize, error: KafkaError) {
        let name = &batch.outgoing(at).message.destination;
        self.forget(name);
        let mut error = Some(refused(error));
        batch.reject_destination(name, || {
            error.take().unwrap_or_else(|| {
                let detail = format!("{name} was refused to an earlier message");
                Error::new(ErrorKind::Rejected, "publish", detail)
            })
        });
    }

    /// Takes the generation out of use; its queue is given up once no other call waits on it. What it did not answer may
    /// be stored: also what waits in the client's queue may have been sent before, over a connection that was lost.
    async fn retire(&self, generation: Arc<Generation>, batch: &mut Batch<'_>) {
        self.generations.retire(&generation);
        for (at, delivery) in batch.take_unanswered() {
            match answer(&generation, batch.outgoing(at), delivery, Instant::now()).await {
                (Answer::Confirmed, _) => batch.confirm(at),
                (Answer::Refused(_) | Answer::None, _) => {
                    batch.note(at, Stored::Unknown, unanswered_by("publish"));
                }
            }
        }
    }

    /// Sends the messages of suspect topics alone, each answered before the next, so that a refusal hits the culprit.
    async fn one_by_one(&self, batch: &mut Batch<'_>, deadline: Instant) {
        let generation = match Generation::new(&self.careful) {
            Ok(generation) => generation,
            Err(error) => return batch.fail_pending(Stored::No, error),
        };
        for at in batch.take_suspects() {
            if !batch.may_send(at) {
                continue;
            }
            let outgoing = batch.outgoing(at);
            let sent = match record::headers(outgoing) {
                Ok(headers) => generation.enqueue(record::record(outgoing, headers)),
                Err(error) => {
                    batch.reject_message(at, error);
                    continue;
                }
            };
            let delivery = match sent {
                Ok(delivery) => delivery,
                Err((error, _)) => {
                    match verdict_on_enqueue(&error) {
                        Verdict::Message => batch.reject_message(at, refused(error)),
                        Verdict::Destination => self.reject_topic(batch, at, error),
                        _ => return batch.fail_pending(Stored::No, refused(error)),
                    }
                    continue;
                }
            };
            match answer(&generation, outgoing, delivery, deadline).await.0 {
                Answer::Confirmed => batch.confirm(at),
                Answer::Refused(error) => match verdict_on_delivery(&error) {
                    Verdict::Suspect | Verdict::Message => {
                        tracing::warn!(topic = outgoing.message.destination, %error, "message refused");
                        batch.reject_message(at, refused(error));
                    }
                    Verdict::Destination => self.reject_topic(batch, at, error),
                    Verdict::NotStored | Verdict::Unknown => {
                        batch.note(at, Stored::Unknown, refused(error));
                        return;
                    }
                },
                Answer::None => {
                    batch.note(at, Stored::Unknown, unanswered_by("publish"));
                    return;
                }
            }
        }
    }

    fn is_fresh(&self, topic: &str) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known
            .get(topic)
            .is_some_and(|topic| topic.at.elapsed() < KNOWN_FOR)
    }

    fn partitions(&self, topic: &str) -> Option<usize> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(topic).map(|topic| topic.partitions)
    }

    fn remember(&self, topic: String, partitions: usize) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        let at = Instant::now();
        known.insert(topic, Known { partitions, at });
    }

    fn forget(&self, topic: &str) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.remove(topic);
    }
}

/// Waits for one answer; without one by the deadline the delivery comes back.
async fn answer(
    generation: &Generation,
    outgoing: &Outgoing,
    mut delivery: DeliveryFuture,
    deadline: Instant,
) -> (Answer, Option<DeliveryFuture>) {
    match timeout_at(deadline, &mut delivery).await {
        Ok(Ok(Ok(stored))) => {
            generation.confirmed(&outgoing.message.destination, stored.partition);
            (Answer::Confirmed, None)
        }
        Ok(Ok(Err((error, _)))) => (Answer::Refused(error), None),
        Ok(Err(_canceled)) => (Answer::Refused(KafkaError::Canceled), None),
        Err(_elapsed) => (Answer::None, Some(delivery)),
    }
}

async fn purge(generation: Arc<Generation>) {
    // Fails only while the runtime shuts down; the drop of the generation purges too.
    let _ = tokio::task::spawn_blocking(move || generation.purge()).await;
}

fn refused(source: KafkaError) -> Error {
    mapped("publish", "the broker did not confirm", source)
}

fn unanswered_by(operation: &'static str) -> Error {
    Error::new(
        ErrorKind::Timeout,
        operation,
        "no confirmation by the publish deadline",
    )
}
