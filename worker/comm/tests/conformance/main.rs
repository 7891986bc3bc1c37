//! One set of checks for every transport, and what happens to a group when a rank dies, stops, leaves or errs.
mod checks;
mod local;
mod shm;
mod tcp;
mod tcp_processes;
