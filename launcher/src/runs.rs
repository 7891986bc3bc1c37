//! Records and lists the runs (executions of jobs) of this user, and determines which runs are
//! active and how the others ended.
//!
//! Each controller writes a [run record](registry::RunRecord) as `run.json` into its run directory,
//! and creates a link to the record in the user's state directory (`$XDG_STATE_HOME/launch/runs`).
//! The record identifies the controller by pid and start time. A later process with the
//! controller's pid is therefore not mistaken for the controller.
mod atomic_file;
mod controller_handle;
mod controller_socket;
mod process_identity;
mod registry;
mod select;

pub(crate) use atomic_file::{
    read_private_file, replace_file_without_sync, replace_output_file, write_atomically,
};
pub(crate) use controller_handle::open_controller_handle;
pub(crate) use controller_socket::{bind_controller_socket, connect_to_controller, is_peer_own_or_root};
pub(crate) use process_identity::ProcessHandle;
pub(crate) use registry::{
    JOURNAL_FILE, Run, RunLossReason, RunState, list_runs, load_run, load_run_in_directory, parse_run_record,
    read_command, record_run_end_outside_journal, register_run, register_takeover,
};
pub(crate) use select::{RunFilter, select_run};
