//! Training on one rank: the trainer, which runs the steps, its activation buffers, and the
//! dispatch of tokens to experts.
pub mod activations;
pub mod boundary_flags;
mod dispatch;
mod evaluation;
pub mod generation;
mod gradient_norm;
pub mod loss_scale;
pub mod moe;
pub mod running_trainer;
pub mod step;
pub mod step_outcome;
