//! What an operator does to single entries: change, throw away, have handled once more.

use tracing::info;

use crate::envelope::Outgoing;
use crate::error::{Error, ErrorKind, Result};
use crate::headers::is_reserved;
use crate::message::{Message, MessageId};
use crate::store::{Leaving, LetterEntry, LetterFilter, LetterOutcome, Note, WholeLetter};
use crate::story::{Origin, Reason, Story};

use super::Redrive;
use super::canary::Sent;
use super::plan::{validate_filter, words};
use super::run::OPERATION;

/// Entries that are thrown away in one transaction.
const STEP_MAX: usize = 500;

/// What became of entries that were to be thrown away.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Discarded {
    /// Thrown away.
    pub count: u64,
    /// Still there, because a run may have sent them: resume it, or redrive them as they are.
    pub in_hand: u64,
}

impl Redrive {
    /// Changes the message of an entry: payload, headers, key, type. What comes of it is another message, with an id of its
    /// own that tells the old one as its [cause](Message::causation_id), in an entry of its own in place of the old one. It is
    /// redriven like any other. Returns its position.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) when the entry is not there, [`Corrupt`](ErrorKind::Corrupt) when it cannot be read,
    /// [`Busy`](ErrorKind::Busy) when a run that is named may have sent it: under its old id it may have its effect still,
    /// and under the new one it would have another. [`Invalid`](ErrorKind::Invalid) for a new header that relaybox writes
    /// itself, or without words.
    pub async fn edit(
        &self,
        operator: &str,
        position: i64,
        because: &str,
        change: impl FnOnce(&mut Message) + Send,
    ) -> Result<i64> {
        words("operator", operator)?;
        words("because", because)?;
        let (entry, old) = self.whole(position).await?;
        let mut new = old.clone();
        change(&mut new);
        new.id = MessageId::generate();
        no_new_reserved(&old, &new)?;
        let new = new.with_causation_id(old.id.as_str());
        let detail = format!("by {}: {because}", new.id);
        let letter = Outgoing {
            message: new,
            // Its attempts and age are those of a new message, whose effect no inbox can have forgotten; why it is here is not.
            story: Story {
                redrive_count: 0,
                first_failed_at: Some(self.clock.now()),
                ..entry.story.clone()
            },
        };
        let leaving = entry.leaving(LetterOutcome::Replaced, detail);
        let note = self.note(operator, "edit");
        let replaced = self.store.replace(&leaving, &letter, &note).await?;
        let position = match replaced {
            Some(position) => position,
            None => return Err(self.untouchable(position).await),
        };
        let (old, new) = (&old.id, &letter.message.id);
        info!(consumer = self.consumer, operator, %old, %new, "dead letter edited");
        Ok(position)
    }

    /// Throws the entries that match now away, for good. The audit keeps their ids, digests and the reason. Those that a run
    /// may have sent stay and are counted: thrown away, they might have their effect all the same.
    ///
    /// # Errors
    /// [`Invalid`](ErrorKind::Invalid) without words, else as the database's; what is done by then stays so: repeat it.
    pub async fn discard(
        &self,
        operator: &str,
        filter: &LetterFilter,
        because: &str,
    ) -> Result<Discarded> {
        words("operator", operator)?;
        words("because", because)?;
        validate_filter(filter)?;
        let end = self.store.last_position().await?;
        let note = self.note(operator, "discard");
        let mut after = 0;
        let mut all = Discarded::default();
        loop {
            let range = (after, end);
            let entries = self
                .store
                .entries(&self.consumer, filter, range, STEP_MAX)
                .await?;
            let Some(last) = entries.last() else {
                let Discarded { count, in_hand } = all;
                info!(
                    consumer = self.consumer,
                    operator, because, count, in_hand, "dead letters discarded"
                );
                return Ok(all);
            };
            let last = last.position;
            let leaving = |entry: &LetterEntry| entry.leaving(LetterOutcome::Discarded, because);
            let leaving: Vec<Leaving> = entries.iter().map(leaving).collect();
            let taken = self.store.take_out(&leaving, &note).await?;
            all.count += taken;
            if taken < leaving.len() as u64 {
                let range = (after, last);
                let left = self
                    .store
                    .entries(&self.consumer, filter, range, STEP_MAX)
                    .await?;
                all.in_hand += left.len() as u64;
            }
            after = last;
        }
    }

    /// Enters a message whose effect happened and is wanted once more: with an id of its own, so that no inbox knows it, which
    /// tells the given one as its cause. It is redriven like any other; its `destination` tells the source. Returns its
    /// position.
    ///
    /// A call that ends with an error of the database may have entered it: look for the id that the error tells before the
    /// call is made again, which would enter another one.
    ///
    /// # Errors
    /// [`Invalid`](ErrorKind::Invalid) for a message that the publisher would not take or that the
    /// [inbox](Redrive::with_inbox) knows by its business key, whatever its id: it would change nothing. Without words, as
    /// well.
    pub async fn reprocess(&self, operator: &str, message: &Message, because: &str) -> Result<i64> {
        let capabilities = self.publisher.capabilities();
        message.validate(&capabilities.limits)?;
        let origin = Origin {
            topic: message.destination.clone(),
            partition: None,
            offset: None,
        };
        self.enter(operator, message, Some(origin), because).await
    }

    /// The same with the message of an entry, which stays.
    ///
    /// # Errors
    /// As [`edit`](Self::edit).
    pub async fn reprocess_entry(
        &self,
        operator: &str,
        position: i64,
        because: &str,
    ) -> Result<i64> {
        let (entry, message) = self.whole(position).await?;
        self.enter(operator, &message, entry.story.origin, because)
            .await
    }

    async fn enter(
        &self,
        operator: &str,
        message: &Message,
        origin: Option<Origin>,
        because: &str,
    ) -> Result<i64> {
        words("operator", operator)?;
        words("because", because)?;
        let mut new = message.clone().with_causation_id(message.id.as_str());
        new.id = MessageId::generate();
        let told = Leaving {
            position: 0,
            message_id: new.id.clone(),
            redrive_count: 0,
            digest: new.digest().to_vec(),
            outcome: LetterOutcome::Entered,
            detail: format!("of {}: {because}", message.id),
        };
        let letter = Outgoing {
            message: new,
            story: Story {
                origin,
                consumer: Some(self.consumer.clone()),
                reason: Some(Reason::new(Reason::REPROCESS)),
                first_failed_at: Some(self.clock.now()),
                ..Story::default()
            },
        };
        self.is_unknown(&letter).await?;
        let note = self.note(operator, "reprocess");
        let entered = self.patiently(|| self.store.enter(&letter, &told, &note));
        let position = entered.await.map_err(|error| {
            let detail = format!("message {}: {error}", letter.message.id);
            Error::new(error.kind(), OPERATION, detail).with_source(error)
        })?;
        let (of, new) = (&message.id, &letter.message.id);
        info!(consumer = self.consumer, operator, %of, %new, "message entered to be handled once more");
        Ok(position)
    }

    async fn whole(&self, position: i64) -> Result<(LetterEntry, Message)> {
        let WholeLetter { entry, message } = self
            .show(position)
            .await?
            .ok_or_else(|| self.gone(position))?;
        Ok((entry, message?))
    }

    /// Refuses what the inbox would take for a duplicate.
    async fn is_unknown(&self, letter: &Outgoing) -> Result<()> {
        let sent = Sent::of(letter.clone(), &self.inbox_key);
        if !self.is_handled(&sent).await? {
            return Ok(());
        }
        let limit = "one that the inbox does not know by its business key";
        Err(Error::invalid("message", limit, letter.message.id.as_str()))
    }

    /// Why an entry could not be changed.
    async fn untouchable(&self, position: i64) -> Error {
        match self.store.may_have_sent(&self.consumer, position).await {
            Err(error) => error,
            Ok(None) => self.gone(position),
            Ok(Some(run)) => {
                let detail = format!(
                    "run {run} may have sent dead letter {position}: resume it, or redrive the entry as it is"
                );
                Error::new(ErrorKind::Busy, OPERATION, detail)
            }
        }
    }

    fn gone(&self, position: i64) -> Error {
        let detail = format!("{} has no dead letter {position}", self.consumer);
        Error::new(ErrorKind::NotFound, OPERATION, detail)
    }

    fn note<'a>(&'a self, operator: &'a str, verb: &'a str) -> Note<'a> {
        Note {
            consumer: &self.consumer,
            operator,
            verb,
        }
    }
}

/// Headers that relaybox writes itself may stand in a message that came from elsewhere, but nobody adds one.
fn no_new_reserved(old: &Message, new: &Message) -> Result<()> {
    let added = |header: &&crate::headers::Header| {
        is_reserved(&header.name) && !old.headers.iter().any(|known| known == *header)
    };
    match new.headers.iter().find(added) {
        Some(header) => {
            let limit = "a name that relaybox does not write itself";
            Err(Error::invalid("header name", limit, &header.name))
        }
        None => Ok(()),
    }
}
