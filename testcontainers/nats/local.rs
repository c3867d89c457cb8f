//! NATS as a local process.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use super::{SERVICE, VERSION, settings};
use crate::ServiceError;
use crate::local::{LocalServer, new_directory};
use crate::names::free_port;
use crate::server::environment;

const HOME_VARIABLE: &str = "RELAYBOX_NATS_HOME";
const PROGRAM: &str = "nats-server";

/// Starts a server with its streams in a directory of its own.
pub(super) fn start(durable: bool, extra: &str) -> Result<(LocalServer, String), ServiceError> {
    let failed = |detail: String| ServiceError::failed(SERVICE, "start", detail);
    let program = program().map_err(failed)?;
    let start = || -> std::io::Result<(LocalServer, String)> {
        let directory = new_directory("nats")?;
        let file = directory.join("nats.conf");
        let command: Vec<OsString> = vec![program.into(), "-c".into(), file.clone().into()];
        // SIGKILL, because an orderly end takes time and the data go anyway.
        let local = LocalServer::new("NATS", directory, "KILL", command)?;
        let port = free_port()?;
        let data = local.directory().join("data");
        let settings = settings("127.0.0.1", port, &data.to_string_lossy(), durable, extra);
        fs::write(file, settings)?;
        Ok((local, format!("nats://127.0.0.1:{port}")))
    };
    let (local, url) = start().map_err(|error| failed(error.to_string()))?;
    local.start()?;
    Ok((local, url))
}

/// The server's program: the one asked for, else the pinned version, else what is installed.
fn program() -> Result<PathBuf, String> {
    if let Some(home) = environment(HOME_VARIABLE) {
        let program = PathBuf::from(home).join(PROGRAM);
        if program.is_file() {
            return Ok(program);
        }
        return Err(format!(
            "no {} ({HOME_VARIABLE}); run testcontainers/install",
            program.display()
        ));
    }
    let pinned = environment("HOME").map(|home| {
        PathBuf::from(home)
            .join(".cache/relaybox")
            .join(format!("nats-{VERSION}"))
    });
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    pinned
        .into_iter()
        .chain(std::env::split_paths(&on_path))
        // Where Debian's package puts it, which a user's PATH need not name.
        .chain([PathBuf::from("/usr/sbin")])
        .map(|directory| directory.join(PROGRAM))
        .find(|program| program.is_file())
        .ok_or_else(|| {
            format!("no {PROGRAM} {VERSION} and none on the PATH; run testcontainers/install")
        })
}
