//! Settings of the NATS adapter, checked once.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::message::Limits;

/// How a client shows who it is. Never part of an error, a log or `Debug`.
#[derive(Clone)]
pub(super) enum Credentials {
    None,
    Token(String),
    UserAndPassword(String, String),
    NkeySeed(String),
    File(PathBuf),
    Text(String),
}

/// A stream whose subjects are known beforehand.
#[derive(Debug, Clone)]
pub(super) struct KnownStream {
    pub(super) name: String,
    pub(super) subjects: Vec<String>,
}

/// A part of a stream, under a name of its own.
#[derive(Debug, Clone)]
pub(super) struct Alias {
    pub(super) name: String,
    pub(super) stream: String,
    pub(super) filters: Vec<String>,
}

/// How to reach a NATS server with JetStream and how to behave there.
///
/// | setting | default | bounds |
/// |---|---|---|
/// | servers | (required) | at least one `nats://host:port` |
/// | name | `relaybox` | not empty |
/// | ping interval | 10 s | 1 s to 10 min |
/// | publish deadline | 10 s | 1 s to 10 min |
/// | in flight | 1,024 | 1 to 65,536 |
/// | limits | [`Limits::default`] | message at most 31 MB |
/// | answer deadline | 5 s | 100 ms to 1 min |
/// | ack wait | 30 s | 500 ms to 24 h |
/// | ack pending | 10,000 | 1 to 1,000,000 |
/// | heartbeat | 5 s | 500 ms to 30 s |
/// | dead letter retention | for ever | at least 1 s |
/// | resend horizon | 2 min | at most 30 days |
///
/// What a server's own settings must allow: `max_payload` of at least the largest message and 64 KiB for its headers.
#[derive(Clone)]
pub struct NatsConfig {
    pub(super) servers: Vec<String>,
    pub(super) name: String,
    pub(super) credentials: Credentials,
    pub(super) require_tls: bool,
    pub(super) ca_file: Option<PathBuf>,
    pub(super) client_certificate: Option<(PathBuf, PathBuf)>,
    pub(super) domain: Option<String>,
    pub(super) ping_interval: Duration,
    pub(super) publish_deadline: Duration,
    pub(super) in_flight_max: usize,
    pub(super) limits: Limits,
    pub(super) answer_deadline: Duration,
    pub(super) ack_wait: Duration,
    pub(super) ack_pending_max: usize,
    pub(super) heartbeat: Duration,
    pub(super) recreate_consumers: bool,
    pub(super) stream_retention: Option<Duration>,
    pub(super) dead_letter_retention: Option<Duration>,
    pub(super) resend_horizon: Duration,
    pub(super) streams: Vec<KnownStream>,
    pub(super) core_subjects: Vec<String>,
    pub(super) aliases: Vec<Alias>,
}

impl NatsConfig {
    /// Defaults for one server, `nats://host:port`; more by [`with_server`](Self::with_server).
    pub fn new(server: impl Into<String>) -> Self {
        Self {
            servers: vec![server.into()],
            name: "relaybox".into(),
            credentials: Credentials::None,
            require_tls: false,
            ca_file: None,
            client_certificate: None,
            domain: None,
            ping_interval: Duration::from_secs(10),
            publish_deadline: Duration::from_secs(10),
            in_flight_max: 1_024,
            limits: Limits::default(),
            answer_deadline: Duration::from_secs(5),
            ack_wait: Duration::from_secs(30),
            ack_pending_max: 10_000,
            heartbeat: Duration::from_secs(5),
            recreate_consumers: true,
            stream_retention: None,
            dead_letter_retention: None,
            resend_horizon: Duration::from_secs(120),
            streams: Vec::new(),
            core_subjects: Vec::new(),
            aliases: Vec::new(),
        }
    }

    /// One more server of the same cluster.
    #[must_use]
    pub fn with_server(mut self, server: impl Into<String>) -> Self {
        self.servers.push(server.into());
        self
    }

    /// The name under which the server lists this client.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Authenticates by a token. Replaces other credentials, as each of these setters does.
    #[must_use]
    pub fn with_token(mut self, token: impl Into<String>) -> Self {
        self.credentials = Credentials::Token(token.into());
        self
    }

    /// Authenticates by user and password.
    #[must_use]
    pub fn with_user(mut self, user: impl Into<String>, password: impl Into<String>) -> Self {
        self.credentials = Credentials::UserAndPassword(user.into(), password.into());
        self
    }

    /// Authenticates by the seed of an nkey.
    #[must_use]
    pub fn with_nkey_seed(mut self, seed: impl Into<String>) -> Self {
        self.credentials = Credentials::NkeySeed(seed.into());
        self
    }

    /// Authenticates by a credentials file, read once at connect.
    #[must_use]
    pub fn with_credentials_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.credentials = Credentials::File(path.into());
        self
    }

    /// Authenticates by the text of a credentials file.
    #[must_use]
    pub fn with_credentials(mut self, text: impl Into<String>) -> Self {
        self.credentials = Credentials::Text(text.into());
        self
    }

    /// Refuses connections without TLS.
    #[must_use]
    pub const fn with_tls(mut self) -> Self {
        self.require_tls = true;
        self
    }

    /// Trusts the authorities in this PEM file instead of the system's, and requires TLS.
    #[must_use]
    pub fn with_ca_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.ca_file = Some(path.into());
        self.with_tls()
    }

    /// Shows this certificate (PEM files), and requires TLS.
    #[must_use]
    pub fn with_client_certificate(
        mut self,
        certificate: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> Self {
        self.client_certificate = Some((certificate.into(), key.into()));
        self.with_tls()
    }

    /// The JetStream domain, where it is not the server's own.
    #[must_use]
    pub fn with_domain(mut self, domain: impl Into<String>) -> Self {
        self.domain = Some(domain.into());
        self
    }

    /// How often a quiet connection is tried; one that leaves two pings unanswered is given up.
    #[must_use]
    pub const fn with_ping_interval(mut self, interval: Duration) -> Self {
        self.ping_interval = interval;
        self
    }

    /// The longest that one publish call takes. The relay's lease must be more than twice as long.
    #[must_use]
    pub const fn with_publish_deadline(mut self, deadline: Duration) -> Self {
        self.publish_deadline = deadline;
        self
    }

    /// Most messages of one publish call that wait for their confirmation at a time.
    #[must_use]
    pub const fn with_in_flight_max(mut self, count: usize) -> Self {
        self.in_flight_max = count;
        self
    }

    /// What a message may be at most.
    #[must_use]
    pub const fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// How long the server may take to connect and to answer questions about streams and consumers.
    #[must_use]
    pub const fn with_answer_deadline(mut self, deadline: Duration) -> Self {
        self.answer_deadline = deadline;
        self
    }

    /// After how long without a sign of life a delivery goes to somebody else. Signs are sent at a third of it, so a
    /// handler may take longer. A durable consumer that is there already must have the same.
    #[must_use]
    pub const fn with_ack_wait(mut self, wait: Duration) -> Self {
        self.ack_wait = wait;
        self
    }

    /// Most messages of a consumer that are delivered and not acknowledged, over all its members; those released with a
    /// delay are among them. A durable consumer that is there already must have the same.
    #[must_use]
    pub const fn with_ack_pending_max(mut self, count: usize) -> Self {
        self.ack_pending_max = count;
        self
    }

    /// How often the server says that it is there while there is nothing to deliver; after two missing ones the
    /// question is asked anew.
    #[must_use]
    pub const fn with_heartbeat(mut self, interval: Duration) -> Self {
        self.heartbeat = interval;
        self
    }

    /// A durable consumer that somebody deleted ends the subscription with an error. Without this it is made anew, with a
    /// loud log, and begins at the oldest message that the stream still holds.
    #[must_use]
    pub const fn without_recreated_consumers(mut self) -> Self {
        self.recreate_consumers = false;
        self
    }

    /// How long messages are kept in a stream that [`create_stream`](super::Nats::create_stream) makes, read or not: longer
    /// than any consumer may be away. Without this: for ever, and consumers have to
    /// [say](crate::consumer::ConsumerConfig::with_source_retention) how long their inbox must remember.
    #[must_use]
    pub const fn with_stream_retention(mut self, retention: Duration) -> Self {
        self.stream_retention = Some(retention);
        self
    }

    /// How long dead letters are kept in a stream that is made here. Without this: for ever.
    #[must_use]
    pub const fn with_dead_letter_retention(mut self, retention: Duration) -> Self {
        self.dead_letter_retention = Some(retention);
        self
    }

    /// For how long a relay may send a message again whose confirmation was lost. A stream that forgets ids earlier is
    /// warned about: it would store such a message twice.
    #[must_use]
    pub const fn with_resend_horizon(mut self, horizon: Duration) -> Self {
        self.resend_horizon = horizon;
        self
    }

    /// A stream and its subjects (patterns). Its name becomes the scope of those subjects, and the server is made to
    /// refuse their messages anywhere else.
    ///
    /// The scope decides what keeps its order together, also across restarts, so it comes from here alone and not from
    /// what a server happens to have; for other subjects it is their first token.
    #[must_use]
    pub fn with_stream<S: Into<String>>(
        mut self,
        name: impl Into<String>,
        subjects: impl IntoIterator<Item = S>,
    ) -> Self {
        self.streams.push(KnownStream {
            name: name.into(),
            subjects: subjects.into_iter().map(Into::into).collect(),
        });
        self
    }

    /// Subjects (a pattern) that no stream needs to hold: sent as plain NATS messages, **at most once**. Such a message
    /// counts as confirmed once it is handed to the connection, and nobody may have got it.
    #[must_use]
    pub fn with_core_subject(mut self, pattern: impl Into<String>) -> Self {
        self.core_subjects.push(pattern.into());
        self
    }

    /// A source of this name: the messages of a stream with one of these subjects (patterns; none means all). More than
    /// one pattern needs a server from 2.10 on.
    #[must_use]
    pub fn with_source<S: Into<String>>(
        mut self,
        name: impl Into<String>,
        stream: impl Into<String>,
        filters: impl IntoIterator<Item = S>,
    ) -> Self {
        self.aliases.push(Alias {
            name: name.into(),
            stream: stream.into(),
            filters: filters.into_iter().map(Into::into).collect(),
        });
        self
    }
}

/// Shows no credentials, neither in a field nor in an address.
impl fmt::Debug for NatsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsConfig")
            .field("servers", &self.tried())
            .field("name", &self.name)
            .field("require_tls", &self.require_tls)
            .field("publish_deadline", &self.publish_deadline)
            .field("ack_wait", &self.ack_wait)
            .field("limits", &self.limits)
            .field("streams", &self.streams)
            .field("core_subjects", &self.core_subjects)
            .field("aliases", &self.aliases)
            .finish_non_exhaustive()
    }
}
