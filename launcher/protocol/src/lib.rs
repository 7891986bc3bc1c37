//! Crate `protocol`: the messages and events that controller, agents and workers exchange.
//!
//! The crate contains the control messages and the events. All types are plain data that can be
//! printed, compared and serialized. The job itself is in crate `jobspec`.
pub mod control;
pub mod event;
pub mod exit;
pub mod failure;
pub mod frame;
mod gpu_fault;
pub mod hang;
pub mod hardware;
pub mod host_name;
mod json_text;
pub mod message_pack;
pub mod network_probe;
pub mod preflight;
pub mod probe;
pub mod run_measurements;
pub mod step_times;
pub mod straggler;
pub mod worker_status;
