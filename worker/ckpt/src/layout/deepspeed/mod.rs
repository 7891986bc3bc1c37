//! Reads DeepSpeed checkpoints of ZeRO stages 0 to 3, also if HF Trainer or Accelerate wrote them.
//!
//! `DIR/latest` names a tag. `DIR/TAG` has model files and the optimizer files of all ranks. If
//! several sources have values of a weight, the flat groups (`param_shapes`) take precedence, then
//! the frozen weights, then the 16-bit `module`.
mod collect;
mod collect_passthrough;
mod embedded_optimizer;
mod file_names;
mod open;
mod partitions;
mod passthrough;
mod stage0;
mod states;
mod tag;
mod tag_directories;
pub(crate) mod universal;

pub(crate) use file_names::{TagFiles, UNIVERSAL_SUFFIX};
pub(crate) use open::open_deepspeed;
pub(crate) use states::{ALLOWED_GLOBALS, ModelStates, OptimizerStates};
pub(crate) use tag_directories::{
    LATEST_FILE, LATEST_UNIVERSAL_FILE, is_tag_directory, list_tags, missing_tag_message, read_latest,
};
