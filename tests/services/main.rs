//! The adapters and whole flows against real services: one binary, so that each service is started once.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

#[path = "../relay_process/ledger.rs"]
mod ledger;
#[path = "../relay_model/mod.rs"]
mod relay_model;
#[path = "../store_contract/mod.rs"]
mod store_contract;

mod clocks;
mod consuming;
mod crash_points;
mod end_to_end;
mod fragile;
mod held_keys;
mod in_a_row;
mod kafka;
mod kafka_contract;
mod losses;
mod nats;
mod nats_contract;
mod postgres;
mod rabbitmq;
mod rabbitmq_contract;
mod redriving;
mod relay_process;
mod relay_trouble;
mod restored;
mod stranded;
mod versions;
mod waiting;
mod workload;
