//! [`MoeLayerPlan`]: which rank of an expert-parallel group has which experts of a layer.
use crate::{
    expert_layout::ExpertLayout,
    model::{Model, MoeModel},
};

/// The placement of one layer's experts: how many experts each rank of an expert-parallel group
/// has, and in which order token rows are sent to them.
#[derive(Clone)]
pub(in crate::train) struct MoeLayerPlan {
    /// The number of MoE layers before this layer.
    pub(super) index: usize,
    /// The parameter unit of this rank's experts.
    pub(super) unit: usize,
    /// The experts in the order in which their rows are sent.
    pub(super) order: Vec<usize>,
    /// The number of experts on each rank of the group.
    pub(in crate::train) per_rank: Vec<usize>,
}

/// Determines for each layer with experts which experts each rank of an expert-parallel group has,
/// and which parameter unit contains this rank's experts. The plan of a layer without experts is
/// `None`.
///
/// The units of experts follow the model's other units: layer by layer, one unit for each rank of a
/// group.
pub(super) fn plan_moe_layers(
    model: &Model,
    moe: MoeModel,
    layout: &ExpertLayout,
    number: usize,
) -> Vec<Option<MoeLayerPlan>> {
    let dense_units = model.sizes().layers + 2;
    let mut plans = vec![None; model.sizes().layers];
    for (index, l) in moe.list_moe_layers().enumerate() {
        plans[l] = Some(MoeLayerPlan {
            index,
            unit: dense_units + index * layout.parallel + number,
            order: layout.list_experts_in_dispatch_order(l),
            per_rank: (0..layout.parallel).map(|r| layout.list_experts_of_group_member(l, r).len()).collect(),
        });
    }
    plans
}
