//! PostgreSQL as a container (not proven, see [`crate::docker`]).

use testcontainers::core::IntoContainerPort;
use testcontainers::{GenericImage, ImageExt};

use super::{IMAGE_TAG, SERVICE};
use crate::ServiceError;
use crate::docker::{self, Container};
use crate::names::free_port;

pub(super) fn start(durable: bool) -> Result<(Container, String), ServiceError> {
    let failed = |error: String| ServiceError::failed(SERVICE, "start", error);
    let host = docker::engine().map_err(failed)?;
    let port = free_port().map_err(|error| failed(error.to_string()))?;
    let switch = if durable { "on" } else { "off" };
    let settings = [
        "max_connections=200".to_owned(),
        "max_prepared_transactions=20".to_owned(),
        format!("fsync={switch}"),
        format!("full_page_writes={switch}"),
    ];
    let arguments = settings
        .into_iter()
        .flat_map(|setting| ["-c".to_owned(), setting]);
    let request = GenericImage::new("postgres", IMAGE_TAG)
        .with_mapped_port(port, 5432.tcp())
        .with_env_var("POSTGRES_HOST_AUTH_METHOD", "trust")
        .with_cmd(arguments);
    let container = Container::start("postgres", request).map_err(failed)?;
    Ok((
        container,
        format!("postgres://postgres@{host}:{port}/postgres"),
    ))
}
