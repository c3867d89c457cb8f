//! RabbitMQ as a container (not proven, see [`crate::docker`]).

use testcontainers::core::IntoContainerPort;
use testcontainers::{GenericImage, ImageExt};

use super::{IMAGE_TAG, SERVICE};
use crate::ServiceError;
use crate::docker::{self, Container};
use crate::names::free_port;

pub(super) fn start() -> Result<(Container, String), ServiceError> {
    let failed = |error: String| ServiceError::failed(SERVICE, "start", error);
    let host = docker::engine().map_err(failed)?;
    let port = free_port().map_err(|error| failed(error.to_string()))?;
    let request = GenericImage::new("rabbitmq", IMAGE_TAG).with_mapped_port(port, 5672.tcp());
    let container = Container::start("rabbitmq", request).map_err(failed)?;
    Ok((container, format!("amqp://guest:guest@{host}:{port}/%2f")))
}
