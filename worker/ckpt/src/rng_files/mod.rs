//! Reads and writes the random generator states (RNG) that HF Trainer and Accelerate save for each
//! rank, and adapts them to another number of ranks. Python loads the written files.
//!
//! - [`streams`]: the content of one rank's file, validated as untrusted input.
//! - `decode`, `encode`: read and write one file, in the container of `torch.save`.
//! - [`reconcile`]: the rule for each kind of stream when N ranks become M, without any I/O.
//! - `missing_rng_files`: creates the files of ranks whose files were lost.
//! - [`rank_files`]: reads and writes the files of all ranks in a checkpoint directory.
//! - [`resume_preparation`]: makes a sibling directory from which an unmodified script resumes with
//!   M ranks.
//! - `deepspeed_reshard`, `scheduler`: rewrite the DeepSpeed state and the scheduler for M ranks.
//! - `link_tree`: duplicates a directory tree with hard links.
mod decode;
mod deepspeed_reshard;
mod encode;
pub(crate) mod link_tree;
pub(crate) mod missing_rng_files;
pub mod rank_files;
pub mod reconcile;
pub mod resume_preparation;
pub(crate) mod scheduler;
pub mod streams;
#[cfg(test)]
mod tests;
