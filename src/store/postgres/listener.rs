//! Hearing the notifications of a channel, on one connection of its own.
//!
//! sqlx's listener is used for one connection only: its own reconnect knows few kinds of broken connections, and none
//! that went silent.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};
use sqlx::Executor;
use sqlx::postgres::{PgListener, PgPoolOptions};
use tracing::{debug, info, warn};

use super::{ACQUIRE_TIMEOUT, PostgresStore, error};
use crate::backoff::{DelayPolicy, Delays, Jitter};
use crate::error::{Error, ErrorKind, Result};
use crate::store::{WakeUp, WakeUps};

/// Longest wait for anything that is asked of the server here, the notification to ourselves included.
const ANSWER_DEADLINE: Duration = ACQUIRE_TIMEOUT;

/// How long nothing is heard before the server is asked whether it is still there.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Time between two tries where connections work and notifications do not arrive.
const DEAF_PAUSE: Duration = Duration::from_secs(60);

const RECONNECT: DelayPolicy = DelayPolicy::exponential(Duration::from_millis(100))
    .with_jitter(Jitter::Equal)
    .with_cap(Duration::from_secs(10));

pub(super) struct Listener {
    store: PostgresStore,
    connection: Option<PgListener>,
    /// Whether a notification has arrived on this connection.
    live: bool,
    /// Before the next connection.
    pause: Duration,
    delays: Delays,
    /// Trouble is told once, until it is over.
    told: bool,
}

impl WakeUps for Listener {
    fn next(&mut self) -> BoxFuture<'_, WakeUp> {
        async move {
            loop {
                let heard = match self.connection.take() {
                    None => self.listen().await,
                    Some(connection) => self.hear(connection).await,
                };
                match heard {
                    Ok(true) => return WakeUp { live: self.live },
                    Ok(false) => {}
                    Err(error) => {
                        let was_live = std::mem::take(&mut self.live);
                        self.lost(&error);
                        if was_live {
                            return WakeUp { live: false };
                        }
                    }
                }
            }
        }
        .boxed()
    }
}

impl Listener {
    pub(super) fn new(store: PostgresStore) -> Self {
        Self {
            store,
            connection: None,
            live: false,
            pause: Duration::ZERO,
            delays: RECONNECT.delays(fastrand::u64(..)),
            told: false,
        }
    }

    /// Connects. What was committed before is found by a poll that begins now.
    async fn listen(&mut self) -> Result<bool> {
        tokio::time::sleep(self.pause).await;
        let options = self.store.pool.connect_options();
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .idle_timeout(None)
            .max_lifetime(None)
            .acquire_timeout(ANSWER_DEADLINE)
            .connect_lazy_with((*options).clone());
        let listening = async {
            let mut listener = PgListener::connect_with(&pool).await?;
            // Otherwise it would connect again by itself before anybody is woken.
            listener.eager_reconnect(false);
            listener.execute(self.store.sql.listen.clone()).await?;
            Ok(listener)
        };
        let listening = tokio::time::timeout(ANSWER_DEADLINE, listening).await;
        let listener = listening
            .map_err(|_| error::of_silence("listen", &pool, ANSWER_DEADLINE))?
            .map_err(|e| error::of_pool("listen", &pool, e))?;
        self.connection = Some(listener);
        Ok(true)
    }

    /// Waits on a connection that listens, and keeps it unless there is an error. Whether anything was heard.
    async fn hear(&mut self, mut connection: PgListener) -> Result<bool> {
        if !self.live {
            self.notify().await?;
        }
        let patience = if self.live {
            SILENCE_MAX
        } else {
            ANSWER_DEADLINE
        };
        let heard = tokio::time::timeout(patience, receive(&mut connection)).await;
        let heard = match heard {
            Ok(received) => {
                received?;
                true
            }
            Err(_) if !self.live => return Err(deaf()),
            Err(_) => {
                // Changes nothing on a connection that is alive.
                let again = connection.execute(self.store.sql.listen.clone());
                let again = tokio::time::timeout(ANSWER_DEADLINE, again).await;
                let again = again.map_err(|_| unavailable("the server does not answer"))?;
                again.map_err(|e| error::of_statement("listen", e))?;
                false
            }
        };
        // All that is there by now is one piece of news. It ends at the latest where tokio makes a task yield.
        while heard && let Some(received) = receive(&mut connection).now_or_never() {
            received?;
        }
        self.connection = Some(connection);
        if heard && !self.live {
            self.live = true;
            self.told = false;
            self.delays.reset();
            info!(
                channel = self.store.wake_up_channel(),
                "relays are woken by notifications"
            );
        }
        Ok(heard)
    }

    /// Sends a notification to ourselves, on another connection.
    async fn notify(&self) -> Result<()> {
        let notify = sqlx::query(self.store.sql.notify.clone());
        let sent = self.store.relayed("notify", |c| notify.execute(c).boxed());
        let sent = tokio::time::timeout(ANSWER_DEADLINE, sent).await;
        sent.map_err(|_| unavailable("no notification could be sent"))?
            .map(drop)
    }

    fn lost(&mut self, error: &Error) {
        self.pause = match error.kind() {
            ErrorKind::Configuration => DEAF_PAUSE,
            _ => self.delays.next_delay(),
        };
        if self.told {
            debug!(%error, "relays are not woken yet, they poll");
        } else {
            warn!(%error, "relays are not woken for now, they poll");
        }
        self.told = true;
    }
}

/// Waits for one notification.
async fn receive(connection: &mut PgListener) -> Result<()> {
    match connection.try_recv().await {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(unavailable("the server closed the connection")),
        Err(error) => Err(error::of_statement("listen", error)),
    }
}

fn unavailable(detail: &str) -> Error {
    Error::new(ErrorKind::Unavailable, "listen", detail)
}

fn deaf() -> Error {
    Error::new(
        ErrorKind::Configuration,
        "listen",
        "a notification that was sent does not arrive: is there a transaction pooler in between, such as PgBouncer? \
         LISTEN needs a session of its own",
    )
}
