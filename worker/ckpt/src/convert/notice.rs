//! [`ConvertNotice`]: something about a conversion that the user must know.
use serde::{Serialize, Serializer};
use std::fmt;

/// A message to the user about the result of a conversion, such as data that are missing in it, or
/// a setting that DeepSpeed needs to load it. A notice is serialized as its text.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConvertNotice {
    /// The DeepSpeed config with which the converted checkpoint is loaded must have this
    /// `sub_group_size`.
    SubGroupSize {
        /// Elements of a ZeRO-3 sub-group.
        elements: u64,
    },
    /// The DeepSpeed config with which the converted checkpoint is loaded must have
    /// `load_universal`.
    LoadUniversal,
    /// DeepSpeed doesn't restore frozen weights and buffers from a universal checkpoint.
    FrozenNotRestored,
    /// DeepSpeed's stage 3 loads a single update count for all groups of a universal checkpoint.
    SharedUpdateCount,
    /// The converted checkpoint lacks integer buffers, which native checkpoints can't store.
    BuffersLeftOut {
        /// Names of the buffers.
        names: Vec<String>,
    },
    /// The source checkpoint doesn't record in which order its run read the data.
    DataOrderUnknown {
        /// Number of samples that the run had consumed, if the source checkpoint contains this
        /// number.
        samples: Option<u64>,
    },
    /// The source checkpoint has weights and no training state, so that a run from the converted
    /// checkpoint starts at step 0.
    WeightsOnly,
    /// The source checkpoint doesn't assign some parameters to any of its parameter groups.
    GroupsUnknown {
        /// Number of parameters without a group.
        parameters: usize,
        /// Number of parameter groups in the source checkpoint.
        groups: usize,
    },
    /// The source checkpoint records a number of optimizer updates that differs from its number of
    /// steps.
    StepFromUpdates {
        /// Number of optimizer updates, which becomes the step of the converted checkpoint.
        updates: u64,
        /// Number of steps that the source checkpoint records.
        steps: u64,
    },
    /// The converted checkpoint contains the RNG state files of the source checkpoint, which are
    /// for another number of ranks.
    RngFilesUnchanged {
        /// Number of ranks of the source checkpoint.
        from_world: u32,
        /// Number of ranks of the converted checkpoint.
        world: u32,
    },
    /// A notice that was already reported when the source checkpoint was opened, as text.
    Source(String),
}

impl fmt::Display for ConvertNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConvertNotice::SubGroupSize { elements } => {
                write!(f, "the config that loads the result needs \"sub_group_size\": {elements}")
            }
            ConvertNotice::LoadUniversal => f.write_str(
                "the config that loads the result needs \"checkpoint\": {\"load_universal\": true}; remove it \
                 before the next restart",
            ),
            ConvertNotice::FrozenNotRestored => f.write_str(
                "DeepSpeed restores neither frozen weights nor buffers from a universal checkpoint, although it \
                 contains them; --to deepspeed has no such limit",
            ),
            ConvertNotice::SharedUpdateCount => f.write_str(
                "DeepSpeed's stage 3 loads one update count for every group of a universal checkpoint, which \
                 then advances too fast; for stage 3 with several groups use --to deepspeed",
            ),
            ConvertNotice::BuffersLeftOut { names } => {
                write!(f, "integer buffers are left out: {}", names.join(", "))
            }
            ConvertNotice::DataOrderUnknown { samples: Some(n) } => write!(
                f,
                "the source contains neither the order of its data nor its seed; a run resumes at sample {n} of \
                 its configured data, with seed 0"
            ),
            ConvertNotice::DataOrderUnknown { samples: None } => f.write_str(
                "the source contains neither its position in the data nor its seed; a run resumes at step × its \
                 configured batch, with seed 0",
            ),
            ConvertNotice::WeightsOnly => f.write_str(
                "the source contains only weights; a run from it starts optimizer, learning rate and data at \
                 step 0",
            ),
            ConvertNotice::GroupsUnknown { parameters, groups } => write!(
                f,
                "the source doesn't assign {parameters} parameters to its {groups} parameter groups; their \
                 optimizer states are kept by name, and the job gives their hyper-parameters (--group assigns \
                 them)"
            ),
            ConvertNotice::StepFromUpdates { updates, steps } => write!(
                f,
                "the optimizer made {updates} updates in {steps} steps; a run resumes at step {updates}"
            ),
            ConvertNotice::RngFilesUnchanged { from_world, world } => write!(
                f,
                "the RNG state files are those of {from_world} ranks; `launch ckpt rng` makes them for {world}"
            ),
            ConvertNotice::Source(text) => f.write_str(text),
        }
    }
}

impl Serialize for ConvertNotice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
