//! Medians, ratios, and the conditions they were measured under.

use std::time::{Duration, Instant};

use relaybox_testcontainers::Postgres;
use sqlx::PgPool;

use super::cpu::{Cpu, Meter};

pub struct Report {
    lines: Vec<String>,
    meter: Meter,
}

/// The beginning of a run.
pub struct Start {
    meter: Meter,
    cpu: Cpu,
    at: Instant,
}

impl Start {
    pub fn end(self) -> Run {
        Run {
            took: self.at.elapsed(),
            cpu: self.meter.read() - self.cpu,
        }
    }
}

/// How long a run took, and what it cost.
#[derive(Clone, Copy)]
pub struct Run {
    pub took: Duration,
    pub cpu: Cpu,
}

impl Report {
    pub async fn new(postgres: &Postgres, smoke: bool) -> Self {
        let pool = PgPool::connect(&postgres.url()).await.unwrap();
        let version: String = sqlx::query_scalar("SHOW server_version")
            .fetch_one(&pool)
            .await
            .unwrap();
        let mut lines = Vec::new();
        if smoke {
            lines.push("smoke run: the figures mean nothing".to_owned());
        }
        if cfg!(debug_assertions) {
            lines.push("debug build: the figures mean nothing".to_owned());
        }
        lines.push(format!(
            "conditions: {}, {}, PostgreSQL {version}, fsync on, loopback",
            cpu(),
            memory()
        ));
        Self {
            lines,
            meter: Meter::new(&pool).await,
        }
    }

    /// Begins to measure a run.
    pub fn start(&self) -> Start {
        Start {
            meter: self.meter.clone(),
            cpu: self.meter.read(),
            at: Instant::now(),
        }
    }

    /// CPU time of the client and of the server for each unit, ours and the twin's.
    pub fn cpu(&mut self, what: &str, units: u32, ours: &[Run], twin_name: &str, twin: &[Run]) {
        let each = |runs: &[Run], part: fn(&Cpu) -> Duration| {
            let parts = runs.iter().map(|run| part(&run.cpu).as_secs_f64());
            median_of(parts) / f64::from(units) * 1e6
        };
        self.line(format!(
            "{what}: client {:.2} and server {:.2} us CPU each, {twin_name} {:.2} and {:.2}",
            each(ours, |cpu| cpu.client),
            each(ours, |cpu| cpu.server),
            each(twin, |cpu| cpu.client),
            each(twin, |cpu| cpu.server),
        ));
    }

    /// A row: our figure and the twin's, in units per second, as medians of pairs, and the median of the ratios.
    pub fn rate(
        &mut self,
        what: &str,
        units: u32,
        ours: &[Duration],
        twin_name: &str,
        twin: &[Duration],
    ) {
        let rate = |times: &[Duration]| f64::from(units) / median(times).as_secs_f64();
        let ratios = ours
            .iter()
            .zip(twin)
            .map(|(ours, twin)| twin.as_secs_f64() / ours.as_secs_f64());
        self.line(format!(
            "{what}: {:.0}/s, {twin_name} {:.0}/s, ratio {:.2} [{}], {} pairs",
            rate(ours),
            rate(twin),
            median_of(ratios.clone()),
            spread(ratios),
            ours.len(),
        ));
    }

    /// A row of times of the same work: the ratio says how much longer ours takes.
    pub fn cost(&mut self, what: &str, ours: &[Duration], twin_name: &str, twin: &[Duration]) {
        let ratios = ours
            .iter()
            .zip(twin)
            .map(|(ours, twin)| ours.as_secs_f64() / twin.as_secs_f64());
        self.line(format!(
            "{what}: {:?}, {twin_name} {:?}, ratio {:.3} [{}], {} pairs",
            median(ours),
            median(twin),
            median_of(ratios.clone()),
            spread(ratios),
            ours.len(),
        ));
    }

    pub fn line(&mut self, line: String) {
        println!("{line}");
        self.lines.push(line);
    }

    pub fn print(&self) {
        println!("\n---\n{}", self.lines.join("\n"));
    }
}

pub fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort();
    times[times.len() / 2]
}

/// The value that `part` of all are not above.
pub fn quantile(times: &[Duration], part: f64) -> Duration {
    let mut times = times.to_vec();
    times.sort();
    let last = times.len().saturating_sub(1);
    times
        .get((last as f64 * part).round() as usize)
        .copied()
        .unwrap_or_default()
}

fn median_of(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn spread(values: impl Iterator<Item = f64> + Clone) -> String {
    let least = values.clone().fold(f64::INFINITY, f64::min);
    let most = values.fold(0.0, f64::max);
    format!("{least:.2} to {most:.2}")
}

fn cpu() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown CPU", |rest| {
            rest.trim_start_matches([' ', '\t', ':'])
        });
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{cores} x {model}")
}

fn memory() -> String {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0);
    format!("{} GiB", kib / 1_048_576)
}
