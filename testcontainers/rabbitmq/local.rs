//! RabbitMQ as a local process: a node with its own port mapper, ports, cookie and directories.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::SERVICE;
use crate::ServiceError;
use crate::local::{LocalServer, new_directory};
use crate::names::free_port;
use crate::server::environment;

const HOME_VARIABLE: &str = "RELAYBOX_RABBITMQ_HOME";
/// Where Debian's package puts the scripts that do not change the user.
const INSTALLED: &str = "/usr/lib/rabbitmq";
const SETTINGS: &str = include_str!("rabbitmq.conf");
const NODE: &str = include_str!("node.sh");
/// Names of nodes are known to their port mapper only, and each node has its own.
const NODE_NAME: &str = "relaybox@localhost";
/// Two schedulers that do not spin: a test machine has better uses for its cores. Input is what the server must not
/// wait for, and neither does its distribution listen beyond this machine.
const FLAGS: &str = "-noinput +S 2:2 +sbwt none +sbwtdcpu none +sbwtdio none \
                     -kernel inet_dist_use_interface {127,0,0,1}";

/// What runs the node's tools: the same environment as the node's.
pub(super) struct Tools {
    ctl: PathBuf,
    environment: Vec<(&'static str, OsString)>,
}

/// Starts a node on a new directory.
pub(super) fn start() -> Result<(LocalServer, Tools, String), ServiceError> {
    let failed = |detail: String| ServiceError::failed(SERVICE, "start", detail);
    let binaries = binaries().map_err(failed)?;
    let start = || -> std::io::Result<(LocalServer, Tools, String)> {
        let directory = new_directory("rabbitmq")?;
        let [port, distribution, mapper] = three_free_ports()?;
        let variables = variables(&directory, port, distribution, mapper);
        let script = directory.join("node.sh");
        let mut command: Vec<OsString> = vec!["env".into()];
        command.extend(variables.iter().map(|(name, value)| {
            let mut pair = OsString::from(name);
            pair.push("=");
            pair.push(value);
            pair
        }));
        command.extend(["sh".into(), script.clone().into()]);
        command.push(binaries.join("rabbitmq-server").into());
        // Not an orderly end, which takes time: the data go anyway.
        let local = LocalServer::new("RabbitMQ", directory, "USR1", command)?;
        fs::write(&script, NODE)?;
        let settings = SETTINGS.replace("{port}", &port.to_string());
        fs::write(local.directory().join("rabbitmq.conf"), settings)?;
        let tools = Tools {
            ctl: binaries.join("rabbitmqctl"),
            environment: variables,
        };
        let url = format!("amqp://guest:guest@127.0.0.1:{port}/%2f");
        Ok((local, tools, url))
    };
    let (local, tools, url) = start().map_err(|error| failed(error.to_string()))?;
    local.start()?;
    Ok((local, tools, url))
}

fn variables(
    directory: &Path,
    port: u16,
    distribution: u16,
    mapper: u16,
) -> Vec<(&'static str, OsString)> {
    let inside = |name: &str| directory.join(name).into_os_string();
    vec![
        // The cookie lies there.
        ("HOME", directory.into()),
        ("RABBITMQ_NODENAME", NODE_NAME.into()),
        ("RABBITMQ_NODE_PORT", port.to_string().into()),
        ("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1".into()),
        ("RABBITMQ_DIST_PORT", distribution.to_string().into()),
        ("ERL_EPMD_PORT", mapper.to_string().into()),
        ("ERL_EPMD_ADDRESS", "127.0.0.1".into()),
        ("RABBITMQ_MNESIA_BASE", inside("data")),
        ("RABBITMQ_LOG_BASE", inside("log")),
        ("RABBITMQ_LOGS", "-".into()),
        ("RABBITMQ_PID_FILE", inside("pid")),
        ("RABBITMQ_ENABLED_PLUGINS_FILE", inside("plugins")),
        ("RABBITMQ_CONFIG_FILE", inside("rabbitmq.conf")),
        ("RABBITMQ_ADVANCED_CONFIG_FILE", inside("advanced.config")),
        // A dump of a node that could not boot would lie in the directory of the tests.
        ("ERL_CRASH_DUMP_SECONDS", "0".into()),
        // Neither the machine's own settings nor a shell around the virtual machine.
        ("RABBITMQ_CONF_ENV_FILE", inside("none")),
        ("RABBITMQ_ALLOW_INPUT", "1".into()),
        ("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", FLAGS.into()),
    ]
}

fn three_free_ports() -> std::io::Result<[u16; 3]> {
    loop {
        let [a, b, c] = [free_port()?, free_port()?, free_port()?];
        if a != b && b != c && a != c {
            return Ok([a, b, c]);
        }
    }
}

impl Tools {
    /// Runs `rabbitmqctl` and returns what it printed.
    pub(super) fn ctl(&self, arguments: &[String]) -> Result<String, String> {
        let output = Command::new(&self.ctl)
            .arg("--quiet")
            .args(arguments)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .current_dir("/")
            .stdin(Stdio::null())
            .output()
            .map_err(|error| error.to_string())?;
        let printed = String::from_utf8_lossy(&output.stdout);
        if output.status.success() {
            return Ok(printed.into_owned());
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        Err(format!(
            "rabbitmqctl {}: {}: {printed}{}",
            arguments.join(" "),
            output.status,
            errors.trim_end()
        ))
    }
}

/// The directory with `rabbitmq-server` and `rabbitmqctl`.
fn binaries() -> Result<PathBuf, String> {
    let home = environment(HOME_VARIABLE).unwrap_or_else(|| INSTALLED.to_owned());
    let binaries = PathBuf::from(home).join("bin");
    for program in ["rabbitmq-server", "rabbitmqctl"] {
        let program = binaries.join(program);
        if !program.is_file() {
            return Err(format!(
                "no {}; run testcontainers/install",
                program.display()
            ));
        }
    }
    Ok(binaries)
}
