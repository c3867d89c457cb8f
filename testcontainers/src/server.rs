//! What a handle stands on, whichever way the service was had.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ServiceError;
use crate::docker::Container;
use crate::local::LocalServer;

/// How a service was had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// By the address in the environment.
    Url,
    /// By a container of our own.
    Container,
    /// By a local process of our own.
    LocalProcess,
}

impl fmt::Display for Way {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Url => "the URL in the environment",
            Self::Container => "a container",
            Self::LocalProcess => "a local process",
        })
    }
}

/// The thing behind a handle. Nothing in it belongs to the async runtime that made it.
pub(crate) enum Server {
    Url,
    // Held for its drop.
    Container(#[allow(dead_code, reason = "dropping it removes the container")] Container),
    Local(Arc<LocalServer>),
}

impl Server {
    pub(crate) fn way(&self) -> Way {
        match self {
            Self::Url => Way::Url,
            Self::Container(_) => Way::Container,
            Self::Local(_) => Way::LocalProcess,
        }
    }

    pub(crate) fn local(
        &self,
        service: &'static str,
        operation: &'static str,
    ) -> Result<&Arc<LocalServer>, ServiceError> {
        match self {
            Self::Local(local) => Ok(local),
            other => Err(ServiceError::NotLocal {
                service,
                operation,
                way: other.way(),
            }),
        }
    }

    /// Runs an operation of the local process, which blocks, off the async threads.
    pub(crate) async fn on_local(
        &self,
        service: &'static str,
        operation: &'static str,
        run: impl FnOnce(&LocalServer) -> Result<(), ServiceError> + Send + 'static,
    ) -> Result<(), ServiceError> {
        let local = Arc::clone(self.local(service, operation)?);
        blocking(service, operation, move || run(&local)).await
    }
}

/// Runs blocking work off the async threads; a panic in it becomes an error.
pub(crate) async fn blocking<T: Send + 'static>(
    service: &'static str,
    operation: &'static str,
    run: impl FnOnce() -> Result<T, ServiceError> + Send + 'static,
) -> Result<T, ServiceError> {
    match tokio::task::spawn_blocking(run).await {
        Ok(result) => result,
        Err(error) => Err(ServiceError::failed(service, operation, error)),
    }
}

/// Asks the service until it answers, its process ends or the time is over.
pub(crate) async fn until_ready<F, A>(
    service: &'static str,
    within: Duration,
    server: &Server,
    probe: F,
) -> Result<(), ServiceError>
where
    F: Fn() -> A,
    A: Future<Output = Result<(), String>>,
{
    const POLL: Duration = Duration::from_millis(50);
    let deadline = Instant::now() + within;
    loop {
        let Err(answer) = probe().await else {
            return Ok(());
        };
        let log = || match server {
            Server::Local(local) => format!("; {}", local.log_tail()),
            Server::Url | Server::Container(_) => String::new(),
        };
        if let Server::Local(local) = server
            && local.pid().is_none()
        {
            let detail = format!("its process ended{}", log());
            return Err(ServiceError::failed(service, "start", detail));
        }
        if Instant::now() >= deadline {
            let detail = format!("no answer within {within:?}, at last: {answer}{}", log());
            return Err(ServiceError::failed(service, "start", detail));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// The value of an environment variable that is set and not blank.
pub(crate) fn environment(name: &str) -> Option<String> {
    std::env::var(name)
        .ok()
        .filter(|value| !value.trim().is_empty())
}
