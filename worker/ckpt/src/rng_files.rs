//! RNG state files of HF Trainer (`rng_state_R.pth`) and Accelerate (`random_states_R.pkl`): reads
//! them, writes them so that Python loads them, and assigns their streams to another number of
//! ranks.
//!
//! - [`streams`]: the content of one rank's file, validated as untrusted input.
//! - `decode`, `encode`: the files themselves, in the container of `torch.save`.
//! - [`reconcile`]: the rule for each kind of stream when N ranks become M. Pure.
//! - `missing_ranks`: creates the files of ranks whose files were lost.
//! - [`rank_files`]: the files of all ranks in a checkpoint directory.
//! - [`prepare`]: a sibling directory from which an unmodified script resumes with M ranks.
//! - `reshard`, `scheduler`: the parts of such a directory that depend on the number of ranks.
//! - `link_tree`: duplicates the other files with hard links.
mod decode;
mod encode;
pub(crate) mod link_tree;
pub(crate) mod missing_ranks;
pub mod prepare;
pub mod rank_files;
pub mod reconcile;
mod reshard;
pub(crate) mod scheduler;
pub mod streams;
#[cfg(test)]
mod tests;
