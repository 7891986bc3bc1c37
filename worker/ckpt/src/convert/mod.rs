//! Converts a checkpoint of any format ([`crate::TensorSource`]) to another format, ZeRO stage or
//! number of ranks.
//!
//! First the result is planned: every file with its values and, for each tensor, the source
//! elements to store ([`file_plan`]). Then the files are written in parallel, with tensors streamed
//! through windows of a fixed size ([`write_files`]). The output directory is hidden until it is
//! complete. A conversion reuses files that a killed conversion finished ([`output`]).
mod companion_files;
mod convert_checkpoint;
mod deepspeed;
mod file_plan;
mod finished_file_check;
mod native;
mod notice;
mod options;
mod output;
mod param_groups;
mod source_state;
mod universal;
mod write_files;
mod write_steps;

pub(crate) use convert_checkpoint::convert_into_directory;
pub use convert_checkpoint::{ConvertReport, convert_checkpoint};
pub use notice::ConvertNotice;
pub use options::{ConvertOptions, ConvertTarget};
pub(crate) use output::compute_source_fingerprint;
pub use param_groups::{UngroupedWeights, find_ungrouped_weights};
