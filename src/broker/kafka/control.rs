//! Questions about the cluster and its topics, each answered within seconds or failed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::admin::{
    AdminClient, AdminOptions, ConfigResource, NewTopic, ResourceSpecifier, TopicResult,
};
use rdkafka::client::Client;
use rdkafka::error::KafkaResult;
use rdkafka::error::{KafkaError, RDKafkaErrorCode as Code};
use rdkafka::producer::{FutureProducer, Producer};

use super::config::KafkaConfig;
use super::context::Context;
use super::error::{Trouble, mapped};
use crate::broker::DESTINATIONS_MAX;
use crate::error::{Error, ErrorKind, Result};

/// A topic as the metadata show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Topic {
    /// How many partitions it has.
    pub(super) partitions: usize,
    /// On how many brokers each is kept.
    pub(super) replicas: usize,
}

/// What questions are asked with. It sends no record: a producer is the client whose events somebody serves, so that
/// the state of its connections is known.
pub(super) struct Control {
    asking: FutureProducer<Context>,
    context: Context,
    admin: rdkafka::ClientConfig,
    brokers: String,
    pub(super) deadline: Duration,
}

impl Control {
    pub(super) fn new(config: &KafkaConfig) -> Result<Arc<Self>> {
        let context = Context::default();
        Ok(Arc::new(Self {
            asking: create_with(&config.asking(), context.clone())?,
            context,
            admin: config.admin(),
            brokers: config.brokers().to_owned(),
            deadline: config.answer_deadline,
        }))
    }

    /// Waits until a broker answers.
    pub(super) async fn reach(self: &Arc<Self>) -> Result<()> {
        let control = Arc::clone(self);
        blocking("connect", move || {
            // The client learns the cluster's id from the first metadata that any broker sends.
            match control.client().fetch_cluster_id(control.deadline) {
                Some(_) => Ok(()),
                None => Err(control.unavailable("connect")),
            }
        })
        .await
    }

    pub(super) fn client(&self) -> &Client<impl rdkafka::ClientContext> {
        self.asking.client()
    }

    /// A client for administration.
    pub(super) fn admin(&self) -> Result<Admin> {
        create_with(&self.admin, Context::default()).map(|client| Admin(Some(client)))
    }

    /// Looks topics up; one answer per name, in order, `None` for those that do not exist.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the brokers tried; [`ErrorKind::Rejected`] when a topic may not be seen.
    pub(super) async fn topics(
        self: &Arc<Self>,
        operation: &'static str,
        names: Vec<String>,
    ) -> Result<Vec<Option<Topic>>> {
        self.look_up(operation, names).await?.into_iter().collect()
    }

    /// The same, where one topic that may not be seen says nothing about the others.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the brokers tried.
    pub(super) async fn look_up(
        self: &Arc<Self>,
        operation: &'static str,
        names: Vec<String>,
    ) -> Result<Vec<Result<Option<Topic>>>> {
        let control = Arc::clone(self);
        blocking(operation, move || {
            let until = Instant::now() + control.deadline;
            names
                .iter()
                .map(|name| control.topic(operation, name, until))
                .collect()
        })
        .await
    }

    fn topic(
        &self,
        operation: &'static str,
        name: &str,
        until: Instant,
    ) -> Result<Result<Option<Topic>>> {
        let left = until.saturating_duration_since(Instant::now());
        let metadata = self
            .client()
            .fetch_metadata(Some(name), left)
            .map_err(|source| self.unavailable(operation).with_source(source))?;
        let Some(topic) = metadata.topics().first() else {
            return Ok(Ok(None));
        };
        match topic.error().map(Code::from) {
            Some(Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::InvalidTopic) => {
                return Ok(Ok(None));
            }
            Some(code @ Code::TopicAuthorizationFailed) => {
                return Ok(Err(mapped(
                    operation,
                    name,
                    KafkaError::MetadataFetch(code),
                )));
            }
            // Some partition has no leader at the moment; the topic is there.
            Some(_) | None => {}
        }
        let replicas = topic.partitions().iter().map(|p| p.replicas().len()).max();
        Ok(Ok(Some(Topic {
            partitions: topic.partitions().len(),
            replicas: replicas.unwrap_or(0),
        })))
    }

    /// Names of topics that begin with this.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] naming the brokers tried.
    pub(super) async fn named(
        self: &Arc<Self>,
        operation: &'static str,
        prefix: String,
    ) -> Result<Vec<String>> {
        let control = Arc::clone(self);
        blocking(operation, move || {
            let metadata = control
                .client()
                .fetch_metadata(None, control.deadline)
                .map_err(|source| control.unavailable(operation).with_source(source))?;
            let there = metadata
                .topics()
                .iter()
                .filter(|topic| topic.error().is_none());
            let named = there.map(|topic| topic.name());
            let mut named: Vec<String> = named
                .filter(|name| name.starts_with(&prefix))
                .map(str::to_owned)
                .collect();
            named.sort_unstable();
            named.truncate(DESTINATIONS_MAX);
            Ok(named)
        })
        .await
    }

    /// Checks that every name exists.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] naming every missing one.
    pub(super) async fn all_exist(
        self: &Arc<Self>,
        operation: &'static str,
        names: &[String],
    ) -> Result<Vec<Topic>> {
        let found = self.topics(operation, names.to_vec()).await?;
        let missing: Vec<&str> = names
            .iter()
            .zip(&found)
            .filter(|(_, topic)| topic.is_none())
            .map(|(name, _)| name.as_str())
            .collect();
        if missing.is_empty() {
            return Ok(found.into_iter().flatten().collect());
        }
        Err(Error::new(
            ErrorKind::NotFound,
            operation,
            format!("no such topic: {}", missing.join(", ")),
        ))
    }

    fn unavailable(&self, operation: &'static str) -> Error {
        let cause = match self.trouble() {
            Some(trouble) => format!(": {}", trouble.detail()),
            None => String::new(),
        };
        let (brokers, deadline) = (&self.brokers, self.deadline);
        let detail = format!("no answer from {brokers} within {deadline:?}{cause}");
        Error::new(ErrorKind::Unavailable, operation, detail)
    }

    /// Why no broker serves this client, if so.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        self.context.trouble()
    }
}

/// Makes and describes topics. Nothing serves its events, which would pile up in the client, so it lives for a call.
pub(super) struct Admin(Option<AdminClient<Context>>);

impl Admin {
    pub(super) async fn create_topics(
        &self,
        topics: &[NewTopic<'_>],
        options: &AdminOptions,
    ) -> KafkaResult<Vec<TopicResult>> {
        match &self.0 {
            Some(client) => client.create_topics(topics, options).await,
            None => Err(KafkaError::Canceled),
        }
    }

    pub(super) async fn describe_topics(
        &self,
        names: &[String],
        options: &AdminOptions,
    ) -> KafkaResult<Vec<Result<ConfigResource, Code>>> {
        match &self.0 {
            Some(client) => {
                let topics = names.iter().map(|name| ResourceSpecifier::Topic(name));
                let topics: Vec<_> = topics.collect();
                client.describe_configs(&topics, options).await
            }
            None => Err(KafkaError::Canceled),
        }
    }
}

/// Its end joins a thread: nothing for an async one.
impl Drop for Admin {
    fn drop(&mut self) {
        end_aside(self.0.take());
    }
}

/// Drops a client on a thread of its own.
pub(super) fn end_aside<T: Send + 'static>(client: Option<T>) {
    let Some(client) = client else {
        return;
    };
    // Where no thread can be had the closure is dropped here and now, and the client with it.
    let _ = std::thread::Builder::new()
        .name("relaybox-kafka-drop".into())
        .spawn(move || drop(client));
}

/// Makes a client of any kind; a property it does not know or a value it refuses is a setting's fault.
pub(super) fn create_with<C, T>(config: &rdkafka::ClientConfig, context: C) -> Result<T>
where
    C: rdkafka::ClientContext,
    T: rdkafka::config::FromClientConfigAndContext<C>,
{
    T::from_config_and_context(config, context).map_err(|source| {
        // The error of a refused value repeats the value, which may be a secret: only the name is shown.
        let (limit, value) = match &source {
            KafkaError::ClientConfig(_, reason, name, _) => {
                let limit = if reason.contains("No such configuration property") {
                    "a property librdkafka knows"
                } else if reason.contains("at build time") {
                    "what this build of librdkafka can do: see the features kafka-ssl, kafka-gssapi and kafka-zstd"
                } else {
                    "a property with a value librdkafka accepts"
                };
                (limit, name.clone())
            }
            KafkaError::ClientCreation(reason) => ("settings librdkafka accepts", reason.clone()),
            _ => ("settings librdkafka accepts", String::new()),
        };
        Error::configuration("property", limit, value)
    })
}

/// Runs a blocking call of the client off the async threads.
pub(super) async fn blocking<T: Send + 'static>(
    operation: &'static str,
    run: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(run).await.map_err(|source| {
        Error::new(ErrorKind::Closed, operation, "the runtime is shutting down").with_source(source)
    })?
}
