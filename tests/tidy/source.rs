//! Rust source, read just well enough: comments, literals, words and the paths that leave a module.

use std::fs;
use std::path::Path;

/// One source file.
pub struct File {
    /// From the repository's root, with `/`.
    pub path: String,
    pub lines: usize,
    /// String literals, unquoted and with their escapes, outside test modules.
    pub literals: Vec<String>,
    /// Identifiers in the whole file, test modules included.
    pub words_everywhere: Vec<String>,
    tokens: Vec<Token>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Word(String),
    Literal(String),
    /// `::`
    Colons,
    Sign(char),
}

impl File {
    pub fn new(path: &str, text: &str) -> Self {
        // The attribute stands at the beginning of a line where a file's tests begin.
        let shipped = if text.starts_with("#[cfg(test)]") {
            ""
        } else {
            text.split("\n#[cfg(test)]").next().unwrap_or("")
        };
        let tokens = tokens(shipped);
        let literals = tokens
            .iter()
            .filter_map(|token| match token {
                Token::Literal(text) => Some(text.clone()),
                _ => None,
            })
            .collect();
        Self {
            path: path.to_owned(),
            lines: text.lines().count(),
            literals,
            words_everywhere: words(&self::tokens(text)),
            tokens,
        }
    }

    /// Identifiers outside test modules.
    pub fn words(&self) -> Vec<String> {
        words(&self.tokens)
    }

    /// Where the file is in the module tree: `["broker", "memory", "publisher"]`; empty for `lib.rs`.
    pub fn module(&self) -> Vec<String> {
        let path = self.path.strip_prefix("src/").unwrap_or(&self.path);
        let path = path.strip_suffix(".rs").unwrap_or(path);
        let mut parts: Vec<String> = path.split('/').map(str::to_owned).collect();
        if matches!(parts.last().map(String::as_str), Some("mod" | "lib")) {
            parts.pop();
        }
        parts
    }

    /// Every path that begins with `crate`, `super` or `self`, from the crate's root and without that word; groups are
    /// taken apart. In `mod.rs` and `lib.rs` a path may also begin with a child module.
    pub fn paths(&self) -> Vec<Vec<String>> {
        let module = self.module();
        let has_children = self.path.ends_with("mod.rs") || self.path.ends_with("lib.rs");
        let mut found = Vec::new();
        let mut at = 0;
        while at < self.tokens.len() {
            let begins = at == 0 || self.tokens[at - 1] != Token::Colons;
            let base = match &self.tokens[at] {
                Token::Word(word) if begins && self.follows(at, &Token::Colons) => {
                    match word.as_str() {
                        "crate" => Some((Vec::new(), at + 2)),
                        "self" => Some((module.clone(), at + 2)),
                        "super" => Some((module.clone(), at)),
                        _ if has_children => Some((module.clone(), at)),
                        _ => None,
                    }
                }
                _ => None,
            };
            at = match base {
                Some((base, from)) => self.tree(base, from, &mut found).max(at + 1),
                None => at + 1,
            };
        }
        found
    }

    fn follows(&self, at: usize, token: &Token) -> bool {
        self.tokens.get(at + 1) == Some(token)
    }

    /// Reads one path or group from `at` on and returns where it ends.
    fn tree(&self, mut path: Vec<String>, mut at: usize, found: &mut Vec<Vec<String>>) -> usize {
        loop {
            match self.tokens.get(at) {
                Some(Token::Word(word)) => {
                    match word.as_str() {
                        "super" => drop(path.pop()),
                        "self" => {}
                        _ => path.push(word.clone()),
                    }
                    if !self.follows(at, &Token::Colons) {
                        // A macro of our own is a word of the language, not a call into a layer.
                        if !self.follows(at, &Token::Sign('!')) {
                            found.push(path);
                        }
                        return at + 1;
                    }
                    at += 2;
                }
                Some(Token::Sign('{')) => {
                    at += 1;
                    while !matches!(self.tokens.get(at), None | Some(Token::Sign('}'))) {
                        at = match &self.tokens[at] {
                            Token::Sign(',') => at + 1,
                            _ => self.tree(path.clone(), at, found),
                        };
                        at = self.past_alias(at);
                    }
                    return at + 1;
                }
                // `path::*`, `path::<T>`: the path so far is what is named.
                _ => {
                    found.push(path);
                    return at + 1;
                }
            }
        }
    }

    fn past_alias(&self, at: usize) -> usize {
        match self.tokens.get(at) {
            Some(Token::Word(word)) if word == "as" => at + 2,
            _ => at,
        }
    }
}

fn words(tokens: &[Token]) -> Vec<String> {
    tokens
        .iter()
        .filter_map(|token| match token {
            Token::Word(word) => Some(word.clone()),
            _ => None,
        })
        .collect()
}

fn tokens(text: &str) -> Vec<Token> {
    let chars: Vec<char> = text.chars().collect();
    let starts = |at: usize, what: &str| {
        what.chars()
            .enumerate()
            .all(|(n, c)| chars.get(at + n) == Some(&c))
    };
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(&c) = chars.get(at) {
        if starts(at, "//") {
            while chars.get(at).is_some_and(|c| *c != '\n') {
                at += 1;
            }
        } else if starts(at, "/*") {
            let mut depth = 0;
            loop {
                let step = match (starts(at, "/*"), starts(at, "*/")) {
                    (true, _) => 1,
                    (_, true) => -1,
                    _ => 0,
                };
                depth += step;
                at += if step == 0 { 1 } else { 2 };
                if depth == 0 || at >= chars.len() {
                    break;
                }
            }
        } else if c == '"' {
            let begin = at + 1;
            at = begin;
            while chars.get(at).is_some_and(|c| *c != '"') {
                at += if chars[at] == '\\' { 2 } else { 1 };
            }
            let end = at.min(chars.len());
            found.push(Token::Literal(chars[begin..end].iter().collect()));
            at += 1;
        } else if c == '\'' {
            // A character, or the beginning of a lifetime.
            at += match (chars.get(at + 1), chars.get(at + 2)) {
                (Some('\\'), _) => {
                    let rest = chars.iter().skip(at + 3);
                    4 + rest.take_while(|c| **c != '\'').count()
                }
                (Some(_), Some('\'')) => 3,
                _ => 1,
            };
        } else if c.is_alphanumeric() || c == '_' {
            let begin = at;
            while chars
                .get(at)
                .is_some_and(|c| c.is_alphanumeric() || *c == '_')
            {
                at += 1;
            }
            let word: String = chars[begin..at].iter().collect();
            let hashes = chars[at..].iter().take_while(|c| **c == '#').count();
            let raw = matches!(word.as_str(), "r" | "br" | "cr");
            if raw && chars.get(at + hashes) == Some(&'"') {
                let begin = at + hashes + 1;
                let close = format!("\"{}", "#".repeat(hashes));
                at = begin;
                while at < chars.len() && !starts(at, &close) {
                    at += 1;
                }
                found.push(Token::Literal(chars[begin..at].iter().collect()));
                at += close.len();
            } else {
                found.push(Token::Word(word));
            }
        } else if starts(at, "::") {
            found.push(Token::Colons);
            at += 2;
        } else {
            if !c.is_whitespace() {
                found.push(Token::Sign(c));
            }
            at += 1;
        }
    }
    found
}

/// Every Rust file in these folders of the repository, sorted.
pub fn read_all(root: &Path, folders: &[&str]) -> Vec<File> {
    let mut files = Vec::new();
    for folder in folders {
        read_folder(root, folder, &mut files);
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

fn read_folder(root: &Path, folder: &str, files: &mut Vec<File>) {
    for entry in fs::read_dir(root.join(folder))
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = format!("{folder}/{name}");
        if entry.path().is_dir() {
            if name != "target" {
                read_folder(root, &path, files);
            }
        } else if name.ends_with(".rs")
            && let Ok(text) = fs::read_to_string(entry.path())
        {
            files.push(File::new(&path, &text));
        }
    }
}
