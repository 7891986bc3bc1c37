//! What the roles say to one another: the job, the control messages, the events, the names of the environment.
//!
//! A leaf: depends on none of our crates. Everything here is plain data that prints, compares and round-trips.
pub mod control;
pub mod env;
pub mod event;
pub mod exit;
pub mod frame;
pub mod hosts;
pub mod ids;
pub mod job;
pub mod preflight;
pub mod machine;
pub mod probe;
pub mod problem;

pub use job::{JobSpec, Source, SourceMap, load};
pub use problem::Problem;
