//! Validated names for SQL: the only caller-chosen text that ever enters a statement.

use crate::error::{Error, Result};

/// What stands before every table name, optionally with a schema: `relaybox_` or `messaging.relaybox_`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix(String);

impl Prefix {
    /// The prefix of the migrations as shipped.
    pub const DEFAULT: &str = "relaybox_";

    /// Takes `prefix` or `schema.prefix`, each part 1 to 40 of `a-z`, `0-9` and `_`, not beginning with a digit.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) for anything else.
    pub fn new(prefix: &str) -> Result<Self> {
        let parts: Vec<&str> = prefix.split('.').collect();
        let plain = |part: &&str| {
            (1..=40).contains(&part.len())
                && part.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
                && part
                    .bytes()
                    .all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_'))
        };
        if parts.len() > 2 || !parts.iter().all(plain) {
            return Err(Error::configuration(
                "prefix",
                "PREFIX or SCHEMA.PREFIX, each 1 to 40 of a-z, 0-9 and _, not beginning with a digit",
                prefix,
            ));
        }
        Ok(Self(prefix.to_owned()))
    }

    /// The prefix, safe to stand in a statement.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Prefix {
    fn default() -> Self {
        Self(Self::DEFAULT.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_pass() {
        for good in ["relaybox_", "a", "messaging.relaybox_", "_x9"] {
            assert!(Prefix::new(good).is_ok(), "{good}");
        }
        let long = "a".repeat(41);
        for bad in [
            "",
            "a.b.c",
            "9a",
            "a;drop table x",
            "a\"",
            "A",
            "é",
            "a.",
            " a",
            &long,
        ] {
            assert!(Prefix::new(bad).is_err(), "{bad}");
        }
    }
}
