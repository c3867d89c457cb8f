//! Kafka as a local process.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{SERVICE, version};
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
pub(super) fn start() -> Result<(LocalServer, String), ServiceError> {
    let failed = |detail: String| ServiceError::failed(SERVICE, "start", detail);
    let java = java().map_err(failed)?;
    let libraries = libraries().map_err(failed)?;
    let start = || -> std::io::Result<(LocalServer, String)> {
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
        let port = free_port()?;
        let data = local.directory().join("data");
        let controller_port = another_free_port(port)?;
        let filled = SETTINGS
            .replace("{port}", &port.to_string())
            .replace("{controller_port}", &controller_port.to_string())
            .replace("{data}", &data.to_string_lossy());
        fs::write(&settings, filled)?;
        fs::write(&logging, LOGGING)?;
        run_format(
            format
                .args(["kafka.tools.StorageTool", "format", "--cluster-id"])
                .arg(cluster_id())
                .arg("--config")
                .arg(&settings),
        )?;
        Ok((local, format!("127.0.0.1:{port}")))
    };
    let (local, brokers) = start().map_err(|error| failed(error.to_string()))?;
    local.start()?;
    Ok((local, brokers))
}

fn another_free_port(taken: u16) -> std::io::Result<u16> {
    loop {
        let port = free_port()?;
        if port != taken {
            return Ok(port);
        }
    }
}

fn run_format(format: &mut Command) -> std::io::Result<()> {
    let output = format.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(std::io::Error::other(format!(
        "formatting the data directory: {}: {}{}",
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

fn java() -> Result<PathBuf, String> {
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
fn libraries() -> Result<PathBuf, String> {
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
