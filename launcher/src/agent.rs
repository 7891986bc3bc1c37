//! The agent: one per node; starts, watches and ends the workers of its node.
//!
//! `core` decides, `driver` does: the core is told what happened and when, and answers with commands. Only `process`
//! starts processes and only `descendants` looks for what they left behind.
mod core;
pub(crate) mod descendants;
mod driver;
mod error_file;
mod executable;
mod gpu_faults;
mod guard;
mod join;
mod kernel_log;
mod oom;
mod output;
mod probe;
mod process;
mod progress;
mod stacks;
pub(crate) mod times;
mod watch;

pub(crate) use core::CONTROLLER_LEASE;
pub use driver::{Started, main};
pub(crate) use executable::{own_hash, print_own_hash};
pub(crate) use process::{become_subreaper, exit_status, reap};

/// For the simulator.
#[cfg(test)]
pub(crate) mod simulated {
    pub(crate) use super::core::{Command, Core, Ending, Input};
}
