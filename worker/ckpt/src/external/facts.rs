//! [`ExternalFacts`]: what is known about a checkpoint of another program.
use crate::catalog::Tie;
use crate::state::{ParamGroupInfo, TrainingState};
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

/// A part of a full training state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatePart {
    /// States of the optimizer.
    OptimizerState,
    /// State of the learning rate scheduler.
    Scheduler,
    /// States of the random number generators of all ranks.
    RandomStates,
    /// State of the random number generators of one rank.
    RandomState {
        /// The rank.
        rank: u32,
    },
    /// `config.json`.
    Config,
    /// Tokenizer files.
    Tokenizer,
}

impl fmt::Display for StatePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StatePart::OptimizerState => f.write_str("optimizer state"),
            StatePart::Scheduler => f.write_str("scheduler"),
            StatePart::RandomStates => f.write_str("random states"),
            StatePart::RandomState { rank } => write!(f, "random state of rank {rank}"),
            StatePart::Config => f.write_str("config.json"),
            StatePart::Tokenizer => f.write_str("tokenizer"),
        }
    }
}

impl Serialize for StatePart {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What a checkpoint of another program records about itself, and what was found out about it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ExternalFacts {
    /// The program and layout: `DeepSpeed`, `HF Trainer with DeepSpeed`, …
    pub kind: &'static str,
    /// The program that wrote the checkpoint, with its version if known.
    pub writer: String,
    /// Name of the directory with the state.
    pub tag: String,
    /// Completed steps.
    pub step: Option<u64>,
    /// Samples consumed by all ranks together, if recorded.
    pub samples: Option<u64>,
    /// Number of ranks that wrote the checkpoint, if known.
    pub world: Option<u32>,
    /// ZeRO stage; only for DeepSpeed.
    pub stage: Option<u8>,
    /// Parameter groups.
    pub groups: Vec<ParamGroupInfo>,
    /// Number of optimizer updates of each weight.
    pub steps: BTreeMap<String, u64>,
    /// State of the learning rate scheduler; null when there is none.
    pub scheduler: Value,
    /// State of the loss scaler of fp16; null when there is none.
    pub loss_scaler: Value,
    /// Tied weights.
    pub ties: Vec<Tie>,
    /// Weights that are not trained.
    pub frozen: Vec<String>,
    /// Tensors of role [`crate::Role::Buffer`].
    pub buffers: Vec<String>,
    /// Weights that are named and not stored.
    pub lost: Vec<String>,
    /// Files with states of random generators, in [`ForeignFacts::root`].
    pub rng_files: Vec<String>,
    /// The directory with the RNG files, the scheduler, the config and the tokenizer.
    pub root: std::path::PathBuf,
    /// Why an existing optimizer state is ignored; also one of the notices.
    #[serde(skip)]
    pub ignored_optimizer: Option<String>,
    /// Likely mistakes: a stale `latest`, steps that differ.
    pub warnings: Vec<String>,
    /// Notices: which of several checkpoints is used, what is ignored.
    pub notices: Vec<String>,
    /// Parts of a full training state that the checkpoint does not have.
    pub missing: Vec<StatePart>,
    /// Parts that the checkpoint names and does not have: damage.
    pub incomplete: Vec<String>,
}

impl ExternalFacts {
    /// Why an existing optimizer state is ignored.
    pub fn ignored_optimizer_reason(&self) -> Option<&str> {
        self.ignored_optimizer.as_deref()
    }

    /// True when the checkpoint was saved for resuming, even if parts of it are missing.
    pub fn is_training_state(&self) -> bool {
        self.step.unwrap_or(0) > 0
            || self.ignored_optimizer_reason().is_some()
            || !self.scheduler.is_null()
            || !self.rng_files.is_empty()
    }

    /// The facts in the form that all checkpoint formats share.
    pub(crate) fn state(&self) -> TrainingState {
        TrainingState {
            step: self.step,
            samples: self.samples,
            world: self.world,
            stage: self.stage,
            groups: self.groups.clone(),
            steps: self.steps.clone(),
            scheduler: self.scheduler.clone(),
            loss_scaler: self.loss_scaler.clone(),
            ties: self.ties.clone(),
            frozen: self.frozen.clone(),
            buffers: self.buffers.clone(),
        }
    }
}
