//! Tests the environment of workers: activated environments, containers and wrapped commands, on
//! this machine and on hosts over real SSH.
mod activation;
mod containers;
mod exec;
mod real_tools;
mod terminal;
mod wrap;
