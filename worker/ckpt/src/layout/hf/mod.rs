//! Reads the files of Hugging Face, HF Trainer and Accelerate: weights, optimizer states and
//! further files.
pub(crate) mod companion_files;
pub(crate) mod module_order;
pub(crate) mod optimizer_state;
pub(crate) mod param_matching;
pub(crate) mod weights;
