//! Kafka, one KRaft node.

mod client;
mod container;
mod line;
mod local;
mod security;
mod tools;

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use line::KafkaLine;
pub use security::KafkaSecurity;

use crate::ServiceError;
use crate::controls::local_controls;
use crate::server::{Server, Way, blocking, environment, until_ready};

const SERVICE: &str = "Kafka";
const BROKERS_VARIABLE: &str = "RELAYBOX_KAFKA_BROKERS";
const POM: &str = include_str!("pom.xml");

const READY_WITHIN: Duration = Duration::from_secs(60);
/// Short: a server that is named should be there, and a wrong name should fail in seconds.
const URL_READY_WITHIN: Duration = Duration::from_secs(5);
const SHUT_DOWN_WITHIN: Duration = Duration::from_secs(30);

/// The pinned version, which stands in the POM alone.
fn version() -> &'static str {
    POM.split_once("<kafka.version>")
        .and_then(|(_, rest)| rest.split_once('<'))
        .map_or("unknown", |(version, _)| version)
}

/// How a Kafka is started. The default serves most tests.
#[derive(Clone, Copy, Debug, Default)]
pub struct KafkaOptions {
    local: bool,
    secured: bool,
    lines: bool,
}

impl KafkaOptions {
    /// Takes a local process whatever the environment offers: for tests that kill or stop the server.
    #[must_use]
    pub fn with_local_process(mut self) -> Self {
        self.local = true;
        self
    }

    /// Has ways to it that a test can break, see [`Kafka::line`], if it becomes a local process.
    #[must_use]
    pub fn with_lines(mut self) -> Self {
        self.lines = true;
        self
    }

    /// Listens with passwords and with TLS too; see [`Kafka::security`]. A local process.
    #[must_use]
    pub fn with_security(mut self) -> Self {
        self.local = true;
        self.secured = true;
        self
    }
}

/// Where a local process listens.
struct Listeners {
    plain: u16,
    controller: u16,
    seats: Vec<line::Seat>,
    security: Option<security::Ports>,
}

/// A running Kafka; a server of our own ends when this is dropped or the process ends.
///
/// The handle belongs to no async runtime: clients are made anew for each call.
pub struct Kafka {
    server: Server,
    brokers: String,
    security: Option<KafkaSecurity>,
    seats: Option<Arc<line::Seats>>,
}

impl Kafka {
    /// Starts with the default options.
    ///
    /// # Errors
    ///
    /// [`ServiceError::Unavailable`] names every way tried and what stopped it.
    pub async fn start() -> Result<Self, ServiceError> {
        Self::start_with(KafkaOptions::default()).await
    }

    /// Starts with the given options; it returns once a metadata request is answered.
    ///
    /// # Errors
    ///
    /// [`ServiceError::Unavailable`] names every way tried and what stopped it.
    pub async fn start_with(options: KafkaOptions) -> Result<Self, ServiceError> {
        let mut tried = Vec::new();
        if options.local {
            tried.push("brokers, container: not tried, a local process was asked for".to_owned());
        } else {
            match environment(BROKERS_VARIABLE) {
                Some(brokers) => {
                    return Self::by_brokers(brokers).await.map_err(|error| {
                        let tried = vec![format!("brokers: {BROKERS_VARIABLE} is set; {error}")];
                        ServiceError::Unavailable {
                            service: SERVICE,
                            tried,
                        }
                    });
                }
                None => tried.push(format!("brokers: {BROKERS_VARIABLE} is not set")),
            }
            match Self::by_container().await {
                Ok(kafka) => return Ok(kafka),
                Err(error) => tried.push(format!("container: {error}")),
            }
        }
        match Self::by_local_process(options).await {
            Ok(kafka) => Ok(kafka),
            Err(error) => {
                tried.push(format!("local process: {error}"));
                Err(ServiceError::Unavailable {
                    service: SERVICE,
                    tried,
                })
            }
        }
    }

    async fn by_brokers(brokers: String) -> Result<Self, ServiceError> {
        let kafka = Self {
            server: Server::Url,
            brokers,
            security: None,
            seats: None,
        };
        kafka.ready(URL_READY_WITHIN).await?;
        Ok(kafka)
    }

    async fn by_container() -> Result<Self, ServiceError> {
        let (container, brokers) = blocking(SERVICE, "start", container::start).await?;
        let kafka = Self {
            server: Server::Container(container),
            brokers,
            security: None,
            seats: None,
        };
        kafka.ready(READY_WITHIN).await?;
        Ok(kafka)
    }

    async fn by_local_process(options: KafkaOptions) -> Result<Self, ServiceError> {
        let failed = |error: std::io::Error| ServiceError::failed(SERVICE, "start", error);
        let lines = if options.lines { line::LINES } else { 0 };
        let ports = local::ports(4 + 2 * lines).map_err(failed)?;
        let [plain, controller, sasl, tls, seats @ ..] = ports.as_slice() else {
            return Err(failed(std::io::Error::other("too few ports")));
        };
        let seats: Vec<line::Seat> = seats
            .chunks_exact(2)
            .map(|pair| line::Seat {
                port: pair[0],
                advertised: pair[1],
            })
            .collect();
        let ports = options.secured.then_some(security::Ports {
            sasl: *sasl,
            tls: *tls,
        });
        let listeners = Listeners {
            plain: *plain,
            controller: *controller,
            seats: seats.clone(),
            security: ports,
        };
        let local = blocking(SERVICE, "start", move || local::start(&listeners)).await?;
        let kafka = Self {
            brokers: format!("127.0.0.1:{plain}"),
            seats: (!seats.is_empty()).then(|| line::Seats::new(seats)),
            security: ports.map(|ports| KafkaSecurity::new(ports, local.directory())),
            server: Server::Local(Arc::new(local)),
        };
        kafka.ready(READY_WITHIN).await?;
        Ok(kafka)
    }

    async fn ready(&self, within: Duration) -> Result<(), ServiceError> {
        until_ready(SERVICE, within, &self.server, || async {
            self.answers().await.map_err(|error| error.to_string())
        })
        .await
    }

    async fn answers(&self) -> Result<(), ServiceError> {
        self.ask("read metadata", client::answers).await
    }

    async fn ask<T: Send + 'static>(
        &self,
        operation: &'static str,
        run: impl FnOnce(&str) -> Result<T, String> + Send + 'static,
    ) -> Result<T, ServiceError> {
        let brokers = self.brokers();
        blocking(SERVICE, operation, move || {
            run(&brokers).map_err(|error| ServiceError::failed(SERVICE, operation, error))
        })
        .await
    }

    /// The bootstrap servers, `host:port` with commas between.
    #[must_use]
    pub fn brokers(&self) -> String {
        self.brokers.clone()
    }

    /// What gets a client in by the listeners with passwords and TLS, if it was started with them.
    #[must_use]
    pub const fn security(&self) -> Option<&KafkaSecurity> {
        self.security.as_ref()
    }

    /// How this server was had.
    #[must_use]
    pub fn way(&self) -> Way {
        self.server.way()
    }

    /// Whether a metadata request is answered now.
    pub async fn is_ready(&self) -> bool {
        self.answers().await.is_ok()
    }

    /// Makes a topic with a name of its own and returns the name.
    ///
    /// # Errors
    ///
    /// As [`Kafka::create_topic_named`].
    pub async fn create_topic(
        &self,
        prefix: &str,
        partitions: i32,
    ) -> Result<String, ServiceError> {
        self.create_topic_with(prefix, partitions, &[]).await
    }

    /// Makes a topic with a name of its own and the given topic settings, and returns the name.
    ///
    /// # Errors
    ///
    /// As [`Kafka::create_topic_named`].
    pub async fn create_topic_with(
        &self,
        prefix: &str,
        partitions: i32,
        settings: &[(&str, &str)],
    ) -> Result<String, ServiceError> {
        let name = crate::unique_name(prefix);
        self.create_topic_named(&name, partitions, settings).await?;
        Ok(name)
    }

    /// Makes a topic with exactly this name; returns when every partition has a leader, so that the first produce or
    /// fetch finds it.
    ///
    /// # Errors
    ///
    /// When the name is taken, a setting is refused, or no leader comes up in time.
    pub async fn create_topic_named(
        &self,
        name: &str,
        partitions: i32,
        settings: &[(&str, &str)],
    ) -> Result<(), ServiceError> {
        let name = name.to_owned();
        let settings: Vec<(String, String)> = settings
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        let runtime = tokio::runtime::Handle::current();
        self.ask("create topic", move |brokers| {
            client::create_topic(&runtime, brokers, &name, partitions, &settings)
        })
        .await
    }

    /// The end offset of every partition, in partition order: what the next record of each would get.
    ///
    /// # Errors
    ///
    /// When the topic does not exist or the broker does not answer.
    pub async fn topic_end_offsets(&self, name: &str) -> Result<Vec<i64>, ServiceError> {
        let name = name.to_owned();
        self.ask("read end offsets", move |brokers| {
            client::end_offsets(brokers, &name)
        })
        .await
    }
}

local_controls!(Kafka, "TERM");

impl fmt::Debug for Kafka {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Kafka")
            .field("way", &self.way())
            .field("brokers", &self.brokers)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn the_pom_names_the_version() {
        assert!(version().starts_with("4."), "{}", version());
    }
}
