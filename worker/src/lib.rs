//! Crate `worker`: the built-in training runtime of one rank.
pub mod data;
pub mod error;
pub mod model;
pub mod optim;
pub mod params;
pub mod rng;
pub mod train;
pub mod zero;
