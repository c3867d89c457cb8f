//! PostgreSQL as a local process.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{MAJOR, SERVICE};
use crate::ServiceError;
use crate::local::{LocalServer, new_directory};
use crate::names::free_port;
use crate::server::environment;

const BINARIES_VARIABLE: &str = "RELAYBOX_PG_BIN";
const INSTALLED: &str = "/usr/lib/postgresql";
/// PostgreSQL refuses to run as root; Debian's package makes this user.
const USER: &str = "postgres";
const SETTINGS: &str = include_str!("postgresql.conf");
const DURABLE: &str = "\nfsync = on\nfull_page_writes = on\n";

/// Initialises a data directory and starts the server on it.
pub(super) fn start(durable: bool) -> Result<(LocalServer, String), ServiceError> {
    let failed = |detail: String| ServiceError::failed(SERVICE, "start", detail);
    let binaries = binaries().map_err(failed)?;
    let start = || -> io::Result<(LocalServer, String)> {
        let directory = new_directory("postgres")?;
        let port = free_port()?;
        let data = directory.join("data");
        let mut command = as_server_user(&binaries.join("postgres"))?;
        command.push("-D".into());
        command.push(data.clone().into());
        command.push("-p".into());
        command.push(port.to_string().into());
        command.push("-k".into());
        command.push(directory.clone().into());
        // From here on the supervisor removes the directory, also when initdb fails. An immediate shutdown gives the
        // shared memory back.
        let local = LocalServer::new("PostgreSQL", directory, "QUIT", command)?;
        initialise(&binaries, local.directory(), &data)?;
        let mut settings = OpenOptions::new()
            .append(true)
            .open(data.join("postgresql.conf"))?;
        settings.write_all(SETTINGS.as_bytes())?;
        if durable {
            settings.write_all(DURABLE.as_bytes())?;
        }
        let url = format!("postgres://{USER}@127.0.0.1:{port}/postgres?sslmode=disable");
        Ok((local, url))
    };
    let (local, url) = start().map_err(|error| failed(error.to_string()))?;
    local.start()?;
    Ok((local, url))
}

fn initialise(binaries: &Path, directory: &Path, data: &Path) -> io::Result<()> {
    let initdb = as_server_user(&binaries.join("initdb"))?;
    if is_root()? {
        run(Command::new("chown").arg(USER).arg(directory))?;
    }
    let (program, arguments) = initdb
        .split_first()
        .ok_or_else(|| io::Error::other("no command"))?;
    run(Command::new(program)
        .args(arguments)
        .arg("-D")
        .arg(data)
        .args(["-U", USER, "-A", "trust", "-E", "UTF8", "--no-locale"])
        .args(["--no-sync", "--no-instructions"])
        // The caller's directory may be closed to the server's user.
        .current_dir(directory))
}

fn run(command: &mut Command) -> io::Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "{command:?}: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim_end()
    )))
}

/// The command line that runs a program as a user PostgreSQL accepts.
///
/// `setpriv` and not `runuser`: it becomes the program, where `runuser` stays in between as a parent that would get
/// the signals meant for the server.
fn as_server_user(program: &Path) -> io::Result<Vec<OsString>> {
    let mut command: Vec<OsString> = Vec::new();
    if is_root()? {
        let user = ["--reuid", USER, "--regid", USER, "--init-groups", "--"];
        command.push("setpriv".into());
        command.extend(user.map(OsString::from));
    }
    command.push(program.into());
    Ok(command)
}

fn is_root() -> io::Result<bool> {
    Ok(fs::metadata("/proc/self")?.uid() == 0)
}

/// A program from the directory of the server's.
pub(super) fn program(name: &str) -> Result<PathBuf, String> {
    let program = binaries()?.join(name);
    if program.is_file() {
        return Ok(program);
    }
    Err(format!(
        "no {}; run testcontainers/install",
        program.display()
    ))
}

/// The directory with `initdb` and `postgres`: the one asked for, else the pinned major version, else the newest.
fn binaries() -> Result<PathBuf, String> {
    let complete = |path: &Path| {
        ["initdb", "postgres"]
            .iter()
            .all(|program| path.join(program).is_file())
    };
    if let Some(path) = environment(BINARIES_VARIABLE).map(PathBuf::from) {
        return if complete(&path) {
            Ok(path)
        } else {
            Err(format!(
                "{BINARIES_VARIABLE} is {}, which lacks initdb or postgres; run testcontainers/install",
                path.display()
            ))
        };
    }
    let mut installed: Vec<(u32, PathBuf)> = fs::read_dir(INSTALLED)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let version = entry.file_name().to_str()?.parse().ok()?;
            Some((version, entry.path().join("bin")))
        })
        .filter(|(_, path)| complete(path))
        .collect();
    installed.sort_by_key(|(version, _)| (version.to_string() == MAJOR, *version));
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    installed
        .pop()
        .map(|(_, path)| path)
        .or_else(|| std::env::split_paths(&on_path).find(|path| complete(path)))
        .ok_or_else(|| {
            format!(
                "no initdb and postgres in {INSTALLED}/*/bin or on the PATH, and {BINARIES_VARIABLE} is not set; \
                 run testcontainers/install"
            )
        })
}
