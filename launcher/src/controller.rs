//! The controller of a run: the process that a user starts, which starts an agent on each host and
//! controls the workers through the agents. It plans the attempts of the run and decides what runs
//! where.
//!
//! `core` makes the decisions without I/O. `driver` executes them: it starts agents through a
//! transport, exchanges messages with them over control connections, and reports events to the
//! journal and to the user. `preparation` holds what an attempt needs before its workers start.
mod attempt_preparation;
mod control_file;
mod controller_events;
mod controller_identity;
mod core;
mod descriptor_limit;
mod driver;
mod exec_socket;
mod file_watch;
mod hang_calls;
mod hang_verdict;
mod hang_verdict_text;
mod hang_waits;
mod hostfile;
mod job_file;
mod journal;
mod peer_exchange;
mod report_id;
mod requeue;
mod restart_policy;
mod root_cause;
mod run_request;
mod run_status;
mod signals;
mod status_file;
mod streamed_logs;
mod tensorboard;

pub(crate) use control_file::{ControlFile, read_stored_job};
pub(crate) use descriptor_limit::count_controller_descriptors;
pub(crate) use driver::{attach_to_run, run_job};
pub(crate) use hostfile::FilteredHostfile;
pub(crate) use job_file::JobFile;
pub(crate) use journal::JournalSummary;
pub(crate) use run_request::{AttachOptions, ResumePreparer, RunOptions, RunRequest};

#[cfg(test)]
mod tests {
    mod fault_positions;
    mod roster;
    mod sim;
    mod simulated_runs;
    mod takeovers;
}
