//! What a training state says of itself beside its tensors, in the same words whatever program wrote it.
use crate::catalog::Tie;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// A group of the optimizer: its hyper-parameters and the weights that it trains.
///
/// As JSON it is one object: the hyper-parameters and `params`, the names.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// As torch calls them (`lr`, `betas`, `eps`, `weight_decay`, …); empty where the checkpoint has none.
    #[serde(flatten)]
    pub hyper: Map<String, Value>,
    /// Weights in the group's own order.
    #[serde(rename = "params", default)]
    pub names: Vec<String>,
}

/// What every training state has beside its tensors, as far as its checkpoint says it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct TrainingState {
    /// Steps done, skipped ones included.
    pub step: Option<u64>,
    /// Ranks that wrote it.
    pub world: Option<u32>,
    /// ZeRO stage.
    pub stage: Option<u8>,
    pub groups: Vec<Group>,
    /// Updates that the optimizer made to each weight.
    pub steps: BTreeMap<String, u64>,
    /// State of the learning rate scheduler, as torch's `state_dict` has it; null when there is none.
    pub scheduler: Value,
    /// State of the loss scaler of fp16; null when there is none.
    pub loss_scaler: Value,
    pub ties: Vec<Tie>,
    /// Weights that are not trained.
    pub frozen: Vec<String>,
    /// Tensors of role [`crate::Role::Buffer`].
    pub buffers: Vec<String>,
}
