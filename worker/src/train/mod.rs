//! A training step and what surrounds it.
pub mod step;
pub mod workspace;
