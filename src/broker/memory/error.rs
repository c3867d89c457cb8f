//! The errors of the memory broker, in one place.

use crate::error::{Error, ErrorKind};

pub(super) fn down(operation: &'static str) -> Error {
    let detail = "the memory broker was taken down by set_available(false)";
    Error::new(ErrorKind::Unavailable, operation, detail)
}

pub(super) fn missing(operation: &'static str, names: &[&str]) -> Error {
    let detail = format!("no such topic: {}", names.join(", "));
    Error::new(ErrorKind::NotFound, operation, detail)
}

pub(super) fn too_large(bytes: usize, bytes_max: usize) -> Error {
    Error::invalid(
        "message",
        format!("a record of at most {bytes_max} bytes"),
        format!("{bytes} bytes"),
    )
}

pub(super) fn full(bytes_max: usize) -> Error {
    let detail = format!("the broker holds its {bytes_max} bytes (bytes_max)");
    Error::new(ErrorKind::Busy, "publish", detail)
}
