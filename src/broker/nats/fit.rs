//! Which headers of a message fit into NATS header lines, and which must be encoded.

use std::collections::BTreeSet;
use std::str::FromStr;

use async_nats::header::HeaderName;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::envelope::Outgoing;
use crate::header_text;
use crate::headers::{self, Header, Headers};
use crate::message::Message;
use crate::story::Story;

/// What a header costs besides its name and value: `: ` and the end of the line.
const LINE_BYTES: usize = 4;

/// Headers by which a sender gives orders to the server (purge, expire, schedule, ...). None of a user's may act.
pub(super) fn is_servers_own(name: &str) -> bool {
    name.get(..5)
        .is_some_and(|start| start.eq_ignore_ascii_case("nats-"))
}

pub(super) fn line_bytes((name, value): &(String, String)) -> usize {
    name.len() + value.len() + LINE_BYTES
}

/// A message's headers, sorted by how they travel.
pub(super) struct Parts {
    /// What a reader takes as it is.
    pub(super) native: Vec<(String, String)>,
    /// What a reader of ours takes from the encoded header, and others can read here.
    pub(super) courtesy: Vec<(String, String)>,
}

impl Parts {
    pub(super) fn of(message: &Message, story: &Story) -> Self {
        let outgoing = Outgoing {
            message: bare(message),
            story: story.clone(),
        };
        let envelope = outgoing.to_headers();
        let encoded = encoded_names(&envelope, &message.headers);
        let mut parts = Self {
            native: Vec::new(),
            courtesy: Vec::new(),
        };
        let mut rest = Vec::new();
        for header in envelope.iter().chain(&message.headers) {
            let text = native_value(header).map(|value| (header.name.clone(), value.to_owned()));
            if encoded.contains(header.name.as_str()) {
                rest.push(header);
                parts.courtesy.extend(text.filter(|_| !acts(header)));
            } else {
                parts.native.extend(text);
            }
        }
        if !rest.is_empty() {
            let name = headers::ENCODED_HEADERS.to_owned();
            parts.native.push((name, header_text::encode(rest)));
        }
        if let Some(key) = &message.key {
            parts
                .native
                .push((headers::KEY.to_owned(), STANDARD.encode(key)));
        }
        if message.payload.is_none() {
            parts
                .native
                .push((headers::NULL_PAYLOAD.to_owned(), "true".to_owned()));
        }
        parts
    }

    pub(super) fn least_bytes(&self) -> usize {
        self.native.iter().map(line_bytes).sum()
    }
}

/// The message with its envelope only.
fn bare(message: &Message) -> Message {
    let mut bare = Message::existing(
        message.id.clone(),
        String::new(),
        message.event_type.clone(),
        message.occurred_at,
    );
    bare.content_type.clone_from(&message.content_type);
    bare.version = message.version;
    bare.trace.clone_from(&message.trace);
    bare
}

/// The names whose headers must be encoded; of each such name all are, so that a reader can leave the native ones alone.
fn encoded_names<'a>(envelope: &'a Headers, users: &'a Headers) -> BTreeSet<&'a str> {
    let first = users.iter().next();
    // Several names of the user's have an order among each other, which a server's clients do not keep.
    let ordered = users
        .iter()
        .any(|header| Some(&header.name) != first.map(|f| &f.name));
    let reserved = |header: &Header| headers::is_reserved(&header.name);
    let users = users
        .iter()
        .filter(|header| ordered || reserved(header) || native_value(header).is_none());
    let envelope = envelope
        .iter()
        .filter(|header| native_value(header).is_none());
    envelope
        .chain(users)
        .map(|header| header.name.as_str())
        .collect()
}

/// Whether a reader would take a line of this name for what a message holds besides its headers.
fn acts(header: &Header) -> bool {
    let acting = [
        headers::KEY,
        headers::NULL_PAYLOAD,
        headers::ENCODED_HEADERS,
    ];
    acting.contains(&header.name.as_str())
}

/// The value as it can stand in a header line and be read back equal.
fn native_value(header: &Header) -> Option<&str> {
    let value = std::str::from_utf8(header.value.as_ref()?).ok()?;
    let plain = value.trim() == value && !value.chars().any(|c| c.is_control() && c != '\t');
    let named = HeaderName::from_str(&header.name).is_ok() && !is_servers_own(&header.name);
    (plain && named).then_some(value)
}
