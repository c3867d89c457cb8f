//! NATS as a container (not proven, see [`crate::docker`]).

use testcontainers::core::IntoContainerPort;
use testcontainers::{GenericImage, ImageExt};

use super::{SERVICE, VERSION, settings};
use crate::ServiceError;
use crate::docker::{self, Container};
use crate::names::free_port;

pub(super) fn start(durable: bool, extra: &str) -> Result<(Container, String), ServiceError> {
    let failed = |error: String| ServiceError::failed(SERVICE, "start", error);
    let host = docker::engine().map_err(failed)?;
    let port = free_port().map_err(|error| failed(error.to_string()))?;
    let settings = settings("0.0.0.0", 4222, "/data", durable, extra);
    let request = GenericImage::new("nats", VERSION)
        .with_mapped_port(port, 4222.tcp())
        .with_copy_to("/etc/relaybox.conf", settings.into_bytes())
        .with_cmd(["-c", "/etc/relaybox.conf"]);
    let container = Container::start("nats", request).map_err(failed)?;
    Ok((container, format!("nats://{host}:{port}")))
}
