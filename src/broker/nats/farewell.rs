//! How a puller ends: it takes its question back, gives back what is held, and makes sure of what was acknowledged.

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::RequestErrorKind;
use async_nats::jetstream::Message;
use bytes::Bytes;
use tokio::time::{Instant, timeout, timeout_at};

use super::ear::Ear;
use super::puller::Puller;
use super::shelf::{ACKNOWLEDGED, Held, IN_PROGRESS, RELEASED};
use crate::error::{Error, ErrorKind, Result};

/// Answers that may still be under way besides the messages of a question: heartbeats, and of signs of life.
const ANSWERS: u64 = 64;
/// Most messages fetched in a last look, and for how long it waits for them.
const SWEPT: usize = 64;
const SWEEP: Duration = Duration::from_millis(50);
/// The number of a message that no stream has.
const NO_SEQUENCE: u64 = 9_000_000_000_000_000_000;

impl Puller {
    /// Gives back what is held and makes sure that the server knows what was acknowledged.
    pub(super) async fn farewell(mut self, until: Instant) -> Result<()> {
        self.held.clear();
        let held = self.shelf.close();
        let said = timeout_at(until, self.say_all(held, until)).await;
        said.unwrap_or_else(|_elapsed| {
            let tried = &self.link.tried;
            let detail = format!("{tried} did not confirm what was acknowledged in time");
            Err(Error::new(ErrorKind::Timeout, "close", detail))
        })
    }

    async fn say_all(&mut self, mut held: BTreeMap<u64, Held>, until: Instant) -> Result<()> {
        self.connected().await?;
        self.send_settled().await;
        // A server that does not answer must not keep the rest from being said.
        let half = until.saturating_duration_since(Instant::now()) / 2;
        let patience = half.min(self.config.answer_deadline);
        let withdrawn = timeout(patience, self.withdraw(&mut held)).await;
        if withdrawn.is_err() {
            self.ear.close().await;
        }
        self.connected().await?;
        if !held.is_empty() {
            // The other half of the time is for what is said.
            let _ = timeout(patience / 2, self.sweep(&mut held)).await;
        }
        for held in held.into_values() {
            // Somebody else may have it by now.
            if Instant::now() < held.until {
                self.say(held.reply, Bytes::from_static(RELEASED)).await;
            }
        }
        self.confirm().await?;
        let _ = self.link.client.flush().await;
        Ok(())
    }

    /// Takes back the question that stands, because what is given back would come here at once. What came until then is
    /// given back with the rest.
    async fn withdraw(&mut self, held: &mut BTreeMap<u64, Held>) {
        let asked = self.pull.take().map_or(0, |pull| pull.left);
        let count = u64::try_from(asked)
            .unwrap_or(u64::MAX)
            .saturating_add(ANSWERS);
        // After a loss the server counts from none again, and the client does not.
        if self.changes.borrow().losses > 0 || !self.ear.close_after(count).await {
            self.ear.close().await;
        } else {
            self.fill(count).await;
        }
        loop {
            tokio::select! {
                message = self.ear.next() => match message {
                    Some(message) => self.collect(message, held),
                    None => return,
                },
                _ = self.changes.changed() => if !self.link.is_connected() {
                    // The question went with the connection.
                    return;
                },
            }
        }
    }

    /// Has the server say something so many times: it answers a sign of life for a message that is nobody's.
    async fn fill(&mut self, count: u64) {
        let (stream, durable) = (&self.feed.stream, &self.feed.durable);
        let nobody = format!("$JS.ACK.{stream}.{durable}.1.{NO_SEQUENCE}.0.0.0");
        let client = &self.link.client;
        for _ in 0..count {
            let (reply, word) = (self.ear.address("f"), Bytes::from_static(IN_PROGRESS));
            let saying = client.publish_with_reply(nobody.clone(), reply, word);
            if saying.await.is_err() {
                return;
            }
        }
    }

    /// Fetches what the server had chosen for the question when it was taken back. It would be delivered before all that is
    /// given back, whatever its place; and with a question that is heard, the server forgets the one that is not.
    async fn sweep(&mut self, held: &mut BTreeMap<u64, Held>) -> Result<()> {
        self.ear = Ear::open(&self.link).await?;
        let question = format!(r#"{{"batch":{SWEPT},"expires":{}}}"#, SWEEP.as_nanos());
        let (subject, request) = self.question("s", question);
        let asked = self.link.context.send_request(subject, request);
        self.link.ask("close", "no last look", asked).await?;
        for _ in 0..SWEPT {
            match self.ear.next().await {
                Some(message) if self.ear.token(&message).is_none() => {
                    self.collect(message, held);
                }
                // The time is over, or there is no consumer.
                _ => break,
            }
        }
        Ok(())
    }

    fn collect(&self, message: async_nats::Message, held: &mut BTreeMap<u64, Held>) {
        if self.ear.token(&message).is_some() {
            return;
        }
        let until = Instant::now() + self.config.ack_wait;
        let context = self.link.context.clone();
        let message = Message { message, context };
        if let Ok(sequence) = message.info().map(|info| info.stream_sequence)
            && let Some(reply) = message.message.reply
        {
            held.insert(sequence, Held { reply, until });
        }
    }

    /// The last acknowledgement once more, as a question: the server answers what is acknowledged already, and its answer
    /// stands for all those before.
    async fn confirm(&mut self) -> Result<()> {
        let Some(reply) = self.unconfirmed.take() else {
            return Ok(());
        };
        loop {
            self.connected().await?;
            let client = self.link.client.clone();
            let asking = client.request(reply.clone(), Bytes::from_static(ACKNOWLEDGED));
            let lost = tokio::select! {
                answer = asking => match answer.map_err(|error| error.kind()) {
                    // Without a consumer there is nothing to confirm any more.
                    Ok(_) | Err(RequestErrorKind::NoResponders) => return Ok(()),
                    Err(RequestErrorKind::TimedOut) => false,
                    Err(_) => true,
                },
                _ = self.changes.changed() => false,
            };
            if lost && self.changes.changed().await.is_err() {
                return Ok(());
            }
        }
    }
}
