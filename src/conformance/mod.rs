//! The broker contracts as test cases: an adapter that passes them keeps what [`Publisher`], [`Subscriber`],
//! [`Subscription`] and [`Delivery`] promise.
//!
//! Implement [`Fixture`] for your broker, then either let [`broker_tests!`](crate::broker_tests) make a test of every case,
//! or call [`run_all`] from a program. Our own adapters run exactly these, in memory and on the real servers; wrappers too.
//!
//! A case leaves something out only by a capability that the adapter declares ([`Need`]), never because it failed. Time is
//! the machine's: where a rule says "not before" a case measures; where it says that something happens a case waits, up to
//! [`DEADLINE`].
//!
//! ```ignore
//! struct Mine(MyBroker);
//!
//! impl relaybox::conformance::Fixture for Mine { .. }
//!
//! relaybox::broker_tests!(Mine(MyBroker::connect().await));
//! ```
//!
//! `examples/custom_broker.rs` is a whole one.
//!
//! Cases fail by panicking: nothing here belongs into production.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "a case fails by panicking"
)]

mod cases;
mod consuming;
mod counting;
mod publishing;
mod sharing;
mod support;
mod trouble;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

#[cfg(doc)]
use crate::broker::{Delivery, Subscription};
use crate::broker::{Publisher, Subscriber};

pub use cases::CASES;
pub use support::{
    DEADLINE, GLANCE, acknowledge, close, fresh, number, numbered, numbers, publish, publish_all,
    receive, receive_count, subscribe, within,
};

/// A broker under test. Every case gets a fixture of its own.
pub trait Fixture: Send + Sync {
    /// Makes a new, empty place to publish to and to subscribe on by the same name, ready for use.
    ///
    /// `partitions` is how many members can share it at least, where the broker fixes that.
    fn topic(&self, partitions: usize) -> BoxFuture<'_, String>;

    /// A publisher on the broker.
    fn publisher(&self) -> Arc<dyn Publisher>;

    /// A subscriber on the broker.
    fn subscriber(&self) -> Arc<dyn Subscriber>;

    /// What stands between the broker and this fixture's publisher and subscriber, but not its [`topic`](Self::topic), and
    /// can be broken. Without it (the default) the cases about trouble are left out.
    fn line(&self) -> Option<Arc<dyn Line>> {
        None
    }
}

/// A connection that a case breaks and mends. All changes are in effect when the future completes.
pub trait Line: Send + Sync {
    /// Everything passes, as at the beginning.
    fn pass(&self) -> BoxFuture<'_, ()>;

    /// Connections end, and no new one can be made.
    fn cut(&self) -> BoxFuture<'_, ()>;

    /// Connections stay, and nothing passes in either direction.
    fn silence(&self) -> BoxFuture<'_, ()>;
}

/// One sentence of the contracts.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Case {
    /// What holds, as a function's name.
    pub name: &'static str,
    /// Without what it makes no sense.
    pub need: Need,
    run: for<'a> fn(&'a dyn Fixture) -> BoxFuture<'a, ()>,
}

/// A capability that a case rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// Every broker can.
    Nothing,
    /// [`SubscriberCapabilities::fan_out`](crate::broker::SubscriberCapabilities::fan_out).
    FanOut,
    /// [`Subscriber::key_affinity`] of the fixture's topics.
    KeyAffinity,
    /// [`Fixture::line`].
    Line,
}

/// How a case ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// The rule is kept.
    Passed,
    /// It is not; what the case said.
    Failed(String),
    /// The fixture lacks what the case needs.
    LeftOut(Need),
}

impl Case {
    async fn is_met(&self, fixture: &dyn Fixture) -> bool {
        match self.need {
            Need::Nothing => true,
            Need::FanOut => fixture.subscriber().capabilities().fan_out,
            Need::KeyAffinity => {
                let topic = fixture.topic(1).await;
                fixture.subscriber().key_affinity(&topic)
            }
            Need::Line => fixture.line().is_some(),
        }
    }

    /// Runs it and tells how it ended. The message of a failure goes through the panic hook, as in any test.
    pub async fn run(&self, fixture: &dyn Fixture) -> Verdict {
        if !self.is_met(fixture).await {
            return Verdict::LeftOut(self.need);
        }
        match AssertUnwindSafe((self.run)(fixture)).catch_unwind().await {
            Ok(()) => Verdict::Passed,
            Err(panic) => {
                let text = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| panic.downcast_ref::<&str>().copied());
                Verdict::Failed(text.unwrap_or("a panic without a text").to_owned())
            }
        }
    }
}

/// How many cases ended how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Summary {
    /// Rules kept.
    pub passed: usize,
    /// Rules broken.
    pub failed: usize,
    /// Cases that need what the fixture lacks.
    pub left_out: usize,
}

/// Runs all [`CASES`], one after the other, each on a new fixture, and tells of each as it ends.
pub async fn run_all<F, Made>(
    mut fixture: impl FnMut() -> Made,
    mut tell: impl FnMut(&Case, &Verdict),
) -> Summary
where
    F: Fixture,
    Made: Future<Output = F>,
{
    let mut summary = Summary::default();
    for case in CASES {
        let verdict = case.run(&fixture().await).await;
        tell(case, &verdict);
        match verdict {
            Verdict::Passed => summary.passed += 1,
            Verdict::Failed(_) => summary.failed += 1,
            Verdict::LeftOut(_) => summary.left_out += 1,
        }
    }
    summary
}

/// Runs the case of this name and panics unless its rule is kept; for [`broker_tests!`](crate::broker_tests).
#[doc(hidden)]
pub async fn hold(name: &str, fixture: &dyn Fixture) {
    let case = CASES.iter().find(|case| case.name == name);
    match case.expect("a case of this name").run(fixture).await {
        Verdict::Passed => {}
        Verdict::Failed(text) => panic!("{text}"),
        Verdict::LeftOut(need) => println!("left out: needs {need:?}"),
    }
}

/// Waits up to [`DEADLINE`] until `condition` is true.
async fn eventually<Answer: Future<Output = bool>>(
    awaited: &str,
    mut condition: impl FnMut() -> Answer,
) {
    let asking = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    within(awaited, asking).await;
}
