//! Subjects, patterns, and the names that are made of them. All of it is pure.

use std::fmt::Write as _;

use md5::{Digest, Md5};

/// The rule for subjects, in words.
pub(super) const SUBJECT_RULE: &str = "up to 1,024 bytes, tokens with dots between, without spaces, control \
                                       characters, `*` and `>`, not of the server's own ($JS, $SYS, _INBOX)";
/// The rule for stream names, in words.
pub(super) const STREAM_RULE: &str =
    "1 to 255 bytes without spaces, control characters, `.`, `*`, `>`, `/` and `\\`";
/// The longest subject: a server ends the connection that sends a line of more than 4,096 bytes.
const SUBJECT_BYTES_MAX: usize = 1_024;
/// The longest name of a stream or consumer that a server takes.
const NAME_BYTES_MAX: usize = 255;

/// First tokens that reach the server itself instead of a stream. A message must never get there: published to
/// `$JS.API.STREAM.DELETE.orders` it would delete.
const SERVERS_OWN: [&str; 3] = ["$JS", "$SYS", "_INBOX"];

fn is_plain(c: char) -> bool {
    !c.is_whitespace() && !c.is_control()
}

/// Whether messages can be published to it.
pub(super) fn is_subject(subject: &str) -> bool {
    let plain = subject.split('.').all(|token| {
        !token.is_empty() && token.chars().all(|c| is_plain(c) && c != '*' && c != '>')
    });
    let servers_own = SERVERS_OWN.contains(&first_token(subject));
    plain && !servers_own && subject.len() <= SUBJECT_BYTES_MAX
}

/// Whether it is a subject or a pattern of subjects.
pub(super) fn is_pattern(pattern: &str) -> bool {
    let count = pattern.split('.').count();
    pattern
        .split('.')
        .enumerate()
        .all(|(at, token)| match token {
            "*" => true,
            ">" => at + 1 == count,
            _ => !token.is_empty() && token.chars().all(|c| is_plain(c) && c != '*' && c != '>'),
        })
}

/// Whether a stream can have this name.
pub(super) fn is_stream_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name
            .chars()
            .all(|c| is_plain(c) && !matches!(c, '.' | '*' | '>' | '/' | '\\'))
}

/// What stands before the first dot.
pub(super) fn first_token(subject: &str) -> &str {
    subject.split_once('.').map_or(subject, |(first, _)| first)
}

/// Whether the subject is one of the pattern's.
pub(super) fn matches(pattern: &str, subject: &str) -> bool {
    let mut subject = subject.split('.');
    for token in pattern.split('.') {
        match (token, subject.next()) {
            (">", Some(_)) => return true,
            ("*", Some(_)) => {}
            (token, Some(other)) if token == other => {}
            _ => return false,
        }
    }
    subject.next().is_none()
}

/// The stream that is made for a rung or for dead letters.
pub(super) fn stream_of(destination: &str) -> String {
    bounded(escaped(destination))
}

/// The durable consumer of a consumer's name; each alias of a stream has one of its own.
pub(super) fn durable(consumer: &str, alias: Option<&str>) -> String {
    let mut name = escaped(consumer);
    if let Some(alias) = alias {
        // No escaped text holds `%@`, so the two parts cannot be mistaken.
        name.push_str("%@");
        name.push_str(&escaped(alias));
    }
    bounded(name)
}

/// The text in characters that any server and file system takes: a dot becomes `~`, all but letters, digits, `_` and
/// `-` becomes `%` and two hexadecimal digits a byte. Reversible, so that two texts never share a name.
fn escaped(text: &str) -> String {
    let mut name = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' => name.push(char::from(byte)),
            b'.' => name.push('~'),
            _ => {
                // Writing to a string never fails.
                let _ = write!(name, "%{byte:02X}");
            }
        }
    }
    name
}

/// A name that would be too long ends in a digest of all of it.
fn bounded(name: String) -> String {
    const KEPT: usize = 200;
    if name.len() <= NAME_BYTES_MAX {
        return name;
    }
    let mut short: String = name.chars().take(KEPT).collect();
    short.push_str("%#");
    for byte in Md5::digest(name.as_bytes()) {
        let _ = write!(short, "{byte:02x}");
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn subjects_have_no_empty_tokens_spaces_or_wildcards() {
        for good in [
            "orders",
            "orders.billing.retry.5s",
            "a.b-c.d_e",
            "é.名",
            "$KV.x",
        ] {
            assert!(is_subject(good), "{good:?}");
        }
        for bad in [
            "",
            ".",
            "a.",
            ".a",
            "a..b",
            "a b",
            "a\tb",
            "a\r\n",
            "a\0b",
            "*",
            "a.*",
            ">",
            "a.>",
            "a>b",
            "$JS.API.STREAM.DELETE.orders",
            "$SYS.x",
            "_INBOX.x",
        ] {
            assert!(!is_subject(bad), "{bad:?}");
        }
        assert!(!is_subject(&"x".repeat(1_025)));
    }

    #[test]
    fn patterns_may_hold_wildcards_as_whole_tokens() {
        for good in ["orders", "orders.*", "orders.>", ">", "*.x.*"] {
            assert!(is_pattern(good), "{good:?}");
        }
        for bad in ["", "a.", ">.a", "a*", "a.>b", "a b"] {
            assert!(!is_pattern(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_pattern_matches_as_on_the_server() {
        for (pattern, subject, expected) in [
            ("orders", "orders", true),
            ("orders", "orders.x", false),
            ("orders.*", "orders.x", true),
            ("orders.*", "orders.x.y", false),
            ("orders.*", "orders", false),
            ("orders.>", "orders.x.y", true),
            ("orders.>", "orders", false),
            (">", "anything.at.all", true),
            ("*.x", "a.x", true),
            ("*.x", "a.y", false),
        ] {
            assert_eq!(matches(pattern, subject), expected, "{pattern} {subject}");
        }
    }

    #[test]
    fn derived_names_are_fixed() {
        assert_eq!(
            stream_of("orders.billing.retry.5s"),
            "orders~billing~retry~5s"
        );
        assert_eq!(stream_of("a_b/c~d"), "a_b%2Fc%7Ed");
        assert_eq!(durable("billing", None), "billing");
        assert_eq!(
            durable("my billing.v2", Some("paid")),
            "my%20billing~v2%@paid"
        );
        assert_ne!(durable("a%@b", None), durable("a", Some("b")));
    }

    proptest! {
        #[test]
        fn derived_names_are_valid_and_never_shared(a in ".{1,300}", b in ".{1,300}", alias in ".{1,9}") {
            for name in [stream_of(&a), durable(&a, None), durable(&a, Some(&alias))] {
                prop_assert!(is_stream_name(&name), "{}", name);
            }
            prop_assert_eq!(a == b, stream_of(&a) == stream_of(&b));
            prop_assert_ne!(durable(&a, Some(&alias)), durable(&b, None));
        }
    }
}
