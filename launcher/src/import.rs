//! Converts the configuration of another launcher to a job.yaml: a configuration of Accelerate or
//! DeepSpeed, or the arguments of torchrun.
//!
//! Every key of the configuration is either converted, or a note states the key, the reason and
//! what to do. The converted job can always be loaded.
mod accelerate;
mod deepspeed;
mod draft;
mod import_options;
mod remaining_keys;
mod torchrun;
mod value_text;

pub(crate) use accelerate::convert_accelerate_config;
pub(crate) use deepspeed::convert_deepspeed_config;
pub(crate) use draft::{ImportNote, ImportedJob};
pub(crate) use import_options::ImportOptions;
pub(crate) use torchrun::convert_torchrun_args;

#[cfg(test)]
mod tests;
