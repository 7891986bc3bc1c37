//! The agent is the process on each host that starts, supervises and ends the workers of the host.
//!
//! Module `startup` prepares the agent's process and control connection. Module `core` is a state
//! machine that decides on actions. Module `driver` executes the actions and reports events to the
//! state machine. Only module `process` starts processes, and only module `descendants` searches
//! for processes that workers left.
mod activity;
mod agent_relay;
mod attach_socket;
mod connect_back;
mod container;
mod core;
mod debug_log;
mod driver;
pub(crate) mod environment_activation;
pub(crate) mod environment_changes;
mod error_file;
mod executable_cache;
mod gpu_faults;
mod hang;
mod kernel_log;
mod log_thread;
pub(crate) mod log_times;
mod lost_connection;
mod oom;
mod output;
mod probe;
mod process;
mod progress;
mod rank_log;
mod stacks;
mod startup;
mod tree_node;
mod usage;
mod watchdog;

pub(crate) use error_file::parse_error_message;
pub(crate) use hang::is_flight_recorder_dump;
pub use startup::{AgentOptions, main};

/// Makes the agent's state machine available to the simulated cluster in the controller's tests.
#[cfg(test)]
pub(crate) mod simulated {
    pub(crate) use super::core::{AgentAction, AgentCore, AgentInput, ProcessGroupSignal};
}
