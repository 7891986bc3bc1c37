//! The training loop: one step, and the saves, evaluations and reloads between steps.
pub mod activations;
pub mod boundary_flags;
mod dispatch;
pub mod generation;
pub mod loss_scale;
pub mod moe;
pub mod run;
pub mod step;
