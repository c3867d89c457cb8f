//! What must hold when every message of a scene came to its end.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use relaybox::envelope::Incoming;

use super::{ATTEMPTS, Kind, Scene, Sent};

/// What deaths may have cost.
#[derive(Debug, Clone)]
pub struct Allowed {
    /// Attempts of messages that end no process which were counted as crashes: a death at a suspect's work looks like it.
    pub blames: RangeInclusive<usize>,
    /// Second copies of a message with the same count: a death between confirm and acknowledgement.
    pub second_copies: usize,
}

/// The copies of a message that members sent, or were about to: by how many attempts they tell of, the class of the last one
/// for each copy.
type Copies = BTreeMap<u32, Vec<String>>;

impl Scene {
    /// Panics if anything is lost, doubled, spoilt or blamed beyond what is allowed. Returns how many were blamed.
    pub async fn judge(&self, allowed: Allowed) -> usize {
        let effects = self.effects().await;
        let letters = self.letters().await;
        let journal = self.journal();
        let sent: BTreeSet<&str> = self.sent.iter().map(Sent::id).collect();
        let seen = effects.iter().map(|(id, _)| id.as_str());
        let seen = seen.chain(letters.iter().map(|letter| letter.message.id.as_str()));
        for id in seen.chain(journal.keys().map(String::as_str)) {
            assert!(sent.contains(id), "{}: {id} was never sent", self.name);
        }
        let mut blames = 0;
        for sent in &self.sent {
            let copies = journal.get(sent.id()).cloned().unwrap_or_default();
            let effects = effects.iter().filter(|(id, _)| id == sent.id());
            let effects: Vec<i32> = effects.map(|(_, attempt)| *attempt).collect();
            let letters = letters.iter().filter(|l| l.message.id == sent.message.id);
            let letters: Vec<&Incoming> = letters.collect();
            let at = format!("{}: {} {:?} {copies:?}", self.name, sent.id(), sent.kind);
            blames += sent.check_copies(&at, &copies);
            let most = copies.values().map(Vec::len).chain([letters.len()]);
            let most = most.max().unwrap_or(0);
            assert!(most <= 1 + allowed.second_copies, "{at}: {most} copies");
            if sent.ends_dead(&copies) {
                assert_eq!(effects, Vec::<i32>::new(), "{at}");
                assert!(!letters.is_empty(), "{at}: lost");
                for letter in letters {
                    sent.check_letter(&at, letter, self);
                }
            } else {
                sent.check_effects(&at, &effects, copies.len() as i32);
                assert!(letters.is_empty(), "{at}: dead");
            }
        }
        let Allowed { blames: of, .. } = allowed;
        assert!(of.contains(&blames), "{}: {blames} blamed", self.name);
        blames
    }

    fn journal(&self) -> BTreeMap<String, Copies> {
        let mut journal: BTreeMap<String, Copies> = BTreeMap::new();
        for file in self.journals.path().read_dir().unwrap() {
            let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
            for line in text.lines() {
                let words: Vec<&str> = line.split(' ').collect();
                let ["copy", id, count, class] = words[..] else {
                    panic!("no line of a journal: {line:?}");
                };
                let copies = journal.entry(id.to_owned()).or_default();
                let count = copies.entry(count.parse().unwrap()).or_default();
                count.push(class.to_owned());
            }
        }
        journal
    }
}

impl Sent {
    fn id(&self) -> &str {
        self.message.id.as_str()
    }

    /// Every count up to the last is there, of the class that the message earned or of a crash that it is blamed for.
    /// Returns how many of the latter.
    fn check_copies(&self, at: &str, copies: &Copies) -> usize {
        let counts: Vec<u32> = copies.keys().copied().collect();
        let expected: Vec<u32> = (1..=counts.len() as u32).collect();
        assert_eq!(counts, expected, "{at}: counts");
        let is_crash = |class: &String| class == "crash";
        let blames = copies.values().filter(|copy| copy.iter().any(is_crash));
        let blames = blames.count();
        let failed = copies.values().filter(|copy| !copy.iter().all(is_crash));
        let failed = failed.count();
        match self.kind {
            Kind::Abort => assert_eq!((counts.len() as u32, failed), (ATTEMPTS, 0), "{at}"),
            Kind::Fail => assert_eq!(counts.len() as u32, ATTEMPTS, "{at}"),
            // Blamed for a crash first, it does not fail any more.
            Kind::Once => assert!(failed <= 1 && !counts.is_empty(), "{at}"),
            Kind::Work => assert_eq!(failed, 0, "{at}: retried"),
        }
        if self.kind == Kind::Abort { 0 } else { blames }
    }

    /// One effect, at an attempt that there can have been.
    fn check_effects(&self, at: &str, effects: &[i32], attempts: i32) {
        let [attempt] = effects else {
            panic!("{at}: effects {effects:?}");
        };
        let first = i32::from(self.kind == Kind::Once);
        assert!((first..=attempts).contains(attempt), "{at}: at {attempt}");
    }

    fn ends_dead(&self, copies: &Copies) -> bool {
        copies.len() == ATTEMPTS as usize
    }

    /// The same bytes, and a story of all attempts.
    fn check_letter(&self, at: &str, letter: &Incoming, scene: &Scene) {
        let Incoming { message, story, .. } = letter;
        assert_eq!(message.payload, self.message.payload, "{at}: payload");
        assert_eq!(message.key, self.message.key, "{at}: key");
        assert_eq!(message.headers, self.message.headers, "{at}: headers");
        assert_eq!(message.event_type, self.message.event_type, "{at}: type");
        assert_eq!(story.retry_count, ATTEMPTS, "{at}: attempts");
        assert_eq!(story.consumer.as_deref(), Some(&*scene.consumer), "{at}");
        let reason = story.reason.as_ref().map(|reason| reason.as_str());
        assert_eq!(reason, Some("retries-exhausted"), "{at}");
        let origin = story.origin.as_ref().map(|origin| &origin.topic);
        assert!(
            origin.is_some_and(|topic| topic.contains(&scene.topic)),
            "{at}: from {origin:?}"
        );
        if self.kind == Kind::Abort {
            let error = story.last_error.as_deref().unwrap_or_default();
            assert!(error.starts_with("crash: "), "{at}: {error}");
        }
    }
}
