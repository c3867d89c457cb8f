//! The inbox that a puller hears the server by.

use async_nats::{Message, Subscriber};
use futures_util::StreamExt as _;

use super::link::Link;
use crate::error::Result;

/// A subscription to an inbox of its own.
pub(super) struct Ear {
    inbox: String,
    subscriber: Subscriber,
    /// Messages heard.
    heard: u64,
}

impl Ear {
    pub(super) async fn open(link: &Link) -> Result<Self> {
        let inbox = link.client.new_inbox();
        let subscribing = link.client.subscribe(format!("{inbox}.*"));
        let subscriber = link.ask("subscribe", "no inbox", subscribing).await?;
        Ok(Self {
            inbox,
            subscriber,
            heard: 0,
        })
    }

    /// The subject of an answer that comes with this token.
    pub(super) fn address(&self, token: &str) -> String {
        format!("{}.{token}", self.inbox)
    }

    /// The token of an answer; nothing for a message of the stream's.
    pub(super) fn token<'a>(&self, message: &'a Message) -> Option<&'a str> {
        let rest = message.subject.strip_prefix(self.inbox.as_str())?;
        rest.strip_prefix('.')
    }

    /// Cancel safe. Nothing is heard any more once the subscription or its connection is over.
    pub(super) async fn next(&mut self) -> Option<Message> {
        let message = self.subscriber.next().await;
        self.heard += u64::from(message.is_some());
        message
    }

    /// Ends the subscription after so many more messages, for the client and the server alike.
    ///
    /// Unsubscribed at once, the client would drop what the server sent before it knew.
    pub(super) async fn close_after(&mut self, count: u64) -> bool {
        let ending = self.subscriber.unsubscribe_after(self.heard + count);
        ending.await.is_ok()
    }

    /// Ends the subscription now.
    pub(super) async fn close(&mut self) {
        let _ = self.subscriber.unsubscribe().await;
    }
}
