//! The INSERT with its binds: run by ourselves, or by another client in its own transaction.

use time::OffsetDateTime;

use super::{PostgresStore, size};
use crate::error::{Error, Result};
use crate::lane::{Lane, lane_of_message};
use crate::message::Message;
use crate::store::{EnqueueStatement, header_codec};

/// The INSERT of some messages, for a client of the user's choice: `$1` to `$11` are the fields in this order, each an
/// array of one element a message.
///
/// ```
/// use relaybox::{Message, outbox::Outbox, store::postgres::PostgresStore};
///
/// # fn example(store: PostgresStore) -> relaybox::Result<()> {
/// let outbox = Outbox::new(store);
/// let messages = [Message::new("orders", "OrderPlaced").with_key("order-17")];
/// let statement = outbox.statement(&messages)?;
/// // With tokio-postgres, inside the service's own transaction:
/// // transaction.execute(statement.sql, &[&statement.lanes, &statement.ids, ..]).await?;
/// assert_eq!(statement.ids, [messages[0].id.as_str()]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct Statement<'a> {
    /// The text, under the store's prefix.
    pub sql: &'a str,
    /// `$1`, `int[]`.
    pub lanes: Vec<Lane>,
    /// `$2`, `text[]`.
    pub ids: Vec<&'a str>,
    /// `$3`, `text[]`.
    pub destinations: Vec<&'a str>,
    /// `$4`, `bytea[]`.
    pub keys: Vec<Option<&'a [u8]>>,
    /// `$5`, `text[]`.
    pub event_types: Vec<&'a str>,
    /// `$6`, `text[]`.
    pub content_types: Vec<Option<&'a str>>,
    /// `$7`, `text[]`.
    pub headers: Vec<Option<String>>,
    /// `$8`, `bytea[]`.
    pub payloads: Vec<Option<&'a [u8]>>,
    /// `$9`, `bigint[]`.
    pub versions: Vec<Option<i64>>,
    /// `$10`, `timestamptz[]`.
    pub occurred_at: Vec<OffsetDateTime>,
    /// `$11`, `int[]`.
    pub sizes: Vec<i32>,
}

/// Payloads, keys and header values never reach logs.
impl std::fmt::Debug for Statement<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Statement")
            .field("sql", &self.sql)
            .field("ids", &self.ids)
            .finish_non_exhaustive()
    }
}

impl EnqueueStatement for PostgresStore {
    type Statement<'a> = Statement<'a>;

    fn statement<'a>(&'a self, messages: &'a [Message]) -> Result<Statement<'a>> {
        for message in messages {
            storable(message)?;
        }
        let all = || messages.iter();
        Ok(Statement {
            sql: self.sql.insert.as_str(),
            lanes: all().map(lane_of_message).collect(),
            ids: all().map(|m| m.id.as_str()).collect(),
            destinations: all().map(|m| &*m.destination).collect(),
            keys: all().map(|m| m.key.as_deref()).collect(),
            event_types: all().map(|m| &*m.event_type).collect(),
            content_types: all().map(|m| m.content_type.as_deref()).collect(),
            headers: all().map(header_codec::encode).collect(),
            payloads: all().map(|m| m.payload.as_deref()).collect(),
            versions: all().map(|m| m.version).collect(),
            occurred_at: all().map(|m| m.occurred_at).collect(),
            sizes: all().map(size).collect(),
        })
    }
}

/// Refuses what a column cannot hold before it is sent: a failed statement would abort the caller's transaction.
fn storable(message: &Message) -> Result<()> {
    let texts = [
        ("id", Some(message.id.as_str())),
        ("destination", Some(&*message.destination)),
        ("event_type", Some(&*message.event_type)),
        ("content_type", message.content_type.as_deref()),
    ];
    for (field, text) in texts {
        if let Some(text) = text.filter(|text| text.contains('\0')) {
            return Err(Error::invalid(field, "text without NUL", text));
        }
    }
    let utc = message.occurred_at.checked_to_offset(time::UtcOffset::UTC);
    if !utc.is_some_and(|utc| (1..=9998).contains(&utc.year())) {
        return Err(Error::invalid(
            "occurred_at",
            "in the years 1 to 9998",
            message.occurred_at.to_string(),
        ));
    }
    Ok(())
}
