//! Converts the configuration of another launcher to a job.yaml: a configuration of Accelerate or
//! DeepSpeed, or the arguments of torchrun.
//!
//! Converts the command lines of these launchers, too, for the drop-in commands.
//!
//! Every key of the configuration is either converted, or a note states the key, the reason and
//! what to do. The converted job can always be loaded.
mod accelerate;
mod command_line;
mod deepspeed;
mod drop_in;
mod import_options;
mod job_draft;
mod remaining_keys;
mod torchrun;
mod value_text;

pub(crate) use accelerate::{convert_accelerate_config, drop_in::AccelerateCommand};
pub(crate) use command_line::requests_help;
pub(crate) use deepspeed::{
    convert_deepspeed_config,
    drop_in::{DeepSpeedCommand, DeepSpeedFiles},
};
pub(crate) use drop_in::DropInContext;
pub(crate) use import_options::ImportOptions;
pub(crate) use job_draft::{ImportNote, ImportedJob, ImportedNodes};
pub(crate) use torchrun::{TorchProgram, convert_torchrun_args, drop_in::convert_torchrun_command};

#[cfg(test)]
mod drop_in_tests;
#[cfg(test)]
mod tests;
