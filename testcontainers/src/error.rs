//! What can go wrong with a service.

use std::fmt;

/// Why a service cannot be had, or why something asked of it did not happen.
///
/// It is cheap to clone and holds only text, so that a shared service can hand the same failure to every test that
/// asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServiceError {
    /// No way led to a running service. Every way is listed with what stopped it.
    Unavailable {
        /// The service's name.
        service: &'static str,
        /// One entry a way, in the order they were tried.
        tried: Vec<String>,
    },
    /// The operation needs a local process, and this service is not one.
    NotLocal {
        /// The service's name.
        service: &'static str,
        /// What was asked for.
        operation: &'static str,
        /// How the service was had instead.
        way: crate::Way,
    },
    /// The service was there and the operation failed.
    Failed {
        /// The service's name.
        service: &'static str,
        /// What was asked for.
        operation: &'static str,
        /// The cause; with the end of the server's log where that says more.
        detail: String,
    },
}

impl ServiceError {
    pub(crate) fn failed(
        service: &'static str,
        operation: &'static str,
        detail: impl fmt::Display,
    ) -> Self {
        Self::Failed {
            service,
            operation,
            detail: detail.to_string(),
        }
    }
}

impl fmt::Display for ServiceError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable { service, tried } => {
                write!(
                    formatter,
                    "{service} was asked for and cannot be had; tried in this order:"
                )?;
                for attempt in tried {
                    write!(formatter, "\n  - {attempt}")?;
                }
                Ok(())
            }
            Self::NotLocal {
                service,
                operation,
                way,
            } => write!(
                formatter,
                "{service}: {operation} needs a local process, but the service was had by {way}; \
                 ask for with_local_process()"
            ),
            Self::Failed {
                service,
                operation,
                detail,
            } => write!(formatter, "{service}: {operation} failed: {detail}"),
        }
    }
}

impl std::error::Error for ServiceError {}
