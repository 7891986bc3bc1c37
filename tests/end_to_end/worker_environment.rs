//! Tests the environment of workers: activated environments and wrapped commands, on this machine
//! and on hosts over real SSH.
mod activation;
mod exec;
mod terminal;
mod wrap;
