//! Whole flows, from the outbox to the effect, on SQLite and the broker in memory.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

#[path = "../relay_model/mod.rs"]
mod relay_model;

mod claims;
mod consuming;
mod dead_heads;
mod dead_letters;
mod destinations;
mod earlier;
mod failing;
mod forms;
mod handlers;
mod handling;
mod hanging;
mod in_place;
mod model;
mod payment;
mod redriving;
mod relaying;
mod remembering;
mod routes;
mod sharing;
mod strangers;
mod support;
mod suspects;
mod versions;
mod waiting;
mod waking;
