//! A service as a local process with its own directory.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::ServiceError;
use crate::supervisor::{Supervisor, is_running};

/// A killed process is gone in milliseconds; more than this means the machine is in trouble.
const GONE_WITHIN: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);
const LOG_TAIL_BYTES: usize = 4 * 1024;

/// The process, its supervisor and its directory. Everything here blocks for a short, bounded time.
pub(crate) struct LocalServer {
    service: &'static str,
    directory: PathBuf,
    log: PathBuf,
    state: Mutex<State>,
}

struct State {
    supervisor: Supervisor,
    pid: Option<u32>,
}

/// A new directory only its owner may enter; whoever gets it hands it to a supervisor at once.
pub(crate) fn new_directory(service: &str) -> io::Result<PathBuf> {
    tempfile::Builder::new()
        .prefix(&format!("relaybox-{service}-"))
        .tempdir()
        .map(tempfile::TempDir::keep)
}

impl LocalServer {
    /// Puts the directory under a supervisor. The command runs at [`LocalServer::start`].
    pub(crate) fn new(
        service: &'static str,
        directory: PathBuf,
        end_signal: &str,
        command: Vec<OsString>,
    ) -> io::Result<Self> {
        let log = directory.join("server.log");
        let supervisor = Supervisor::new(&directory, &log, end_signal, command)?;
        Ok(Self {
            service,
            directory,
            log,
            state: Mutex::new(State {
                supervisor,
                pid: None,
            }),
        })
    }

    /// The directory that is removed when the server's owner ends.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Starts the process; readiness is the caller's to check.
    pub(crate) fn start(&self) -> Result<(), ServiceError> {
        let mut state = self.state();
        if state.pid.is_some_and(is_running) {
            return Err(self.failed("start", "it is running already"));
        }
        let pids = self.order(&mut state, "start", "start")?;
        state.pid = pids.first().copied();
        Ok(())
    }

    /// SIGKILL to the process and its children; returns when all of them are gone.
    pub(crate) fn kill(&self) -> Result<(), ServiceError> {
        let mut state = self.state();
        self.running("kill", &state)?;
        let pids = self.order(&mut state, "kill", "KILL")?;
        if !gone(&pids, GONE_WITHIN) {
            return Err(self.failed("kill", format!("{pids:?} are still there after SIGKILL")));
        }
        Ok(())
    }

    /// SIGSTOP to the process and its children: the kernel still accepts connections, nobody answers them.
    pub(crate) fn stop(&self) -> Result<(), ServiceError> {
        let mut state = self.state();
        self.running("stop", &state)?;
        self.order(&mut state, "stop", "STOP").map(drop)
    }

    /// SIGCONT after [`LocalServer::stop`].
    pub(crate) fn cont(&self) -> Result<(), ServiceError> {
        let mut state = self.state();
        self.running("cont", &state)?;
        self.order(&mut state, "cont", "CONT").map(drop)
    }

    /// Asks the server to end by its own signal and waits; a server that does not within the time is killed.
    pub(crate) fn shut_down(&self, signal: &str, within: Duration) -> Result<(), ServiceError> {
        let mut state = self.state();
        self.running("shut down", &state)?;
        let pids = self.order(&mut state, "shut down", signal)?;
        if gone(&pids, within) {
            return Ok(());
        }
        drop(state);
        self.kill()
    }

    /// The server's process id while it runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.state().pid.filter(|pid| is_running(*pid))
    }

    /// The last lines the server wrote.
    pub(crate) fn log_tail(&self) -> String {
        let bytes = fs::read(&self.log).unwrap_or_default();
        let tail = &bytes[bytes.len().saturating_sub(LOG_TAIL_BYTES)..];
        let text = String::from_utf8_lossy(tail);
        match text.trim_end() {
            "" => "(the server's log is empty)".to_owned(),
            lines => format!("end of the server's log:\n{lines}"),
        }
    }

    pub(crate) fn failed(
        &self,
        operation: &'static str,
        detail: impl std::fmt::Display,
    ) -> ServiceError {
        ServiceError::failed(self.service, operation, detail)
    }

    fn running(&self, operation: &'static str, state: &State) -> Result<(), ServiceError> {
        if state.pid.is_some_and(is_running) {
            return Ok(());
        }
        Err(self.failed(operation, "it is not running"))
    }

    fn order(
        &self,
        state: &mut State,
        operation: &'static str,
        order: &str,
    ) -> Result<Vec<u32>, ServiceError> {
        state
            .supervisor
            .order(order)
            .map_err(|error| self.failed(operation, error))
    }

    // A test that panicked with the lock held leaves nothing half-done behind it: orders are one line each.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn gone(pids: &[u32], within: Duration) -> bool {
    let deadline = Instant::now() + within;
    loop {
        if !pids.iter().copied().any(is_running) {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(POLL);
    }
}
