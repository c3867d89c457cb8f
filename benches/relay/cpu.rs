//! What a run cost in CPU time, which says more than its duration where others use the machine.

use std::time::Duration;

use sqlx::PgPool;

/// The kernel's unit of these counts.
const TICK: Duration = Duration::from_millis(10);

/// CPU time of this process, and of the server where it runs on this machine.
#[derive(Clone, Copy, Default)]
pub struct Cpu {
    pub client: Duration,
    pub server: Duration,
}

/// Reads both.
#[derive(Clone)]
pub struct Meter {
    postmaster: Option<u32>,
}

impl Meter {
    pub async fn new(pool: &PgPool) -> Self {
        let backend: i32 = sqlx::query_scalar("SELECT pg_backend_pid()")
            .fetch_one(pool)
            .await
            .unwrap();
        let backend = Process::read(&backend.to_string()).filter(|found| found.name == "postgres");
        Self {
            postmaster: backend.map(|backend| backend.parent),
        }
    }

    pub fn read(&self) -> Cpu {
        let ticks = |process: Process| process.own_ticks;
        Cpu {
            client: TICK * Process::read("self").map_or(0, ticks),
            server: TICK * self.postmaster.map_or(0, server_ticks),
        }
    }
}

impl std::ops::Sub for Cpu {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            client: self.client.saturating_sub(before.client),
            server: self.server.saturating_sub(before.server),
        }
    }
}

/// The server's processes, and those that have ended.
fn server_ticks(postmaster: u32) -> u32 {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| Process::read(entry.file_name().to_str()?));
    let all = processes.filter_map(|process| match process {
        Process { id, .. } if id == postmaster => Some(process.own_ticks + process.ended_ticks),
        Process { parent, .. } if parent == postmaster => Some(process.own_ticks),
        _ => None,
    });
    all.sum()
}

struct Process {
    id: u32,
    name: String,
    parent: u32,
    own_ticks: u32,
    /// Of children that have ended.
    ended_ticks: u32,
}

impl Process {
    fn read(id: &str) -> Option<Self> {
        let text = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
        let (id, rest) = text.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(") ")?;
        let numbers: Vec<u32> = rest
            .split(' ')
            .map(|number| number.trim().parse().unwrap_or(0))
            .collect();
        // Counted from the state on: parent is 1; user and system time are 11 and 12, of ended children 13 and 14.
        Some(Self {
            id: id.parse().ok()?,
            name: name.to_owned(),
            parent: *numbers.get(1)?,
            own_ticks: numbers.get(11)? + numbers.get(12)?,
            ended_ticks: numbers.get(13)? + numbers.get(14)?,
        })
    }
}
