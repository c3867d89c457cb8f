//! What a puller says to the server: questions, settlements, and signs of life.

use std::sync::Arc;

use async_nats::{Request, Subject};
use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

use super::durable::{Feed, expires};
use super::puller::{Pull, Puller, Signs};
use super::shelf::{ACKNOWLEDGED, IN_PROGRESS};

impl Puller {
    /// Asks for as many messages as there is room for, one question at a time.
    pub(super) async fn ask_for_more(&mut self) {
        let now = Instant::now();
        let waiting = self.pause.is_some() || self.errand.is_some();
        let room = self.shelf.room();
        if self.pull.is_some() || waiting || room == 0 || !self.link.is_connected() {
            return;
        }
        self.numbers += 1;
        let number = self.numbers;
        let expires = expires(&self.config);
        let question = format!(
            r#"{{"batch":{room},"expires":{},"idle_heartbeat":{}}}"#,
            expires.as_nanos(),
            self.config.heartbeat.as_nanos(),
        );
        let (subject, request) = self.question(&format!("p{number}"), question);
        let asked = self.link.context.send_request(subject, request);
        match timeout_at(now + self.config.answer_deadline, asked).await {
            Ok(Ok(())) => {
                self.pull = Some(Pull {
                    number,
                    left: room,
                    heard: Instant::now(),
                });
            }
            Ok(Err(error)) => self.trouble(&error.to_string(), false),
            Err(_elapsed) => self.trouble("the connection takes nothing", false),
        }
    }

    /// A question for messages, whose answers come with this token.
    pub(super) fn question(&self, token: &str, question: String) -> (String, Request) {
        let Feed {
            stream, durable, ..
        } = &self.feed;
        let request = Request::new()
            .payload(question.into())
            .inbox(self.ear.address(token));
        (format!("CONSUMER.MSG.NEXT.{stream}.{durable}"), request)
    }

    pub(super) async fn send_settled(&mut self) {
        if !self.link.is_connected() {
            // Kept here: the client would keep it too, but not tell whether it was sent.
            return;
        }
        for (reply, word) in self.shelf.take_settled() {
            if word == ACKNOWLEDGED {
                self.unconfirmed = Some(reply.clone());
            }
            self.say(reply, word).await;
        }
    }

    pub(super) async fn say(&mut self, reply: Subject, word: Bytes) {
        let saying = self.link.client.publish(reply, word);
        let until = Instant::now() + self.config.answer_deadline;
        // What is not said is asked again by the server, after the ack wait.
        if !matches!(timeout_at(until, saying).await, Ok(Ok(()))) {
            tracing::warn!(source = self.shelf.source, "a settlement could not be sent");
        }
    }

    /// Tells the server that what is held is still in work. The answer to the last sign stands for those before it.
    pub(super) async fn keep_alive(&mut self) {
        let now = Instant::now();
        let third = self.config.ack_wait / 3;
        if let Some(signs) = &self.signs
            && now < signs.sent + third
        {
            return;
        }
        self.signs = None;
        let ending = self.shelf.ending(now + 2 * third);
        let Some(last) = ending.last().cloned() else {
            return;
        };
        if !self.link.is_connected() {
            return;
        }
        self.numbers += 1;
        let number = self.numbers;
        for lease in &ending {
            // Released meanwhile: a sign of life would cut its delay short.
            if !self.shelf.holds(lease) {
                continue;
            }
            if !Arc::ptr_eq(lease, &last) {
                self.say(lease.reply(), Bytes::from_static(IN_PROGRESS))
                    .await;
                continue;
            }
            let inbox = self.ear.address(&format!("w{number}"));
            let word = Bytes::from_static(IN_PROGRESS);
            let asking = self
                .link
                .client
                .publish_with_reply(lease.reply(), inbox, word);
            let _ = timeout_at(now + self.config.answer_deadline, asking).await;
        }
        self.signs = Some(Signs {
            number,
            leases: ending,
            until: now + self.config.ack_wait,
            sent: now,
        });
    }
}
