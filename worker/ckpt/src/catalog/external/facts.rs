//! Defines [`ExternalFacts`], information about another program's checkpoint that is not in its
//! tensors, such as the step.
use crate::catalog::training_state::TrainingState;
use serde::{Serialize, Serializer};
use std::fmt;

/// A part of the training state that is needed for resuming, but that a checkpoint may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainingStatePart {
    /// States of the optimizer, such as Adam's moments.
    OptimizerState,
    /// State of the learning rate scheduler.
    Scheduler,
    /// RNG states of all ranks.
    RngStates,
    /// RNG states of one rank, in a checkpoint that has the RNG states of other ranks.
    RankRngState {
        /// The rank without RNG states.
        rank: u32,
    },
    /// The model config, `config.json`.
    Config,
    /// The files of the tokenizer.
    Tokenizer,
}

impl fmt::Display for TrainingStatePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TrainingStatePart::OptimizerState => f.write_str("optimizer state"),
            TrainingStatePart::Scheduler => f.write_str("scheduler"),
            TrainingStatePart::RngStates => f.write_str("RNG states"),
            TrainingStatePart::RankRngState { rank } => write!(f, "RNG state of rank {rank}"),
            TrainingStatePart::Config => f.write_str("config.json"),
            TrainingStatePart::Tokenizer => f.write_str("tokenizer"),
        }
    }
}

impl Serialize for TrainingStatePart {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Information about another program's checkpoint that is not in its tensors, such as the program,
/// the step, and parts that are missing.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ExternalFacts {
    /// The program and layout, such as `DeepSpeed` or `HF Trainer with DeepSpeed`.
    pub kind: &'static str,
    /// The program that wrote the checkpoint, with its version if known.
    pub writer: String,
    /// Name of the directory or file that contains the training state.
    pub tag: String,
    /// The training state without the tensors, in the form common to all formats.
    #[serde(flatten)]
    pub state: TrainingState,
    /// Names of weights that the checkpoint lists without storing their values.
    pub lost: Vec<String>,
    /// Names of the RNG state files in [`ExternalFacts::root`].
    pub rng_files: Vec<String>,
    /// The directory with the RNG state files, the scheduler, the config and the tokenizer.
    pub root: std::path::PathBuf,
    /// Why an existing optimizer state is ignored. `None` if no optimizer state is ignored. The
    /// text is also one of the notices.
    #[serde(skip)]
    pub ignored_optimizer: Option<String>,
    /// Likely mistakes, such as a stale `latest` or steps that differ.
    pub warnings: Vec<String>,
    /// Messages about choices of the reader, such as which of several checkpoints it opened and
    /// which files it ignored.
    pub notices: Vec<String>,
    /// Parts of a full training state that the checkpoint does not have.
    pub missing: Vec<TrainingStatePart>,
    /// Descriptions of parts that the checkpoint refers to but does not have. Such a checkpoint is
    /// damaged.
    pub incomplete: Vec<String>,
}

impl ExternalFacts {
    /// Returns the reason why the optimizer state in the checkpoint's files is not read, or `None`
    /// if it is read or absent.
    pub fn ignored_optimizer_reason(&self) -> Option<&str> {
        self.ignored_optimizer.as_deref()
    }

    /// Returns true if the checkpoint contains state for resuming a training, such as an optimizer
    /// step or RNG files, and not only weights.
    pub fn is_training_state(&self) -> bool {
        self.state.step.unwrap_or(0) > 0
            || self.ignored_optimizer_reason().is_some()
            || !self.state.scheduler.is_null()
            || !self.rng_files.is_empty()
    }
}
