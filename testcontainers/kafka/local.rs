//! Kafka as a local process.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Listeners, SERVICE, security, version};
use crate::ServiceError;
use crate::local::{LocalServer, new_directory};
use crate::names::free_port;
use crate::server::environment;

const HOME_VARIABLE: &str = "RELAYBOX_KAFKA_HOME";
const SETTINGS: &str = include_str!("server.properties");
const LOGGING: &str = include_str!("log4j2.xml");
/// A broker for a test lives for seconds: the fast compiler and a collector without threads start it sooner.
const FLAGS: [&str; 4] = [
    "-Xmx512m",
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xshare:auto",
];

/// Formats a data directory and starts the broker on it.
pub(super) fn start(listeners: &Listeners) -> Result<LocalServer, ServiceError> {
    let failed = |detail: String| ServiceError::failed(SERVICE, "start", detail);
    let java = java().map_err(failed)?;
    let libraries = libraries().map_err(failed)?;
    let start = || -> io::Result<LocalServer> {
        let directory = new_directory("kafka")?;
        let settings = directory.join("server.properties");
        let logging = directory.join("log4j2.xml");
        let mut command: Vec<OsString> = vec![java.clone().into()];
        command.extend(FLAGS.map(OsString::from));
        let mut logging_flag = OsString::from("-Dlog4j2.configurationFile=");
        logging_flag.push(&logging);
        command.push(logging_flag);
        command.push("-cp".into());
        // The star is Java's own, not a shell's.
        command.push(libraries.join("*").into());
        let mut format = Command::new(&command[0]);
        format.args(&command[1..]);
        command.push("kafka.Kafka".into());
        command.push(settings.clone().into());
        // From here on the supervisor removes the directory, also when the format fails. SIGKILL, because an orderly
        // end takes time and the data go anyway.
        let local = LocalServer::new("Kafka", directory, "KILL", command)?;
        fs::write(&settings, filled(listeners, &java, local.directory())?)?;
        fs::write(&logging, LOGGING)?;
        format
            .args(["kafka.tools.StorageTool", "format", "--cluster-id"])
            .arg(cluster_id())
            .arg("--config")
            .arg(&settings);
        if listeners.security.is_some() {
            format.args(["--add-scram", &security::scram()]);
        }
        run("formatting the data directory", &mut format)?;
        Ok(local)
    };
    let local = start().map_err(|error| failed(error.to_string()))?;
    local.start()?;
    Ok(local)
}

/// The settings, and beside them what they name.
fn filled(listeners: &Listeners, java: &Path, directory: &Path) -> io::Result<String> {
    let mut more = String::new();
    let mut more_advertised = String::new();
    let mut protocols = String::new();
    for (at, seat) in listeners.seats.iter().enumerate() {
        more += &format!(",LINE{at}://127.0.0.1:{}", seat.port);
        more_advertised += &format!(",LINE{at}://127.0.0.1:{}", seat.advertised);
        protocols += &format!("LINE{at}:PLAINTEXT,");
    }
    if let Some(ports) = &listeners.security {
        let secured = format!(
            ",SASL://127.0.0.1:{},TLS://127.0.0.1:{}",
            ports.sasl, ports.tls
        );
        more += &secured;
        more_advertised += &secured;
    }
    let mut settings = SETTINGS
        .replace("{port}", &listeners.plain.to_string())
        .replace("{controller_port}", &listeners.controller.to_string())
        .replace("{more_listeners}", &more)
        .replace("{more_advertised}", &more_advertised)
        .replace("{more_protocols}", &protocols)
        .replace("{data}", &directory.join("data").to_string_lossy());
    if listeners.security.is_some() {
        settings += &security::prepare(java, directory)?;
    }
    Ok(settings)
}

/// So many free ports, all different.
pub(super) fn ports(count: usize) -> io::Result<Vec<u16>> {
    let mut ports = Vec::with_capacity(count);
    while ports.len() < count {
        let port = free_port()?;
        if !ports.contains(&port) {
            ports.push(port);
        }
    }
    Ok(ports)
}

/// Runs a command to its end; what it said is the error.
pub(super) fn run(what: &str, command: &mut Command) -> io::Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{what}: {}: {}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr).trim_end()
    )))
}

/// Sixteen bytes in base64: 22 characters, of which the last carries two bits.
fn cluster_id() -> String {
    let mut id: String = (0..21).map(|_| fastrand::alphanumeric()).collect();
    id.push('A');
    id
}

pub(super) fn java() -> Result<PathBuf, String> {
    if let Some(home) = environment("JAVA_HOME") {
        let java = Path::new(&home).join("bin/java");
        if java.is_file() {
            return Ok(java);
        }
    }
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&on_path)
        .map(|directory| directory.join("java"))
        .find(|java| java.is_file())
        .ok_or_else(|| "no java in JAVA_HOME or on the PATH; run testcontainers/install".to_owned())
}

/// The directory with the jars, as `testcontainers/install` makes it.
pub(super) fn libraries() -> Result<PathBuf, String> {
    let home = match environment(HOME_VARIABLE) {
        Some(home) => PathBuf::from(home),
        None => environment("HOME")
            .map(PathBuf::from)
            .ok_or_else(|| format!("neither {HOME_VARIABLE} nor HOME is set"))?
            .join(".cache/relaybox")
            .join(format!("kafka-{}", version())),
    };
    let libraries = home.join("libs");
    let server = libraries.join(format!("kafka_2.13-{}.jar", version()));
    if server.is_file() {
        return Ok(libraries);
    }
    Err(format!(
        "no {}; run testcontainers/install",
        server.display()
    ))
}
