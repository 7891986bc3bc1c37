//! Crate `contract`: the data that controller, agents and workers exchange.
//!
//! The crate contains the control messages and the events. It re-exports crate `jobspec`, which
//! contains the job and the names of environment variables. All types are plain data that can be
//! printed, compared and serialized.
pub mod control;
pub mod event;
pub mod exit;
pub mod failure;
pub mod frame;
pub mod hardware;
pub mod preflight;
pub mod probe;

pub use jobspec::{self as job, JobSource, JobSpec, SourceMap, env, hosts, ids, load_job};
