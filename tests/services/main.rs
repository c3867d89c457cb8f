//! The adapters against real services: one binary, so that each service is started once.

#[path = "../store_contract/mod.rs"]
mod store_contract;

mod postgres;
