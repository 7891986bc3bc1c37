//! Crate `contract`: the data that controller, agents and workers exchange.
//!
//! The crate contains the job, the control messages, the events and the names of environment
//! variables. Its only dependency among the crates of this workspace is `diagnostic`. All types are
//! plain data that can be printed, compared and serialized.
pub mod control;
pub mod env;
pub mod event;
pub mod exit;
pub mod failure;
pub mod frame;
pub mod hardware;
pub mod hosts;
pub mod ids;
pub mod job;
pub mod preflight;
pub mod probe;

pub use job::{JobSource, JobSpec, SourceMap, load_job};
