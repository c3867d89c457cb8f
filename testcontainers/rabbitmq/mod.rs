//! RabbitMQ, one node.

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

const SERVICE: &str = "RabbitMQ";
const URL_VARIABLE: &str = "RELAYBOX_RABBITMQ_URL";
const IMAGE_TAG: &str = "3.10.25-alpine";

const READY_WITHIN: Duration = Duration::from_secs(90);
/// Short: a server that is named should be there, and a wrong name should fail in seconds.
const URL_READY_WITHIN: Duration = Duration::from_secs(5);
const SHUT_DOWN_WITHIN: Duration = Duration::from_secs(60);

/// How a RabbitMQ is started. The default serves most tests.
#[derive(Clone, Copy, Debug, Default)]
pub struct RabbitMqOptions {
    local: bool,
}

impl RabbitMqOptions {
    /// Takes a local process whatever the environment offers: for tests that kill, stop or command the server.
    #[must_use]
    pub fn with_local_process(mut self) -> Self {
        self.local = true;
        self
    }
}

/// A running RabbitMQ; a server of our own ends when this is dropped or the process ends.
///
/// The handle belongs to no async runtime: connections are made anew for each call.
pub struct RabbitMq {
    server: Server,
    tools: Option<Arc<local::Tools>>,
    url: String,
}

impl RabbitMq {
    /// Starts with the default options.
    ///
    /// # Errors
    ///
    /// [`ServiceError::Unavailable`] names every way tried and what stopped it.
    pub async fn start() -> Result<Self, ServiceError> {
        Self::start_with(RabbitMqOptions::default()).await
    }

    /// Starts with the given options; it returns once a channel opens.
    ///
    /// # Errors
    ///
    /// [`ServiceError::Unavailable`] names every way tried and what stopped it.
    pub async fn start_with(options: RabbitMqOptions) -> Result<Self, ServiceError> {
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
            match Self::by_container().await {
                Ok(rabbitmq) => return Ok(rabbitmq),
                Err(error) => tried.push(format!("container: {error}")),
            }
        }
        match Self::by_local_process().await {
            Ok(rabbitmq) => Ok(rabbitmq),
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
        let rabbitmq = Self {
            server: Server::Url,
            tools: None,
            url,
        };
        rabbitmq.ready(URL_READY_WITHIN).await?;
        Ok(rabbitmq)
    }

    async fn by_container() -> Result<Self, ServiceError> {
        let (container, url) = blocking(SERVICE, "start", container::start).await?;
        let rabbitmq = Self {
            server: Server::Container(container),
            tools: None,
            url,
        };
        rabbitmq.ready(READY_WITHIN).await?;
        Ok(rabbitmq)
    }

    async fn by_local_process() -> Result<Self, ServiceError> {
        let (local, tools, url) = blocking(SERVICE, "start", local::start).await?;
        let rabbitmq = Self {
            server: Server::Local(Arc::new(local)),
            tools: Some(Arc::new(tools)),
            url,
        };
        rabbitmq.ready(READY_WITHIN).await?;
        Ok(rabbitmq)
    }

    async fn ready(&self, within: Duration) -> Result<(), ServiceError> {
        until_ready(SERVICE, within, &self.server, || client::answers(&self.url)).await
    }

    /// The AMQP URL, with user and password.
    #[must_use]
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// `host:port` of the URL, for a proxy in front of it.
    #[must_use]
    pub fn address(&self) -> String {
        let authority = self
            .url
            .split_once("://")
            .map_or(&*self.url, |(_, rest)| rest);
        let authority = authority.split(['/', '?']).next().unwrap_or_default();
        let host = authority
            .rsplit_once('@')
            .map_or(authority, |(_, host)| host);
        host.to_owned()
    }

    /// The same URL by another `host:port`.
    #[must_use]
    pub fn url_by(&self, address: &str) -> String {
        self.url.replacen(&self.address(), address, 1)
    }

    /// How this server was had.
    #[must_use]
    pub fn way(&self) -> Way {
        self.server.way()
    }

    /// Whether a channel opens now.
    pub async fn is_ready(&self) -> bool {
        client::answers(&self.url).await.is_ok()
    }

    /// Runs `rabbitmqctl` on the node and returns what it printed. Local process only.
    ///
    /// # Errors
    ///
    /// [`ServiceError::NotLocal`], or what the tool said.
    pub async fn ctl(&self, arguments: &[&str]) -> Result<String, ServiceError> {
        self.server.local(SERVICE, "rabbitmqctl")?;
        let tools = self.tools.clone();
        let arguments: Vec<String> = arguments.iter().map(|word| (*word).to_owned()).collect();
        blocking(SERVICE, "rabbitmqctl", move || match tools {
            Some(tools) => tools
                .ctl(&arguments)
                .map_err(|error| ServiceError::failed(SERVICE, "rabbitmqctl", error)),
            None => Ok(String::new()),
        })
        .await
    }

    /// Raises the memory alarm: the node reads nothing more from connections that publish. Local process only.
    ///
    /// # Errors
    ///
    /// As [`RabbitMq::ctl`].
    pub async fn block(&self) -> Result<(), ServiceError> {
        let arguments = ["set_vm_memory_high_watermark", "0.00001"];
        self.ctl(&arguments).await.map(drop)
    }

    /// Clears the memory alarm. Local process only.
    ///
    /// # Errors
    ///
    /// As [`RabbitMq::ctl`].
    pub async fn unblock(&self) -> Result<(), ServiceError> {
        let arguments = ["set_vm_memory_high_watermark", "0.4"];
        self.ctl(&arguments).await.map(drop)
    }

    /// Closes every client's connection from the node's side. Local process only.
    ///
    /// # Errors
    ///
    /// As [`RabbitMq::ctl`].
    pub async fn close_all_connections(&self) -> Result<(), ServiceError> {
        let arguments = ["close_all_connections", "a test asked for it"];
        self.ctl(&arguments).await.map(drop)
    }
}

local_controls!(RabbitMq, "TERM");

/// Shows the address only: the URL holds a password.
impl fmt::Debug for RabbitMq {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("RabbitMq")
            .field("way", &self.way())
            .field("address", &self.address())
            .finish_non_exhaustive()
    }
}
