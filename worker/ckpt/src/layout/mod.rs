//! The layouts of checkpoints: which files each program writes, and what they contain.
pub(crate) mod dcp;
pub(crate) mod deepspeed;
pub(crate) mod hf;
pub(crate) mod native;
pub mod peft;
