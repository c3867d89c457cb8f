//! The container way. Compiled and linted, but not proven: no Docker engine was at hand when it was written.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use testcontainers::runners::AsyncRunner;
use testcontainers::{ContainerRequest, GenericImage, ImageExt};
use tokio::sync::oneshot;

use crate::server::environment;
use crate::unique_name;

const PING_WITHIN: Duration = Duration::from_secs(2);
/// Pulling an image is part of it.
const START_WITHIN: Duration = Duration::from_secs(180);
const DEFAULT_SOCKET: &str = "unix:///var/run/docker.sock";

/// A running container, removed when dropped.
///
/// A thread with a runtime of its own owns it, because the client's connections die with the runtime that made them,
/// and a shared service outlives the runtime of the test that started it.
pub(crate) struct Container {
    stop: Option<oneshot::Sender<()>>,
    owner: Option<JoinHandle<()>>,
    // Held for its stdin: when that closes, it removes the container, also after SIGKILL.
    watchdog: Option<Child>,
}

/// Whether a Docker engine answers, and under which host its published ports are reached.
pub(crate) fn engine() -> Result<String, String> {
    let address = environment("DOCKER_HOST").unwrap_or_else(|| DEFAULT_SOCKET.to_owned());
    let failed = |error: std::io::Error| format!("no Docker engine at {address}: {error}");
    if let Some(path) = address.strip_prefix("unix://") {
        let stream = UnixStream::connect(path).map_err(failed)?;
        stream
            .set_read_timeout(Some(PING_WITHIN))
            .and_then(|()| stream.set_write_timeout(Some(PING_WITHIN)))
            .map_err(failed)?;
        ping(stream).map_err(failed)?;
        return Ok("127.0.0.1".to_owned());
    }
    let Some((scheme, authority)) = address.split_once("://") else {
        return Err(format!("DOCKER_HOST is not an address: {address}"));
    };
    if !matches!(scheme, "tcp" | "http" | "https") {
        return Err(format!(
            "DOCKER_HOST has a scheme not known here: {address}"
        ));
    }
    let authority = authority.trim_end_matches('/');
    let socket = authority
        .to_socket_addrs()
        .map_err(failed)?
        .next()
        .ok_or_else(|| format!("DOCKER_HOST names no address: {address}"))?;
    // The port may speak TLS, so an accepted connection has to do.
    TcpStream::connect_timeout(&socket, PING_WITHIN).map_err(failed)?;
    let host = authority
        .rsplit_once(':')
        .map_or(authority, |(host, _)| host);
    Ok(host.to_owned())
}

fn ping(mut stream: impl Read + Write) -> std::io::Result<()> {
    stream.write_all(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")?;
    let mut answer = [0; 64];
    let length = stream.read(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer[..length]);
    match answer.split_whitespace().nth(1) {
        Some("200") => Ok(()),
        _ => Err(std::io::Error::other(format!("ping answered {answer:?}"))),
    }
}

impl Container {
    /// Starts the container and waits until it runs; readiness is the caller's to check.
    pub(crate) fn start(
        service: &str,
        request: ContainerRequest<GenericImage>,
    ) -> Result<Self, String> {
        let name = unique_name(&format!("relaybox_{service}"));
        let watchdog = watchdog(&name).map_err(|error| format!("no watchdog: {error}"))?;
        let request = request
            .with_container_name(&name)
            .with_startup_timeout(START_WITHIN);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| format!("no runtime: {error}"))?;
        let (stop, stopped) = oneshot::channel::<()>();
        let (started, start) = std::sync::mpsc::channel();
        let owner = std::thread::spawn(move || {
            runtime.block_on(async move {
                match request.start().await {
                    Ok(container) => {
                        let _ = started.send(Ok(()));
                        // Ends by the handle's drop, which closes the channel.
                        let _ = stopped.await;
                        let _ = container.rm().await;
                    }
                    Err(error) => {
                        let _ = started.send(Err(error.to_string()));
                    }
                }
            });
        });
        let container = Self {
            stop: Some(stop),
            owner: Some(owner),
            watchdog: Some(watchdog),
        };
        match start.recv_timeout(START_WITHIN) {
            Ok(Ok(())) => Ok(container),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                // The thread hangs in the engine; joining it would hang the test too.
                let mut container = container;
                container.owner = None;
                Err(format!("not running within {START_WITHIN:?}"))
            }
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(owner) = self.owner.take() {
            let _ = owner.join();
        }
        if let Some(mut watchdog) = self.watchdog.take() {
            drop(watchdog.stdin.take());
            let _ = watchdog.wait();
        }
    }
}

/// A shell that removes the container once our end of its stdin is closed, by whatever.
fn watchdog(name: &str) -> std::io::Result<Child> {
    Command::new("sh")
        .args([
            "-c",
            "trap : HUP INT TERM; read -r _; exec docker rm -fv \"$1\"",
        ])
        .args(["relaybox-watchdog", name])
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}
