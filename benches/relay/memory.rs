//! What a relay at full speed needs, in a process of its own: its peak against what the same process had before.

use std::sync::Arc;
use std::time::Duration;

use relaybox::relay::{Relay, RelayConfig};
use relaybox::store::OutboxStore;
use relaybox::store::postgres::PostgresStore;

use super::Size;
use super::backlog::Backlog;
use super::checked::Checked;
use super::drain::{BATCH, Noop, when_done};
use super::report::Report;

/// The first argument of the process that is measured.
pub const CHILD: &str = "--memory-of-a-relay";

const BATCH_BYTES_MAX: usize = 16 << 20;
const MIB: u64 = 1 << 20;
/// Beside the batches in flight: one a worker.
const ALLOWANCE: u64 = 64 * MIB;

pub async fn measure(report: &mut Report, backlog: &Backlog, size: Size) {
    // The second kind fills its batches by bytes.
    for (rows, payload_bytes) in [
        (size.memory_rows, super::backlog::PAYLOAD_BYTES),
        (size.memory_rows / 100, 100_000),
    ] {
        let url = backlog.filled(rows, payload_bytes).await;
        let output = tokio::process::Command::new(std::env::current_exe().unwrap())
            .args([CHILD, &url, &rows.to_string()])
            .output()
            .await
            .unwrap();
        let told = String::from_utf8(output.stdout).unwrap();
        let failed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{failed}");
        let numbers: Vec<u64> = told
            .split_whitespace()
            .map(|n| n.parse().unwrap())
            .collect();
        let [before, peak] = numbers[..] else {
            panic!("two numbers, not {told}");
        };
        let goal = BATCH_BYTES_MAX as u64 + ALLOWANCE;
        report.line(format!(
            "memory of a relay, {rows} rows of {payload_bytes} bytes, one worker, batch_bytes_max {} MiB: \
             {} MiB above {} MiB before, goal {} MiB",
            BATCH_BYTES_MAX as u64 / MIB,
            (peak - before) / MIB,
            before / MIB,
            goal / MIB,
        ));
    }
}

/// The process itself: prints its memory before the relay, and its peak.
pub async fn child(url: &str, rows: u32) {
    let store = PostgresStore::connect(url).await.unwrap();
    let checked = Arc::new(Checked::new(rows));
    let before = status("VmRSS:");
    let config = RelayConfig::default()
        .with_batch_rows_max(BATCH)
        .with_batch_bytes_max(BATCH_BYTES_MAX)
        .with_shutdown_deadline(Duration::from_secs(60));
    let relay = Relay::new(store.clone(), Noop::checked(&checked)).with_config(config);
    relay.run_until(when_done(&checked)).await.unwrap();
    assert!(checked.is_complete());
    assert_eq!(store.pending(10).await.unwrap(), 0);
    println!("{before} {}", status("VmHWM:"));
}

/// A line of this process's status, in bytes.
fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.split_whitespace().next());
    kib.unwrap().parse::<u64>().unwrap() * 1_024
}
