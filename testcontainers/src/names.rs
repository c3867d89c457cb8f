//! Names and ports nobody else has.

use std::io;
use std::net::TcpListener;

const PREFIX_LENGTH_MAX: usize = 40;
const SUFFIX_LENGTH: usize = 12;

/// A name that is free wherever it is used: the prefix, an underscore and twelve random characters.
///
/// It serves as a PostgreSQL database (at most 63 bytes, no quoting needed) and as a Kafka topic: lower-case letters,
/// digits and underscores, at most 53 bytes, a letter first. Other characters of the prefix become underscores.
#[must_use]
pub fn unique_name(prefix: &str) -> String {
    let mut name: String = prefix
        .chars()
        .take(PREFIX_LENGTH_MAX)
        .map(|character| match character.to_ascii_lowercase() {
            plain @ ('a'..='z' | '0'..='9' | '_') => plain,
            _ => '_',
        })
        .collect();
    if !name.starts_with(|first: char| first.is_ascii_lowercase()) {
        name.insert(0, 't');
        name.truncate(PREFIX_LENGTH_MAX);
    }
    name.push('_');
    name.extend((0..SUFFIX_LENGTH).map(|_| fastrand::alphanumeric().to_ascii_lowercase()));
    name
}

/// A port of 127.0.0.1 that nobody listens on now.
///
/// It lies below the ephemeral range, so that no outgoing connection takes it while its server is down: a client that
/// keeps dialling a dead ephemeral port ends up connected to itself, and the server cannot come back.
pub(crate) fn free_port() -> io::Result<u16> {
    let mut last = None;
    for _ in 0..100 {
        let port = fastrand::u16(15_000..32_000);
        match TcpListener::bind(("127.0.0.1", port)) {
            Ok(_) => return Ok(port),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| io::Error::other("no free port")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_valid_bounded_and_distinct() {
        for prefix in ["orders", "", "9lives", "Örders.retry-5s", &"x".repeat(300)] {
            let name = unique_name(prefix);
            assert!(
                name.len() <= PREFIX_LENGTH_MAX + 1 + SUFFIX_LENGTH,
                "{name}"
            );
            assert!(
                name.starts_with(|first: char| first.is_ascii_lowercase()),
                "{name}"
            );
            assert!(
                name.bytes()
                    .all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_')),
                "{name}"
            );
            assert_ne!(name, unique_name(prefix));
        }
    }
}
