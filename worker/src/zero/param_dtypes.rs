//! [`ParamDtypes`]: the element types in which a job computes with parameters and updates them.
use super::ShardingPolicy;
use device::Dtype;
use jobspec::{Precision, TrainSpec};

/// The element types of a job's parameters: the type with which forward and backward passes
/// compute, and the type that the optimizer updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParamDtypes {
    /// The type that forward and backward passes compute with.
    pub compute: Dtype,
    /// The type that the optimizer updates: `F32`, or equal to `compute`.
    pub updated: Dtype,
}

impl ParamDtypes {
    /// Returns the element types of parameters that the precision in the job's `train` section
    /// requires.
    pub fn for_job(train: &TrainSpec) -> Self {
        let compute = match train.precision {
            Precision::Fp32 => Dtype::F32,
            Precision::Bf16 | Precision::Fp8 => Dtype::Bf16,
            Precision::Fp16 => Dtype::F16,
        };
        ParamDtypes { compute, updated: if train.rounds_stochastically() { compute } else { Dtype::F32 } }
    }

    /// Returns whether fp32 master weights are kept in addition to the parameters for forward and
    /// backward passes.
    pub fn has_master_weights(&self) -> bool {
        self.compute != self.updated
    }
}

/// Returns whether ranks convert fp32 master weights to 16-bit parameters whenever they gather
/// them, instead of storing a 16-bit copy.
///
/// This is the case on GPUs at stage 3, where parameters are gathered for each use anyway. Casting
/// saves two bytes per parameter, and takes little time compared with the gather.
pub fn casts_params_on_gather(policy: ShardingPolicy, weights: ParamDtypes, on_host: bool) -> bool {
    policy.shard_parameters && weights.has_master_weights() && !on_host
}
