//! One connection: how it is made, what happened to it, and how it is.

use std::collections::VecDeque;
use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream::Context;
use async_nats::jetstream::context::ContextBuilder;
use async_nats::{Client, ConnectOptions, Event, ServerError};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use super::config::{Credentials, NatsConfig};
use super::error::{disconnected, mapped, not_connected, without_jetstream};
use super::tls;
use crate::backoff::{DelayPolicy, Jitter};
use crate::broker::Health;
use crate::error::{Error, ErrorKind, Result};

/// Most subjects remembered that the server did not let us publish to.
const DENIALS_MAX: usize = 64;
/// For how long health tells of what the server refused.
const TOLD_FOR: Duration = Duration::from_secs(60);
/// How the server words a subject that may not be published to; the subject follows in quotes.
const PUBLISH_DENIED: &str = "permissions violation for publish to ";

/// What a server says of its JetStream. The client's own type for it does not read the answer of a server before 2.10.
#[derive(Deserialize)]
struct Account {
    error: Option<async_nats::jetstream::Error>,
}

/// A connection that mends itself.
pub(super) struct Link {
    pub(super) client: Client,
    pub(super) context: Context,
    pub(super) tried: String,
    pub(super) answer_deadline: Duration,
    notes: Arc<Notes>,
}

/// What the client's events told.
struct Notes {
    changes: watch::Sender<Changes>,
    book: Mutex<Book>,
}

/// How often things happened, so that a waiting call sees that one did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Changes {
    /// Connections lost.
    pub(super) losses: u64,
    /// Connections made.
    pub(super) connections: u64,
    /// Subjects refused.
    pub(super) denials: u64,
    /// The client gave the connection up and makes no other one.
    pub(super) over: bool,
}

#[derive(Default)]
struct Book {
    denials: VecDeque<(String, Instant)>,
    trouble: Option<(String, Instant)>,
    lame_duck: bool,
}

impl Notes {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, event: &Event) {
        match event {
            Event::Connected => {
                self.book().lame_duck = false;
                self.changes.send_modify(|changes| changes.connections += 1);
            }
            Event::Disconnected => self.changes.send_modify(|changes| changes.losses += 1),
            Event::LameDuckMode => self.book().lame_duck = true,
            Event::SlowConsumer(_) => {
                self.trouble("the server delivers faster than we read".into())
            }
            Event::ServerError(ServerError::Other(text)) => {
                // First, so that whoever is woken by a denial finds it in the health.
                self.trouble(format!("the server says: {text}"));
                if let Some(subject) = denied_subject(text) {
                    let mut book = self.book();
                    if book.denials.len() >= DENIALS_MAX {
                        book.denials.pop_front();
                    }
                    book.denials.push_back((subject.to_owned(), Instant::now()));
                    drop(book);
                    self.changes.send_modify(|changes| changes.denials += 1);
                }
            }
            Event::ServerError(other) => self.trouble(format!("the server says: {other}")),
            Event::ClientError(error) => self.trouble(error.to_string()),
            Event::Draining | Event::Closed => {}
        }
    }

    fn trouble(&self, text: String) {
        tracing::warn!(trouble = text, "NATS connection");
        self.book().trouble = Some((text, Instant::now()));
    }
}

/// Dropped with the client's task. That may have panicked over what it read, and the client's own state does not tell.
struct LastWord(Arc<Notes>);

impl Drop for LastWord {
    fn drop(&mut self) {
        self.0.changes.send_modify(|changes| {
            changes.losses += 1;
            changes.over = true;
        });
    }
}

/// The subject that a server's error says may not be published to.
fn denied_subject(text: &str) -> Option<&str> {
    let start = text.get(..PUBLISH_DENIED.len())?;
    let rest = text.get(PUBLISH_DENIED.len()..)?;
    start
        .eq_ignore_ascii_case(PUBLISH_DENIED)
        .then(|| rest.trim().trim_matches(['"', '\'']))
}

impl Link {
    /// Connects and asks whether there is JetStream.
    pub(super) async fn connect(config: &NatsConfig) -> Result<Self> {
        let tried = config.tried();
        let addresses = config.addresses()?;
        let notes = Arc::new(Notes {
            changes: watch::Sender::new(Changes::default()),
            book: Mutex::default(),
        });
        let until = Instant::now() + config.answer_deadline;
        let options = options(config, Arc::clone(&notes)).await?;
        let client = match timeout_at(until, options.connect(addresses)).await {
            Ok(Ok(client)) => client,
            Ok(Err(error)) => return Err(not_connected(&tried, &error)),
            Err(_elapsed) => {
                let detail = format!(
                    "none of {tried} answered within {:?}",
                    config.answer_deadline
                );
                return Err(Error::new(ErrorKind::Unavailable, "connect", detail));
            }
        };
        let context = context(config, client.clone(), config.answer_deadline);
        let link = Self {
            client,
            context,
            tried,
            answer_deadline: config.answer_deadline,
            notes,
        };
        let nothing = json!({});
        let asked = link.context.request("INFO", &nothing);
        let account: Account = link
            .ask("connect", "JetStream does not answer", asked)
            .await?;
        if let Some(refusal) = account.error {
            let detail = format!("no JetStream at {}: {refusal}", link.tried);
            return Err(Error::new(without_jetstream(&refusal), "connect", detail));
        }
        Ok(link)
    }

    pub(super) fn is_connected(&self) -> bool {
        !self.is_over() && self.client.connection_state() == State::Connected
    }

    /// Whether the client makes no connection any more.
    pub(super) fn is_over(&self) -> bool {
        self.notes.changes.borrow().over
    }

    /// An error if there is no connection now.
    pub(super) fn require(&self, operation: &'static str) -> Result<()> {
        match self.client.connection_state() {
            State::Connected if self.is_over() => {
                Err(disconnected(operation, &self.tried, &State::Disconnected))
            }
            State::Connected => Ok(()),
            state => Err(disconnected(operation, &self.tried, &state)),
        }
    }

    pub(super) fn changes(&self) -> watch::Receiver<Changes> {
        self.notes.changes.subscribe()
    }

    /// Whether the server refused this subject since then.
    pub(super) fn denied(&self, subject: &str, since: Instant) -> bool {
        let book = self.notes.book();
        let mut denials = book.denials.iter();
        denials.any(|(denied, at)| denied == subject && *at >= since)
    }

    /// Waits for an answer of the server's, within the answer deadline.
    pub(super) async fn ask<T, E>(
        &self,
        operation: &'static str,
        detail: &str,
        question: impl Future<Output = std::result::Result<T, E>>,
    ) -> Result<T>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        match timeout(self.answer_deadline, question).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(mapped(ErrorKind::Unavailable, operation, detail, error)),
            Err(_elapsed) => Err(Error::new(
                ErrorKind::Unavailable,
                operation,
                format!(
                    "{detail}: no answer of {} within {:?}",
                    self.tried, self.answer_deadline
                ),
            )),
        }
    }

    pub(super) fn health(&self) -> Health {
        if !self.is_connected() {
            return Health::down(format!("no connection to {}", self.tried));
        }
        let book = self.notes.book();
        let mut health = Health::up();
        health.detail = match &book.trouble {
            _ if book.lame_duck => Some("the server is about to shut down".to_owned()),
            Some((text, at)) if at.elapsed() < TOLD_FOR => Some(text.clone()),
            _ => None,
        };
        health
    }
}

/// A connection that several share, and that is made anew for all of them once the client gave it up.
pub(super) struct Renewable {
    config: NatsConfig,
    current: Mutex<Arc<Link>>,
    renewing: tokio::sync::Mutex<()>,
}

impl Renewable {
    pub(super) fn new(config: &NatsConfig, link: Arc<Link>) -> Self {
        Self {
            config: config.clone(),
            current: Mutex::new(link),
            renewing: tokio::sync::Mutex::default(),
        }
    }

    fn slot(&self) -> MutexGuard<'_, Arc<Link>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn current(&self) -> Arc<Link> {
        Arc::clone(&self.slot())
    }

    /// Another one than this, which is over.
    pub(super) async fn renew(&self, over: &Arc<Link>) -> Result<Arc<Link>> {
        let _one_at_a_time = self.renewing.lock().await;
        let current = self.current();
        if !Arc::ptr_eq(&current, over) && !current.is_over() {
            return Ok(current);
        }
        let made = Arc::new(Link::connect(&self.config).await?);
        *self.slot() = Arc::clone(&made);
        Ok(made)
    }
}

/// JetStream over a client. One deadline holds for questions and for confirmations, so publishing has a context of its
/// own.
pub(super) fn context(config: &NatsConfig, client: Client, deadline: Duration) -> Context {
    let builder = ContextBuilder::new()
        .timeout(deadline)
        .ack_timeout(deadline)
        // Every call bounds what it has in flight itself: waiting for a permit that an earlier message of the same call
        // holds would never end.
        .max_ack_inflight(1 << 20);
    match &config.domain {
        Some(domain) => builder.domain(domain).build(client),
        None => builder.build(client),
    }
}

async fn options(config: &NatsConfig, notes: Arc<Notes>) -> Result<ConnectOptions> {
    let unusable = |what: &'static str| {
        // The text of such an error may hold a part of the secret.
        move |_| Error::configuration("credentials", what, "something else")
    };
    let options = match &config.credentials {
        Credentials::None => ConnectOptions::new(),
        Credentials::Token(token) => ConnectOptions::with_token(token.clone()),
        Credentials::UserAndPassword(user, password) => {
            ConnectOptions::with_user_and_password(user.clone(), password.clone())
        }
        Credentials::NkeySeed(seed) => ConnectOptions::with_nkey(seed.clone()),
        Credentials::Text(text) => ConnectOptions::with_credentials(text)
            .map_err(unusable("the text of a credentials file"))?,
        Credentials::File(path) => ConnectOptions::with_credentials_file(path)
            .await
            .map_err(unusable("a credentials file that can be read"))?,
    };
    let last_word = LastWord(notes);
    let mut options = options
        .name(&config.name)
        .ping_interval(config.ping_interval)
        .connection_timeout(config.answer_deadline)
        .request_timeout(Some(config.answer_deadline))
        .tls_client_config(tls::client_config(config).await?)
        .reconnect_delay_callback(reconnect_delay)
        .event_callback(move |event| {
            last_word.0.take(&event);
            ready(())
        });
    if config.require_tls {
        options = options.require_tls(true);
    }
    Ok(options)
}

/// Before the first attempt nothing, then up to 2 s with jitter, so that a thousand clients do not come back at once.
fn reconnect_delay(attempts: usize) -> Duration {
    let Some(retries) = attempts.checked_sub(1).filter(|retries| *retries > 0) else {
        return Duration::ZERO;
    };
    let policy = DelayPolicy::exponential(Duration::from_millis(50))
        .with_cap(Duration::from_secs(2))
        .with_jitter(Jitter::Equal);
    let attempt = u32::try_from(retries).unwrap_or(u32::MAX);
    policy.delay(attempt, None, &mut fastrand::Rng::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes() -> Notes {
        Notes {
            changes: watch::Sender::new(Changes::default()),
            book: Mutex::default(),
        }
    }

    #[test]
    fn a_refused_subject_is_read_from_the_servers_words() {
        let text = "Permissions Violation for Publish to \"orders.placed\"";
        assert_eq!(denied_subject(text), Some("orders.placed"));
        assert_eq!(
            denied_subject("Permissions Violation for Subscription to \"x\""),
            None
        );
        assert_eq!(denied_subject("é"), None);
    }

    #[test]
    fn denials_are_bounded_and_counted() {
        let notes = notes();
        let since = Instant::now();
        for n in 0..2 * DENIALS_MAX {
            let text = format!("Permissions Violation for Publish to \"s.{n}\"");
            notes.take(&Event::ServerError(ServerError::Other(text)));
        }
        assert_eq!(notes.book().denials.len(), DENIALS_MAX);
        assert_eq!(notes.changes.borrow().denials, 2 * DENIALS_MAX as u64);
        assert!(notes.book().denials.iter().all(|(_, at)| *at >= since));
    }

    #[test]
    fn the_end_of_the_clients_task_is_a_loss_for_good() {
        let notes = Arc::new(notes());
        let mut changes = notes.changes.subscribe();
        drop(LastWord(Arc::clone(&notes)));
        assert!(changes.has_changed().is_ok_and(|changed| changed));
        let now = *changes.borrow_and_update();
        assert!(now.over && now.losses == 1, "{now:?}");
    }

    #[test]
    fn the_first_attempt_to_reconnect_is_at_once_and_all_are_bounded() {
        assert_eq!(reconnect_delay(1), Duration::ZERO);
        for attempts in [2, 10, 1_000, usize::MAX] {
            let delay = reconnect_delay(attempts);
            assert!(
                delay > Duration::ZERO && delay <= Duration::from_secs(2),
                "{delay:?}"
            );
        }
    }
}
