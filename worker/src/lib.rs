//! Crate `worker`: the built-in training runtime of one rank.
pub mod agree;
pub mod check;
pub mod data;
pub mod error;
pub mod experts;
mod gpu;
mod gpu_check;
pub mod life;
pub mod model;
mod network;
pub mod optim;
pub mod params;
pub mod resume;
pub mod rng;
pub mod save;
mod host_local;
pub mod session;
pub mod stages;
pub mod state;
pub mod storage;
pub mod train;
pub mod trained;
pub mod zero;

pub use check::Judge;
pub use gpu_check::main as gpu_check;
pub use life::main;
