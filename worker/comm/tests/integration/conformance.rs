//! Conformance tests of the transports: every transport passes the same checks, and reports ranks
//! that die, stop, leave or make mistakes.
mod checks;
mod local;
mod shm;
mod tcp;
mod tcp_processes;
