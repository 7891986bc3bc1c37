//! Finds, kills and reaps the child processes and other descendants of this process.
mod children;
mod descendants;

pub(crate) use children::{
    become_subreaper, decode_wait_status, lock_children, reap_children, reap_group_leader,
};
pub(crate) use descendants::{
    ProcessStat, kill_descendants, list_children, list_processes, read_start_ticks, signal_if_unchanged,
};
