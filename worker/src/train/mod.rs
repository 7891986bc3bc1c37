//! The training loop: one step, and the saves, evaluations and reloads between steps.
pub mod boundary;
mod dispatch;
pub mod experts;
pub mod loss_scale;
pub mod run;
pub mod sample;
pub mod step;
pub mod workspace;
