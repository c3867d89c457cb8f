//! A small shell that outlives this process just long enough to end the server.
//!
//! A handle in a `static` is never dropped and a SIGKILLed process runs no code, so neither `Drop` nor a signal
//! handler can be trusted with the clean-up. The kernel closes our end of a pipe in every case; the shell waits for
//! that.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The shell and the two pipes to it.
pub(crate) struct Supervisor {
    shell: Child,
    // Taken at the end: closing it is the order to clean up.
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Supervisor {
    /// Starts the shell; the server starts with the order `start`.
    pub(crate) fn new(
        directory: &Path,
        log: &Path,
        end_signal: &str,
        command: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> io::Result<Self> {
        let mut shell = Command::new("sh")
            .arg("-c")
            .arg(include_str!("supervisor.sh"))
            .arg("relaybox-supervisor")
            .arg(directory)
            .arg(log)
            .arg(end_signal)
            .args(command)
            // Not in the directory, which it removes.
            .current_dir("/")
            // Ctrl-C and a test runner's time-out kill the group of the tests; the shell must live on to clean up.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // An inherited stderr would keep the reader of `cargo test | tee` waiting.
            .stderr(Stdio::null())
            .spawn()?;
        let pipes = shell.stdin.take().zip(shell.stdout.take());
        let Some((orders, answers)) = pipes else {
            return Err(io::Error::other("the supervisor has no pipes"));
        };
        Ok(Self {
            shell,
            orders: Some(orders),
            answers: BufReader::new(answers),
        })
    }

    /// Gives one order and returns the process ids of the answer, the server's first.
    pub(crate) fn order(&mut self, order: &str) -> io::Result<Vec<u32>> {
        let Some(orders) = self.orders.as_mut() else {
            return Err(io::Error::other("the supervisor has ended"));
        };
        orders.write_all(format!("{order}\n").as_bytes())?;
        let mut answer = String::new();
        if self.answers.read_line(&mut answer)? == 0 {
            return Err(io::Error::other("the supervisor has died"));
        }
        answer
            .split_whitespace()
            .map(|pid| pid.parse().map_err(io::Error::other))
            .collect()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        drop(self.orders.take());
        // Bounded: the shell itself gives up after some seconds. Nothing useful can be done with a failure here.
        let _ = self.shell.wait();
    }
}

/// Whether the process runs. A zombie does not.
pub(crate) fn is_running(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    // The name in parentheses may hold anything, a ')' too; the state follows the last one.
    let state = stat
        .rsplit_once(')')
        .and_then(|(_, rest)| rest.trim_start().chars().next());
    !matches!(state, Some('Z' | 'X') | None)
}
