//! States of random generators as HF Trainer (`rng_state_R.pth`) and Accelerate (`random_states_R.pkl`) write them: read,
//! written byte for byte as Python takes them back, and carried to another number of ranks by one rule.
//!
//! - [`streams`]: what one rank's file holds; every layout is checked as if an enemy had written it.
//! - `parse`, `write`: files of `torch.save`.
//! - [`rule`]: what happens to each kind of stream when N ranks become M. Pure.
//! - `fill`: files of ranks that lost theirs.
//! - [`folder`]: the files of a whole checkpoint.
//! - [`prepare`]: a sibling folder from which an unmodified script resumes with another number of ranks.
pub(crate) mod fill;
pub mod folder;
pub(crate) mod link;
mod parse;
pub mod prepare;
mod rewrite;
pub mod rule;
mod scheduler;
pub mod streams;
#[cfg(test)]
mod tests;
mod write;
