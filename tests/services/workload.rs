//! A short run of the workload under trouble, in processes of its own with servers of its own.

use std::collections::HashMap;
use std::process::{Command, Stdio};

/// Time of the trouble. The long run is a command of its own: see testcontainers/README.md.
const SECONDS: &str = "20";

#[test]
fn a_bank_over_kafka_under_trouble_loses_doubles_and_disorders_nothing() {
    a_bank_under_trouble("kafka");
}

#[test]
fn a_bank_over_rabbitmq_under_trouble_loses_doubles_and_disorders_nothing() {
    a_bank_under_trouble("rabbitmq");
}

#[test]
fn a_bank_over_nats_under_trouble_loses_and_doubles_nothing() {
    a_bank_under_trouble("nats");
}

fn a_bank_under_trouble(broker: &str) {
    let seed = fastrand::u32(..1_000_000).to_string();
    println!("seed {seed}");
    let output = Command::new(env!("CARGO_BIN_EXE_workload"))
        .args(["--seconds", SECONDS, "--seed", &seed, "--broker", broker])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{printed}");
    assert!(output.status.success(), "seed {seed}: {}", output.status);
    let counts: HashMap<&str, &str> = printed
        .lines()
        .last()
        .unwrap()
        .split(' ')
        .map(|pair| pair.split_once('=').unwrap())
        .collect();
    assert_eq!(counts["seed"], seed);
    let count = |name: &str| -> u64 { counts[name].parse().unwrap() };
    // The verdict says something: there was work, and some of it failed.
    assert!(count("committed") > 50);
    assert!(count("retried") > 0);
    assert_eq!(count("committed"), count("applied") + count("dead"));
}
