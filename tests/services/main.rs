//! The adapters and whole flows against real services: one binary, so that each service is started once.

#[path = "../store_contract/mod.rs"]
mod store_contract;

mod kafka;
mod postgres;
