//! [`TensorRole`]: distinguishes weights, buffers and each kind of optimizer state (such as Adam's
//! first moment) among the tensors of a checkpoint.
use serde::{Deserialize, Serialize};
use std::fmt;

/// Kind of a tensor in a checkpoint: weight, buffer, or one of the optimizer states such as Adam's
/// first moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorRole {
    /// A parameter of the model: the FP32 master weight, or BF16 in a run without master weights.
    Weight,
    /// First moment of Adam, Lion or Adafactor.
    ExpAvg,
    /// Second moment of Adam.
    ExpAvgSq,
    /// Momentum of SGD or Muon.
    Momentum,
    /// Second moments of Adafactor: the mean of each row of a matrix.
    ExpAvgSqRow,
    /// Second moments of Adafactor: the mean of each column of a matrix.
    ExpAvgSqCol,
    /// Second moment of Adafactor for each element of a parameter that is not a matrix.
    ExpAvgSqVector,
    /// A buffer of the model: a tensor that is saved with the weights and not trained.
    Buffer,
}

impl TensorRole {
    /// All kinds (roles) of tensors in checkpoints, in the order in which a manifest lists the
    /// tensors.
    pub const ALL: [TensorRole; 8] = [
        TensorRole::Weight,
        TensorRole::ExpAvg,
        TensorRole::ExpAvgSq,
        TensorRole::Momentum,
        TensorRole::ExpAvgSqRow,
        TensorRole::ExpAvgSqCol,
        TensorRole::ExpAvgSqVector,
        TensorRole::Buffer,
    ];

    /// Returns the name of this kind of tensor in files and tables, such as `exp_avg` for Adam's
    /// first moment.
    pub fn name(self) -> &'static str {
        match self {
            TensorRole::Weight => "weight",
            TensorRole::ExpAvg => "exp_avg",
            TensorRole::ExpAvgSq => "exp_avg_sq",
            TensorRole::Momentum => "momentum",
            TensorRole::ExpAvgSqRow => "exp_avg_sq_row",
            TensorRole::ExpAvgSqCol => "exp_avg_sq_col",
            TensorRole::ExpAvgSqVector => "exp_avg_sq_vector",
            TensorRole::Buffer => "buffer",
        }
    }

    /// Returns true if tensors of this kind are optimizer states, and not weights or buffers. A
    /// tensor of such a role has the name of its weight, and the shape that
    /// [`TensorRole::tensor_shape_for_weight`] derives from the weight's shape.
    pub fn is_optimizer_state(self) -> bool {
        !matches!(self, TensorRole::Weight | TensorRole::Buffer)
    }

    /// Returns the shape that a tensor of this kind, such as a second moment, has for a weight with
    /// the shape `weight`. Returns `None` if optimizers keep no such state for the weight.
    pub fn tensor_shape_for_weight<N>(self, weight: &[N]) -> Option<&[N]> {
        match (self, weight) {
            (TensorRole::ExpAvgSqRow, [_, _]) => Some(&weight[..1]),
            (TensorRole::ExpAvgSqCol, [_, _]) => Some(&weight[1..]),
            (TensorRole::ExpAvgSqRow | TensorRole::ExpAvgSqCol, _) | (TensorRole::ExpAvgSqVector, [_, _]) => {
                None
            }
            _ => Some(weight),
        }
    }

    /// Returns the key of this optimizer state in the `state_dict` of torch's optimizers. Returns
    /// `None` for weights, buffers, and states that launch stores only in native checkpoints.
    pub(crate) fn torch_key(self) -> Option<&'static str> {
        match self {
            TensorRole::ExpAvg | TensorRole::ExpAvgSq => Some(self.name()),
            TensorRole::Momentum => Some("momentum_buffer"),
            TensorRole::ExpAvgSqRow | TensorRole::ExpAvgSqCol | TensorRole::ExpAvgSqVector => None,
            TensorRole::Weight | TensorRole::Buffer => None,
        }
    }

    /// Returns the kind of the optimizer state with the given key in the `state_dict` of torch's
    /// optimizers, or `None` for other keys.
    pub(crate) fn from_torch_key(key: &str) -> Option<TensorRole> {
        TensorRole::ALL.into_iter().find(|role| role.torch_key() == Some(key))
    }
}

impl fmt::Display for TensorRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
