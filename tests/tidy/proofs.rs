//! Each rule, seen failing on files made up for it, and passing beside them.

use super::*;

const LIB: (&str, &str) = (
    "src/lib.rs",
    "pub mod message;\npub use message::{Message, Limits};\npub use relay::Relay;",
);

fn files(all: &[(&str, &str)]) -> Vec<File> {
    all.iter()
        .chain([&LIB])
        .map(|(path, text)| File::new(path, text))
        .collect()
}

/// Whether exactly this file of a small crate makes the rule complain.
#[track_caller]
fn judged(rule: fn(&[File]) -> Vec<String>, path: &str, text: &str) -> bool {
    let others = [
        ("src/broker/memory/mod.rs", ""),
        ("src/broker/kafka/mod.rs", ""),
        ("src/store/sqlite/mod.rs", ""),
        ("src/headers.rs", r#"pub const ID: &str = "x-message-id";"#),
    ];
    let mut all: Vec<_> = others.into_iter().filter(|other| other.0 != path).collect();
    assert!(rule(&files(&all)).is_empty(), "complains of the others");
    all.push((path, text));
    let complaints = rule(&files(&all));
    assert!(complaints.len() < 2, "{complaints:?}");
    complaints.iter().any(|complaint| complaint.contains(path))
}

#[test]
fn a_call_upwards_or_sideways_is_seen() {
    let refused = |path, text| judged(calls_go_downwards, path, text);
    // Vocabulary
    assert!(!refused("src/story.rs", "use crate::error::cut;"));
    assert!(refused("src/story.rs", "use crate::broker::Publisher;"));
    assert!(refused("src/story.rs", "use crate::relay;"));
    assert!(refused("src/story.rs", "use crate::Relay;"));
    assert!(!refused("src/story.rs", "use crate::Message;"));
    assert!(!refused(
        "src/story.rs",
        "let x = crate::Limits::default();"
    ));
    assert!(refused("src/story.rs", "let x = crate::Relay::new();"));
    assert!(refused("src/story.rs", "fn f() -> crate::store::Lease {}"));
    // Contracts
    let contract = "src/broker/publisher.rs";
    assert!(!refused(contract, "use crate::store::Lease;"));
    assert!(!refused(contract, "use super::Stored;"));
    assert!(refused(contract, "use super::memory::MemoryBroker;"));
    assert!(refused(contract, "use crate::{relay::Relay, message};"));
    assert!(refused(
        "src/broker/mod.rs",
        "pub use memory::MemoryBroker;"
    ));
    assert!(refused("src/broker/mod.rs", "pub use self::memory::X;"));
    assert!(!refused(
        "src/broker/mod.rs",
        "pub mod memory; use std::fmt;"
    ));
    // Engines
    let engine = "src/relay/lanes.rs";
    assert!(!refused(
        engine,
        "use crate::{broker::{Publisher, Stored}, inbox};"
    ));
    assert!(refused(
        engine,
        "use crate::broker::{Publisher, memory::X};"
    ));
    assert!(refused("src/dlq.rs", "use crate::store::sqlite as db;"));
    assert!(refused(engine, "use super::super::store::sqlite::Pool;"));
    assert!(refused(engine, "use crate::testing::ManualClock;"));
    // Adapters
    let adapter = "src/broker/kafka/publisher.rs";
    assert!(!refused(
        adapter,
        "use super::error; use crate::broker::kafka;"
    ));
    assert!(!refused(adapter, "use crate::broker::Publisher;"));
    assert!(refused(adapter, "use crate::ladder::Ladder;"));
    assert!(refused(adapter, "use crate::broker::memory::MemoryBroker;"));
    assert!(refused(adapter, "use super::super::memory;"));
    assert!(refused(adapter, "let x = crate::store::sqlite::open();"));
    // Tools
    let tool = "src/testing/faults.rs";
    assert!(!refused(
        tool,
        "use crate::{relay::Relay, broker::Publisher};"
    ));
    assert!(refused(tool, "use crate::broker::memory::MemoryBroker;"));
    // A file in no layer
    assert!(refused("src/helpers.rs", ""));
    // What does not count
    assert!(!refused(
        engine,
        "/// [`crate::broker::memory`]\n// crate::broker::memory::X"
    ));
    assert!(!refused(
        engine,
        "fn f() {}\n#[cfg(test)]\nmod tests { use crate::broker::memory::X; }"
    ));
    assert!(!refused(
        engine,
        r##"let x = r#"use crate::broker::memory;"#;"##
    ));
}

#[test]
fn a_product_in_an_engine_is_seen() {
    let refused = |path, text| judged(engines_name_no_product, path, text);
    assert!(refused("src/relay.rs", "fn to_kafka() {}"));
    assert!(refused("src/relay/mod.rs", r#"let hint = "ask Postgres";"#));
    assert!(refused("src/inbox.rs", "use sqlx::Pool;"));
    assert!(!refused(
        "src/inbox.rs",
        "// as in SQLite and Kafka\nfn f() {}"
    ));
    assert!(!refused("src/store/inbox.rs", "pub struct Sqlite;"));
}

#[test]
fn sql_outside_its_file_is_seen() {
    let refused = |path, text| judged(sql_stands_in_sql_rs, path, text);
    let statement = r#"const Q: &str = "SELECT 1";"#;
    assert!(refused("src/store/sqlite/outbox.rs", statement));
    assert!(refused("src/relay.rs", "let q = r#\"\n  DELETE FROM x\"#;"));
    assert!(refused("src/relay.rs", r#"format!("INSERT INTO {t}")"#));
    assert!(!refused("src/store/sqlite/sql.rs", statement));
    assert!(!refused(
        "src/relay.rs",
        r#"// "SELECT 1"
        let x = "SELECTED"; let y = "select one";"#
    ));
    assert!(!refused("tests/sqlite.rs", statement));
}

#[test]
fn a_header_spelled_elsewhere_is_seen() {
    let refused = |path, text| judged(header_names_stand_in_headers_rs, path, text);
    assert!(refused("src/ladder.rs", r#"let name = "x-retry-count";"#));
    assert!(!refused(
        "src/ladder.rs",
        r#"// "x-retry-count"
        let name = "tenant";"#
    ));
    assert!(!refused(
        "src/ladder.rs",
        "fn f() {}\n#[cfg(test)]\nmod tests { const X: &str = \"x-due-at\"; }"
    ));
    assert!(!refused("tests/ladder.rs", r#"let name = "x-due-at";"#));
}

#[test]
fn an_adapter_that_lacks_a_file_is_seen() {
    let of = |layer: &str, names: &[&str]| -> Vec<File> {
        names
            .iter()
            .map(|name| File::new(&format!("src/{layer}/{name}.rs"), ""))
            .collect()
    };
    let broker = ["mod", "config", "publisher", "subscriber", "error", "more"];
    let store = [
        "mod",
        "outbox",
        "admin",
        "inbox",
        "dead_letters",
        "redrive",
        "versions",
        "waiting",
        "sql",
        "error",
    ];
    for (layer, names) in [("broker/nats", &broker[..]), ("store/mysql", &store)] {
        assert!(adapters_have_the_same_files(&of(layer, names)).is_empty());
        for (place, name) in names.iter().enumerate() {
            let mut fewer = names.to_vec();
            fewer.remove(place);
            let complaints = adapters_have_the_same_files(&of(layer, &fewer));
            assert_eq!(complaints.len(), usize::from(*name != "more"), "{name}");
        }
    }
}

#[test]
fn a_long_file_is_seen() {
    let refused = |lines: usize| judged(files_stay_short, "tests/x.rs", &"\n".repeat(lines));
    assert!(refused(501));
    assert!(!refused(500));
}

#[test]
fn unsafe_code_is_seen_in_tests_too() {
    let refused = |path, text| judged(nothing_is_unsafe, path, text);
    assert!(refused("src/x.rs", "fn f() { unsafe { g() } }"));
    assert!(refused(
        "src/x.rs",
        "\n#[cfg(test)]\nmod tests { unsafe fn f() {} }"
    ));
    assert!(refused(
        "benches/x.rs",
        "let c = '\"'; unsafe { g() }; let d = '\"';"
    ));
    assert!(!refused(
        "src/x.rs",
        "// unsafe\nlet x = \"unsafe\"; fn unsafe_not() {}"
    ));
}

#[test]
fn a_stray_file_at_the_top_is_seen() {
    let good = ["Cargo.toml", "LICENSE-MIT", "src", ".ci"];
    assert!(the_top_level_is_as_agreed(good).is_empty());
    let stray = ["notes.md", "scripts", "LICENSE", "Makefile"];
    assert_eq!(the_top_level_is_as_agreed(stray).len(), stray.len());
}

#[test]
fn what_git_tracks_and_what_is_read_is_not_nothing() {
    assert!(top_level().contains("src"));
    let read = repository();
    assert!(read.iter().any(|file| file.path == "tests/tidy/proofs.rs"));
    let publisher = read
        .iter()
        .find(|file| file.path == "src/broker/memory/publisher.rs");
    let paths = publisher.map(File::paths).unwrap_or_default();
    let called = |path: &str| paths.iter().any(|found| found.join("::") == path);
    assert!(called("broker::Publisher"), "{paths:?}");
    assert!(called("broker::memory::MemoryBroker"), "{paths:?}");
}
