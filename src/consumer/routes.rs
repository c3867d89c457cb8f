//! Routes: what becomes of a failure, by its class. Pure decisions.

use std::time::Duration;

use crate::envelope::Incoming;
use crate::error::{Error, Result};
use crate::ladder::{Ask, Ladder};
use crate::story::Reason;

use super::handler::{BatchHandler, Handler, OutsideHandler};
use super::outcome::{Failure, Outcome};

/// Most tries of a [`Route::Local`].
const LOCAL_TIMES_MAX: u32 = 20;
/// Longest pause before a try of a [`Route::Local`]: longer waits are for rungs, which hold no room of the consumer
/// and no rebalance up.
const LOCAL_DELAY_MAX: Duration = Duration::from_secs(10);
/// Most rules of a consumer or handler.
const RULES_MAX: usize = 64;

/// What becomes of a failed attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Route {
    /// The next rung (the default).
    Rung,
    /// The first rung that waits at least this long, else the longest; as [`Outcome::RetryAfter`].
    After(Duration),
    /// Again in this process, up to `times` times (1 to 20), each after `delay` (at most 10 s), and then the next rung.
    ///
    /// The attempt with all its tries counts once, and its story tells the last error. While it waits it holds neither a handler's
    /// place nor a connection, but its key waits, and it counts among the deliveries in flight. It is for failures that are over
    /// in a moment. A stop or a rebalance ends it uncounted: the message comes again.
    Local {
        /// Tries after the first.
        times: u32,
        /// Pause before each of them.
        delay: Duration,
    },
    /// A dead letter at once. The reason, or without one that of the failure, or [`Reason::PERMANENT`].
    DeadLetter(Option<Reason>),
    /// Counts as handled, without its effect: that is rolled back, and the inbox records the id in a transaction of its own, so that
    /// no copy of it is handled later. Counted and logged with its class. Work outside of a transaction is not undone.
    Skip,
}

/// Which route failures take, by their class: what [`Failure::with_class`] said, else `handler`, `panic`, `timeout` or `crash`.
///
/// A route decides where the handler left it open: for [`Outcome::Retry`], panics, timeouts and crashes.
/// [`Outcome::RetryAfter`] and [`Outcome::Permanent`] stand as they were said.
///
/// For all failures of a consumer: [`Consumer::with_routes`](super::Consumer::with_routes). For what one handler returns: [`Routed`];
/// what its rules do not name is left to the consumer's.
///
/// ```
/// use std::time::Duration;
/// use relaybox::consumer::{Route, Routes};
/// use relaybox::story::Reason;
///
/// let routes = Routes::new()
///     .with("lock-timeout", Route::Local { times: 3, delay: Duration::from_millis(50) })
///     .with("card-declined", Route::DeadLetter(Some(Reason::new("card-declined"))))
///     .with("already-cancelled", Route::Skip)
///     .with_otherwise(Route::Rung);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Routes {
    rules: Vec<(String, Route)>,
    otherwise: Option<Route>,
}

/// What follows a failed attempt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Another try after this pause, in this process.
    Again(Duration),
    /// Record it without its effect.
    Skip,
    /// What the ladder makes of it.
    Fail(Ask),
}

impl Routes {
    /// Without a rule: every failure goes to the next rung.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sends failures of this class this way. The class is written as [`Failure::with_class`] writes it.
    #[must_use]
    pub fn with(mut self, class: &str, route: Route) -> Self {
        self.rules.push((class.to_owned(), route));
        self
    }

    /// Sends failures of all other classes this way (default: to the next rung, or as the consumer says). A `crash` is neither tried
    /// again locally nor skipped: where this says so, it goes to the next rung.
    #[must_use]
    pub fn with_otherwise(mut self, route: Route) -> Self {
        self.otherwise = Some(route);
        self
    }

    /// Refuses rules that cannot be meant.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration): a class that no failure can have, or that has two rules; a `crash` that is
    /// skipped or tried again locally, which would hide or repeat it without end; delays and counts out of bounds.
    pub(super) fn validate(&self) -> Result<()> {
        if self.rules.len() > RULES_MAX {
            let limit = format!("at most {RULES_MAX}");
            return Err(refused("routes", limit, self.rules.len()));
        }
        for (at, (class, route)) in self.rules.iter().enumerate() {
            if Reason::new(class).as_str() != class {
                let limit = "1 to 64 of a-z, 0-9 and '-'".into();
                return Err(refused("routes class", limit, class));
            }
            if self.rules[..at].iter().any(|(earlier, _)| earlier == class) {
                return Err(refused("routes class", "each class once".into(), class));
            }
            if class == Failure::CRASH && is_hidden(route) {
                let limit = "a rung or a dead letter for a crash".into();
                return Err(refused("routes", limit, format!("{route:?}")));
            }
            validate_route(route)?;
        }
        self.otherwise.iter().try_for_each(validate_route)
    }

    /// The same, and that a delay which only a rung can give has one.
    pub(super) fn validate_with(&self, ladder: &Ladder) -> Result<()> {
        self.validate()?;
        let all = self.rules.iter().map(|(_, route)| route);
        let mut all = all.chain(&self.otherwise);
        match all.find(|route| matches!(route, Route::After(_))) {
            Some(route) if ladder.is_empty() => {
                let limit = "a ladder with rungs for it".into();
                Err(refused("routes", limit, format!("{route:?}")))
            }
            _ => Ok(()),
        }
    }

    fn of(&self, class: &str) -> Option<&Route> {
        let named = self.rules.iter().find(|(rule, _)| rule == class);
        named.map(|(_, route)| route).or_else(|| {
            let otherwise = self.otherwise.as_ref();
            otherwise.filter(|route| class != Failure::CRASH || !is_hidden(route))
        })
    }

    /// What follows a failure that asked for this, after so many tries in this process.
    pub(super) fn next(&self, failure: &Failure, ask: Ask, tries: u32) -> Next {
        if ask != Ask::Next {
            return Next::Fail(ask);
        }
        match failure.route().or_else(|| self.of(failure.class())) {
            None | Some(Route::Rung) => Next::Fail(Ask::Next),
            Some(Route::After(least)) => Next::Fail(Ask::After(*least)),
            Some(Route::Local { times, delay }) if tries < *times => Next::Again(*delay),
            Some(Route::Local { .. }) => Next::Fail(Ask::Next),
            Some(Route::DeadLetter(reason)) => {
                let reason = reason.as_ref().or(failure.reason());
                Next::Fail(Ask::Never(reason.cloned()))
            }
            Some(Route::Skip) => Next::Skip,
        }
    }

    fn mark(&self, outcome: Outcome) -> Outcome {
        match outcome {
            Outcome::Retry(failure) => {
                let route = self.of(failure.class()).cloned();
                Outcome::Retry(failure.on(route))
            }
            said => said,
        }
    }
}

const fn is_hidden(route: &Route) -> bool {
    matches!(route, Route::Local { .. } | Route::Skip)
}

fn validate_route(route: &Route) -> Result<()> {
    match route {
        Route::After(Duration::ZERO) => Err(refused("routes delay", "more than zero".into(), "0s")),
        Route::Local { times, .. } if !(1..=LOCAL_TIMES_MAX).contains(times) => {
            let limit = format!("1 to {LOCAL_TIMES_MAX}");
            Err(refused("routes local times", limit, times))
        }
        Route::Local { delay, .. } if *delay > LOCAL_DELAY_MAX => {
            let limit = format!("at most {LOCAL_DELAY_MAX:?}");
            Err(refused("routes local delay", limit, format!("{delay:?}")))
        }
        _ => Ok(()),
    }
}

fn refused(field: &'static str, limit: String, value: impl ToString) -> Error {
    Error::configuration(field, limit, value.to_string())
}

/// A handler whose failures take these [`Routes`], in any of the three forms. So handlers of several types, for example those of a
/// [`Router`](super::Router), may have routes of their own. What ends a handler from outside, a panic or a timeout, is the
/// consumer's.
#[derive(Debug, Clone)]
pub struct Routed<H> {
    routes: Routes,
    handler: H,
}

impl<H> Routed<H> {
    /// Routes what this handler returns.
    ///
    /// # Errors
    /// [`Configuration`](crate::ErrorKind::Configuration) for rules that cannot be meant; see [`Route`].
    pub fn new(routes: Routes, handler: H) -> Result<Self> {
        routes.validate()?;
        Ok(Self { routes, handler })
    }
}

impl<C: Send, H: Handler<C>> Handler<C> for Routed<H> {
    async fn handle(&self, connection: &mut C, incoming: &Incoming) -> Outcome {
        self.routes
            .mark(self.handler.handle(connection, incoming).await)
    }
}

impl<C: Send, H: BatchHandler<C>> BatchHandler<C> for Routed<H> {
    async fn handle(&self, connection: &mut C, batch: &[&Incoming]) -> Outcome {
        self.routes
            .mark(self.handler.handle(connection, batch).await)
    }
}

impl<H: OutsideHandler> OutsideHandler for Routed<H> {
    async fn handle(&self, incoming: &Incoming) -> Outcome {
        self.routes.mark(self.handler.handle(incoming).await)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const LOCAL: Route = Route::Local {
        times: 2,
        delay: SECOND,
    };

    fn routes() -> Routes {
        Routes::new()
            .with("busy", LOCAL)
            .with("declined", Route::DeadLetter(Some(Reason::new("declined"))))
            .with("broken", Route::DeadLetter(None))
            .with("limited", Route::After(SECOND))
            .with("gone", Route::Skip)
    }

    fn next(routes: &Routes, failure: Failure, tries: u32) -> Next {
        routes.next(&failure, Ask::Next, tries)
    }

    fn of(class: &str) -> Failure {
        Failure::new("x").with_class(class)
    }

    #[test]
    fn a_failure_goes_the_way_of_its_class() {
        let never = |reason: Option<&str>| Next::Fail(Ask::Never(reason.map(Reason::new)));
        let routes = routes();
        assert_eq!(next(&routes, of("declined"), 0), never(Some("declined")));
        assert_eq!(next(&routes, of("broken"), 0), never(None));
        let told = of("broken").with_reason(Reason::new("told"));
        assert_eq!(next(&routes, told, 0), never(Some("told")));
        assert_eq!(
            next(&routes, of("limited"), 0),
            Next::Fail(Ask::After(SECOND))
        );
        assert_eq!(next(&routes, of("gone"), 0), Next::Skip);
        assert_eq!(next(&routes, of("other"), 0), Next::Fail(Ask::Next));
        assert_eq!(next(&routes, Failure::new("x"), 0), Next::Fail(Ask::Next));
        let otherwise = routes.with_otherwise(Route::Skip);
        assert_eq!(next(&otherwise, Failure::new("x"), 0), Next::Skip);
        assert_eq!(next(&otherwise, of("broken"), 0), never(None));
    }

    #[test]
    fn local_tries_are_bounded_whatever_classes_they_fail_with() {
        let routes = routes().with(
            "late",
            Route::Local {
                times: 1,
                delay: SECOND,
            },
        );
        assert_eq!(next(&routes, of("busy"), 0), Next::Again(SECOND));
        assert_eq!(next(&routes, of("busy"), 1), Next::Again(SECOND));
        assert_eq!(next(&routes, of("late"), 1), Next::Fail(Ask::Next));
        assert_eq!(next(&routes, of("busy"), 2), Next::Fail(Ask::Next));
    }

    #[test]
    fn what_a_handler_said_itself_stands() {
        let routes = Routes::new().with_otherwise(Route::Skip);
        for ask in [Ask::After(SECOND), Ask::Never(None)] {
            assert_eq!(
                routes.next(&Failure::new("x"), ask.clone(), 0),
                Next::Fail(ask)
            );
        }
    }

    #[test]
    fn a_crash_is_neither_skipped_nor_run_again_locally() {
        for hidden in [Route::Skip, LOCAL] {
            let routes = Routes::new().with_otherwise(hidden.clone());
            assert_eq!(next(&routes, Failure::crash(), 0), Next::Fail(Ask::Next));
            assert!(Routes::new().with("crash", hidden).validate().is_err());
        }
        let dead = Routes::new().with_otherwise(Route::DeadLetter(None));
        assert_eq!(
            next(&dead, Failure::crash(), 0),
            Next::Fail(Ask::Never(None))
        );
        assert_eq!(of("crash").class(), "handler-crash", "nobody can pretend");
    }

    #[test]
    fn the_innermost_routes_decide_and_leave_the_rest_to_the_consumer() {
        let inner = Routes::new().with("gone", Route::Rung);
        let outer = Routes::new().with("gone", Route::Skip).with("busy", LOCAL);
        let marked = |class| match outer.mark(inner.mark(Outcome::Retry(of(class)))) {
            Outcome::Retry(failure) => failure,
            other => unreachable!("{other:?}"),
        };
        let consumer = Routes::new().with_otherwise(Route::DeadLetter(None));
        let ways = ["gone", "busy", "other"].map(|class| next(&consumer, marked(class), 0));
        let expected = [
            Next::Fail(Ask::Next),
            Next::Again(SECOND),
            Next::Fail(Ask::Never(None)),
        ];
        assert_eq!(ways, expected);
    }

    #[test]
    fn rules_that_cannot_be_meant_are_refused() {
        let field = |routes: Routes| {
            let error = routes.validate().unwrap_err();
            error.violation().unwrap().field
        };
        let rule = |route| Routes::new().with("a", route);
        let local = |times, delay| Route::Local { times, delay };
        assert_eq!(
            field(rule(Route::Skip).with("a", Route::Rung)),
            "routes class"
        );
        assert_eq!(
            field(Routes::new().with("Not So", Route::Rung)),
            "routes class"
        );
        assert_eq!(field(rule(local(0, SECOND))), "routes local times");
        assert_eq!(field(rule(local(21, SECOND))), "routes local times");
        assert_eq!(field(rule(local(1, 11 * SECOND))), "routes local delay");
        assert_eq!(field(rule(Route::After(Duration::ZERO))), "routes delay");
        let otherwise = Routes::new().with_otherwise(local(0, SECOND));
        assert_eq!(field(otherwise), "routes local times");
        let many = (0..65).fold(Routes::new(), |all, n| {
            all.with(&format!("c{n}"), Route::Rung)
        });
        assert_eq!(field(many), "routes");
        routes().validate().unwrap();
        assert!(routes().validate_with(&Ladder::none()).is_err());
        routes().validate_with(&Ladder::rungs([SECOND])).unwrap();
    }
}
