//! Crate `worker`: the built-in training runtime of one rank.
pub mod agree;
pub mod check;
pub mod data;
pub mod error;
pub mod life;
pub mod model;
pub mod optim;
pub mod params;
pub mod resume;
pub mod rng;
pub mod save;
pub mod session;
pub mod stages;
pub mod state;
pub mod train;
pub mod zero;

pub use check::Judge;
pub use life::main;
