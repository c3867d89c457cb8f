//! A payment provider, and one that stands in for it: it knows idempotency keys as real ones do, and fails on command.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

/// What a provider says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Charged,
    Declined,
}

/// A timeout, a broken connection, a 503: nobody knows whether it charged.
#[derive(Debug)]
pub struct NoAnswer;

pub trait Provider {
    /// Charges once for a key, however often it is asked, and gives the first answer again. Real ones forget keys after
    /// some time, often a day: what is older must be looked up there before it is tried again.
    fn charge(
        &self,
        key: &str,
        cents: i64,
    ) -> impl Future<Output = Result<Answer, NoAnswer>> + Send;
}

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// It does not arrive.
    NotReached,
    /// It charges, and the answer is lost.
    AnswerLost,
    /// It never comes back, and has done nothing.
    HangsBefore,
    /// It never comes back, and has charged.
    HangsAfter,
}

/// Charges in memory. A clone is the same provider.
#[derive(Clone, Default)]
pub struct FakeProvider(Arc<State>);

#[derive(Default)]
struct State {
    book: Mutex<Book>,
    hanging: Notify,
}

#[derive(Default)]
struct Book {
    troubles: VecDeque<Trouble>,
    answers: HashMap<String, Answer>,
    calls: usize,
    charged: Vec<String>,
}

/// More than this is declined.
const LIMIT_CENTS: i64 = 100_000;

impl FakeProvider {
    /// Meets the next calls with these, one each.
    pub fn with_troubles(self, troubles: impl IntoIterator<Item = Trouble>) -> Self {
        self.with_book(|book| book.troubles.extend(troubles));
        self
    }

    /// Completes once a call hangs that hung to nobody's knowledge before.
    pub async fn hangs(&self) {
        self.0.hanging.notified().await;
    }

    pub fn calls(&self) -> usize {
        self.with_book(|book| book.calls)
    }

    /// Keys in the order of their charges: one that stands there twice has paid twice.
    pub fn charged(&self) -> Vec<String> {
        self.with_book(|book| book.charged.clone())
    }

    fn with_book<T>(&self, work: impl FnOnce(&mut Book) -> T) -> T {
        work(&mut self.0.book.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Book {
    fn charge(&mut self, key: &str, cents: i64) -> Answer {
        if let Some(answer) = self.answers.get(key) {
            return *answer;
        }
        let answer = if cents > LIMIT_CENTS {
            Answer::Declined
        } else {
            self.charged.push(key.to_owned());
            Answer::Charged
        };
        self.answers.insert(key.to_owned(), answer);
        answer
    }
}

impl Provider for FakeProvider {
    async fn charge(&self, key: &str, cents: i64) -> Result<Answer, NoAnswer> {
        let trouble = self.with_book(|book| {
            book.calls += 1;
            book.troubles.pop_front()
        });
        if trouble == Some(Trouble::NotReached) {
            return Err(NoAnswer);
        }
        if trouble == Some(Trouble::HangsBefore) {
            self.0.hanging.notify_one();
            std::future::pending::<()>().await;
        }
        // Real calls take their time.
        tokio::task::yield_now().await;
        let answer = self.with_book(|book| book.charge(key, cents));
        if trouble == Some(Trouble::HangsAfter) {
            self.0.hanging.notify_one();
            std::future::pending::<()>().await;
        }
        match trouble {
            Some(Trouble::AnswerLost) => Err(NoAnswer),
            _ => Ok(answer),
        }
    }
}
