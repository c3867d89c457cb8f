//! NATS with JetStream, one node.

mod client;
mod container;
mod local;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::ServiceError;
use crate::controls::local_controls;
use crate::server::{Server, Way, blocking, environment, until_ready};

const SERVICE: &str = "NATS";
const URL_VARIABLE: &str = "RELAYBOX_NATS_URL";
const SETTINGS: &str = include_str!("nats.conf");
/// The pinned version; `testcontainers/install` reads it from this line.
const VERSION: &str = "2.15.3";

const READY_WITHIN: Duration = Duration::from_secs(60);
/// Short: a server that is named should be there, and a wrong name should fail in seconds.
const URL_READY_WITHIN: Duration = Duration::from_secs(5);
const SHUT_DOWN_WITHIN: Duration = Duration::from_secs(30);

/// How a NATS server is started. The default serves most tests.
#[derive(Clone, Debug, Default)]
pub struct NatsOptions {
    local: bool,
    durable: bool,
    extra: String,
}

impl NatsOptions {
    /// Takes a local process whatever the environment offers: for tests that kill or stop the server.
    #[must_use]
    pub fn with_local_process(mut self) -> Self {
        self.local = true;
        self
    }

    /// Syncs every write to the disk before it is acknowledged (`sync_interval: always`, from 2.10 on). Without it a
    /// stored message survives the death of the process, and not that of the machine.
    #[must_use]
    pub fn with_durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// Adds lines to the server's own settings, for example `max_payload: 64KB`. A server by URL has its own.
    #[must_use]
    pub fn with_settings(mut self, lines: impl Into<String>) -> Self {
        self.extra = lines.into();
        self
    }
}

/// The server's settings file.
fn settings(host: &str, port: u16, data: &str, durable: bool, extra: &str) -> String {
    let durable = if durable { "sync_interval: always" } else { "" };
    let mut settings = SETTINGS
        .replace("{host}", host)
        .replace("{port}", &port.to_string())
        .replace("{data}", data)
        .replace("{durable}", durable);
    settings.push_str(extra);
    settings.push('\n');
    settings
}

/// A running NATS server; one of our own ends when this is dropped or the process ends.
///
/// The handle belongs to no async runtime: clients are made anew for each call.
pub struct Nats {
    server: Server,
    url: String,
}

impl Nats {
    /// Starts with the default options.
    ///
    /// # Errors
    ///
    /// [`ServiceError::Unavailable`] names every way tried and what stopped it.
    pub async fn start() -> Result<Self, ServiceError> {
        Self::start_with(NatsOptions::default()).await
    }

    /// Starts with the given options; it returns once a question about JetStream is answered.
    ///
    /// # Errors
    ///
    /// [`ServiceError::Unavailable`] names every way tried and what stopped it.
    pub async fn start_with(options: NatsOptions) -> Result<Self, ServiceError> {
        let mut tried = Vec::new();
        if options.local {
            tried.push("URL, container: not tried, a local process was asked for".to_owned());
        } else {
            match environment(URL_VARIABLE) {
                Some(url) => {
                    return Self::by_url(url).await.map_err(|error| {
                        let tried = vec![format!("URL: {URL_VARIABLE} is set; {error}")];
                        ServiceError::Unavailable {
                            service: SERVICE,
                            tried,
                        }
                    });
                }
                None => tried.push(format!("URL: {URL_VARIABLE} is not set")),
            }
            match Self::by_container(options.clone()).await {
                Ok(nats) => return Ok(nats),
                Err(error) => tried.push(format!("container: {error}")),
            }
        }
        match Self::by_local_process(options).await {
            Ok(nats) => Ok(nats),
            Err(error) => {
                tried.push(format!("local process: {error}"));
                Err(ServiceError::Unavailable {
                    service: SERVICE,
                    tried,
                })
            }
        }
    }

    async fn by_url(url: String) -> Result<Self, ServiceError> {
        let nats = Self {
            server: Server::Url,
            url,
        };
        nats.ready(URL_READY_WITHIN).await?;
        Ok(nats)
    }

    async fn by_container(options: NatsOptions) -> Result<Self, ServiceError> {
        let start = move || container::start(options.durable, &options.extra);
        let (container, url) = blocking(SERVICE, "start", start).await?;
        let nats = Self {
            server: Server::Container(container),
            url,
        };
        nats.ready(READY_WITHIN).await?;
        Ok(nats)
    }

    async fn by_local_process(options: NatsOptions) -> Result<Self, ServiceError> {
        let start = move || local::start(options.durable, &options.extra);
        let (local, url) = blocking(SERVICE, "start", start).await?;
        let nats = Self {
            server: Server::Local(Arc::new(local)),
            url,
        };
        nats.ready(READY_WITHIN).await?;
        Ok(nats)
    }

    async fn ready(&self, within: Duration) -> Result<(), ServiceError> {
        until_ready(SERVICE, within, &self.server, || client::answers(&self.url)).await
    }

    /// Where it is reached: `nats://host:port`.
    #[must_use]
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// How this server was had.
    #[must_use]
    pub fn way(&self) -> Way {
        self.server.way()
    }

    /// Whether a question about JetStream is answered now.
    pub async fn is_ready(&self) -> bool {
        client::answers(&self.url).await.is_ok()
    }
}

local_controls!(Nats, "TERM");

/// Without the URL, which may hold a password.
impl fmt::Debug for Nats {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Nats")
            .field("way", &self.way())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::settings;

    #[test]
    fn the_settings_are_filled_in() {
        let plain = settings("127.0.0.1", 4222, "/tmp/x", false, "max_payload: 64KB");
        assert!(plain.contains("port: 4222") && plain.contains("store_dir: \"/tmp/x\""));
        assert!(plain.ends_with("max_payload: 64KB\n"));
        assert!(!plain.contains("sync_interval") && !plain.contains(": {"));
        let durable = settings("127.0.0.1", 4222, "/tmp/x", true, "");
        assert!(durable.contains("sync_interval: always"));
    }
}
