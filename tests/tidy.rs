//! The shape of the repository, held by a test: who may call whom, what stands where, and how large a file gets.
//!
//! It reads source text, so it needs no feature and no service. Comments never count, and neither does what stands
//! behind a file's `#[cfg(test)]`. Every rule is a function from files to complaints; `mod proofs` has seen each fail.

#[path = "tidy/source.rs"]
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use source::File;

const VOCABULARY: &[&str] = &[
    "backoff",
    "clock",
    "codec",
    "digest",
    "envelope",
    "error",
    "event",
    "header_text",
    "headers",
    "lane",
    "message",
    "readiness",
    "story",
];
const ENGINES: &[&str] = &["consumer", "dlq", "inbox", "ladder", "outbox", "relay"];
/// Tools that stand beside the layers: they may use all of them, but no adapter.
const TOOLS: &[&str] = &["conformance", "testing"];
/// Exported macros stand at the crate's root, whatever file makes them.
const MACROS: &[&str] = &["__broker_cases", "__broker_test", "broker_tests"];
const PRODUCTS: &[&str] = &[
    "kafka", "rabbitmq", "lapin", "rdkafka", "nats", "postgres", "mysql", "sqlite", "sqlx",
];
const BROKER_FILES: &[&str] = &["mod", "config", "publisher", "subscriber", "error"];
const STORE_FILES: &[&str] = &[
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
const STATEMENTS: &[&str] = &[
    "SELECT", "INSERT", "UPDATE", "DELETE", "CREATE", "ALTER", "DROP", "WITH",
];
const LINES_MAX: usize = 500;
const TOP_LEVEL: &[&str] = &[
    // What the repository is made of
    ".ci",
    "CHANGELOG.md",
    "Cargo.lock",
    "Cargo.toml",
    "README.md",
    "benches",
    "docs",
    "examples",
    "migrations",
    "src",
    "testcontainers",
    "tests",
    // Tools' settings
    ".cargo",
    ".config",
    ".dockerignore",
    ".editorconfig",
    ".gitattributes",
    ".github",
    ".gitignore",
    "clippy.toml",
    "deny.toml",
    "rust-toolchain.toml",
    "rustfmt.toml",
];

/// A layer of the crate, and what a module of it may call.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Room {
    /// `lib.rs`, the contents page.
    Contents,
    Vocabulary,
    Contract,
    Engine,
    Adapter(String),
    Tool,
}

impl Room {
    /// The room of a path from the crate's root; `None` if the table above does not know it.
    fn of(path: &[String], adapters: &BTreeSet<String>) -> Option<Self> {
        let first = path.first().map_or("", String::as_str);
        let second = path.get(1).map_or("", String::as_str);
        let known = |names: &[&str]| names.contains(&first);
        match first {
            "" => Some(Self::Contents),
            "broker" | "store" => {
                let adapter = format!("{first}/{second}");
                Some(if adapters.contains(&adapter) {
                    Self::Adapter(adapter)
                } else {
                    Self::Contract
                })
            }
            _ if known(VOCABULARY) => Some(Self::Vocabulary),
            _ if known(ENGINES) => Some(Self::Engine),
            _ if known(TOOLS) => Some(Self::Tool),
            _ => None,
        }
    }

    fn may_call(&self, other: &Self) -> bool {
        use Room::{Adapter, Contents, Contract, Engine, Tool, Vocabulary};
        match (self, other) {
            (Contents, _) | (_, Vocabulary) => true,
            (_, Contents) | (Vocabulary, _) => false,
            (Adapter(own), Adapter(other)) => own == other,
            (_, Contract) => true,
            (_, Adapter(_)) => false,
            (Engine, Engine) | (Tool, Engine | Tool) => true,
            (Contract | Engine | Adapter(_), Engine | Tool) => false,
        }
    }
}

/// `broker/memory`, `store/postgres`, ...: the folders of `src/broker` and `src/store`.
fn adapters(files: &[File]) -> BTreeSet<String> {
    let folder = |file: &File| match file.path.split('/').collect::<Vec<_>>()[..] {
        ["src", layer @ ("broker" | "store"), adapter, _, ..] => Some(format!("{layer}/{adapter}")),
        _ => None,
    };
    files.iter().filter_map(folder).collect()
}

/// What `lib.rs` re-exports, and from where: `crate::Message` means `crate::message::Message`.
fn exports(files: &[File]) -> BTreeMap<String, Vec<String>> {
    let lib = files.iter().find(|file| file.path == "src/lib.rs");
    lib.map(File::paths)
        .unwrap_or_default()
        .into_iter()
        .filter_map(|path| Some((path.last()?.clone(), path)))
        .collect()
}

fn calls_go_downwards(files: &[File]) -> Vec<String> {
    let adapters = adapters(files);
    let exports = exports(files);
    let mut complaints = Vec::new();
    for file in files.iter().filter(|file| file.path.starts_with("src/")) {
        let Some(room) = Room::of(&file.module(), &adapters) else {
            complaints.push(format!(
                "{}: belongs to no layer that tests/tidy.rs knows",
                file.path
            ));
            continue;
        };
        for path in file.paths() {
            let first = path.first().map_or("", String::as_str);
            if MACROS.contains(&first) {
                continue;
            }
            let meant = exports.get(first).unwrap_or(&path);
            match Room::of(meant, &adapters) {
                Some(other) if room.may_call(&other) => {}
                // A name from outside in the contents page, such as `std` in a path of its own.
                None if room == Room::Contents => {}
                _ => complaints.push(format!(
                    "{}: {room:?} may not call crate::{}",
                    file.path,
                    path.join("::")
                )),
            }
        }
    }
    complaints
}

fn engines_name_no_product(files: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    for file in files {
        if Room::of(&file.module(), &BTreeSet::new()) != Some(Room::Engine) {
            continue;
        }
        for word in file.words().into_iter().chain(file.literals.clone()) {
            let lower = word.to_lowercase();
            for product in PRODUCTS.iter().filter(|product| lower.contains(*product)) {
                complaints.push(format!(
                    "{}: an engine names {product}: {word:?}",
                    file.path
                ));
            }
        }
    }
    complaints
}

fn sql_stands_in_sql_rs(files: &[File]) -> Vec<String> {
    let is_sql = |literal: &String| {
        let first = literal.split_whitespace().next().unwrap_or("");
        STATEMENTS.contains(&first)
    };
    complain(files, |file| {
        let parts: Vec<_> = file.path.split('/').collect();
        let home = matches!(
            parts[..],
            ["src", "store", _, "sql.rs"] | ["src", "store", _, "sql", _]
        );
        let stray = file.literals.iter().find(|literal| is_sql(literal));
        stray
            .filter(|_| file.path.starts_with("src/") && !home)
            .map(|literal| format!("SQL outside a store's sql.rs: {literal:?}"))
    })
}

fn header_names_stand_in_headers_rs(files: &[File]) -> Vec<String> {
    complain(files, |file| {
        let stray = file.literals.iter().find(|text| text.starts_with("x-"));
        // Names of queue arguments look the same, and also stand in one place.
        let home = file.path == "src/headers.rs" || file.path.ends_with("/arguments.rs");
        stray
            .filter(|_| file.path.starts_with("src/") && !home)
            .map(|literal| format!("spells the header {literal:?}; use the constant"))
    })
}

fn adapters_have_the_same_files(files: &[File]) -> Vec<String> {
    let present: BTreeSet<&str> = files.iter().map(|file| file.path.as_str()).collect();
    let mut complaints = Vec::new();
    for adapter in adapters(files) {
        let wanted = if adapter.starts_with("broker/") {
            BROKER_FILES
        } else {
            STORE_FILES
        };
        for name in wanted {
            let path = format!("src/{adapter}/{name}.rs");
            if !present.contains(path.as_str()) {
                complaints.push(format!(
                    "{path} is missing: all adapters have the same files"
                ));
            }
        }
    }
    complaints
}

fn files_stay_short(files: &[File]) -> Vec<String> {
    complain(files, |file| {
        (file.lines > LINES_MAX).then(|| {
            let lines = file.lines;
            format!("{lines} lines, over {LINES_MAX}: which second thing lives there?")
        })
    })
}

fn nothing_is_unsafe(files: &[File]) -> Vec<String> {
    complain(files, |file| {
        let found = file.words_everywhere.iter().any(|word| word == "unsafe");
        found.then(|| "says unsafe".to_owned())
    })
}

fn the_top_level_is_as_agreed<'a>(names: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    names
        .into_iter()
        .filter(|name| !TOP_LEVEL.contains(name) && !name.starts_with("LICENSE-"))
        .map(|name| format!("{name} does not belong to the top level"))
        .collect()
}

fn complain(files: &[File], rule: impl Fn(&File) -> Option<String>) -> Vec<String> {
    let complaint = |file: &File| rule(file).map(|text| format!("{}: {text}", file.path));
    files.iter().filter_map(complaint).collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn repository() -> Vec<File> {
    let files = source::read_all(
        root(),
        &["src", "tests", "examples", "benches", "testcontainers"],
    );
    assert!(files.iter().any(|file| file.path == "src/lib.rs"));
    files
}

/// First parts of what git tracks; of what is there, where git does not answer (a packaged crate).
fn top_level() -> BTreeSet<String> {
    let git = Command::new("git")
        .arg("-C")
        .arg(root())
        .arg("ls-files")
        .output();
    let tracked: BTreeSet<String> = git
        .ok()
        .filter(|output| output.status.success())
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default()
        .lines()
        .filter_map(|path| path.split('/').next().map(str::to_owned))
        .collect();
    if !tracked.is_empty() {
        return tracked;
    }
    let unpacked = ["target", ".git", ".cargo_vcs_info.json", "Cargo.toml.orig"];
    std::fs::read_dir(root())
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| !unpacked.contains(&name.as_str()))
        .collect()
}

#[track_caller]
fn hold(complaints: &[String]) {
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

macro_rules! rules {
    ($($name:ident: $complaints:expr;)+) => {
        $(
            #[test]
            fn $name() {
                hold(&$complaints);
            }
        )+
    };
}

rules! {
    layers_call_only_downwards: calls_go_downwards(&repository());
    no_engine_names_a_product: engines_name_no_product(&repository());
    sql_stands_only_in_sql_rs: sql_stands_in_sql_rs(&repository());
    header_names_are_spelled_once: header_names_stand_in_headers_rs(&repository());
    all_adapters_have_the_same_files: adapters_have_the_same_files(&repository());
    no_file_is_long: files_stay_short(&repository());
    no_code_is_unsafe: nothing_is_unsafe(&repository());
    the_top_level_holds_nothing_else: the_top_level_is_as_agreed(top_level().iter().map(String::as_str));
}

#[path = "tidy/proofs.rs"]
mod proofs;
