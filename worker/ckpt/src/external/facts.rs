//! What is known about a checkpoint of another program.
use crate::catalog::Tie;
use crate::state::{Group, TrainingState};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// What a checkpoint of another program says about itself, and what was found out about it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ForeignFacts {
    /// What it is, in words: `DeepSpeed`, `HF Trainer with DeepSpeed`, …
    pub kind: &'static str,
    /// The program that wrote it, with its version where known.
    pub writer: String,
    /// The folder that holds the state.
    pub tag: String,
    /// Steps done.
    pub step: Option<u64>,
    /// Samples consumed by all ranks together, where it says so.
    pub samples: Option<u64>,
    /// Ranks that wrote it, where it says so.
    pub world: Option<u32>,
    /// ZeRO stage, of DeepSpeed's.
    pub stage: Option<u8>,
    pub groups: Vec<Group>,
    /// Updates that the optimizer made to each weight.
    pub steps: BTreeMap<String, u64>,
    /// State of the learning rate scheduler; null when there is none.
    pub scheduler: Value,
    /// State of the loss scaler of fp16; null when there is none.
    pub loss_scaler: Value,
    pub ties: Vec<Tie>,
    /// Weights that are not trained.
    pub frozen: Vec<String>,
    /// Tensors of role [`crate::Role::Buffer`].
    pub buffers: Vec<String>,
    /// Weights that are named but nowhere stored.
    pub lost: Vec<String>,
    /// Files with states of random generators, in [`ForeignFacts::root`].
    pub rng_files: Vec<String>,
    /// The folder that holds what lies beside the state: RNG files, scheduler, config, tokenizer.
    pub root: std::path::PathBuf,
    /// What is likely a mistake: a stale `latest`, steps that differ.
    pub warnings: Vec<String>,
    /// What deserves to be known: which of several was taken, what isn't read.
    pub notices: Vec<String>,
    /// What a full training state has and this checkpoint has not.
    pub missing: Vec<String>,
    /// What it says itself that it has and it has not: damage.
    pub incomplete: Vec<String>,
}

impl ForeignFacts {
    /// The notice that says why states of the optimizer that are there aren't read.
    pub fn unread(&self) -> Option<&str> {
        let says = |n: &&String| {
            n.contains("optimizer") && ["isn't read: ", "aren't read: "].iter().any(|part| n.contains(part))
        };
        self.notices.iter().find(says).map(String::as_str)
    }

    /// True when it was saved to go on from, whether or not everything for that is there.
    pub fn is_training_state(&self) -> bool {
        self.step.unwrap_or(0) > 0
            || self.unread().is_some()
            || !self.scheduler.is_null()
            || !self.rng_files.is_empty()
    }

    /// The same in the words that all checkpoints share.
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
