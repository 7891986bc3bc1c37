//! [`EmbeddedOptimizer`]: the optimizer states that a DeepSpeed model file contains at ZeRO stage
//! 0.
use crate::codec::pickle::PickleView;
use crate::codec::torch_file::{TensorView, TorchFile};
use crate::error::DeepSpeedError;
use crate::layout::hf::optimizer_state::OptimizerStateDict;

/// The optimizer states that a DeepSpeed model file contains at ZeRO stage 0.
pub(crate) struct EmbeddedOptimizer {
    pub(super) optimizer: OptimizerStateDict,
    /// FP32 master weights of each parameter group. Empty if the file has no master weights.
    pub(super) masters: Vec<Vec<TensorView>>,
}

impl EmbeddedOptimizer {
    /// Reads the optimizer states and FP32 master weights from `root`, the optimizer's entry in a
    /// DeepSpeed model file of ZeRO stage 0. Returns `None` if `root` has no parameter groups.
    pub(super) fn read(
        file: &TorchFile,
        root: PickleView<'_>,
    ) -> std::result::Result<Option<EmbeddedOptimizer>, DeepSpeedError> {
        let inner = root.get("optimizer_state_dict").unwrap_or(root);
        if inner.get("param_groups").is_none() {
            return Ok(None);
        }
        let mut masters = Vec::new();
        for group in root.get("fp32_groups").and_then(|g| g.as_items()).into_iter().flat_map(|g| g.iter()) {
            let mut views = Vec::new();
            let list: Vec<_> = match group.as_items() {
                Some(items) => items.iter().collect(),
                None => vec![group],
            };
            for tensor in list {
                views.push(file.parse_tensor(tensor)?.ok_or(DeepSpeedError::InvalidField("fp32_groups"))?);
            }
            masters.push(views);
        }
        Ok(Some(EmbeddedOptimizer { optimizer: OptimizerStateDict::read(file, inner)?, masters }))
    }
}
