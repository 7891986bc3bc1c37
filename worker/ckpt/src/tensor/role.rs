//! [`TensorRole`]: the purpose of a tensor in a checkpoint.
use serde::{Deserialize, Serialize};
use std::fmt;

/// The purpose of a tensor in a checkpoint: weight, optimizer state or buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorRole {
    /// A parameter of the model: the FP32 master weight, or BF16 in a run without master weights.
    Weight,
    /// First moment of Adam.
    ExpAvg,
    /// Second moment of Adam.
    ExpAvgSq,
    /// Momentum of SGD, Muon or Lion.
    Momentum,
    /// A buffer of the model: a tensor that is saved with the weights and not trained.
    Buffer,
}

impl TensorRole {
    /// Every role, in the order in which a manifest lists tensors.
    pub const ALL: [TensorRole; 5] = [
        TensorRole::Weight,
        TensorRole::ExpAvg,
        TensorRole::ExpAvgSq,
        TensorRole::Momentum,
        TensorRole::Buffer,
    ];

    /// Returns the name of the role in files and tables, such as `exp_avg`.
    pub fn name(self) -> &'static str {
        match self {
            TensorRole::Weight => "weight",
            TensorRole::ExpAvg => "exp_avg",
            TensorRole::ExpAvgSq => "exp_avg_sq",
            TensorRole::Momentum => "momentum",
            TensorRole::Buffer => "buffer",
        }
    }

    /// Returns true for the role of an optimizer state. A tensor of such a role has the name and
    /// the shape of its weight.
    pub fn is_optimizer_state(self) -> bool {
        matches!(self, TensorRole::ExpAvg | TensorRole::ExpAvgSq | TensorRole::Momentum)
    }
}

impl fmt::Display for TensorRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
