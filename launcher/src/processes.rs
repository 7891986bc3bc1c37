//! Finds, kills and reaps the child processes and other descendants of this process, and reports
//! which signals this process ignores.
mod children;
mod descendants;
mod ignored_signal;

pub(crate) use children::{
    become_subreaper, decode_wait_status, lock_children, reap_children, reap_group_leader,
};
pub(crate) use descendants::{
    ProcessStat, kill_descendants, list_children, list_processes, read_start_ticks, signal_if_unchanged,
};
pub(crate) use ignored_signal::is_signal_ignored;
