//! One connection that is made anew whenever it is needed and not there.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lapin::types::LongString;
use lapin::uri::AMQPUri;
use lapin::{Channel, Connection, ConnectionProperties};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};

use super::config::{RabbitMqConfig, address};
use super::error::mapped;
use crate::backoff::{DelayPolicy, Jitter};
use crate::broker::Health;
use crate::error::{Error, ErrorKind, Result};

/// Handshakes that were given up and may still hang in the client, which cannot be told to stop one; more are not begun.
/// Enough for tries at their slowest pace until the system gives up the oldest, after a quarter of an hour.
const ABANDONED_MAX: usize = 128;

/// How often an idle link looks whether it lost its connection.
const LOOK: Duration = Duration::from_secs(1);

/// Between two tries to connect: soon at first, and not in step with others.
pub(super) const PAUSE: DelayPolicy = DelayPolicy::exponential(Duration::from_millis(50))
    .with_jitter(Jitter::Equal)
    .with_cap(Duration::from_secs(5));

/// A connection for one purpose. Publishing and consuming have one each: an alarm stops the broker from reading what
/// publishers send, and acknowledgements must not wait behind that.
pub(super) struct Link {
    config: Arc<RabbitMqConfig>,
    purpose: &'static str,
    state: Mutex<State>,
    dialling: tokio::sync::Mutex<()>,
    handshakes: Arc<Semaphore>,
}

#[derive(Default)]
struct State {
    connection: Option<Arc<Connection>>,
    /// The URL to try first.
    next: usize,
    failures: u32,
    /// Before this instant nothing is tried, and the last error is the answer.
    not_before: Option<Instant>,
    last_error: String,
    closed: bool,
}

impl Link {
    pub(super) fn new(config: &Arc<RabbitMqConfig>, purpose: &'static str) -> Arc<Self> {
        Arc::new(Self {
            config: Arc::clone(config),
            purpose,
            state: Mutex::default(),
            dialling: tokio::sync::Mutex::default(),
            handshakes: Arc::new(Semaphore::new(ABANDONED_MAX)),
        })
    }

    /// Makes the connection anew whenever it is lost, also while nobody asks, until the link is closed or dropped.
    pub(super) fn keep_up(self: &Arc<Self>) {
        let link = Arc::downgrade(self);
        tokio::spawn(async move {
            loop {
                sleep(LOOK).await;
                let Some(link) = link.upgrade() else {
                    return;
                };
                if link.state().closed {
                    return;
                }
                let until = Instant::now() + link.config.answer_deadline;
                // What it meets is told by the health, and by the next call.
                drop(link.get("connect", until).await);
            }
        });
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn usable(&self) -> Option<Arc<Connection>> {
        let state = self.state();
        let connection = state.connection.as_ref()?;
        connection
            .status()
            .connected()
            .then(|| Arc::clone(connection))
    }

    /// The connection, made if need be. Within a pause after a failure the last error comes at once.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming what was tried; [`ErrorKind::Closed`] after [`close`](Self::close).
    pub(super) async fn get(
        &self,
        operation: &'static str,
        until: Instant,
    ) -> Result<Arc<Connection>> {
        if let Some(connection) = self.usable() {
            return Ok(connection);
        }
        let Ok(_turn) = timeout_at(until, self.dialling.lock()).await else {
            return Err(self.unavailable(operation));
        };
        if let Some(connection) = self.usable() {
            return Ok(connection);
        }
        let first = {
            let mut state = self.state();
            state.connection = None;
            if state.closed {
                return Err(Error::new(ErrorKind::Closed, operation, "it was closed"));
            }
            if state
                .not_before
                .is_some_and(|instant| Instant::now() < instant)
            {
                drop(state);
                return Err(self.unavailable(operation));
            }
            state.next
        };
        let count = self.config.urls.len();
        for turn in 0..count {
            let at = (first + turn) % count;
            let Some(url) = self.config.urls.get(at) else {
                continue;
            };
            // Each has its share of the time, so that one that says nothing does not keep the others from being tried.
            let now = Instant::now();
            let left = u32::try_from(count - turn).unwrap_or(u32::MAX);
            let share = until.saturating_duration_since(now) / left;
            match self.dial(url, now + share).await {
                Ok(connection) => return self.keep(operation, connection, at),
                Err(error) => {
                    let mut state = self.state();
                    state.last_error = format!("{}: {error}", address(url));
                    state.next = (at + 1) % count;
                }
            }
        }
        let mut state = self.state();
        state.failures = state.failures.saturating_add(1);
        let pause = PAUSE.delay(state.failures, None, &mut fastrand::Rng::new());
        state.not_before = Some(Instant::now() + pause);
        drop(state);
        Err(self.unavailable(operation))
    }

    fn keep(
        &self,
        operation: &'static str,
        connection: Connection,
        at: usize,
    ) -> Result<Arc<Connection>> {
        let connection = Arc::new(connection);
        let mut state = self.state();
        if state.closed {
            return Err(Error::new(ErrorKind::Closed, operation, "it was closed"));
        }
        state.connection = Some(Arc::clone(&connection));
        state.next = at;
        state.failures = 0;
        state.not_before = None;
        tracing::debug!(purpose = self.purpose, "connected");
        Ok(connection)
    }

    async fn dial(&self, url: &str, until: Instant) -> Result<Connection, String> {
        let mut uri: AMQPUri = url.parse()?;
        let heartbeat = u16::try_from(self.config.heartbeat.as_secs()).unwrap_or(u16::MAX);
        uri.query.heartbeat.get_or_insert(heartbeat);
        let name = format!("{} ({})", self.config.connection_name, self.purpose);
        let properties =
            ConnectionProperties::default().with_connection_name(LongString::from(name));
        let tls = self.config.tls.clone();
        let Ok(permit) = Arc::clone(&self.handshakes).try_acquire_owned() else {
            return Err(format!("{ABANDONED_MAX} handshakes hang already"));
        };
        let runtime = lapin::runtime::default_runtime().map_err(|error| error.to_string())?;
        // On a task of its own: a handshake goes on in the client when its future is dropped, so it keeps its permit.
        let handshake = tokio::spawn(async move {
            let connected =
                Connection::connect_uri_with_config(uri, properties, tls, runtime).await;
            drop(permit);
            connected
        });
        let until = until.min(Instant::now() + self.config.answer_deadline);
        match timeout_at(until, handshake).await {
            Ok(Ok(Ok(connection))) => Ok(connection),
            Ok(Ok(Err(error))) => Err(error.to_string()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no answer in time".to_owned()),
        }
    }

    /// A new channel. A connection that does not even open one in time is given up.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub(super) async fn channel(
        &self,
        operation: &'static str,
        until: Instant,
    ) -> Result<(Arc<Connection>, Channel)> {
        let connection = self.get(operation, until).await?;
        let patience = until.min(Instant::now() + self.config.answer_deadline);
        match timeout_at(patience, connection.create_channel()).await {
            Ok(Ok(channel)) => Ok((connection, channel)),
            Ok(Err(error)) => Err(mapped(operation, "no channel", error)),
            Err(_) => {
                if !connection.status().blocked() {
                    self.forget(&connection, "a channel did not open in time");
                }
                Err(self.unavailable(operation))
            }
        }
    }

    /// Gives up a connection that does not answer.
    pub(super) fn forget(&self, connection: &Arc<Connection>, why: &str) {
        let mut state = self.state();
        if state
            .connection
            .as_ref()
            .is_some_and(|kept| Arc::ptr_eq(kept, connection))
        {
            state.connection = None;
            why.clone_into(&mut state.last_error);
        }
    }

    fn unavailable(&self, operation: &'static str) -> Error {
        let tried = self.config.addresses();
        let last = &self.state().last_error;
        let detail = format!("no RabbitMQ answers at {tried}: {last}");
        Error::new(ErrorKind::Unavailable, operation, detail)
    }

    /// Whether the broker reads nothing because of an alarm.
    pub(super) fn is_blocked(&self) -> bool {
        self.usable()
            .is_some_and(|connection| connection.status().blocked())
    }

    pub(super) fn health(&self) -> Health {
        let state = self.state();
        if state.closed {
            return Health::closed();
        }
        match &state.connection {
            Some(connection) if connection.status().blocked() => {
                Health::blocked("the broker takes nothing because of an alarm")
            }
            Some(connection) if connection.status().connected() => Health::up(),
            _ if state.last_error.is_empty() => Health::down("the connection was lost"),
            _ => Health::down(state.last_error.clone()),
        }
    }

    /// Closes for good. What the broker does not answer by `until` is left to it.
    pub(super) async fn close(&self, until: Instant) {
        let connection = {
            let mut state = self.state();
            state.closed = true;
            state.connection.take()
        };
        if let Some(connection) = connection
            && let Some(reason) = super::arguments::short("closed")
        {
            // An answer that fails or does not come changes nothing: the connection is dropped.
            drop(timeout_at(until, connection.close(200, reason)).await);
        }
    }
}
