//! A training step and what surrounds it.
pub mod boundary;
pub mod experts;
pub mod loss_scale;
mod roads;
pub mod run;
pub mod sample;
pub mod step;
pub mod workspace;
