//! Every transport runs one set of checks, and is tested with ranks that die, stop, leave or make
//! mistakes.
mod checks;
mod local;
mod shm;
mod tcp;
mod tcp_processes;
