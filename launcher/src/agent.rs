//! The agent: one per node; starts, watches and ends the workers of its node.
//!
//! `core` decides, `driver` does: the core is told what happened and when, and answers with commands. Only `process`
//! starts processes and only `descendants` looks for what they left behind.
mod core;
pub(crate) mod descendants;
mod driver;
mod error_file;
mod output;
mod process;

pub use driver::main;
pub(crate) use process::{become_subreaper, reap};
