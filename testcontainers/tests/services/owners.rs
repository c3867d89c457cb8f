//! Servers end with the process that holds them, however it ends.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use relaybox_testcontainers::Postgres;

use super::{local_postgres, until};

#[tokio::test]
async fn a_dropped_server_is_gone() {
    let postgres = Postgres::start_with(local_postgres()).await.unwrap();
    let pid = postgres.pid().unwrap();
    let directory = postgres.directory().unwrap().to_owned();
    drop(postgres);
    assert!(!runs(pid));
    assert!(!directory.exists());
}

#[test]
fn a_sigkilled_owner_takes_its_postgres_along() {
    let mut owner = Owner::of("postgres");
    owner.process.kill().unwrap();
    owner.service_is_gone();
}

#[test]
fn a_sigkilled_owner_takes_its_kafka_along() {
    let mut owner = Owner::of("kafka");
    owner.process.kill().unwrap();
    owner.service_is_gone();
}

#[test]
fn a_sigkilled_owner_takes_its_rabbitmq_along() {
    let mut owner = Owner::of("rabbitmq");
    let family = children(owner.server);
    assert_eq!(family.len(), 2, "the node and its port mapper: {family:?}");
    owner.process.kill().unwrap();
    owner.service_is_gone();
    until("node and port mapper are gone", || {
        !family.iter().copied().any(runs)
    });
}

#[test]
fn a_sigkilled_owner_takes_its_nats_along() {
    let mut owner = Owner::of("nats");
    owner.process.kill().unwrap();
    owner.service_is_gone();
}

#[test]
fn a_sigkilled_owner_takes_its_stopped_postgres_along() {
    let mut owner = Owner::of("postgres");
    let stopped = Command::new("sh")
        .args(["-c", "kill -STOP \"$1\"", "sh"])
        .arg(owner.server.to_string())
        .status();
    assert!(stopped.unwrap().success());
    owner.process.kill().unwrap();
    owner.service_is_gone();
}

// The handle sits in a static there: ending the usual way does not drop it either.
#[test]
fn an_owner_that_ends_takes_its_postgres_along() {
    let mut owner = Owner::of("postgres");
    drop(owner.process.stdin.take());
    assert!(owner.process.wait().unwrap().success());
    owner.service_is_gone();
}

/// The processes that have this one as their parent.
fn children(parent: u32) -> Vec<u32> {
    let is_child = |pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let told = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        told.is_some_and(|told| told.trim() == parent.to_string())
    };
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok())
        .filter(is_child)
        .collect()
}

/// The bin that holds a service, with only the local process left as a way.
pub fn holder(service: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hold_service"));
    command
        .arg(service)
        .env_remove("RELAYBOX_POSTGRES_URL")
        .env_remove("RELAYBOX_KAFKA_BROKERS")
        .env_remove("RELAYBOX_RABBITMQ_URL")
        .env_remove("RELAYBOX_NATS_URL")
        .env("DOCKER_HOST", "unix:///nonexistent/docker.sock")
        .stdin(Stdio::null());
    command
}

/// A process that holds a service, and what it said of it.
struct Owner {
    process: Child,
    server: u32,
    directory: PathBuf,
}

impl Owner {
    fn of(service: &str) -> Self {
        let mut process = holder(service)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let mut words = line.split_whitespace().skip(1);
        let server = words.next().unwrap().parse().unwrap();
        let directory = PathBuf::from(words.next().unwrap());
        assert!(runs(server) && directory.is_dir());
        Self {
            process,
            server,
            directory,
        }
    }

    fn service_is_gone(mut self) {
        self.process.wait().unwrap();
        until("the server is gone", || !runs(self.server));
        until("the directory is gone", || !self.directory.exists());
    }
}

/// Whether the process runs; a zombie waits for its parent and does not.
fn runs(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("State:"))
        .is_some_and(|state| !state.trim_start().starts_with(['Z', 'X']))
}
