//! Messages that the client cannot read.
//!
//! Headers need not be text, whatever the client thinks: it gives up the connection that such a message comes by, and
//! does so again at every delivery. The server also hands a message out as data, so such a one is fetched that way, and
//! settled by the subject that its delivery would have named.

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

use async_nats::Subject;
use async_nats::header::HeaderName;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;
use time::OffsetDateTime;

use super::durable::{Feed, consumer_info};
use super::link::Link;
use super::shelf::Shelf;
use crate::clock::from_rfc3339;
use crate::error::Result;

/// Most messages looked at in one go.
const LOOKED_AT_MAX: u64 = 1_024;

/// A message as the server stores it.
pub(super) struct Raw {
    pub(super) sequence: u64,
    pub(super) subject: String,
    pub(super) reply: Subject,
    pub(super) stored_at: OffsetDateTime,
    pub(super) headers: Vec<(String, Bytes)>,
    pub(super) payload: Bytes,
}

#[derive(Deserialize)]
struct Answer {
    message: Option<Stored>,
}

#[derive(Deserialize)]
struct Stored {
    subject: String,
    #[serde(default)]
    hdrs: String,
    #[serde(default)]
    data: String,
    time: String,
}

/// What was found, and from where on to look next; nothing when all was looked at.
pub(super) struct Look {
    pub(super) found: Vec<Raw>,
    pub(super) next: Option<u64>,
}

/// Those messages among what was delivered and is held by nobody here that no client of this kind can read.
pub(super) async fn unreadable(
    link: &Link,
    feed: &Feed,
    shelf: &Arc<Shelf>,
    cursor: u64,
) -> Result<Look> {
    let Feed {
        stream, durable, ..
    } = feed;
    let Some(info) = consumer_info(link, "receive", stream, durable).await? else {
        let (found, next) = (Vec::new(), None);
        return Ok(Look { found, next });
    };
    let (floor, delivered) = (
        info.ack_floor.stream_sequence,
        info.delivered.stream_sequence,
    );
    let (sequences, next) = window(floor, cursor, delivered);
    let mut found = Vec::new();
    for sequence in sequences {
        if shelf.holds_sequence(sequence) {
            continue;
        }
        let question = json!({ "seq": sequence });
        let subject = format!("STREAM.MSG.GET.{stream}");
        let asked = link.context.request(subject, &question);
        let answer: Answer = link
            .ask("receive", "a message could not be looked at", asked)
            .await?;
        // Removed meanwhile, or not what this consumer gets.
        let Some(stored) = answer.message.filter(|stored| feed.takes(&stored.subject)) else {
            continue;
        };
        let block = STANDARD.decode(&stored.hdrs).unwrap_or_default();
        if block.is_empty() || is_readable(&block) {
            continue;
        }
        tracing::warn!(
            stream,
            sequence,
            "a message whose headers the client cannot read was fetched as data"
        );
        let delivered = info.delivered.consumer_sequence;
        let reply = format!("$JS.ACK.{stream}.{durable}.1.{sequence}.{delivered}.0.0");
        found.push(Raw {
            sequence,
            reply: reply.into(),
            stored_at: from_rfc3339(&stored.time).unwrap_or_else(OffsetDateTime::now_utc),
            headers: read(&block),
            payload: STANDARD.decode(&stored.data).unwrap_or_default().into(),
            subject: stored.subject,
        });
    }
    Ok(Look { found, next })
}

/// What to look at now of what was delivered and is not settled, and from where on to look next.
fn window(floor: u64, cursor: u64, delivered: u64) -> (RangeInclusive<u64>, Option<u64>) {
    let first = floor.saturating_add(1).max(cursor);
    let last = delivered.min(first.saturating_add(LOOKED_AT_MAX - 1));
    let next = (last < delivered).then(|| last.saturating_add(1));
    (first..=last, next)
}

/// Whether the client can read this block of headers.
fn is_readable(block: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(block) else {
        return false;
    };
    let mut lines = text.lines();
    let status = lines.next().and_then(|line| line.strip_prefix("NATS/1.0"));
    if !status.is_some_and(|status| status.trim().is_empty()) {
        return false;
    }
    let mut after_header = false;
    lines.filter(|line| !line.is_empty()).all(|line| {
        // The client panics over it.
        if line.contains('\r') {
            return false;
        }
        let continued = after_header && line.starts_with(char::is_whitespace);
        let named = line
            .split_once(':')
            .is_some_and(|(name, _)| HeaderName::from_str(name).is_ok());
        after_header = true;
        continued || named
    })
}

/// The headers in a block, as far as they are any. A name that is no text is shown as such.
fn read(block: &[u8]) -> Vec<(String, Bytes)> {
    block
        .split(|byte| *byte == b'\n')
        .skip(1)
        .filter_map(|line| {
            let colon = line.iter().position(|byte| *byte == b':')?;
            let (name, value) = line.split_at_checked(colon)?;
            let value = value.get(1..)?.trim_ascii();
            let name = String::from_utf8_lossy(name).into_owned();
            Some((name, Bytes::copy_from_slice(value)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readable_is_what_the_client_reads() {
        for good in [
            &b"NATS/1.0\r\n\r\n"[..],
            b"NATS/1.0\r\nA: 1\r\nB:\r\n\r\n",
            b"NATS/1.0\r\nA: 1\r\n continued\r\n\r\n",
        ] {
            assert!(is_readable(good), "{}", String::from_utf8_lossy(good));
        }
        for bad in [
            &b"NATS/1.0\r\nA: \xff\r\n\r\n"[..],
            b"NATS/1.0\r\nno colon\r\n\r\n",
            b"NATS/1.0\r\nbad name: 1\r\n\r\n",
            b"NATS/1.0 4x4\r\n\r\n",
            b"NATS/2.0\r\n\r\n",
            b"NATS/1.0\r\nA: x\ry\r\n\r\n",
            b"NATS/1.0\r\nA: x\r\n y\rz\r\n\r\n",
            b"",
        ] {
            assert!(!is_readable(bad), "{}", String::from_utf8_lossy(bad));
        }
    }

    #[test]
    fn all_that_was_delivered_is_looked_at_window_by_window() {
        let (mut cursor, mut seen) = (0, Vec::new());
        loop {
            let (sequences, next) = window(5, cursor, 5_000);
            assert!(sequences.clone().count() as u64 <= LOOKED_AT_MAX);
            seen.extend(sequences);
            match next {
                Some(next) => cursor = next,
                None => break,
            }
        }
        assert_eq!(seen, (6..=5_000).collect::<Vec<_>>());
        assert_eq!(window(5, 0, 5).0.count(), 0);
        // The floor went past the cursor.
        assert_eq!(window(9, 7, 10).0, 10..=10);
    }

    #[test]
    fn what_is_no_text_comes_out_byte_for_byte() {
        let headers = read(b"NATS/1.0\r\nA: \xff\xfe \r\nno colon\r\nx-message-id:m-1\r\n\r\n");
        let expected = [("A", &b"\xff\xfe"[..]), ("x-message-id", b"m-1")];
        let expected = expected.map(|(name, value)| (name.to_owned(), Bytes::from_static(value)));
        assert_eq!(headers, expected);
    }
}
