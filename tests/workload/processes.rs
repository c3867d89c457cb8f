//! The roles as processes: started, killed, frozen, and stopped in order.

use std::fs::File;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::broker::Product;
use super::world::{Anyhow, POSTGRES};

/// How long a role may take to end after SIGTERM.
const STOP_WITHIN: Duration = Duration::from_secs(60);
const SIGTERM: i32 = 15;
/// How often a process is asked whether it has ended.
const POLL: Duration = Duration::from_millis(20);

/// What every process of a run is told.
#[derive(Debug, Clone)]
pub struct Setting {
    pub url: String,
    pub product: Product,
    pub address: String,
    pub seed: u64,
    /// Where their logs go.
    pub directory: PathBuf,
}

/// The processes of one role. They end with this one, by the pipe that they read.
#[derive(Debug)]
pub struct Fleet {
    role: &'static str,
    setting: Setting,
    members: Vec<Option<Child>>,
    /// Processes that ended by themselves, or did not end when told to.
    pub faults: Vec<String>,
}

impl Fleet {
    pub fn start(role: &'static str, size: usize, setting: &Setting) -> Anyhow<Self> {
        let mut fleet = Self {
            role,
            setting: setting.clone(),
            members: (0..size).map(|_| None).collect(),
            faults: Vec::new(),
        };
        fleet.start_missing()?;
        Ok(fleet)
    }

    pub fn name(&self, member: usize) -> String {
        format!("{} {member}", self.role)
    }

    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Starts those that do not run, in the same instant.
    pub fn start_missing(&mut self) -> Anyhow<()> {
        self.note_ended()?;
        for member in 0..self.members.len() {
            if self.members[member].is_none() {
                self.members[member] = Some(self.spawn(member)?);
            }
        }
        Ok(())
    }

    fn spawn(&self, member: usize) -> Anyhow<Child> {
        let log = self
            .setting
            .directory
            .join(format!("{}-{member}.log", self.role));
        let log = File::options().create(true).append(true).open(log)?;
        let child = Command::new(std::env::current_exe()?)
            .args([
                "--role",
                self.role,
                "--seed",
                &self.setting.seed.to_string(),
                "--broker",
                self.setting.product.name(),
            ])
            .env(POSTGRES, &self.setting.url)
            .env(self.setting.product.variable(), &self.setting.address)
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            // Ctrl-C is for the one who started them.
            .process_group_of_its_own()
            .spawn()?;
        Ok(child)
    }

    /// Notes those that ended though nobody told them to.
    fn note_ended(&mut self) -> Anyhow<()> {
        for member in 0..self.members.len() {
            let Some(child) = &mut self.members[member] else {
                continue;
            };
            if let Some(status) = child.try_wait()? {
                self.members[member] = None;
                let name = self.name(member);
                self.faults
                    .push(format!("{name} ended by itself: {status}"));
            }
        }
        Ok(())
    }

    /// SIGKILL; returns when it is gone.
    pub fn kill(&mut self, member: usize) -> Anyhow<()> {
        self.note_ended()?;
        if let Some(mut child) = self.members[member].take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// SIGSTOP, and SIGCONT after `time`. A shell does both, so that nobody stays frozen when this process dies.
    pub async fn freeze(&mut self, member: usize, time: Duration) -> Anyhow<()> {
        self.note_ended()?;
        let Some(child) = &self.members[member] else {
            return Ok(());
        };
        let mut shell = Command::new("sh")
            .args(["-c", "kill -STOP $1; sleep $2; kill -CONT $1", "freeze"])
            .arg(child.id().to_string())
            .arg(format!("{:.3}", time.as_secs_f64()))
            .stdin(Stdio::null())
            .process_group_of_its_own()
            .spawn()?;
        let status = tokio::task::spawn_blocking(move || shell.wait()).await??;
        if status.success() {
            return Ok(());
        }
        Err(format!("{} could not be frozen", self.name(member)).into())
    }

    /// SIGTERM to all, and waits until they have ended well.
    pub async fn stop(&mut self) -> Anyhow<()> {
        self.note_ended()?;
        for child in self.members.iter().flatten() {
            let pid = child.id().to_string();
            Command::new("kill").args(["-TERM", &pid]).status()?;
        }
        let deadline = Instant::now() + STOP_WITHIN;
        for member in 0..self.members.len() {
            let Some(mut child) = self.members[member].take() else {
                continue;
            };
            let ended = loop {
                if let Some(status) = child.try_wait()? {
                    // One that has just been started may not listen yet, and simply ends.
                    let good = status.success() || status.signal() == Some(SIGTERM);
                    break good.then_some(()).ok_or(status.to_string());
                }
                if Instant::now() > deadline {
                    child.kill()?;
                    child.wait()?;
                    break Err(format!("it did not stop within {STOP_WITHIN:?}"));
                }
                tokio::time::sleep(POLL).await;
            };
            if let Err(why) = ended {
                let name = self.name(member);
                self.faults.push(format!("{name} was told to stop: {why}"));
            }
        }
        Ok(())
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for child in self.members.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

trait OwnGroup {
    fn process_group_of_its_own(&mut self) -> &mut Self;
}

impl OwnGroup for Command {
    fn process_group_of_its_own(&mut self) -> &mut Self {
        std::os::unix::process::CommandExt::process_group(self, 0)
    }
}

/// Ends this process when the one that started it is gone.
pub fn end_with_parent() {
    std::thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(3);
    });
}

/// A directory for the logs and the history of a run.
pub fn directory(seed: u64) -> io::Result<PathBuf> {
    let prefix = format!("relaybox-workload-{seed}-");
    let directory = tempfile::Builder::new().prefix(&prefix).tempdir()?;
    Ok(directory.keep())
}

/// Removes it after a good run.
pub fn remove(directory: &Path) {
    if let Err(error) = std::fs::remove_dir_all(directory) {
        eprintln!("{} stays: {error}", directory.display());
    }
}
