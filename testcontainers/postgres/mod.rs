//! PostgreSQL.

mod container;
mod database;
mod local;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::ServiceError;
use crate::controls::local_controls;
use crate::server::{Server, Way, blocking, environment, until_ready};

const SERVICE: &str = "PostgreSQL";
const URL_VARIABLE: &str = "RELAYBOX_POSTGRES_URL";
/// The major version in use; the container's tag names the minor one.
const MAJOR: &str = "15";
const IMAGE_TAG: &str = "15.14-alpine";

const READY_WITHIN: Duration = Duration::from_secs(30);
/// Short: a server that is named should be there, and a wrong name should fail in seconds.
const URL_READY_WITHIN: Duration = Duration::from_secs(5);
const SHUT_DOWN_WITHIN: Duration = Duration::from_secs(20);

/// How a PostgreSQL is started. The default serves most tests.
#[derive(Clone, Copy, Debug, Default)]
pub struct PostgresOptions {
    durable: bool,
    local: bool,
}

impl PostgresOptions {
    /// Turns fsync and full-page writes on, as in production: for figures that mean something.
    /// Without it (the default) they are off. A server by URL keeps its own settings.
    #[must_use]
    pub fn with_durable(mut self) -> Self {
        self.durable = true;
        self
    }

    /// Takes a local process whatever the environment offers: for tests that kill or stop the server.
    #[must_use]
    pub fn with_local_process(mut self) -> Self {
        self.local = true;
        self
    }
}

/// A running PostgreSQL; a server of our own ends when this is dropped or the process ends.
///
/// The handle belongs to no async runtime: connections are made anew for each call.
pub struct Postgres {
    server: Server,
    url: String,
}

impl Postgres {
    /// Starts with the default options.
    ///
    /// # Errors
    ///
    /// [`ServiceError::Unavailable`] names every way tried and what stopped it.
    pub async fn start() -> Result<Self, ServiceError> {
        Self::start_with(PostgresOptions::default()).await
    }

    /// Starts with the given options; it returns once `SELECT 1` is answered.
    ///
    /// # Errors
    ///
    /// [`ServiceError::Unavailable`] names every way tried and what stopped it.
    pub async fn start_with(options: PostgresOptions) -> Result<Self, ServiceError> {
        let mut tried = Vec::new();
        if options.local {
            tried.push("URL, container: not tried, a local process was asked for".to_owned());
        } else {
            match environment(URL_VARIABLE) {
                Some(url) => {
                    return Self::by_url(url).await.map_err(|error| {
                        // The URL itself may hold a password.
                        let tried = vec![format!("URL: {URL_VARIABLE} is set; {error}")];
                        ServiceError::Unavailable {
                            service: SERVICE,
                            tried,
                        }
                    });
                }
                None => tried.push(format!("URL: {URL_VARIABLE} is not set")),
            }
            match Self::by_container(options).await {
                Ok(postgres) => return Ok(postgres),
                Err(error) => tried.push(format!("container: {error}")),
            }
        }
        match Self::by_local_process(options).await {
            Ok(postgres) => Ok(postgres),
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
        let postgres = Self {
            server: Server::Url,
            url,
        };
        postgres.ready(URL_READY_WITHIN).await?;
        Ok(postgres)
    }

    async fn by_container(options: PostgresOptions) -> Result<Self, ServiceError> {
        let (container, url) =
            blocking(SERVICE, "start", move || container::start(options.durable)).await?;
        let postgres = Self {
            server: Server::Container(container),
            url,
        };
        postgres.ready(READY_WITHIN).await?;
        Ok(postgres)
    }

    async fn by_local_process(options: PostgresOptions) -> Result<Self, ServiceError> {
        let (local, url) =
            blocking(SERVICE, "start", move || local::start(options.durable)).await?;
        let postgres = Self {
            server: Server::Local(Arc::new(local)),
            url,
        };
        postgres.ready(READY_WITHIN).await?;
        Ok(postgres)
    }

    async fn ready(&self, within: Duration) -> Result<(), ServiceError> {
        until_ready(SERVICE, within, &self.server, || {
            database::answers(&self.url)
        })
        .await
    }

    /// The URL of the server's own database, with the rights to create others.
    #[must_use]
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// How this server was had.
    #[must_use]
    pub fn way(&self) -> Way {
        self.server.way()
    }

    /// Whether `SELECT 1` is answered now.
    pub async fn is_ready(&self) -> bool {
        database::answers(&self.url).await.is_ok()
    }

    /// Makes a fresh database with a name of its own and returns its URL.
    ///
    /// It is never dropped by us: with a server of our own it goes with the server; on a server by URL it stays, under
    /// the prefix and twelve random characters.
    ///
    /// # Errors
    ///
    /// When the server cannot be reached or refuses.
    pub async fn create_database(&self, prefix: &str) -> Result<String, ServiceError> {
        let name = crate::unique_name(prefix);
        database::create(&self.url, &name)
            .await
            .map_err(|error| ServiceError::failed(SERVICE, "create database", error))?;
        Ok(database::with_database(&self.url, &name))
    }

    /// Path of a program of the same PostgreSQL, such as `pg_dump`. Local process only.
    ///
    /// # Errors
    ///
    /// [`ServiceError::NotLocal`], or the program is not installed beside the server.
    pub fn program(&self, name: &str) -> Result<PathBuf, ServiceError> {
        self.server.local(SERVICE, "program")?;
        local::program(name).map_err(|why| ServiceError::failed(SERVICE, "program", why))
    }
}

local_controls!(Postgres, "INT");

impl fmt::Debug for Postgres {
    // Without the URL, which may hold a password.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Postgres")
            .field("way", &self.way())
            .finish_non_exhaustive()
    }
}
